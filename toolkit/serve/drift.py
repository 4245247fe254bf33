"""Does the fit still hold? A few of its points are measured again through the workers before a
server takes requests.

Each point is a slice, or for a continuous policy a round from an empty batch, on all workers at
once, as the fit's own overhead was measured: so many rows of so many tokens for so many steps. The
median of its times is held against the law that the scheduler asks. Memory is not tried, nor are
points that would take too long.

The stated error is one that 5 % of held-out slices exceed. Of four points one alone would exceed it
by chance at 17 of 100 starts of a healthy machine, several at one or two. What makes a machine
slower (other programs, heat, another clock) shows at most points. So one of several is told, and
not held against the fit.
"""

from __future__ import annotations

import asyncio
import math
import time
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
from toolkit.sched.protocols import LatencyLaw, Policy
from toolkit.sched.queues import serving_s
from toolkit.sched.types import Failure
from toolkit.workers.protocol import (
    BatchDone,
    BatchProgress,
    OnEvent,
    RoundDone,
    WorkerEvent,
    Workers,
)
from toolkit.workers.supervisor import SilentWorkerError

STEPS = 16  # of a point, at most
RUNS_MIN, RUNS_MAX = 3, 9  # of each point
LEAST_PERCENT = 10.0  # a fit of a quiet hour promises less than the next hour holds
BUDGET_S = 3.0
MAY_EXCEED = 1  # of several points


OnFound = Callable[["list[MeasuredPoint]"], None]
Ended = tuple[Failure, float]  # how a batch ended, and when


class DriftPoint(NamedTuple):
    """Rows of `length` tokens that run for `steps`."""

    rows: int
    length: int
    steps: int


@dataclass(slots=True, frozen=True)
class MeasuredPoint:
    """A point's median time beside what the law says, and how far the fit's stated error reaches.
    In seconds.
    """

    point: DriftPoint
    seconds: float
    expected_s: float
    allowed_percent: float

    @property
    def percent(self) -> float:
        """By how much it took longer than predicted."""
        return 100.0 * (self.seconds / self.expected_s - 1.0)

    @property
    def drifted(self) -> bool:
        return abs(self.percent) > self.allowed_percent

    def text(self) -> str:
        """For a line: which point, and how far off."""
        return f"{self.point.rows} x {self.point.length} tokens for {self.point.steps} steps {self.percent:+.0f} %"


@dataclass(slots=True, frozen=True)
class DriftCheck:
    """What is measured again: the plan's points, as its policy has them run.

    The fit's stated error is the 95th percentile of its held-out slices or rounds, at least 10 %.
    """

    points: tuple[DriftPoint, ...]
    runs: int
    law: LatencyLaw
    in_rounds: bool
    vocab_size: int
    allowed_percent: float
    workers: tuple[int, ...] = (0,)  # whom it is about: of a fleet those of one kind

    def expected_s(self, point: DriftPoint) -> float:
        """What the law says of the point."""
        rows, length, steps = point
        if not self.in_rounds:
            return serving_s(self.law, rows, length, steps)
        leave_s = rows * self.law.leave_s(length + steps)
        return (
            self.law.round_s
            + self.law.prefill_s(rows, length)
            + self.law.decode_s(rows, length, steps)
            + leave_s
        )

    def rows(self, point: DriftPoint, first: int) -> list[Row]:
        """The point's rows, whose names count from `first`; in a round all end with its last step."""
        tokens = tuple(position % self.vocab_size for position in range(point.length))
        limit = point.steps + (self.in_rounds and self.law.prefill_emits_token)
        sampling = SamplingParams(ignore_eos=True)
        return [Row(f"check-{first + k}", tokens, 0, limit, sampling) for k in range(point.rows)]


def checks_of(plan: Plan, budget_s: float = BUDGET_S) -> list[DriftCheck]:
    """A check of each kind of the plan's workers, which share the time.

    Points of the recipe's grid, as many as by the laws take `budget_s` in all; none where all take
    longer.
    """
    policy, kinds, checks = make_policy(plan.policy.name, plan.policy.parameters), plan.kinds, []
    first = 0
    for kind in kinds:
        workers = tuple(range(first, first + kind.workers))
        checks.append(replace(_check_of(kind, policy, budget_s / len(kinds)), workers=workers))
        first += kind.workers
    return checks


