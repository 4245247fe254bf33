"""Replays against a running server: warm-up, prediction, replay, and the comparison of both.

In order: the server and the requests for it (`look_at` makes a `Subject`); `Measurement`, one part
of a trace (`llmctl bench`); `Session`, several windows (`llmctl validate`); and the errors over
windows and requests. Each replay is predicted before it starts, with what the warm-up just before
it showed. Progress is reported through a `Progress` and `note`; nothing is printed or written here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from toolkit.bench.client import (
    Lengths,
    LoadSpec,
    Progress,
    Replay,
    fitted,
    limits_of,
    run,
    try_out,
)
from toolkit.bench.predict import (
    SEEDS,
    ServerConditions,
    check_server,
    conditions,
    counts_or_none,
    other_requests,
    predict,
    predicted,
    reports_batch_times,
    scheduling,
    seen_by_clients,
    settle,
    times_between,
    warm_up,
)
from toolkit.bench.report import Prediction, cache_use, report, served, values_of
from toolkit.endpoints.target import CacheCounts, Target, cache_counts, with_answer_ids
from toolkit.errors import InputError, TargetMissedError
from toolkit.files.bench import (
    BenchReport,
    MetricError,
    RequestError,
    Validation,
    Warmup,
    WindowResult,
)
from toolkit.files.io import head
from toolkit.files.plan import Plan
from toolkit.files.profile import OnForeign
from toolkit.metrics import Served, summarize
from toolkit.traces.types import Trace
from toolkit.traces.windows import TraceWindow, mean_rate
from toolkit.traces.write import to_ms
from toolkit.units import seconds

METRICS = ("throughput_rps", "ttft_mean_s", "tpot_mean_s", "e2e_mean_s", "e2e_p95_s")
HELD_TO = ("throughput_rps", "ttft_mean_s", "tpot_mean_s", "e2e_mean_s")  # by --max-error

Floats = NDArray[np.float64]
Loop = Literal["open", "closed"]

# Notes on the requests: of lengths that are given or hidden, and of answers without ids.
GIVEN = "each request's limit is exactly its output, so the scheduler knows the lengths"
HIDDEN = "the scheduler knows each request's limit; only the engine knows the lengths"
NO_ANSWER_IDS = (
    "the server does not give its answers' token ids: later prompts have other tokens there, which "
    "no cache holds"
)


@dataclass(slots=True, frozen=True)
class RequestSettings:
    """What the user sets for the requests; None: the plan's value, else one that any server
    accepts.

    `rate` is in requests per second. `lengths` are hidden by default from a server that allows it
    (llmctl's with `--allow-end-after`), and given to others.
    """

    rate: float | None = None
    lengths: Lengths | None = None
    max_new_tokens: int | None = None
    vocab_size: int | None = None
    timeout_s: float = 600.0
    seed: int = 0
    # closed: a later turn follows the end of the turn before; None: closed in a trace of sessions
    loop: Loop | None = None


@dataclass(slots=True, frozen=True)
class Subject:
    """A server, the trace with lengths that it accepts and the rate of the replay, and how the
    trace becomes requests.

    The trace's limits are those that the requests name: where lengths are given, each limit is the
    request's output, so that a prediction simulates what is sent.
    """

    target: Target
    trace: Trace
    load: LoadSpec

    @property
    def notes(self) -> list[str]:
        """What a reader must know of the requests."""
        sessions, dialect = self.trace.sessions, self.load.dialect
        found = [
            f"the server does not take {lacking}: lengths may differ from the trace's"
            for lacking in dialect.lacks
        ]
        found.append(f"replay: {GIVEN if self.load.lengths == 'given' else HIDDEN}")
        if sessions is not None:
            later = int((sessions.previous >= 0).sum())
            found.append(
                f"closed loop: {later:,} of {len(self.trace):,} requests are sent when the turn "
                "before has ended"
            )
            if dialect.token_ids and not dialect.answer_ids:
                found.append(NO_ANSWER_IDS)
        if self.trace.shared is not None and not dialect.token_ids:
            found.append("prompts share words, so the tokens that they share are approximate")
        return found


def look_at(
    target: Target,
    trace: Trace,
    plan: Plan | None,
    settings: RequestSettings,
    on_foreign: OnForeign | None = None,
) -> Subject:
    """Ask the server what it accepts, with a few requests.

    `ForeignError` where it is not the server that `plan` was fitted to (with `on_foreign` that is
    called instead), `InputError` with the server's own message where it refuses.
    """
    if plan is not None:
        check_server(plan, target, on_foreign)
    limits = limits_of(plan, target, settings.max_new_tokens, settings.vocab_size)
    whole = fitted(trace, limits, settings.rate)
    if settings.loop == "closed" and trace.sessions is None:
        raise InputError(
            f"{trace.source}: it has no sessions, so there is no closed loop", "leave out --loop"
        )
    if settings.loop == "open":
        whole = replace(whole, sessions=None)
    lengths, dialect = try_out(target, settings.lengths, limits.output)
    if whole.sessions is not None:
        dialect = with_answer_ids(target, dialect)
    named = whole.output_tokens
    if lengths == "hidden":
        named = np.where(whole.max_tokens, whole.max_tokens, limits.output)
    whole = replace(whole, max_tokens=named)
    load = LoadSpec(
        lengths, limits.output, limits.vocabulary, settings.timeout_s, settings.seed, dialect
    )
    return Subject(target, whole, load)


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
        self._cached: tuple[CacheCounts | None, CacheCounts | None] = (None, None)

    def warm_up(self, about_s: float, after_s: float) -> bool:
        """Serve the requests behind `after_s` of the trace for `about_s` seconds, and predict;
        False: interrupted.
        """
        if self._plan is None:
            return True
        found = predicted(self._plan, self._part)
        as_fitted = found.metrics(self._sla)
        count = 0
        if reports_batch_times(self._plan, self._target):
            count = round(about_s * as_fitted["throughput_rps"])
        trace = other_requests(self._whole, after_s, count)
        warm, interrupted = self._warm_up(trace, about_s) if count else (None, False)
        if interrupted:
            return False
        self._finished = trace.output_tokens.tolist()
        if warm:
            current = conditions(warm.slowdown, warm.front, self._finished, warm.arrival_cost_s)
            found = predicted(self._plan, self._part, current)
        metrics = found.metrics(self._sla)
        targets = values_of(found.sla_ratios(self._sla), self._sla) if found.served.ok.any() else {}
        self._predicted = Prediction(metrics, as_fitted, warm, targets)
        return True

    def _warm_up(self, trace: Trace, about_s: float) -> tuple[Warmup | None, bool]:
        """`warm_up`, with notes for the user."""
        self._note(f"warming up with {len(trace):,} other requests: about {seconds(about_s)}")
        with self._progress("warming up", len(trace)) as advance:
            warm, interrupted = warm_up(self._target, trace, self._load, advance)
        if warm:
            shown = f"batches take {warm.slowdown:.2f} times as long as fitted"
            if warm.arrival_cost_s:
                each = seconds(warm.arrival_cost_s)
                shown += f", and {each} more for each request that arrives meanwhile"
            self._note(f"warm-up: {shown}; the prediction includes that")
        if warm and warm.front:
            first, last = seconds(warm.front.first_s), seconds(warm.front.last_s)
            delays = f"{first} to first tokens and {last} to last ones"
            self._note(f"warm-up: HTTP and the front add {delays}; the prediction includes that")
        return warm, interrupted

    def replay(self) -> Replay:
        """Replay the part."""
        expected_s = self._predicted.metrics.get("makespan_s", float(self._part.arrival_s[-1]))
        self._note(
            f"replaying {len(self._part):,} requests against {self._target.model}:"
            f" about {seconds(expected_s)}"
        )
        self._counted = counts_or_none(self._target) if self._target.own else {}
        cached = cache_counts(self._target)
        with self._progress("replaying", len(self._part)) as advance:
            replay = run(self._target, self._part, self._load, advance)
        self._cached = cached, cache_counts(self._target) if cached else None
        self._counted_later = counts_or_none(self._target) if self._counted else {}
        return replay

    def report(self, replay: Replay, inputs: Mapping[str, Path]) -> BenchReport:
        """What `replay` measured beside the prediction; `inputs` are the files that this was made
        from.
        """
        counted, later = self._counted, self._counted_later
        times = times_between(counted, later, replay.samples) if self._predicted.warmup else None
        slowdown, front = (times.slowdown, times.front) if times else (None, None)
        cost_s = times.arrivals.cost_s if times else 0.0
        hindsight: dict[str, float] = {}
        if self._plan and slowdown:
            during_replay = conditions(slowdown, front, self._finished, cost_s)
            hindsight = predict(self._plan, self._part, self._sla, during_replay)
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
            in_hindsight=hindsight,
            scheduling=scheduling(counted, later) if counted else None,
            cache=cache_use(replay.samples, self._part, self._cached, self._predicted.metrics),
            policy=self._plan.policy.name if self._plan else None,
            request_rate_rps=mean_rate(self._whole) or None,
        )


class Session:
    """Windows replayed against one server under one plan.

    Args:
        subject: the server, and the whole trace; warm-ups are taken from behind each window.
        warmup_s: about how long they last; 0: no warm-up.

    `results`, and `lines` (each request as JSON), hold the windows that were replayed to their end.
    """

    def __init__(self, subject: Subject, plan: Plan, warmup_s: float, progress: Progress) -> None:
        self._target, self._whole, self._load = subject.target, subject.trace, subject.load
        self._notes = subject.notes
        self._plan, self._warmup_s, self._progress = plan, warmup_s, progress
        self._reports_batches = reports_batch_times(plan, subject.target)
        self.results: list[WindowResult] = []
        self.lines: list[str] = []
        self._pairs: list[Pair] = []
        self._finished: list[int] = []  # output lengths that the server's scheduler has seen

    def run(self, windows: Sequence[TraceWindow]) -> bool:
        """Replay the windows; whether that was interrupted."""
        for number, window in enumerate(windows, start=1):
            current = self._warm_up(number, window)
            if current is None or self._replay(number, len(windows), window, current):
                return True
        return False

    def validation(self, trace: Path, plan: Path) -> Validation:
        """validation.json, with the files that it was made from."""
        return Validation(
            **head({"plan": plan, "trace": trace}),
            model=self._target.model,
            policy=self._plan.policy.name,
            notes=[*self._whole.notes, *self._notes],
            windows=self.results,
            metrics=metric_errors(self.results),
            requests=request_errors(self._pairs),
        )

    def _warm_up(self, number: int, window: TraceWindow) -> ServerConditions | None:
        """What other requests show of the server now; None: interrupted."""
        count = round(self._warmup_s * predict(self._plan, window.trace, {})["throughput_rps"])
        if not count:
            return self._unwarmed()
        trace = other_requests(self._whole, window.end_s, count)
        with self._progress("warming up", count) as advance:
            if self._reports_batches:
                warm, interrupted = warm_up(self._target, trace, self._load_of(number), advance)
            else:
                warm, interrupted = self._warm_up_unreported(number, trace, advance)
        if interrupted:
            return None
        self._finished += trace.output_tokens.tolist()
        if warm is None:
            return self._unwarmed()
        return conditions(warm.slowdown, warm.front, self._finished, warm.arrival_cost_s)

    def _unwarmed(self) -> ServerConditions:
        return ServerConditions(finished=tuple(self._finished))

    def _warm_up_unreported(
        self, number: int, trace: Trace, advance: Callable[..., None]
    ) -> tuple[Warmup | None, bool]:
        """`warm_up` of a server that does not report its batches."""
        load = self._load_of(number)
        trace, interrupted = settle(self._target, trace, load, advance)
        if interrupted:
            return None, True
        expected = predicted(self._plan, trace, self._unwarmed()).served
        replay = run(self._target, trace, replace(load, seed=load.seed + 1), advance)
        if replay.interrupted:
            return None, True
        self.lines += request_lines(
            number, "warm-up", trace, Pair(served(replay.samples), expected)
        )
        return seen_by_clients(self._plan, trace, replay.samples, self._finished), False

    def _replay(
        self, number: int, count: int, window: TraceWindow, current: ServerConditions
    ) -> bool:
        """Replay one window of `count`; whether that was interrupted."""
        trace, sla = window.trace, self._plan.recipe.sla
        simulated = predicted(self._plan, trace, current)
        before = counts_or_none(self._target) if self._reports_batches else {}
        cached = cache_counts(self._target)
        with self._progress(f"window {number} of {count}", len(trace)) as advance:
            replay = run(self._target, trace, self._load_of(number), advance)
        if replay.interrupted:
            return True
        after = counts_or_none(self._target) if before else {}
        times = times_between(before, after, replay.samples)
        pair = Pair(served(replay.samples), simulated.served)
        self._finished += trace.output_tokens.tolist()
        self._pairs.append(pair)
        self.lines += request_lines(number, "window", trace, pair)
        counted = cached, cache_counts(self._target) if cached else None
        slowdown = times.slowdown if times else None
        hindsight: dict[str, float] = {}
        if times and slowdown:
            during_replay = conditions(
                slowdown, times.front, current.finished, times.arrivals.cost_s
            )
            hindsight = predicted(self._plan, trace, during_replay).metrics(sla)
        self.results.append(
            WindowResult(
                start_s=window.start_s,
                end_s=window.end_s,
                requests=len(replay.samples),
                failed=sum(bool(sample.failure) for sample in replay.samples),
                refused=sum(sample.refused for sample in replay.samples),
                slowdown=current.slowdown,
                arrival_cost_s=current.arrival_cost_s,
                front_first_s=current.front.first_s if current.front else 0.0,
                front_last_s=current.front.last_s if current.front else 0.0,
                measured=summarize(pair.measured, sla),
                predicted=simulated.metrics(sla),
                slowdown_meanwhile=slowdown,
                cache=cache_use(replay.samples, trace, counted, simulated.metrics({})),
                predicted_in_hindsight=hindsight,
            )
        )
        return False

    def _load_of(self, number: int) -> LoadSpec:
        """The load of a window. Each window has prompts of its own, as has each warm-up: otherwise
        the server's cache would hold what the windows before have in common with it.
        """
        return replace(self._load, seed=self._load.seed + SEEDS * (number - 1))


@dataclass(slots=True, frozen=True)
class Pair:
    """The requests of one window as served and as predicted, in the same order."""

    measured: Served
    predicted: Served


def metric_errors(windows: Sequence[WindowResult]) -> list[MetricError]:
    """The errors of each of `METRICS` over the windows, except metrics without a measurement."""
    found = []
    for name in METRICS:
        measured = np.array([window.measured.get(name, 0.0) for window in windows])
        predicted = np.array([window.predicted.get(name, 0.0) for window in windows])
        if not measured.size or (measured <= 0.0).any():
            continue
        errors = 100.0 * (predicted / measured - 1.0)
        found.append(
            MetricError(
                metric=name,
                measured=float(measured.mean()),
                predicted=float(predicted.mean()),
                error_percent=float(100.0 * (predicted.mean() / measured.mean() - 1.0)),
                worst_percent=float(errors[np.abs(errors).argmax()]),
            )
        )
    return found


def request_errors(pairs: Sequence[Pair]) -> list[RequestError]:
    """TTFT and E2E of every request that was served in both."""
    found = []
    for name in ("ttft", "e2e"):
        parts: list[Floats] = [np.empty(0)]
        for pair in pairs:
            both = pair.measured.ok & pair.predicted.ok
            measured, predicted = (
                _latency(one, name)[both] for one in (pair.measured, pair.predicted)
            )
            seen = measured > 0.0
            parts.append(100.0 * (predicted[seen] / measured[seen] - 1.0))
        errors = np.concatenate(parts)
        if not errors.size:
            continue
        found.append(
            RequestError(
                latency=name,
                median_percent=float(np.median(errors)),
                median_absolute_percent=float(np.median(np.abs(errors))),
                p90_absolute_percent=float(np.percentile(np.abs(errors), 90)),
                requests=errors.size,
            )
        )
    return found


class RequestLine(msgspec.Struct, frozen=True):
    """A request of a validation, as measured and as predicted. The prediction of a warm-up does not
    know today's conditions.
    """

    window: int
    part: str  # warm-up or window
    timestamp: float  # ms
    input_length: int
    output_length: int
    ttft_ms: float | None
    e2e_ms: float | None
    predicted_ttft_ms: float | None
    predicted_e2e_ms: float | None


def request_lines(number: int, part: str, trace: Trace, pair: Pair) -> list[str]:
    """The requests of window `number`'s `part`, a line of JSON each; None for a request that was
    not served.
    """
    latencies = [
        [
            to_ms(value) if ok else None
            for value, ok in zip(_latency(one, name).tolist(), one.ok.tolist(), strict=True)
        ]
        for one in (pair.measured, pair.predicted)
        for name in ("ttft", "e2e")
    ]
    columns = (
        trace.arrival_s.tolist(),
        trace.prompt_tokens.tolist(),
        trace.output_tokens.tolist(),
        *latencies,
    )
    encode = msgspec.json.Encoder().encode
    return [
        encode(RequestLine(number, part, to_ms(arrival_s), *rest)).decode() + "\n"
        for arrival_s, *rest in zip(*columns, strict=True)
    ]


def hold(errors: Iterable[tuple[str, float | None]], limit_percent: float) -> None:
    """`TargetMissedError` where a prediction of `HELD_TO` is off by more than the limit; None
    stands for no prediction.
    """
    known = [(metric, error) for metric, error in errors if metric in HELD_TO and error is not None]
    wrong = [f"{metric} {error:+.1f} %" for metric, error in known if abs(error) > limit_percent]
    if wrong:
        found = f"beyond {limit_percent:g} %: {', '.join(wrong)}"
        raise TargetMissedError(found, "profile and fit again, on the machine as it is now")


def _latency(served: Served, name: str) -> Floats:
    return (served.first_token_s if name == "ttft" else served.finish_s) - served.arrival_s
