"""Check that the fit still holds: measure a few of its points before the server takes requests.

A point is a slice, or for a continuous policy a round from an empty batch, as the fit's own
overhead was measured. It runs several times, on all workers of a kind at once, and its median time
is compared with the law that the scheduler uses. The check does not measure memory, and leaves out
points that would take too long.

The fit's stated error is one that 5 % of held-out slices exceed. With four points, one alone would
exceed it by chance at 17 of 100 starts of a healthy machine, and several at one or two. A slower
machine (other programs, heat, another clock rate) shows at most points. So one outlier among
several points is reported, but does not count against the fit.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

import numpy as np

from toolkit.engines.protocol import Round, Row, SamplingParams
from toolkit.errors import TargetMissedError
from toolkit.estimators.load import laws_from_fit
from toolkit.files.plan import Kind, Plan
from toolkit.sched.policies import make_policy
from toolkit.sched.policies.base import Policy
from toolkit.sched.protocols import LatencyLaw, MemoryLaw
from toolkit.sched.queues import serving_s
from toolkit.sched.types import Failure
from toolkit.workers.protocol import (
    BatchDone,
    BatchProgress,
    OnEvent,
    RoundDone,
    RunBatch,
    RunRound,
    RunSlice,
    WorkerEvent,
    WrappedWorkers,
)

POINT_STEPS_MAX = 16
RUNS_MIN = 3
RUNS_MAX = 9  # of each point
ALLOWED_PERCENT_MIN = 10.0  # a fit made in a quiet hour states too small an error for a busy one
BUDGET_S = 3.0  # of all points, as the laws predict it
OUTLIERS_MAX = 1  # among several points

OnFound = Callable[["list[MeasuredPoint]"], None]
BatchEnd = tuple[Failure, float]  # how a batch ended, and when, in seconds on the check's clock


class DriftPoint(NamedTuple):
    """Rows of `length` tokens each that run for `steps` steps."""

    rows: int
    length: int
    steps: int


@dataclass(slots=True, frozen=True)
class MeasuredPoint:
    """A point's median time and the law's prediction, in seconds, and the error that is allowed."""

    point: DriftPoint
    seconds: float
    expected_s: float
    allowed_percent: float

    @property
    def percent(self) -> float:
        """By how many percent it took longer than predicted."""
        return 100.0 * (self.seconds / self.expected_s - 1.0)

    @property
    def drifted(self) -> bool:
        return abs(self.percent) > self.allowed_percent

    def text(self) -> str:
        """The point and its deviation, for a message."""
        rows, length, steps = self.point
        return f"{rows} x {length} tokens for {steps} steps {self.percent:+.0f} %"


@dataclass(slots=True, frozen=True)
class DriftCheck:
    """The points to measure on workers of one kind, in slices or rounds as the policy runs them.

    `allowed_percent` is the fit's stated error: the 95th percentile over its held-out slices or
    rounds, but at least `ALLOWED_PERCENT_MIN`.
    """

    points: tuple[DriftPoint, ...]
    runs: int
    law: LatencyLaw
    in_rounds: bool
    vocab_size: int
    allowed_percent: float
    workers: tuple[int, ...] = (0,)

    def expected_s(self, point: DriftPoint) -> float:
        """The law's prediction of a point, in seconds."""
        rows, length, steps = point
        if not self.in_rounds:
            return serving_s(self.law, rows, length, steps)
        run_s = self.law.prefill_s(rows, length) + self.law.decode_s(rows, length, steps)
        return self.law.round_s + run_s + rows * self.law.leave_s(length + steps)

    def rows(self, point: DriftPoint, first: int) -> list[Row]:
        """The rows of a point, with ids from `first`. In a round all end at its last step."""
        tokens = tuple(position % self.vocab_size for position in range(point.length))
        limit = point.steps + (self.in_rounds and self.law.prefill_emits_token)
        sampling = SamplingParams(ignore_eos=True)
        return [Row(f"check-{first + k}", tokens, 0, limit, sampling) for k in range(point.rows)]


def checks_of(plan: Plan, budget_s: float = BUDGET_S) -> list[DriftCheck]:
    """One check for each kind of the plan's workers; they share `budget_s` seconds.

    The points come from the recipe's grid: as many as fit into the budget by the laws, or none if
    even one takes longer.
    """
    policy = make_policy(plan.policy.name, plan.policy.parameters)
    checks = []
    first = 0
    for kind in plan.kinds:
        workers = tuple(range(first, first + kind.workers))
        checks.append(_check_of(kind, policy, budget_s / len(plan.kinds), workers))
        first += kind.workers
    return checks