def _check_of(kind: Kind, policy: Policy, budget_s: float) -> DriftCheck:
    laws, fit = laws_from_fit(kind.fit), kind.fit
    law = laws.rounds if policy.continuous else laws.latency
    overhead = fit.rounds.overhead if policy.continuous and fit.rounds else fit.overhead
    memory = laws.round_memory if policy.continuous else laws.memory
    spec = kind.recipe.profile
    steps = min(STEPS, *spec.slice_tokens)
    allowed = max(overhead.error.p95_percent, LEAST_PERCENT)

    def fits(rows: int, length: int) -> bool:
        if length + steps > fit.engine.max_model_len:
            return False
        if policy.continuous:  # newcomers are prefilled beside the batch that they join
            return 2 * rows * (length + steps) <= memory.usable_tokens and rows <= laws.slots
        return rows <= int(memory.max_batch(np.array([length]), steps, 0.0)[0])

    sizes, lengths = sorted(spec.batch_sizes), sorted(spec.input_lengths)
    small, usual = lengths[0], lengths[len(lengths) // 2]
    wanted = [
        (sizes[0], usual),
        (sizes[len(sizes) // 2], small),
        (sizes[len(sizes) // 2], usual),
        (sizes[-1], small),
    ]
    chosen = [
        DriftPoint(rows, length, steps)
        for rows, length in dict.fromkeys(wanted)
        if fits(rows, length)
    ]
    check = DriftCheck((), RUNS_MIN, law, policy.continuous, fit.engine.vocab_size, allowed)
    chosen.sort(key=check.expected_s)
    while chosen and RUNS_MIN * sum(map(check.expected_s, chosen)) > budget_s:
        chosen.pop()
    once_s = sum(map(check.expected_s, chosen))
    runs = min(int(budget_s / once_s), RUNS_MAX) if once_s > 0 else 0
    return DriftCheck(tuple(chosen), runs, law, policy.continuous, fit.engine.vocab_size, allowed)


def judge(found: Sequence[MeasuredPoint], *, strict: bool, say: Callable[[str], None]) -> None:
    """Say what was found; with `strict`, `TargetMissedError` where points are beyond the fit's
    stated error.
    """
    if not found:
        say("fit: no point of it could be measured again in the time given")
        return
    allowed = " and ".join(
        f"{percent:.0f}" for percent in sorted({one.allowed_percent for one in found})
    )
    wrong = [one for one in found if one.drifted]
    if len(wrong) <= MAY_EXCEED < len(found):
        but = "".join(
            f"; but for {one.text()}, as one of {len(found)} may by chance" for one in wrong
        )
        say(
            f"fit: measured again at {len(found)} points, within its stated error of {allowed} %{but}"
        )
        return
    if not wrong:
        say(f"fit: measured again at one point, within its stated error of {allowed} %")
        return
    told = f"beyond its stated error of {allowed} %: {', '.join(one.text() for one in wrong)}"
    if strict:
        raise TargetMissedError(
            f"the fit does not hold: {told}", "profile and fit again; or serve without --strict"
        )
    say(
        f"warning: the fit does not hold, {told}; predictions and policies that ask the laws are off by as much"
    )


@dataclass(slots=True, eq=False)
class CheckedWorkers:
    """`Workers` that measure a check's points when they have started, before anybody else may use
    them.

    Args:
        workers: who runs them.
        checks: what is measured, one after the other, each on its workers at once.
        on_found: gets the result; what it raises, `start` raises.
    """

    workers: Workers
    checks: Sequence[DriftCheck]
    on_found: OnFound
    clock: Callable[[], float] = time.perf_counter
    size: int = field(init=False)
    _waits: dict[int, asyncio.Future[Ended]] = field(
        default_factory=dict
    )  # by worker, while it runs something
    _batches: int = 0
    _rows: int = 0

    def __post_init__(self) -> None:
        self.size = self.workers.size

    async def start(self, on_event: OnEvent) -> None:
        """Start the workers, then measure. `EngineError` if one cannot start."""

        def route(event: WorkerEvent) -> None:
            if not measuring:
                on_event(event)
            elif isinstance(event, BatchDone | RoundDone):
                self._waits.pop(event.worker).set_result((event.failure, self.clock()))
            elif not isinstance(event, BatchProgress):
                on_event(event)

        measuring = True
        await self.workers.start(route)
        found = [measured for check in self.checks for measured in await self._measure(check)]
        measuring = False
        self.on_found(found)

    async def _measure(self, check: DriftCheck) -> list[MeasuredPoint]:
        times: dict[DriftPoint, list[float]] = {}
        for point in check.points * check.runs:
            seconds = await self._run(check, point)
            if None in seconds:
                # out of memory, or a worker is gone: the pool starts it again, and the rest is not
                # measured
                break
            times.setdefault(point, []).extend(one for one in seconds if one is not None)
        return [
            MeasuredPoint(point, median(seconds), check.expected_s(point), check.allowed_percent)
            for point, seconds in times.items()
        ]

    async def _run(self, check: DriftCheck, point: DriftPoint) -> list[float | None]:
        """The point on every worker of the check at once; seconds from dispatch to result, None
        where it failed.
        """
        begun_s: list[float] = []
        waits: list[asyncio.Future[Ended]] = []
        first_row = self._rows
        for worker in check.workers:
            rows = check.rows(point, self._rows)
            numbers = tuple(range(self._rows, self._rows + len(rows)))
            self._rows += len(rows)
            waits.append(self._expect(worker))
            begun_s.append(self.clock())
            if check.in_rounds:
                plan = Round(point.steps, tuple(rows), numbers)
                self.workers.run_round(worker, self._batches, plan, check.expected_s(point))
            else:
                expected_s = check.expected_s(point)
                self.workers.run(worker, self._batches, rows, point.steps, expected_s)
        ended = await asyncio.gather(*waits)
        if check.in_rounds:
            short = [
                worker
                for worker, (failure, _) in zip(check.workers, ended, strict=True)
                if failure == "oom"
            ]
            await self._evict(short, tuple(range(first_row, self._rows)))
        return [
            None if failure else end_s - begin_s
            for begin_s, (failure, end_s) in zip(begun_s, ended, strict=True)
        ]

    async def _evict(self, workers: Sequence[int], numbers: tuple[int, ...]) -> None:
        """Rounds of these ran out of memory and left rows that had room: nobody may meet them
        later.
        """
        waits = []
        for worker in workers:
            waits.append(self._expect(worker))
            self.workers.run_round(worker, self._batches, Round(0, evict=numbers))
        await asyncio.gather(*waits)

    def _expect(self, worker: int) -> asyncio.Future[Ended]:
        """The end of a batch that the worker will be given next."""
        self._batches += 1
        self._waits[worker] = wait = asyncio.get_running_loop().create_future()
        return wait

    def run(
        self,
        worker: int,
        batch_id: int,
        rows: Sequence[Row],
        steps: int,
        estimated_s: float = math.inf,
    ) -> None:
        self.workers.run(worker, batch_id, rows, steps, estimated_s)

    def run_round(
        self, worker: int, batch_id: int, plan: Round, estimated_s: float = math.inf
    ) -> None:
        self.workers.run_round(worker, batch_id, plan, estimated_s)

    def interrupt(self, worker: int, batch_id: int) -> None:
        self.workers.interrupt(worker, batch_id)

    def cancel(self, worker: int, batch_id: int, request_ids: Sequence[str]) -> None:
        self.workers.cancel(worker, batch_id, request_ids)

    def kill(self, worker: int) -> None:
        self.workers.kill(worker)

    def silent(self) -> list[SilentWorkerError]:
        return self.workers.silent()

    async def stop(self) -> None:
        await self.workers.stop()
