"""Replays against a running server: warm-up, prediction, replay, and the comparison of both.

In order: the server and the requests for it (`prepare_replay` makes a `ReplaySetup`);
`Measurement`, one part of a trace (`llmctl bench`); `Session`, several windows (`llmctl validate`);
and the errors over windows and requests. Each replay is predicted before it starts, under the
conditions of the warm-up just before it.
"""

from __future__ import annotations

import time
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
    client_times,
    fitted,
    limits_of,
    probe_dialect,
    run,
    run_whole,
    served,
)
from toolkit.bench.passes import PassLogs
from toolkit.bench.predict import (
    SEEDS,
    ServerTimes,
    check_server,
    counts_or_none,
    in_hindsight,
    other_requests,
    predict,
    predicted,
    reports_batch_times,
    scheduling,
    seen_by,
    seen_by_clients,
    settle,
    times_between,
    warm_up,
)
from toolkit.bench.report import Prediction, cache_use, report, values_of
from toolkit.endpoints.target import CacheCounts, Target, cache_counts, with_answer_ids
from toolkit.errors import InputError, LateClientError, TargetMissedError
from toolkit.files.bench import (
    NOT_SERVERS,
    BenchReport,
    ClientTimes,
    MetricError,
    RequestError,
    Validation,
    Warmup,
    WindowResult,
    took_text,
)
from toolkit.files.io import head
from toolkit.files.plan import Plan
from toolkit.files.profile import OnForeign
from toolkit.interrupts import InterruptedReplayError, held
from toolkit.metrics import FRONT, Served, summarize
from toolkit.sim.conditions import ServerConditions
from toolkit.traces.types import Trace
from toolkit.traces.windows import TraceWindow, mean_rate
from toolkit.traces.write import to_ms
from toolkit.units import seconds

HELD_TO = ("throughput_rps", "ttft_mean_s", "tpot_mean_s", "e2e_mean_s")  # by --max-error
METRICS = (*HELD_TO, "e2e_p95_s", FRONT)

