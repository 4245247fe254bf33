"""The best settings of a live search beside the best ones of a restart sweep, on a real vLLM.

    python -m benchmarks.engines.live_sweep plan.json --tuning live-tuning.json --vllm-python PYTHON
        [--trace TRACE] [--rate RATE] [--minutes 35] [--settings 60] [--work FOLDER]

`llmctl tune plan.json --live` has made live-tuning.json on one server, without a restart. Here each
of the settings that it tried gets a vLLM of its own, started with these values as flags, and the
same windows of the same trace in the same kind of burst: one that settles the server, and then as
many as the time is for. Trace and rate must be those of the search, which is checked.

Then the best settings of the search and the best ones of the sweep have five starts each, in turn
(A B B A ...), with a burst of every window. A pair of starts that follow one another is one
difference; the five have a mean with its 95 % interval. If 0 is in it, the two are the same within
noise.

An estimate comes first. FOLDER has a journal: after Ctrl-C (exit code 130) the same command goes
on, and the time of earlier runs counts. It also has vLLM's output of the newest start, and of each
that failed. Needs an otherwise idle machine. --starts 2 --settings 2
--minutes 4 tries it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

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
from toolkit.live.bursts import Bursts, mean_of
from toolkit.live.search import interval
from toolkit.live.space import Settings
from toolkit.serve.server import Ending
from toolkit.traces.read import read_trace
from toolkit.traces.types import trace_path
from toolkit.traces.windows import fit_windows, mean_rate, prepare

WINDOWS = 4  # that `llmctl tune --live` cuts
START_S = 12.0  # of vLLM on a CPU, before one was measured
SHOWN = 8


@dataclass(frozen=True)
class Start:
    """A start of vLLM with its settings, and the bursts that it served after the first one.

    Attributes:
        loaded_s: seconds until it answered.
        seconds: of all, its end included.
        failed: why it did not start; '': it did.
    """

    settings: Settings
    loaded_s: float
    seconds: float
    bursts: list[BurstFigures]
    failed: str = ""

    @property
    def score(self) -> float:
        return mean_of(self.bursts).score if self.bursts else -1.0

    def line(self) -> str:
        """For the journal."""
        figures = [one.model_dump() for one in self.bursts]
        return json.dumps({**vars(self), "bursts": figures})

    @classmethod
    def of(cls, line: str) -> Start:
        fields = json.loads(line)
        figures = [BurstFigures.model_validate(one) for one in fields.pop("bursts")]
        return cls(**fields, bursts=figures)


class Journal:
    """The starts so far, in their order. A file of another sweep is refused."""

    def __init__(self, path: Path, key: str) -> None:
        self._path = path
        self._known: list[Start] = []
        head = json.dumps({"key": key})
        if path.is_file():
            first, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
            if first != head:
                raise InputError(f"{path} is of another sweep", "give another --work")
            self._known = [Start.of(line) for line in lines if line.endswith("}")]
        path.write_text(
            "".join(line + "\n" for line in (head, *(one.line() for one in self._known))),
            encoding="utf-8",
        )

    def __len__(self) -> int:
        return len(self._known)

    @property
    def spent_s(self) -> float:
        return sum(one.seconds for one in self._known)

    def get(self, number: int) -> Start | None:
        """Start `number`, if it was made."""
        return self._known[number] if number < len(self._known) else None

    def put(self, start: Start) -> None:
        self._known.append(start)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(start.line() + "\n")


class Sweep:
    """What all starts have in common."""

    def __init__(self, given: argparse.Namespace, plan: Plan, tuning: LiveTuning) -> None:
        self._given = given
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
        words = [digest(given.plan).sha256, digest(given.tuning).sha256, str(given.settings)]
        key = sha256(json.dumps([*words, given.starts]).encode()).hexdigest()
        self.journal = Journal(given.work / "journal.jsonl", key)
        self._number = 0

    def start(self, settings: Settings, windows: Sequence[int]) -> Start:
        """Start vLLM with these settings, and send it a burst of each window."""
        number = self._number
        self._number += 1
        found = self.journal.get(number)
        if found is None:
            found = self._started(settings, windows)
            self.journal.put(found)
        elif found.settings != settings:
            raise InputError(f"start {number} of the journal has others", "give another --work")
        return found

    def _started(self, settings: Settings, windows: Sequence[int]) -> Start:
        plan = self._plan
        flags = plan.policy.parameters | settings
        planned = PlannedPolicy(name=plan.policy.name, parameters=flags)
        begun_s = time.monotonic()
        loaded_s = 0.0
        bursts: list[BurstFigures] = []
        failed = ""
        log = self._given.work / "vllm.log"
        with (
            tempfile.TemporaryDirectory() as folder,
            log.open("w", encoding="utf-8") as output,
            redirect_stderr(output),
        ):
            order = ServerOrder(
                plan.model_copy(update={"policy": planned}),
                plan.recipe.name,
                "127.0.0.1",
                0,
                Ending(timeout_s=1.0),
            )
            try:
                with vllm_server(command_of(order, Path(folder)), quiet=False) as server:
                    loaded_s = time.monotonic() - begun_s
                    bursts = [*self._bursts(server, windows)]
            except EngineError as error:
                failed = error.message
        if failed:
            log.rename(log.with_name(f"failed-{len(self.journal)}.log"))
        return Start(settings, loaded_s, time.monotonic() - begun_s, bursts, failed)

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


def windows_within(
    minutes: float, settings: int, starts: int, start_s: float, burst_s: float
) -> int:
    """How many bursts each of the settings can have, beside the one that settles it."""
    confirm_s = 2 * starts * (start_s + (1 + WINDOWS) * burst_s)
    each_s = (60.0 * minutes - confirm_s) / settings - start_s - burst_s
    return min(int(each_s / burst_s), WINDOWS)


def words_of(settings: Settings) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def run(given: argparse.Namespace) -> None:
    """Sweep, confirm, print. Raises `InputError`, `KeyboardInterrupt`."""
    tuning = read_file(LiveTuning, given.tuning)
    plan = read_file(Plan, given.plan)
    given.work.mkdir(parents=True, exist_ok=True)
    sweep = Sweep(given, plan, tuning)
    settings = tried(tuning, given.settings)
    count = len(settings) - 1
    note = "" if count >= given.settings else f"; the search has no {given.settings}"
    burst_s = tuning.spent_s / tuning.bursts
    spent_s = sweep.journal.spent_s
    resumed = len(sweep.journal)
    print(f"{count} settings beside those of the start{note}; {2 * given.starts} more to confirm")
    print(f"a burst took {burst_s:.1f} s in the search, a start takes about {START_S:.0f} s")
    if resumed:
        print(f"{resumed} starts of an earlier run are kept, of {spent_s / 60:.1f} min")
    usual = sweep.start(settings[0], range(WINDOWS))
    if usual.failed:
        raise InputError(f"vLLM does not start with those of the start: {usual.failed}", "")
    windows = windows_within(given.minutes, count, given.starts, usual.loaded_s + 2.0, burst_s)
    if windows < 1:
        raise InputError(
            f"{given.minutes:g} minutes are too few: a start took {usual.loaded_s:.1f} s",
            "give more --minutes, or fewer --settings",
        )
    each_s = usual.loaded_s + 2.0 + (1 + windows) * burst_s
    confirm_s = 2 * given.starts * (usual.loaded_s + 2.0 + (1 + WINDOWS) * burst_s)
    about_s = usual.seconds + count * each_s + confirm_s
    print(
        f"vLLM started in {usual.loaded_s:.1f} s; each setting has 1 + {windows} bursts: about "
        f"{about_s / 60:.0f} min in all",
        flush=True,
    )
    found = [usual]
    for number, one in enumerate(settings[1:], start=1):
        start = sweep.start(one, range(windows))
        found.append(start)
        how = start.failed or f"{mean_of(start.bursts).goodput_rps:.2f} requests/s"
        print(f"{number} of {count}, {start.seconds:.0f} s: {words_of(one)}: {how}", flush=True)
    # of each the same bursts
    best = max(found, key=lambda one: mean_of(one.bursts[:windows]).score if one.bursts else -1.0)
    sweep_s = sum(one.seconds for one in found)
    show(tuning, found, windows)
    if best.settings == tuning.best:
        print(f"both have the same best settings: {words_of(best.settings)}")
    pairs = confirmed(sweep, tuning.best, best.settings, given.starts)
    keep("starts", [json.loads(one.line()) for one in found])
    keep("confirmation", [[json.loads(one.line()) for one in pair] for pair in pairs])
    show_pairs(pairs)
    searched = len(tuning.trials)
    print(
        f"the search: {searched} settings, {tuning.bursts} bursts, one start, "
        f"{tuning.spent_s / 60:.1f} min; the sweep: {len(found)} settings, "
        f"{sum(len(one.bursts) + 1 for one in found)} bursts, {len(found)} starts, "
        f"{sweep_s / 60:.1f} min"
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


def show(tuning: LiveTuning, found: Sequence[Start], windows: int) -> None:
    """The best settings of the sweep, and what the search measured of them."""
    measured = {json.dumps(one.settings): one.first for one in tuning.trials}
    ranked = sorted(found, key=lambda one: -one.score)
    print(f"\nGoodput, requests/s: the sweep's mean of {windows} bursts, the search's first burst")
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
    parser.add_argument("--minutes", type=float, default=35.0, help="of all runs together")
    parser.add_argument("--settings", type=int, default=60)
    parser.add_argument("--starts", type=int, default=5, help="of each of the two best")
    parser.add_argument("--work", type=Path, default=Path("live-sweep"))
    given = parser.parse_args()
    os.environ[PYTHON_VARIABLE] = given.vllm_python
    return ended(lambda: run(given), "; the same command goes on")


if __name__ == "__main__":
    sys.exit(main())
