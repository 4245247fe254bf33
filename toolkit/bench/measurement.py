"""A part of a trace against a running server, once: warm-up, prediction, replay, and what came of it.

It is predicted before it is replayed, with what the warm-up has shown. What a person should know meanwhile is told
through `note` and a `Progress`; nothing is printed or written here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from toolkit.bench.client import Progress, Replay, run
from toolkit.bench.costs import counts_or_none, scheduling
from toolkit.bench.foreign import tells_of_its_laws
from toolkit.bench.predict import predict, predicted
from toolkit.bench.report import Prediction, report, values_of
from toolkit.bench.subject import Subject
from toolkit.bench.warmup import conditions, others, times_between, warm_up
from toolkit.files.bench import BenchReport, Warmup
from toolkit.files.io import head
from toolkit.files.plan import Plan
from toolkit.traces.scale import mean_rate
from toolkit.traces.types import Trace
from toolkit.units import seconds


class Measurement:
    """One part of a subject's trace.

    Args:
        subject: the server, and the whole trace.
        part: what is replayed of it.
        plan: what the server runs; without one nothing is predicted, and no warm-up is needed.
        sla: targets that attainment is counted by.
    """

    def __init__(
        self,
        subject: Subject,
        part: Trace,
        plan: Plan | None,
        sla: Mapping[str, float],
        note: Callable[[str], None],
        progress: Progress,
    ) -> None:
        self._target, self._whole, self._load = subject.target, subject.trace, subject.load
        self._part, self._plan, self._sla = part, plan, sla
        self._note, self._progress = note, progress
        self._predicted = Prediction()
        self._finished: list[int] = []  # output lengths that the server's scheduler has seen
        self._counted: dict[str, float] = {}  # by the server, before and after the replay
        self._counted_later: dict[str, float] = {}

    def warm_up(self, about_s: float, after_s: float) -> bool:
        """Serve the requests behind `after_s` of the trace for `about_s` seconds, and predict; False: interrupted."""
        if self._plan is None:
            return True
        found = predicted(self._plan, self._part)
        as_fitted = found.metrics(self._sla)
        count = round(about_s * as_fitted["throughput_rps"]) if tells_of_its_laws(self._plan, self._target) else 0
        trace = others(self._whole, after_s, count)
        warm, interrupted = self._warm_up(trace, about_s) if count else (None, False)
        if interrupted:
            return False
        self._finished = trace.output_tokens.tolist()
        if warm:
            shown = conditions(warm.slowdown, warm.front, self._finished, warm.arrival_cost_s)
            found = predicted(self._plan, self._part, shown)
        metrics, targets = found.metrics(self._sla), values_of(found.sla_ratios(self._sla), self._sla)
        self._predicted = Prediction(metrics, as_fitted, warm, targets)
        return True

    def _warm_up(self, trace: Trace, about_s: float) -> tuple[Warmup | None, bool]:
        """`warm_up`, in words for whoever watches."""
        self._note(f"warming up with {len(trace):,} other requests: about {seconds(about_s)}")
        with self._progress("warming up", len(trace)) as advance:
            warm, interrupted = warm_up(self._target, trace, self._load, advance)
        if warm:
            slow = f"batches take {warm.slowdown:.2f} times as long as fitted"
            each = seconds(warm.arrival_cost_s)
            more = f", and {each} more for each request that arrives meanwhile" if warm.arrival_cost_s else ""
            self._note(f"warm-up: {slow}{more}; the prediction takes that over")
        if warm and warm.front:
            delays = f"{seconds(warm.front.first_s)} to first tokens and {seconds(warm.front.last_s)} to last ones"
            self._note(f"warm-up: HTTP and the front add {delays}; so do the prediction's latencies")
        return warm, interrupted

    def replay(self) -> Replay:
        """The part itself."""
        expected_s = self._predicted.metrics.get("makespan_s", float(self._part.arrival_s[-1]))
        self._note(f"replaying {len(self._part):,} requests against {self._target.model}: about {seconds(expected_s)}")
        self._counted = counts_or_none(self._target) if self._target.own else {}
        with self._progress("replaying", len(self._part)) as advance:
            replay = run(self._target, self._part, self._load, advance)
        self._counted_later = counts_or_none(self._target) if self._counted else {}
        return replay

    def report(self, replay: Replay, inputs: Mapping[str, Path]) -> BenchReport:
        """What `replay` measured beside what was predicted; `inputs` are the files that this was made from."""
        counted, later = self._counted, self._counted_later
        times = times_between(counted, later, replay.samples) if self._predicted.warmup else None
        slowdown, front = (times.slowdown, times.front) if times else (None, None)
        cost_s = times.arrivals.cost_s if times else 0.0
        known: dict[str, float] = {}
        if self._plan and slowdown:
            known = predict(self._plan, self._part, self._sla, conditions(slowdown, front, self._finished, cost_s))
        return report(
            replay,
            head(dict(inputs)),
            model=self._target.model,
            lengths=self._load.lengths,
            trace_notes=self._part.notes,
            sla=self._sla,
            predicted=self._predicted,
            replay_slowdown=slowdown,
            replay_arrival_cost_s=cost_s,
            replay_front=front,
            in_hindsight=known,
            scheduling=scheduling(counted, later) if counted else None,
            policy=self._plan.policy.name if self._plan else None,
            request_rate_rps=mean_rate(self._whole) or None,
        )
