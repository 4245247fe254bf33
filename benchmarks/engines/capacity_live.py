"""The capacity of a recipe as `llmctl capacity` predicts it, beside the one that is measured live.

    python -m benchmarks.engines.capacity_live --work DIR --recipe tiny-llama-cpu-rebatch
        [--fit FILE] [--trace chat-small] [--seconds 60] [--json FILE]

Takes a quarter of an hour for a recipe, and four minutes more where it has to be profiled. Needs an
otherwise idle machine, and for recipes of engine `vllm` an environment with vLLM that
LLMCTL_VLLM_PYTHON names.

The recipe is profiled and fitted, unless a fit is given. Its capacity is predicted on the trace by
the fit alone, and again by the speed that the server shows beside the load generator: at the rate
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

import json
import math
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.command import make_parser
from toolkit.engine_traits import traits_of
from toolkit.files.io import read_file
from toolkit.files.plan import Plan

SHARES = (0.8, 0.9, 1.0, 1.1, 1.25)  # of the predicted capacity
START_S = 180.0


def main(args: Sequence[str] | None = None) -> None:
    """Predict, serve, measure, and print a row for each rate."""
    parser = make_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="a folder for its files")
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--fit", type=Path, help="default: profile and fit the recipe")
    parser.add_argument("--trace", default="chat-small")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each rate")
    parser.add_argument("--warmup", type=float, default=20.0, help="seconds before each rate")
    parser.add_argument("--calibrations", type=int, default=2, help="before the first rate")
    given = parser.parse_args(args)
    given.work.mkdir(parents=True, exist_ok=True)
    fit = given.fit or fitted(given.recipe, given.work)
    words = [given.recipe, "--fit", str(fit), "--trace", given.trace, "--no-at-once", "--json"]
    capacity_rps, binding = predicted(words)
    print(f"{given.recipe}: {capacity_rps:.1f} requests/s by the fit alone, then {binding}")
    plan = given.work / "plan.json"
    llmctl("render", given.recipe, "--fit", str(fit), "--out", str(plan))
    port = free_port()
    command = [sys.executable, "-m", "toolkit", "serve", str(plan), "--port", str(port)]
    if not traits_of(read_file(Plan, plan).recipe.engine.name).server:
        command.append("--allow-end-after")  # outputs have the lengths of the trace
    with (given.work / "serve.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    points = []
    try:
        wait_for(f"http://127.0.0.1:{port}", server)
        seen: list[str] = []
        slowdowns: list[float] = []

        def calibrate(rate: float) -> tuple[float, str]:
            bench = given.work / f"calibration-{len(seen) // 2 + 1}.json"
            replay(given, plan, port, rate, bench)
            seen.extend(["--bench", str(bench)])
            found_rps, binding = predicted([*words, *seen])
            report = json.loads(bench.read_text(encoding="utf-8"))
            slowdowns.append(report["replay_slowdown"] or report["warmup"]["slowdown"])
            return found_rps, binding

        for _ in range(given.calibrations):
            capacity_rps, binding = calibrate(capacity_rps)
        print(f"{capacity_rps:.1f} requests/s by {given.calibrations} calibrations", flush=True)
        rates = [share * capacity_rps for share in SHARES]
        print("| requests/s | predicted | measured | kept | limit that binds |")
        print("|---|---|---|---|---|")
        for rate in rates:
            capacity_rps, binding = calibrate(capacity_rps)
            points.append(measured(given, plan, port, rate))
        shown = ", ".join(f"{slowdown:.2f}" for slowdown in slowdowns)
        print(f"beside the load generator batches took {shown} times as long as fitted")
        print(f"by the mean of all: {capacity_rps:.1f} requests/s predicted, then {binding}")
    finally:
        server.terminate()
        server.wait()
    found = crossing(points)
    if found is None:
        print("the rates do not bracket the measured capacity")
        return
    error = 100.0 * (capacity_rps / found - 1.0)
    print(f"measured: {found:.1f} requests/s; the prediction is {error:+.1f} % off")
    nearest = sorted(points, key=lambda point: abs(math.log(point[0] / found)))[:2]
    files = [given.work / f"bench-{rate:.3f}.json" for rate, _ in nearest]
    later = [predicted([*words, "--bench", str(file)])[0] for file in files]
    hindsight_rps = math.sqrt(math.prod(later))
    error = 100.0 * (hindsight_rps / found - 1.0)
    print(
        f"by the speed of the two nearest runs: {hindsight_rps:.1f} requests/s, {error:+.1f} % off"
    )


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def fitted(recipe: str, work: Path) -> Path:
    """Profile and fit the recipe in `work`, unless that was done before."""
    profile = work / "profile.json"
    fit = work / "fit.json"
    if not fit.exists():
        llmctl("profile", recipe, "--out", str(profile))
        llmctl("fit", str(profile), "--out", str(fit))
    return fit


def predicted(words: Sequence[str]) -> tuple[float, str]:
    """The capacity and the limit that breaks above it."""
    [told] = json.loads(llmctl("capacity", *words))["capacities"]
    return float(told["capacity_rps"]), str(told["binding"])


def replay(given: Any, plan: Path, port: int, rate: float, out: Path) -> None:
    """Replay the trace at this rate."""
    words = ["--url", f"http://127.0.0.1:{port}", "--plan", str(plan), "--trace", given.trace]
    words += ["--rate", f"{rate:.6g}", "--duration", f"{given.seconds:g}"]
    llmctl("bench", *words, "--warmup", f"{given.warmup:g}", "--out", str(out))


def measured(given: Any, plan: Path, port: int, rate: float) -> tuple[float, float]:
    """Replay the trace at this rate: the rate, and the greatest used share of a target."""
    out = given.work / f"bench-{rate:.3f}.json"
    replay(given, plan, port, rate, out)
    report = json.loads(out.read_text(encoding="utf-8"))
    shares = {one["target"]: one["measured_s"] / one["limit_s"] for one in report["targets"]}
    said = {
        one["target"]: one["predicted_s"] / one["limit_s"]
        for one in report["targets"]
        if one["predicted_s"] is not None
    }
    binding = max(shares, key=lambda name: shares[name])
    cells = [f"{rate:.1f}", f"{max(said.values(), default=math.nan):.2f}"]
    cells += [f"{shares[binding]:.2f}", "yes" if shares[binding] <= 1.0 else "no", binding]
    print(f"| {' | '.join(cells)} |", flush=True)
    return rate, shares[binding]


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


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    """Wait until the server is ready."""
    from toolkit.endpoints.target import look

    end_s = time.monotonic() + START_S
    while look(url).state != "ready":
        if server.poll() is not None or time.monotonic() > end_s:
            raise SystemExit("the server did not start: see serve.log")
        time.sleep(0.3)


def llmctl(*words: str) -> str:
    """Run a command; its output."""
    command = [sys.executable, "-m", "toolkit", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