def _check_of(kind: Kind, policy: Policy, budget_s: float, workers: tuple[int, ...]) -> DriftCheck:
    laws = laws_from_fit(kind.fit)
    fit = kind.fit
    spec = kind.recipe.profile
    law: LatencyLaw = laws.latency
    memory: MemoryLaw = laws.memory
    overhead = fit.overhead
    if policy.continuous:
        law = laws.rounds
        memory = laws.round_memory
        overhead = fit.rounds.overhead if fit.rounds else fit.overhead
    steps = min(POINT_STEPS_MAX, *spec.slice_tokens)

    def fits(rows: int, length: int) -> bool:
        if length + steps > fit.engine.max_model_len:
            return False
        if policy.continuous:  # new rows are prefilled beside the batch that they join
            return 2 * rows * (length + steps) <= memory.usable_tokens and rows <= laws.slots
        return rows <= int(memory.max_batch(np.array([length]), steps, 0.0)[0])

    sizes = sorted(spec.batch_sizes)
    lengths = sorted(spec.input_lengths)
    size = sizes[len(sizes) // 2]
    length = lengths[len(lengths) // 2]
    wanted = dict.fromkeys(
        [(sizes[0], length), (size, lengths[0]), (size, length), (sizes[-1], lengths[0])]
    )
    check = DriftCheck(
        points=(),
        runs=RUNS_MIN,
        law=law,
        in_rounds=policy.continuous,
        vocab_size=fit.engine.vocab_size,
        allowed_percent=max(overhead.error.p95_percent, ALLOWED_PERCENT_MIN),
        workers=workers,
    )
    points = [DriftPoint(*shape, steps) for shape in wanted if fits(*shape)]
    points.sort(key=check.expected_s)
    while points and RUNS_MIN * sum(map(check.expected_s, points)) > budget_s:
        points.pop()
    once_s = sum(map(check.expected_s, points))
    runs = min(int(budget_s / once_s), RUNS_MAX) if once_s > 0 else 0
    return replace(check, points=tuple(points), runs=runs)


def judge(found: Sequence[MeasuredPoint], *, strict: bool, say: Callable[[str], None]) -> None:
    """Report a check through `say`. With `strict`, raises `TargetMissedError` if the fit is off."""
    if not found:
        say("fit: no point of it could be measured again in the time given")
        return
    percents = sorted({measured.allowed_percent for measured in found})
    allowed = " and ".join(f"{percent:.0f}" for percent in percents)
    drifted = [measured for measured in found if measured.drifted]
    points = "one point" if len(found) == 1 else f"{len(found)} points"
    if not drifted or len(drifted) <= OUTLIERS_MAX < len(found):
        outliers = "".join(
            f", except {measured.text()} (one of {len(found)} points may exceed it by chance)"
            for measured in drifted
        )
        say(f"fit: measured again at {points}, within its stated error of {allowed} %{outliers}")
        return
    deviations = ", ".join(measured.text() for measured in drifted)
    text = f"beyond its stated error of {allowed} %: {deviations}"
    if strict:
        raise TargetMissedError(
            f"the fit does not hold: {text}", "profile and fit again; or serve without --strict"
        )
    say(
        f"warning: the fit does not hold, {text}; "
        "predictions, and policies that use the laws, are wrong by as much"
    )


@dataclass(eq=False)
class CheckedWorkers(WrappedWorkers):
    """`Workers` that run the checks in `start`, before the driver may use them."""

    checks: Sequence[DriftCheck]  # one after the other
    on_found: OnFound  # gets the result; what it raises, `start` raises
    clock: Callable[[], float] = time.perf_counter
    # The end of each worker's running batch.
    _ends: dict[int, asyncio.Future[BatchEnd]] = field(default_factory=dict)
    _batches: int = 0  # sent so far
    _rows: int = 0  # sent so far

    async def start(self, on_event: OnEvent) -> None:
        """Start the workers, then measure. Raises `EngineError` if one cannot start."""

        def route(event: WorkerEvent) -> None:
            if not measuring:
                on_event(event)
            elif isinstance(event, BatchDone | RoundDone):
                self._ends.pop(event.worker).set_result((event.failure, self.clock()))
            elif not isinstance(event, BatchProgress):
                on_event(event)

        measuring = True
        await self.workers.start(route)
        found: list[MeasuredPoint] = []
        for check in self.checks:
            times: defaultdict[DriftPoint, list[float]] = defaultdict(list)
            for point in check.points * check.runs:
                runs = [self._run(check, point, worker) for worker in check.workers]
                seconds = await asyncio.gather(*runs)
                if None in seconds:
                    break  # out of memory, or a worker was lost and the pool restarts it
                times[point] += [one_s for one_s in seconds if one_s is not None]
            allowed = check.allowed_percent
            found += [
                MeasuredPoint(point, median(seconds), check.expected_s(point), allowed)
                for point, seconds in times.items()
            ]
        measuring = False
        self.on_found(found)

    async def _run(self, check: DriftCheck, point: DriftPoint, worker: int) -> float | None:
        """Run a point on a worker: the seconds from dispatch to result, or None if it failed."""
        rows = check.rows(point, self._rows)
        expected_s = check.expected_s(point)
        numbers = tuple(range(self._rows, self._rows + len(rows)))
        self._rows += len(rows)
        end = self._expect_end(worker)
        begin_s = self.clock()
        batch: RunBatch = RunSlice(self._batches, tuple(rows), point.steps)
        if check.in_rounds:
            batch = RunRound(self._batches, Round(point.steps, tuple(rows), numbers))
        self.workers.run(worker, batch, expected_s)
        failure, end_s = await end
        if check.in_rounds and failure == "oom":  # the round has left rows on its worker
            end = self._expect_end(worker)
            self.workers.run(worker, RunRound(self._batches, Round(0, evict=numbers)))
            await end
        return None if failure else end_s - begin_s

    def _expect_end(self, worker: int) -> asyncio.Future[BatchEnd]:
        """The end of the batch that the worker gets next, numbered `_batches`."""
        self._batches += 1
        self._ends[worker] = end = asyncio.get_running_loop().create_future()
        return end