Floats = NDArray[np.float64]
Loop = Literal["open", "closed"]

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

    `rate` is in requests per second. By default, `lengths` are hidden from a server that allows
    this (llmctl's with `--allow-end-after`), and given to others.
    """

    rate: float | None = None
    lengths: Lengths | None = None
    max_new_tokens: int | None = None
    vocab_size: int | None = None
    timeout_s: float = 600.0
    seed: int = 0
    # closed: a later turn follows the end of the turn before (None: if the trace has sessions)
    loop: Loop | None = None
    # so many requests at once, the first ones spread over `ramp_s`; 0: they are sent at their times
    concurrency: int = 0
    ramp_s: float = 0.0


def unused_seed() -> int:
    """A seed that no earlier run drew prompts from: a server's prefix cache may still hold those,
    and would find them where the trace shares nothing.
    """
    return time.time_ns()


@dataclass(slots=True, frozen=True)
class ReplaySetup:
    """A server, the trace with lengths that it accepts and the rate of the replay, and how the
    trace becomes requests.

    The trace's limits are those in the requests: where lengths are given, each limit is the
    request's output, so that a prediction simulates what is sent.
    """

    target: Target
    trace: Trace
    load: LoadSpec

    @property
    def notes(self) -> list[str]:
        """What a reader must know of the requests."""
        sessions = self.trace.sessions
        dialect = self.load.dialect
        notes = [
            f"the server does not take {lacking}: lengths may differ from the trace's"
            for lacking in dialect.lacks
        ]
        notes.append(f"replay: {GIVEN if self.load.lengths == 'given' else HIDDEN}")
        if self.load.concurrency:
            at_once = f"{self.load.concurrency:,} requests at once"
            notes.append(f"closed loop: {at_once}, the next is sent when one ends")
        if sessions is not None:
            later = f"{int((sessions.previous >= 0).sum()):,} of {len(self.trace):,} requests"
            notes.append(f"closed loop: {later} are sent when the turn before has ended")
            if dialect.token_ids and not dialect.answer_ids:
                notes.append(NO_ANSWER_IDS)
        if self.trace.shared is not None and not dialect.token_ids:
            notes.append("prompts share words, so the tokens that they share are approximate")
        return notes


def prepare_replay(
    target: Target,
    trace: Trace,
    plan: Plan | None,
    settings: RequestSettings,
    on_foreign: OnForeign | None = None,
) -> ReplaySetup:
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
    lengths, dialect = probe_dialect(target, settings.lengths, limits.output)
    if whole.sessions is not None:
        dialect = with_answer_ids(target, dialect)
    named = whole.output_tokens
    if lengths == "hidden":
        named = np.where(whole.max_tokens, whole.max_tokens, limits.output)
    whole = replace(whole, max_tokens=named)
    load = LoadSpec(
        lengths,
        limits.output,
        limits.vocabulary,
        settings.timeout_s,
        settings.seed,
        dialect,
        settings.concurrency,
        settings.ramp_s,
    )
    return ReplaySetup(target, whole, load)


@dataclass(slots=True, frozen=True)
class CountedReplay:
    """A replay, and the server's counters before and after it: of batches (empty: not read), and
    of the prefix cache (None: the server has none).
    """

    replay: Replay
    before: dict[str, float]
    after: dict[str, float]
    cached: tuple[CacheCounts | None, CacheCounts | None]

    @property
    def times(self) -> ServerTimes | None:
        """See `times_between`."""
        return times_between(self.before, self.after, self.replay.samples)


def counted_run(
    target: Target, trace: Trace, load: LoadSpec, on_done: Callable[[], None], *, counters: bool
) -> CountedReplay:
    """`run`, reading the server's counters of batches if `counters`, and those of its cache."""
    before = counts_or_none(target) if counters else {}
    cached = cache_counts(target)
    replay = run(target, trace, load, on_done)
    cached_after = cache_counts(target) if cached else None
    after = counts_or_none(target) if before else {}
    return CountedReplay(replay, before, after, (cached, cached_after))


class Measurement:
    """Replays one part of a trace.

    Args:
        setup: the server, and the whole trace.
        part: what is replayed of it.
        plan: what the server runs; without one nothing is predicted, and no warm-up is needed.
        sla: targets that attainment is counted by.
    """

    def __init__(
        self,
        setup: ReplaySetup,
        part: Trace,
        plan: Plan | None,
        sla: Mapping[str, float],
        note: Callable[[str], None],
        progress: Progress,
    ) -> None:
        self._target = setup.target
        self._whole = setup.trace
        self._load = setup.load
        self._part = part
        self._plan = plan
        self._sla = sla
        self._note = note
        self._progress = progress
        self._predicted = Prediction()
        self._finished: list[int] = []  # output lengths that the server's scheduler has seen

    def warm_up(self, about_s: float, after_s: float) -> None:
        """Serve the requests behind `after_s` of the trace for `about_s` seconds, and predict.

        Raises `InterruptedReplayError`.
        """
        if self._plan is None:
            return
        result = predicted(self._plan, self._part, load=self._load)
        as_fitted = result.metrics(self._sla)
        count = 0
        if reports_batch_times(self._plan, self._target):
            count = round(about_s * as_fitted["throughput_rps"])
        trace = other_requests(self._whole, after_s, count, mean_rate(self._part))
        warm = self._warm_up(trace, about_s) if count else None
        self._finished = trace.output_tokens.tolist()
        if warm:
            current = seen_by(warm, self._finished)
            result = predicted(self._plan, self._part, current, load=self._load)
        ratios = result.sla_ratios(self._sla) if result.served.ok.any() else {}
        targets = values_of(ratios, self._sla)
        self._predicted = Prediction(result.metrics(self._sla), as_fitted, warm, targets)

    def _warm_up(self, trace: Trace, about_s: float) -> Warmup | None:
        """`warm_up`, with notes for the user."""
        self._note(f"warming up with {len(trace):,} other requests: about {seconds(about_s)}")
        with self._progress("warming up", len(trace)) as advance:
            warm = warm_up(self._target, trace, self._load, advance)
        if warm:
            shown = took_text(warm.slowdown, warm.launch_slowdown, "take")
            if warm.arrival_cost_s:
                each = seconds(warm.arrival_cost_s)
                shown += f", and {each} more for each request that arrives meanwhile"
            self._note(f"warm-up: {shown}; the prediction includes that")
        if warm and warm.front:
            first = seconds(warm.front.first_s)
            last = seconds(warm.front.last_s)
            delays = f"{first} to first tokens and {last} to last ones"
            self._note(f"warm-up: HTTP and the front add {delays}; the prediction includes that")
        return warm

    def replay(self) -> CountedReplay:
        """Replay the part."""
        expected_s = self._predicted.metrics.get("makespan_s", float(self._part.arrival_s[-1]))
        self._note(
            f"replaying {len(self._part):,} requests against {self._target.model}:"
            f" about {seconds(expected_s)}"
        )
        own = self._target.own
        with self._progress("replaying", len(self._part)) as advance:
            return counted_run(self._target, self._part, self._load, advance, counters=own)

    def report(self, counted: CountedReplay, inputs: Mapping[str, Path]) -> BenchReport:
        """The measured values beside the prediction, made from the files `inputs`."""
        replay = counted.replay
        times = counted.times if self._predicted.warmup else None
        return report(
            replay,
            head(dict(inputs)),
            model=self._target.model,
            lengths=self._load.lengths,
            trace_notes=self._part.notes,
            changes=self._part.changes,
            sla=self._sla,
            predicted=self._predicted,
            times=times,
            in_hindsight=in_hindsight(
                self._plan, self._part, self._sla, times, self._finished, self._load
            ),
            scheduling=scheduling(counted.before, counted.after),
            cache=cache_use(replay.samples, self._part, counted.cached, self._predicted.metrics),
            policy=self._plan.policy.name if self._plan else None,
            request_rate_rps=None if self._load.concurrency else mean_rate(self._whole) or None,
            concurrency=self._load.concurrency,
        )


class Session:
    """Windows replayed against one server under one plan.

    Args:
        setup: the server, and the whole trace; warm-ups are taken from behind each window.
        warmup_s: about how long they last; 0: no warm-up.
        logs: the server's passes, if they are kept.

    `results`, and `lines` (each request as JSON), hold the windows that were replayed to their end.
    """

    def __init__(
        self,
        setup: ReplaySetup,
        plan: Plan,
        warmup_s: float,
        progress: Progress,
        logs: PassLogs | None = None,
    ) -> None:
        self._target = setup.target
        self._whole = setup.trace
        self._load = setup.load
        self._notes = setup.notes
        self._plan = plan
        self._warmup_s = warmup_s
        self._progress = progress
        self._logs = logs
        self._reports_batches = reports_batch_times(plan, setup.target)
        self.results: list[WindowResult] = []
        self.lines: list[str] = []
        self._pairs: list[Pair] = []
        self._warmup_client: ClientTimes | None = None  # of the last warm-up
        self._finished: list[int] = []  # output lengths that the server's scheduler has seen

    def run(self, windows: Sequence[TraceWindow]) -> bool:
        """Replay the windows; whether that was interrupted."""
        try:
            for number, window in enumerate(windows, start=1):
                current = self._warm_up(number, window)
                with held():  # a window that was replayed is kept
                    self._replay(number, len(windows), window, current)
        except (InterruptedReplayError, KeyboardInterrupt):
            return True
        return False

    def validation(self, trace: Path, plan: Path) -> Validation:
        """validation.json, with the files that it was made from."""
        return Validation(
            **head({"plan": plan, "trace": trace}),
            model=self._target.model,
            policy=self._plan.policy.name,
            notes=[*self._whole.notes, *self._notes],
            changes=self._whole.changes,
            windows=self.results,
            metrics=metric_errors(self.results),
            requests=request_errors(self._pairs),
        )

    def _warm_up(self, number: int, window: TraceWindow) -> ServerConditions:
        """The server's conditions now, as other requests show them."""
        self._warmup_client = None
        count = round(self._warmup_s * predict(self._plan, window.trace, {})["throughput_rps"])
        if not count:
            return self._unwarmed()
        trace = other_requests(self._whole, window.end_s, count, mean_rate(window.trace))
        with self._progress("warming up", count) as advance:
            if self._reports_batches:
                warm = warm_up(self._target, trace, self._load_of(number), advance)
            else:
                warm = self._warm_up_unreported(number, trace, advance)
        self._finished += trace.output_tokens.tolist()
        if warm is None:
            return self._unwarmed()
        self._warmup_client = warm.client
        return seen_by(warm, self._finished)

    def _unwarmed(self) -> ServerConditions:
        return ServerConditions(finished=tuple(self._finished))

    def _warm_up_unreported(
        self, number: int, trace: Trace, advance: Callable[..., None]
    ) -> Warmup | None:
        """`warm_up` of a server that does not report its batches."""
        load = self._load_of(number)
        trace = settle(self._target, trace, load, advance)
        expected = predicted(self._plan, trace, self._unwarmed()).served
        replay = run_whole(self._target, trace, replace(load, seed=load.seed + 1), advance)
        pair = Pair(served(replay.samples), expected)
        self.lines += request_lines(number, "warm-up", trace, pair)
        return seen_by_clients(self._plan, trace, replay, self._finished)

    def _replay(
        self, number: int, count: int, window: TraceWindow, current: ServerConditions
    ) -> None:
        """Replay one window of `count`. Raises `InterruptedReplayError`."""
        trace = window.trace
        sla = self._plan.recipe.sla
        simulated = predicted(self._plan, trace, current)
        load = self._load_of(number)
        counters = self._reports_batches
        logs = self._logs
        if logs is not None:
            load = replace(load, named=True)
            logs.begin()
        with self._progress(f"window {number} of {count}", len(trace)) as advance:
            counted = counted_run(self._target, trace, load, advance, counters=counters)
        if counted.replay.interrupted:
            raise InterruptedReplayError
        samples = counted.replay.samples
        times = counted.times
        front_s = logs.end(number, counted.replay) if logs is not None else None
        pair = Pair(served(samples), simulated.served)
        measured = summarize(pair.measured, sla)
        if times and times.front:
            measured[FRONT] = times.front.first_s
        self._finished += trace.output_tokens.tolist()
        self._pairs.append(pair)
        self.lines += request_lines(number, "window", trace, pair)
        self.results.append(
            WindowResult(
                start_s=window.start_s,
                end_s=window.end_s,
                requests=len(samples),
                failed=sum(bool(sample.failure) for sample in samples),
                refused=sum(sample.refused for sample in samples),
                slowdown=current.slowdown,
                launch_slowdown=current.launch_slowdown,
                arrival_cost_s=current.arrival_cost_s,
                front_first_s=current.front.first_s if current.front else 0.0,
                front_last_s=current.front.last_s if current.front else 0.0,
                measured=measured,
                predicted=simulated.metrics(sla),
                slowdown_meanwhile=times.slowdown if times else None,
                launch_slowdown_meanwhile=times.launch_slowdown if times else None,
                passes=logs.file(number).name if logs is not None else "",
                front_by_passes_s=front_s,
                cache=cache_use(samples, trace, counted.cached, simulated.metrics({})),
                client=client_times(counted.replay, sla),
                warmup_client=self._warmup_client,
                predicted_in_hindsight=in_hindsight(
                    self._plan, trace, sla, times, current.finished
                ),
            )
        )

    def _load_of(self, number: int) -> LoadSpec:
        """The load of a window. Each window and each warm-up has prompts of its own: otherwise the
        server's prefix cache would hold blocks of earlier windows.
        """
        return replace(self._load, seed=self._load.seed + SEEDS * (number - 1))


@dataclass(slots=True, frozen=True)
class Pair:
    """The requests of one window as served and as predicted, in the same order."""

    measured: Served
    predicted: Served


def metric_errors(windows: Sequence[WindowResult]) -> list[MetricError]:
    """The errors of each of `METRICS` over the windows, except metrics without a measurement."""
    errors_of = []
    for name in METRICS:
        measured = np.array([window.measured.get(name, 0.0) for window in windows])
        predicted = np.array([window.predicted.get(name, 0.0) for window in windows])
        if not measured.size or (measured <= 0.0).any():
            continue
        errors = 100.0 * (predicted / measured - 1.0)
        errors_of.append(
            MetricError(
                metric=name,
                measured=float(measured.mean()),
                predicted=float(predicted.mean()),
                error_percent=float(100.0 * (predicted.mean() / measured.mean() - 1.0)),
                worst_percent=float(errors[np.abs(errors).argmax()]),
            )
        )
    return errors_of


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
    """A request of a validation, as measured and predicted; a warm-up is predicted as fitted."""

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
    """The requests of a window, a line of JSON each; None for a request that was not served."""
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


def refuse_late(result: BenchReport | Validation) -> None:
    """Raise `LateClientError` where the result does not count as measured."""
    if result.late:
        raise LateClientError(
            f"{NOT_SERVERS}: {result.late}",
            "run it again on a quieter machine, as root, or from another machine",
        )


def hold(errors: Iterable[tuple[str, float | None]], limit_percent: float) -> None:
    """`TargetMissedError` where a prediction (not None) of `HELD_TO` is off by more than this."""
    known = [(metric, error) for metric, error in errors if metric in HELD_TO and error is not None]
    wrong = [f"{metric} {error:+.1f} %" for metric, error in known if abs(error) > limit_percent]
    if wrong:
        found = f"beyond {limit_percent:g} %: {', '.join(wrong)}"
        raise TargetMissedError(found, "profile and fit again, on the machine as it is now")


def _latency(served: Served, name: str) -> Floats:
    return (served.first_token_s if name == "ttft" else served.finish_s) - served.arrival_s
