"""A replay against a running server: warm-up, prediction, replay, and the comparison of both.

In order: the server and the requests for it (`prepare_replay` makes a `ReplaySetup`);
`Measurement`, one part of a trace (`llmctl bench`); and what is refused afterwards. The prediction
is made before the replay starts, at the speed that the warm-up showed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from toolkit.bench.client import (
    Lengths,
    LoadSpec,
    Progress,
    Replay,
    fitted,
    limits_of,
    probe_dialect,
    run,
)
from toolkit.bench.predict import (
    check_server,
    counts_or_none,
    other_requests,
    outcome_of,
    predicted,
    reports_batch_times,
    slowdown_between,
    warm_up,
)
from toolkit.bench.report import Prediction, cache_use, report
from toolkit.endpoints.target import Target, with_answer_ids
from toolkit.errors import InputError, LateClientError, TargetMissedError
from toolkit.files.bench import HELD_TO, NOT_SERVERS, BenchReport, Warmup, took_text
from toolkit.files.io import head
from toolkit.files.plan import Plan
from toolkit.files.profile import OnForeign
from toolkit.traces.types import Trace
from toolkit.traces.windows import mean_rate
from toolkit.units import seconds

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
    seed: int = 0
    # closed: a later turn follows the end of the turn before (None: if the trace has sessions)
    loop: Loop | None = None
    concurrency: int = 0  # so many requests at once; 0: they are sent at their times


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
            if not dialect.answer_ids:
                notes.append(NO_ANSWER_IDS)
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
    limits = limits_of(plan, target)
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
        seed=settings.seed,
        dialect=dialect,
        concurrency=settings.concurrency,
    )
    return ReplaySetup(target, whole, load)


@dataclass(slots=True, frozen=True)
class CountedReplay:
    """A replay, and the server's counters before and after it; empty: it shows none."""

    replay: Replay
    before: dict[str, float]
    after: dict[str, float]

    @property
    def slowdown(self) -> float | None:
        """See `slowdown_between`."""
        return slowdown_between(self.before, self.after)


def counted_run(
    target: Target, trace: Trace, load: LoadSpec, on_done: Callable[[], None]
) -> CountedReplay:
    """Return what `run` does, with the server's counters before and after."""
    before = counts_or_none(target)
    replay = run(target, trace, load, on_done)
    return CountedReplay(replay, before, counts_or_none(target) if before else {})


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

    def warm_up(self, about_s: float, after_s: float) -> None:
        """Serve the requests behind `after_s` of the trace for `about_s` seconds, and predict.

        Raises `InterruptedReplayError`.
        """
        if self._plan is None:
            return
        result = predicted(self._plan, self._part, load=self._load)
        as_fitted = outcome_of(result, self._sla)
        count = 0
        if reports_batch_times(self._plan, self._target):
            count = round(about_s * as_fitted.metrics["throughput_rps"])
        trace = other_requests(self._whole, after_s, count, mean_rate(self._part))
        warm = self._warm_up(trace, about_s) if count else None
        if warm:
            seen = trace.output_tokens.tolist()
            result = predicted(self._plan, self._part, warm.slowdown, seen, load=self._load)
        self._predicted = Prediction(outcome_of(result, self._sla), as_fitted, warm)

    def _warm_up(self, trace: Trace, about_s: float) -> Warmup | None:
        """`warm_up`, with notes for the user."""
        self._note(f"warming up with {len(trace):,} other requests: about {seconds(about_s)}")
        with self._progress("warming up", len(trace)) as advance:
            warm = warm_up(self._target, trace, self._load, advance)
        if warm:
            took = took_text(warm.slowdown, "take")
            self._note(f"warm-up: {took}; the prediction includes that")
        return warm

    def replay(self) -> CountedReplay:
        """Replay the part."""
        expected_s = self._predicted.outcome.metrics.get(
            "makespan_s", float(self._part.arrival_s[-1])
        )
        self._note(
            f"replaying {len(self._part):,} requests against {self._target.model}:"
            f" about {seconds(expected_s)}"
        )
        with self._progress("replaying", len(self._part)) as advance:
            return counted_run(self._target, self._part, self._load, advance)

    def report(self, counted: CountedReplay, inputs: Mapping[str, Path]) -> BenchReport:
        """The measured values beside the prediction, made from the files `inputs`."""
        replay = counted.replay
        return report(
            replay,
            head(dict(inputs)),
            model=self._target.model,
            lengths=self._load.lengths,
            trace_notes=self._part.notes,
            changes=self._part.changes,
            sla=self._sla,
            predicted=self._predicted,
            slowdown=counted.slowdown if self._predicted.warmup else None,
            cache=cache_use(
                replay.samples,
                self._part,
                counted.before,
                counted.after,
                self._predicted.outcome.metrics,
            ),
            policy=self._plan.settings.policy if self._plan else None,
            request_rate_rps=None if self._load.concurrency else mean_rate(self._whole) or None,
            concurrency=self._load.concurrency,
        )


def refuse_late(result: BenchReport) -> None:
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
