"""The capacity of a recipe as `llmctl capacity` predicts it, beside the one that is measured live.

    python -m benchmarks.engines.capacity_live --work DIR --recipe tiny-llama-cpu-rebatch
        [--trace chat-small] [--seconds 60] [--json FILE]

Takes a quarter of an hour for a recipe, and four minutes more where it has to be profiled. Needs an
otherwise idle machine, and for recipes of engine `vllm` an environment with vLLM.

The recipe is profiled and fitted. Its capacity is predicted on the trace by the fit alone, and
again by the speed that the server shows beside the load generator: at the rate
predicted so far, `--calibrations` times, by the mean of all so far (`llmctl capacity --bench`). Its
server then gets the trace at five rates around that prediction, each for some seconds after a
warm-up. A shared machine changes its speed within minutes, so another calibration stands before
each rate, and the last prediction is by the mean of all calibrations: those of the same minutes as
the rates. No run that is compared is in it.
The measured capacity lies between the highest rate that keeps all targets and the lowest one that
does not, where the binding target crosses its limit: by the logarithms of rates and of used shares.
The capacity by the speed that the two nearest runs themselves had is printed, too.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence

from benchmarks.common.command import make_parser
from benchmarks.engines.live import Work, add_work
from toolkit.engine_traits import traits_of
from toolkit.files.bench import BenchReport
from toolkit.files.shipped import load_recipe, recipe_path
from toolkit.traces.types import trace_path

SHARES = (0.8, 0.9, 1.0, 1.1, 1.25)  # of the predicted capacity
PLAN = "plan.json"


class Capacity:
    """The capacity that is predicted for a recipe, by its fit and by what benches showed."""

    def __init__(self, work: Work, given: argparse.Namespace) -> None:
        self._work = work
        self._given = given
        self._trace = str(trace_path(given.trace).absolute())
        self._words = [str(work.recipe), "--fit", work.fit(), "--trace", self._trace]
        self._benches: list[str] = []
        self.slowdowns: list[float] = []
        self.rps, self.binding = self.by()

    def by(self, *benches: str) -> tuple[float, str]:
        """The capacity by the speed that these benches saw, and the limit that breaks above it."""
        seen = [word for bench in benches for word in ("--bench", bench)]
        words = [*self._words, *seen, "--json"]
        [told] = json.loads(self._work.llmctl("capacity", *words))["capacities"]
        return float(told["capacity_rps"]), str(told["binding"])

    def calibrate(self, url: str) -> None:
        """Predict it again, after a bench at the capacity predicted so far."""
        bench = f"calibration-{len(self._benches) + 1}.json"
        report = self.bench(url, self.rps, bench)
        self._benches.append(bench)
        warmup_slowdown = report.warmup.slowdown if report.warmup else 1.0
        self.slowdowns.append(report.replay_slowdown or warmup_slowdown)
        self.rps, self.binding = self.by(*self._benches)

    def bench(self, url: str, rate: float, out: str) -> BenchReport:
        """Replay the trace at this rate."""
        given = self._given
        words = ["--trace", self._trace, "--rate", f"{rate:.6g}"]
        words += ["--duration", f"{given.seconds:g}", "--warmup", f"{given.warmup:g}"]
        return self._work.bench(url, PLAN, out, *words)


def main() -> None:
    """Predict, serve, measure, and print a row for each rate."""
    parser = make_parser(__doc__)
    add_work(parser)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--trace", default="chat-small")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each rate")
    parser.add_argument("--warmup", type=float, default=20.0, help="seconds before each rate")
    parser.add_argument("--calibrations", type=int, default=2, help="before the first rate")
    given = parser.parse_args()
    work = Work(given, recipe_path(given.recipe).absolute())
    capacity = Capacity(work, given)
    print(
        f"{given.recipe}: {capacity.rps:.1f} requests/s by the fit alone, {capacity.binding} then"
    )
    work.llmctl("render", str(work.recipe), "--fit", work.fit(), "--out", PLAN)
    # outputs have the lengths of the trace
    has_server = traits_of(load_recipe(work.recipe).engine.name).server
    points = []
    with work.serving(PLAN, *([] if has_server else ["--allow-end-after"])) as url:
        for _ in range(given.calibrations):
            capacity.calibrate(url)
        print(f"{capacity.rps:.1f} requests/s by {given.calibrations} calibrations", flush=True)
        rates = [share * capacity.rps for share in SHARES]
        print("| requests/s | predicted | measured | kept | limit that binds |")
        print("|---|---|---|---|---|")
        for rate in rates:
            capacity.calibrate(url)
            points.append((rate, used_share(rate, capacity.bench(url, rate, bench_file(rate)))))
    shown = ", ".join(f"{slowdown:.2f}" for slowdown in capacity.slowdowns)
    print(f"beside the load generator batches took {shown} times as long as fitted")
    print(f"by the mean of all: {capacity.rps:.1f} requests/s predicted, {capacity.binding} then")
    found = crossing(points)
    if found is None:
        print("the rates do not bracket the measured capacity")
        return
    off = 100.0 * (capacity.rps / found - 1.0)
    print(f"measured: {found:.1f} requests/s; the prediction is {off:+.1f} % off")
    nearest = sorted(rates, key=lambda rate: abs(math.log(rate / found)))[:2]
    hindsight_rps = math.sqrt(math.prod(capacity.by(bench_file(rate))[0] for rate in nearest))
    off = 100.0 * (hindsight_rps / found - 1.0)
    print(f"by the speed of the two nearest runs: {hindsight_rps:.1f} requests/s, {off:+.1f} % off")


def bench_file(rate: float) -> str:
    return f"bench-{rate:.3f}.json"


def used_share(rate: float, report: BenchReport) -> float:
    """Print the row of a rate; the greatest used share of a target."""
    shares = report.measured.used
    said = report.predicted.used.values()
    binding = max(shares, key=lambda name: shares[name])
    cells = [f"{rate:.1f}", f"{max(said, default=math.nan):.2f}", f"{shares[binding]:.2f}"]
    cells += ["yes" if shares[binding] <= 1.0 else "no", binding]
    print(f"| {' | '.join(cells)} |", flush=True)
    return shares[binding]


def crossing(points: Sequence[tuple[float, float]]) -> float | None:
    """The rate at which the used share crosses 1; None where the rates do not bracket it."""
    kept = [point for point in points if point[1] <= 1.0]
    broken = [point for point in points if point[1] > 1.0]
    if not kept or not broken:
        return None
    low = max(kept)
    above = [point for point in broken if point[0] > low[0]]
    if not above:
        return None
    high = min(above)
    slope = math.log(high[1] / low[1]) / math.log(high[0] / low[0])
    return low[0] * math.exp(-math.log(low[1]) / slope)


if __name__ == "__main__":
    main()
