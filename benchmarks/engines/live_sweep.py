"""The best settings of a live search beside the best ones of a restart sweep, on a real vLLM.

    python -m benchmarks.engines.live_sweep plan.json --tuning live-tuning.json --vllm-python PYTHON
        [--trace TRACE] [--rate RATE] [--settings 60] [--bursts 2] [--starts 5]

`llmctl tune plan.json --live` has made live-tuning.json on one server, without a restart. Here each
of the settings that it tried gets a vLLM of its own, started with these values as flags, and the
same windows of the same trace in the same kind of burst: one that settles the server, and then
--bursts more. Trace and rate must be those of the search, which is checked.

Then the best settings of the search and the best ones of the sweep have five starts each, in turn
(A B B A ...), with a burst of every window. A pair of starts that follow one another is one
difference; the five have a mean with its 95 % interval. If 0 is in it, the two are the same within
noise.

An hour with the defaults, on a CPU. Needs an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.command import add_vllm, ended, make_parser
from benchmarks.common.results_file import keep
from toolkit.backends import ServerOrder
from toolkit.backends.vllm.backend import command_of
from toolkit.backends.vllm.command import VllmServer, vllm_server
from toolkit.backends.vllm.setup import PYTHON_VARIABLE
from toolkit.bench.session import RequestSettings, prepare_replay, unused_seed
from toolkit.endpoints.target import find_target
from toolkit.errors import EngineError, InputError
from toolkit.files.io import digest, read_file
from toolkit.files.live import BurstFigures, LiveTuning
from toolkit.files.plan import Plan, PlannedPolicy
from toolkit.live.search import Bursts, Settings, interval, mean_of
from toolkit.serve.server import Ending
from toolkit.traces.read import read_trace
from toolkit.traces.types import trace_path
from toolkit.traces.windows import fit_windows, mean_rate, prepare

WINDOWS = 4  # that `llmctl tune --live` cuts
SHOWN = 8


@dataclass(frozen=True)
class Start:
    """A start of vLLM with its settings, and the bursts that it served after the first one.
    `seconds`: of all, its end included. `failed`: why it did not start; '': it did.
    """

    settings: Settings
    seconds: float
    bursts: list[BurstFigures]
    failed: str = ""

    @property
    def score(self) -> float:
        return mean_of(self.bursts).score if self.bursts else -1.0

    def data(self) -> dict[str, Any]:
        """For the file of results."""
        return {**vars(self), "bursts": [one.model_dump() for one in self.bursts]}


class Sweep:
    """What all starts have in common."""

    def __init__(self, given: argparse.Namespace, plan: Plan, tuning: LiveTuning) -> None:
        self._plan = plan
        self._tuning = tuning
        recipe = plan.recipe
        path = trace_path(given.trace or recipe.tune.trace)
        self._trace, _ = read_trace(path)
        known = tuning.inputs.get("trace")
        if known is None or known.sha256 != digest(path).sha256:
            raise InputError(f"{path.name} is not the trace of the search", "give its --trace")
        self._rate = given.rate or recipe.tune.request_rate_rps
        asked = prepare(self._trace, recipe, self._rate)
        cut = fit_windows(asked, tuning.window_s, WINDOWS, 0, recipe.tune.seed)
        rate = mean_rate(cut.search[0].trace)
        if not np.allclose((cut.seconds, rate), (tuning.window_s, tuning.rate_rps)):
            raise InputError(
                f"its first window has {rate:.4g} requests/s, and that of the search "
                f"{tuning.rate_rps:.4g}",
                f"{self._rate:g} requests/s is another rate: give the --rate of the search",
            )

    def start(self, settings: Settings, windows: Sequence[int]) -> Start:
        """Start vLLM with these settings, and send it a burst of each window."""
        plan = self._plan
        flags = plan.policy.parameters | settings
        planned = plan.model_copy(
            update={"policy": PlannedPolicy(name=plan.policy.name, parameters=flags)}
        )
        begun_s = time.monotonic()
        bursts: list[BurstFigures] = []
        failed = ""
        with tempfile.TemporaryDirectory() as folder:
            order = ServerOrder(planned, plan.recipe.name, "127.0.0.1", 0, Ending(timeout_s=1.0))
            try:
                with vllm_server(command_of(order, Path(folder)), quiet=True) as server:
                    bursts = [*self._bursts(server, windows)]
            except EngineError as error:
                failed = error.message
        return Start(settings, time.monotonic() - begun_s, bursts, failed)

    def _bursts(self, server: VllmServer, windows: Sequence[int]) -> Iterator[BurstFigures]:
        plan = self._plan
        recipe = plan.recipe
        tuning = self._tuning
        wished = RequestSettings(self._rate, seed=unused_seed(), loop="open")
        setup = prepare_replay(find_target(server.url), self._trace, plan, wished, lambda _: None)
        cut = fit_windows(setup.trace, tuning.window_s, WINDOWS, 0, recipe.tune.seed)
        bursts = Bursts(setup.target, setup.load, cut.search, recipe.sla, cut.seconds)
        bursts.measure(0)  # the server settles
        for window in windows:
            yield bursts.measure(window)


def tried(tuning: LiveTuning, count: int) -> list[Settings]:
    """The settings of the start, and as many of the search, which tried them in random order; the
    best ones are among them.
    """
    others = [one.settings for one in tuning.trials if one.settings != tuning.start]
    if tuning.best in others[count:]:
        others.insert(0, tuning.best)
    return [tuning.start, *others[:count]]


def words_of(settings: Settings) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def run(given: argparse.Namespace) -> None:
    """Sweep, confirm, print. Raises `InputError`, `KeyboardInterrupt`."""
    tuning = read_file(LiveTuning, given.tuning)
    sweep = Sweep(given, read_file(Plan, given.plan), tuning)
    settings = tried(tuning, given.settings)
    found = []
    for number, one in enumerate(settings, start=1):
        start = sweep.start(one, range(given.bursts))
        found.append(start)
        how = start.failed or f"{mean_of(start.bursts).goodput_rps:.2f} requests/s"
        print(
            f"{number} of {len(settings)}, {start.seconds:.0f} s: {words_of(one)}: {how}",
            flush=True,
        )
    best = max(found, key=lambda one: one.score)
    show(tuning, found)
    if best.settings == tuning.best:
        print(f"both have the same best settings: {words_of(best.settings)}")
    pairs = confirmed(sweep, tuning.best, best.settings, given.starts)
    keep("starts", [one.data() for one in found])
    keep("confirmation", [[one.data() for one in pair] for pair in pairs])
    show_pairs(pairs)
    print(
        f"the search: {len(tuning.trials)} settings, {tuning.bursts} bursts, one start, "
        f"{tuning.spent_s / 60:.1f} min; the sweep: {len(found)} settings, "
        f"{sum(len(one.bursts) + 1 for one in found)} bursts, {len(found)} starts, "
        f"{sum(one.seconds for one in found) / 60:.1f} min"
    )


def confirmed(
    sweep: Sweep, live: Settings, swept: Settings, count: int
) -> list[tuple[Start, Start]]:
    """So many pairs of starts: with the search's best settings, and with the sweep's."""
    pairs = []
    for number in range(count):
        order = [live, swept] if number % 2 == 0 else [swept, live]
        pair = [sweep.start(settings, range(WINDOWS)) for settings in order]
        print(f"confirming, pair {number + 1} of {count}", flush=True)
        if any(one.failed for one in pair):
            raise InputError(f"vLLM did not start: {pair[0].failed or pair[1].failed}", "again")
        pairs.append((pair[0], pair[1]) if number % 2 == 0 else (pair[1], pair[0]))
    return pairs


def show(tuning: LiveTuning, found: Sequence[Start]) -> None:
    """The best settings of the sweep, and what the search measured of them."""
    measured = {json.dumps(one.settings): one.first for one in tuning.trials}
    ranked = sorted(found, key=lambda one: -one.score)
    print("\nGoodput, requests/s: the mean of the sweep's bursts, the search's first burst")
    print("\n| | settings | sweep | search |")
    print("|---:|---|---:|---:|")
    for number, one in enumerate(ranked[:SHOWN], start=1):
        live = measured.get(json.dumps(one.settings))
        searched = "" if live is None else f"{live.goodput_rps:.2f}"
        swept = mean_of(one.bursts).goodput_rps if one.bursts else 0.0
        print(f"| {number} | {words_of(one.settings)} | {swept:.2f} | {searched} |")
    failed = sum(bool(one.failed) for one in found)
    print(f"\nvLLM refused to start with {failed} of {len(found)}")


def show_pairs(pairs: Sequence[tuple[Start, Start]]) -> None:
    """Both settings' values of each start, and the differences."""
    live, swept = pairs[0]
    print(f"\nA, best of the search: {words_of(live.settings)}")
    print(f"B, best of the sweep: {words_of(swept.settings)}")
    print("\n| start | goodput A | goodput B | score A | score B | A over B |")
    print("|---:|---:|---:|---:|---:|---:|")
    percents = []
    for number, (one, two) in enumerate(pairs, start=1):
        goodputs = [mean_of(each.bursts).goodput_rps for each in (one, two)]
        percent = 100.0 * (one.score / two.score - 1.0) if two.score else 0.0
        percents.append(percent)
        print(
            f"| {number} | {goodputs[0]:.3f} | {goodputs[1]:.3f} | {one.score:.3f} | "
            f"{two.score:.3f} | {percent:+.1f} % |"
        )
    means = [float(np.mean([pair[k].score for pair in pairs])) for k in (0, 1)]
    print(f"\nmean score: A {means[0]:.3f}, B {means[1]:.3f}")
    gain = interval(percents)
    if gain is None:
        print(f"{len(percents)} pairs of starts are too few for an interval")
        return
    within = gain.low_percent <= 0.0 <= gain.high_percent
    print(
        f"A over B: {gain.percent:+.1f} % (95 %: {gain.low_percent:+.1f} to "
        f"{gain.high_percent:+.1f}); {'the same within noise' if within else 'they differ'}"
    )


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("plan", type=Path, help="the plan that the live server had")
    parser.add_argument("--tuning", type=Path, required=True)
    add_vllm(parser)
    parser.add_argument("--trace", help="of the search; default: the recipe's")
    parser.add_argument("--rate", type=float, help="of the search; default: the recipe's")
    parser.add_argument("--settings", type=int, default=60)
    parser.add_argument("--bursts", type=int, default=2, choices=range(1, WINDOWS + 1))
    parser.add_argument("--starts", type=int, default=5, help="of each of the two best")
    given = parser.parse_args()
    os.environ[PYTHON_VARIABLE] = given.vllm_python
    return ended(lambda: run(given))


if __name__ == "__main__":
    sys.exit(main())
