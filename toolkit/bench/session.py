"""Windows of a trace against a running server, one after the other: warm-up, prediction, replay, and what came of each.

Every window is predicted before it is replayed, with what the warm-up just before it has shown. How far one gets is
told through a `Progress`; nothing is printed or written here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from toolkit.bench.client import Progress, Replay, run
from toolkit.bench.costs import counts_or_none
from toolkit.bench.foreign import tells_of_its_laws
from toolkit.bench.outside import seen_by_clients
from toolkit.bench.predict import Conditions, predict, predicted
from toolkit.bench.report import served
from toolkit.bench.subject import Subject
from toolkit.bench.validate import Pair, metric_errors, request_errors, request_lines
from toolkit.bench.warmup import ServerTimes, conditions, others, times_between, warm_up
from toolkit.files.bench import Warmup
from toolkit.files.io import head
from toolkit.files.plan import Plan
from toolkit.files.validation import Validation, WindowResult
from toolkit.metrics import summarize
from toolkit.sim.api import SimResult
from toolkit.traces.types import Trace
from toolkit.traces.windows import Window


class Session:
    """Windows replayed against one server under one plan.

    Args:
        subject: the server, and the whole trace; warm-ups are taken from behind each window.
        warmup_s: about how long they last; 0: none.

    `results`, and `lines` (each request as JSON), hold what was replayed to its end.
    """

    def __init__(self, subject: Subject, plan: Plan, warmup_s: float, progress: Progress) -> None:
        self._target, self._whole, self._load = subject.target, subject.trace, subject.load
        self._notes = subject.notes
        self._plan, self._warmup_s, self._progress = plan, warmup_s, progress
        self._tells = tells_of_its_laws(plan, subject.target)
        self.results: list[WindowResult] = []
        self.lines: list[str] = []
        self._pairs: list[Pair] = []
        self._finished: list[int] = []  # output lengths that the server's scheduler has seen

    def run(self, windows: Sequence[Window]) -> bool:
        """Replay them; whether that was interrupted."""
        for number, window in enumerate(windows, start=1):
            shown = self._warm_up(number, window)
            if shown is None or self._replay(number, len(windows), window, shown):
                return True
        return False

    def validation(self, trace: Path, plan: Path) -> Validation:
        """validation.json; the files are those that this was made from."""
        return Validation(
            **head({"plan": plan, "trace": trace}),
            model=self._target.model,
            policy=self._plan.policy.name,
            notes=[*self._whole.notes, *self._notes],
            windows=self.results,
            metrics=metric_errors(self.results),
            requests=request_errors(self._pairs),
        )

    def _warm_up(self, number: int, window: Window) -> Conditions | None:
        """What other requests show of the server as it is now; None: interrupted."""
        count = round(self._warmup_s * predict(self._plan, window.trace, {})["throughput_rps"])
        if not count:
            return self._unwarmed()
        trace = others(self._whole, window.end_s, count)
        with self._progress("warming up", count) as advance:
            if self._tells:
                warm, interrupted = warm_up(self._target, trace, self._load, advance)
            else:
                warm, interrupted = self._look(number, trace, advance)
        if interrupted:
            return None
        self._finished += trace.output_tokens.tolist()
        if warm is None:
            return self._unwarmed()
        return conditions(warm.slowdown, warm.front, self._finished, warm.arrival_cost_s)

    def _unwarmed(self) -> Conditions:
        return Conditions(finished=tuple(self._finished))

    def _look(self, number: int, trace: Trace, advance: Callable[..., None]) -> tuple[Warmup | None, bool]:
        """`warm_up` of a server that tells nothing of its batches."""
        expected = predicted(self._plan, trace, self._unwarmed()).served
        replay = run(self._target, trace, replace(self._load, seed=self._load.seed + 1), advance)
        if replay.interrupted:
            return None, True
        self.lines += request_lines(number, "warm-up", trace, Pair(served(replay.samples), expected))
        return seen_by_clients(self._plan, trace, replay.samples, self._finished), False

    def _replay(self, number: int, count: int, window: Window, shown: Conditions) -> bool:
        """One window; whether that was interrupted."""
        simulated = predicted(self._plan, window.trace, shown)
        before = counts_or_none(self._target) if self._tells else {}
        with self._progress(f"window {number} of {count}", len(window.trace)) as advance:
            replay = run(self._target, window.trace, self._load, advance)
        if replay.interrupted:
            return True
        times = times_between(before, counts_or_none(self._target), replay.samples) if self._tells else None
        pair = Pair(served(replay.samples), simulated.served)
        self._finished += window.trace.output_tokens.tolist()
        self._pairs.append(pair)
        self.lines += request_lines(number, "window", window.trace, pair)
        self.results.append(self._result(window, replay, simulated, shown, times))
        return False

    def _result(
        self, window: Window, replay: Replay, simulated: SimResult, shown: Conditions, times: ServerTimes | None
    ) -> WindowResult:
        sla, meanwhile = self._plan.recipe.sla, times.slowdown if times else None
        known: dict[str, float] = {}
        if times and meanwhile:
            then = conditions(meanwhile, times.front, shown.finished, times.arrivals.cost_s)
            known = predicted(self._plan, window.trace, then).metrics(sla)
        return WindowResult(
            start_s=window.start_s,
            end_s=window.end_s,
            requests=len(replay.samples),
            failed=sum(bool(sample.failure) for sample in replay.samples),
            refused=sum(sample.refused for sample in replay.samples),
            slowdown=shown.slowdown,
            arrival_cost_s=shown.arrival_cost_s,
            front_first_s=shown.front.first_s if shown.front else 0.0,
            front_last_s=shown.front.last_s if shown.front else 0.0,
            measured=summarize(served(replay.samples), sla),
            predicted=simulated.metrics(sla),
            slowdown_meanwhile=meanwhile,
            predicted_in_hindsight=known,
        )
