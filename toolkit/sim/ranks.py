"""The engines of one data-parallel server of vLLM on one clock, behind vLLM's own balancer.

Engines of a mixture of experts run in lock step (`LockStep`, vLLM's `DPEngineCoreProc`), since each
has a part of the experts: all make a pass together, and an engine without rows makes a dummy pass
of one token. A wave of passes begins with a request that comes while none runs. At some passes all
agree whether a request is unfinished anywhere; the wave ends where none is (`Waves`). A pass takes
as long as its slowest engine: by default the fitted law, where all compute as many tokens as the
engine with the most if all run CUDA graphs (`DataParallel.seconds`).

Engines of a dense model do not know of one another (`Independent`).

`vllm-check` compares the passes of all engines, the dummy passes and the ends of waves with vLLM's
own. Not modelled: the time of messages between processes, and figures that an engine of a dense
model tells within a pass. Requests reach the API servers in turn.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from toolkit.catalogue.releases import Release
from toolkit.compiled import Reduced, reduced
from toolkit.errors import InputError
from toolkit.estimators.steps import StepShape
from toolkit.interrupts import check
from toolkit.routing.rank_balancer import Coordinator, RankBalancer
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sched.types import Refusal, Request
from toolkit.sim.blocks import Node, PagedRequest, copy_of
from toolkit.sim.flight import EngineLaw, Flight, grown_shape
from toolkit.sim.ledger import Ledger
from toolkit.sim.loop import CHECK_EVERY
from toolkit.sim.paged_engine import PagedEngine, PagedRun, Reuse, Tokens, refusal
from toolkit.sim.passes import PagedPass
from toolkit.sim.worker import FrontDelay

# Seconds of a pass of all engines, by their shapes; convex in the cached tokens.
PassSeconds: TypeAlias = Callable[[Sequence[StepShape]], float]
FIRST_SYNC: Final = (0, 30)  # vLLM that also agrees after the first pass of a wave
SAME: Final = 1e-9  # relative: of two times that are one but for rounding
RANKS_MAX: Final = 1024


@dataclass(slots=True, frozen=True)
class DataParallel:
    """How the engines of a server share its requests.

    Attributes:
        size: engines.
        lock_step: whether they wait for one another, as those of a mixture of experts do.
        servers: API servers, each with a balancer (vLLM's default: as many as engines).
        sync_passes: passes from one agreement to the next (vLLM's `dp_sync_interval`).
        syncs_first: whether the engines also agree after the first pass of a wave.
        graph_tokens: the most tokens of a pass with CUDA graphs; 0: there are none.
        pass_s: seconds of a pass in lock step, by the shapes of all engines; None: `seconds`.
    """

    size: int
    lock_step: bool = True
    servers: int = 1
    sync_passes: int = 16
    syncs_first: bool = True
    graph_tokens: int = 512
    pass_s: PassSeconds | None = None

    def __reduce__(self) -> Reduced:
        return reduced(self)

    def __post_init__(self) -> None:
        if not 1 <= self.size <= RANKS_MAX:
            raise InputError(f"data parallelism of {self.size} engines: 1 to {RANKS_MAX:,}")
        if self.servers < 1 or self.sync_passes < 1 or self.graph_tokens < 0:
            raise InputError(
                f"data parallelism with {self.servers} API servers, an agreement every "
                f"{self.sync_passes} passes and graphs of {self.graph_tokens} tokens: the first "
                "two are at least 1, the last is at least 0"
            )

    def seconds(self, law: EngineLaw, shapes: Sequence[StepShape], *, ahead: bool) -> float:
        """Seconds of a pass in lock step: of the slowest engine. A law that was measured with so
        many engines has their exchange in it.
        """
        if self.pass_s is not None:
            return self.pass_s(shapes)
        most = max([shape.tokens for shape in shapes])
        pads = most <= self.graph_tokens
        slowest_s = 0.0
        for shape in shapes:
            run = padded(shape, most) if pads and shape.tokens < most else shape
            pass_s = max(law.gpu_s(run), law.launch_s(run)) if ahead else law.forward_s(run)
            slowest_s = max(slowest_s, pass_s)
        return slowest_s


def sync_rule(release: Release) -> tuple[int, bool]:
    """`sync_passes` and `syncs_first` of a release of vLLM, by default."""
    return (16, True) if release >= FIRST_SYNC else (32, False)


def padded(shape: StepShape, tokens: int) -> StepShape:
    """The shape with as many new tokens as `tokens`; the further ones belong to no row."""
    return StepShape(
        shape.decodes,
        shape.decode_cached,
        shape.prefills,
        shape.prefill_tokens,
        shape.prefill_attended,
        shape.prefill_cached,
        shape.decode_inside,
        shape.prefill_inside,
        shape.growing,
        shape.draft_tokens + tokens - shape.tokens,
    )


class Waves:
    """When engines in lock step make passes.

    Attributes:
        running: whether a wave runs.
        number: of the wave.
        step: passes of the wave so far.
    """

    def __init__(self, sync_passes: int, *, syncs_first: bool) -> None:
        self._every = sync_passes
        self._first = syncs_first
        self.running = False
        self.number = 0
        self.step = 0

    def begin(self) -> None:
        """A request has come: all engines make passes."""
        self.running = True

    @property
    def until_sync(self) -> int:
        """Passes up to the next agreement, which follows the last of them."""
        if self._first and not self.step:
            return 1
        return self._every - self.step % self._every

    def skip(self, steps: int) -> None:
        """All have made so many passes, each with a request unfinished anywhere."""
        self.step += steps

    def passed(self, *, unfinished: bool) -> None:
        """All have made a pass; `unfinished`: a request is, anywhere."""
        self.step += 1
        if self.step % self._every == 0 or (self._first and self.step == 1):
            self.running = unfinished
            if not unfinished:
                self.number += 1
                self.step = 0


class RanksFlight(Flight):
    """As `Flight`, for passes that all engines make together, with times that are given.

    With `ahead` a pass is planned when the one before it begins.
    """

    def __init__(self, law: EngineLaw, *, ahead: bool) -> None:
        super().__init__(law)
        self._ahead = ahead
        self._pass_s = 0.0
        self.host_s = 0.0  # between two passes

    def begin(
        self, now_s: float, steps: int, pass_s: float, growth_s: float, after_s: float
    ) -> None:
        """So many passes begin, the first of `pass_s`, each following one `growth_s` longer. The
        host takes `after_s` between two.
        """
        self.begin_s = max(now_s, self.end_s) if self._ahead else now_s
        self._base_s = self.begin_s
        self._pass_s = pass_s
        self.host_s = after_s
        self._period_s = pass_s + after_s
        self._growth_s = growth_s
        self.first_s = self.begin_s + pass_s
        self.keep(steps)

    def cut(self, now_s: float) -> None:
        if self._ahead:
            self.keep(1 + self._begun(now_s, self.steps - 1))
        else:
            self.keep(max(self._begun(now_s, self.steps), 1))

    def keep(self, steps: int) -> None:
        self.steps = steps
        begins_s = self._begins_s(steps)
        self.end_s = begins_s + self._pass_s + self._growth_s * (steps - 1)
        self.due_s = begins_s if self._ahead else self.end_s

    def _last_gap_s(self, end_s: float) -> float:
        return self.host_s + end_s - self._begins_s(self.steps)


class Rank(PagedRun):
    """One engine in lock step, of which `LockStep` says when it does what."""

    def __init__(
        self,
        index: int,
        engine: PagedEngine,
        flags: VllmPolicy,
        ledger: Ledger,
        flight: RanksFlight,
        *,
        shares: bool,
    ) -> None:
        super().__init__(index, engine, flags, ledger, shares=shares, tells=True)
        self._flight = flight
        self._told = (0, 0)

    @property
    def unfinished(self) -> bool:
        """Whether a request that it knows is unfinished, as far as it knows."""
        return bool(self.scheduler.running) or bool(self.scheduler.waiting)

    @property
    def waits(self) -> bool:
        """Whether a request waits here."""
        return bool(self._arrived) or bool(self.scheduler.waiting)

    def arrive(self, row: PagedRequest, now_s: float, *, has_tokens: bool = False) -> None:
        self._arrived.append(row)

    def enter(self) -> None:
        """Take the requests that have come."""
        for row in self._arrived:
            self.scheduler.add(row)
        self._arrived.clear()

    def plan(self) -> PagedPass | None:
        """Plan a pass; None: it has no rows."""
        if not self.unfinished:
            return None
        plan = self._planned()
        for row in plan.preempted:
            if row.mark:  # it had its last token with the last pass; else none since admitted
                self._close(row, self._last_s)
        if plan.apart is not None:
            for row in plan.apart.paused:
                self._close(row, self._last_s)
        return plan if plan.rows else None

    def most_steps(self, plan: PagedPass | None) -> int:
        """How many passes of the same rows follow, this one included; 0: any number, of dummies."""
        if plan is not None:
            return self.scheduler.ahead()
        return 1 if self.unfinished else 0

    def begin(self, plan: PagedPass | None) -> None:
        """The planned passes begin; None: dummies."""
        self._leap = plan
        self._since_s = max(self._flight.begin_s, self._done_s)

    def commit(self) -> Tokens | None:
        """The passes are over, but for the tokens' times; None: they were dummies."""
        plan = self._leap
        self._leap = None
        return None if plan is None else self._commit(plan)

    def give(self, tokens: Tokens, end_s: float) -> None:
        """The tokens of the passes exist; the last at `end_s`."""
        self._give(tokens, end_s)

    def settle(self, tokens: Tokens | None) -> None:
        """It learns of the tokens of the last pass, or with `ahead` of the one before."""
        ended = tokens.ended if tokens is not None else []
        if self._ahead:
            self.scheduler.settle(self._under_way)
            self._under_way = ended
        else:
            self.scheduler.settle(ended)

    def tell(self, coordinator: Coordinator, waves: Waves, now_s: float) -> None:
        """Tell the coordinator its figures, if they have changed."""
        scheduler = self.scheduler
        counts = (len(scheduler.waiting), len(scheduler.running))
        if counts != self._told:
            self._told = counts
            used = (self._blocks - scheduler.pool.free) / self._blocks
            stamp = (waves.number, waves.step)
            coordinator.tell(self._index, (counts[0], counts[1], used), stamp, now_s)


class LockStep:
    """Engines that make each pass together.

    Attributes:
        ranks: the engines.
        next_s: when `work` is to be called next; infinity while there is nothing to do.
    """

    def __init__(
        self,
        parallel: DataParallel,
        engine: PagedEngine,
        flags: VllmPolicy,
        ledger: Ledger,
        coordinator: Coordinator,
        *,
        shares: bool,
    ) -> None:
        self._parallel = parallel
        self._law = engine.steps
        self._ahead = engine.ahead
        self._ledger = ledger
        self._coordinator = coordinator
        self._flight = RanksFlight(engine.steps, ahead=engine.ahead)
        self.waves = Waves(parallel.sync_passes, syncs_first=parallel.syncs_first)
        self.ranks = [
            Rank(index, engine, flags, ledger, self._flight, shares=shares)
            for index in range(parallel.size)
        ]
        self._under_way = False  # whether passes are
        self._plan_s = 0.0  # when the next pass is planned
        self.next_s = math.inf

    def arrive(self, rank: int, row: PagedRequest, now_s: float) -> None:
        """A request comes to an engine."""
        self.ranks[rank].arrive(row, now_s)
        if not self._under_way:
            if self.next_s == math.inf:
                self.next_s = max(self._plan_s, now_s)
        elif self._flight.steps > 1:
            self._flight.cut(now_s)
            self.next_s = self._flight.due_s

    def work(self, *, drain: bool, follow: bool) -> None:
        """Do what is due at `next_s`: end the passes that are under way, and plan the next."""
        now_s = self.next_s
        if self._under_way:
            self._end(now_s)
            if not self._ahead:  # requests that follow the ends come before the next plan
                self.next_s = self._plan_s
                return
        self._plan(now_s, drain=drain)

    def _end(self, now_s: float) -> None:
        self._under_way = False
        flight = self._flight
        waves = self.waves
        steps = flight.steps
        waves.skip(steps - 1)
        for rank in self.ranks:
            tokens = rank.commit()
            if tokens is None:
                self._ledger.dummy_passes += steps
            else:
                rank.give(tokens, flight.end_s)
            rank.settle(tokens)
            rank.tell(self._coordinator, waves, now_s)
        waves.passed(unfinished=any(rank.unfinished for rank in self.ranks))
        self._plan_s = now_s + flight.host_s

    def _plan(self, now_s: float, *, drain: bool) -> None:
        self.next_s = math.inf
        waves = self.waves
        ranks = self.ranks
        waits = any(rank.waits for rank in ranks)
        if not (waits or (drain and waves.running)):
            self._plan_s = max(now_s, self._flight.end_s)
            return
        waves.begin()
        plans: list[PagedPass | None] = []
        for rank in ranks:
            rank.enter()
            rank.tell(self._coordinator, waves, now_s)
            plans.append(rank.plan())
        most = 0
        for rank, plan in zip(ranks, plans, strict=True):
            steps = rank.most_steps(plan)
            if steps and (steps < most or not most):
                most = steps
        steps, pass_s, growth_s = self._leap(plans, most or waves.until_sync)
        after_s = 0.0
        if not self._ahead:
            after_s = max([self._law.after_s(0 if plan is None else plan.rows) for plan in plans])
        self._flight.begin(now_s, steps, pass_s, growth_s, after_s)
        for rank, plan in zip(ranks, plans, strict=True):
            rank.begin(plan)
        self._under_way = True
        self.next_s = self._flight.due_s

    def _leap(self, plans: Sequence[PagedPass | None], most: int) -> tuple[int, float, float]:
        """How many of at most `most` passes are each longer than the one before by the same time,
        the seconds of the first, and that time. The slowest engine is then the same in all.
        """
        first_s = self._seconds(plans, 1)
        growth_s = 0.0
        while most > 1:
            growth_s = (self._seconds(plans, most) - first_s) / (most - 1)
            middle = (most + 1) // 2
            middle_s = self._seconds(plans, middle)
            # the seconds are convex: equal to their chord inside it, they are equal all along it
            if most == 2 or abs(first_s + growth_s * (middle - 1) - middle_s) <= SAME * middle_s:
                break
            most = middle
        return most, first_s, growth_s if most > 1 else 0.0

    def _seconds(self, plans: Sequence[PagedPass | None], step: int) -> float:
        """Seconds of one of the passes that begin with `plans`; the first is 1."""
        shapes = []
        for plan in plans:
            if plan is None:
                shapes.append(StepShape(1, 0))
            else:
                shapes.append(plan.shape if step == 1 else grown_shape(plan.shape, step))
        return self._parallel.seconds(self._law, shapes, ahead=self._ahead)


class Independent:
    """Engines of a dense model. Attributes: as those of `LockStep`."""

    def __init__(
        self,
        parallel: DataParallel,
        engine: PagedEngine,
        flags: VllmPolicy,
        ledger: Ledger,
        coordinator: Coordinator,
        *,
        shares: bool,
    ) -> None:
        self._coordinator = coordinator
        self._told = [(0, 0)] * parallel.size
        self.ranks = [
            PagedRun(index, engine, flags, ledger, shares=shares, tells=True)
            for index in range(parallel.size)
        ]
        self.next_s = math.inf

    def arrive(self, rank: int, row: PagedRequest, now_s: float) -> None:
        """A request comes to an engine."""
        self.ranks[rank].arrive(row, now_s)
        self._look()

    def work(self, *, drain: bool, follow: bool) -> None:
        """Let one engine do what is due at `next_s`."""
        now_s = self.next_s
        for index, rank in enumerate(self.ranks):
            if rank.next_s == now_s:
                rank.work(drain=drain, follow=follow)
                report = rank.report(now_s)
                counts = (report.waiting, report.running)
                if counts != self._told[index]:
                    self._told[index] = counts
                    figures = (report.waiting, report.running, report.kv_usage)
                    self._coordinator.tell(index, figures, (0, 0), now_s)
                break
        self._look()

    def _look(self) -> None:
        self.next_s = min([rank.next_s for rank in self.ranks])


def serve_ranks(
    requests: Sequence[Request],
    flags: VllmPolicy,
    engine: PagedEngine,
    parallel: DataParallel,
    ledger: Ledger,
    reuse: Reuse,
    *,
    front: FrontDelay | None = None,
    drain: bool = True,
) -> list[Refusal]:
    """Serve requests on the engines of one server, each of which is `engine` with a cache of its
    own; the ledger has a worker for each. Returns the refusals: requests that can never be served.

    `InputError` where that is not modelled: prefills at intervals, which engines in lock step count
    together; vLLM's own scheduler; speculative decoding.
    """
    if flags.prefill_schedule_interval > 1:
        raise InputError(
            f"prefill_schedule_interval is {flags.prefill_schedule_interval}, which is not "
            "modelled with data parallelism",
            "leave it at 1",
        )
    if engine.link is not None:
        raise InputError(
            "--scheduler installed plans the passes of one engine, not of data-parallel ones",
            "simulate them with --scheduler model",
        )
    if engine.drafts is not None:
        raise InputError(
            "speculative decoding is not modelled with data parallelism",
            "leave engine.vllm.drafts out of the recipe",
        )
    return _Service(requests, flags, engine, parallel, ledger, reuse, front).serve(drain=drain)


class _Service:
    """The requests, the engines of the server, and what gives the one to the other."""

    def __init__(
        self,
        requests: Sequence[Request],
        flags: VllmPolicy,
        engine: PagedEngine,
        parallel: DataParallel,
        ledger: Ledger,
        reuse: Reuse,
        front: FrontDelay | None,
    ) -> None:
        self._requests = requests
        self._engine = engine
        self._ledger = ledger
        self._front = front
        ledger.shares = bool(reuse)
        outputs = ledger.output_tokens
        self._refusals: dict[int, Refusal] = {}
        for number, request in enumerate(requests):
            refused = refusal(request, outputs[number], flags, engine)
            if refused is not None:
                self._refusals[number] = refused
        self._shares = bool(reuse) and flags.prefix_caching
        numbers = range(len(requests))
        self._leaves: list[Node] = []
        self._watched: list[bool] = []
        if self._shares:
            lookahead = engine.hash_lookahead
            self._leaves, self._watched = reuse.contents(numbers, requests, outputs, lookahead)
        self._copies: list[dict[Node, Node]] = [{} for _ in range(parallel.size)]
        self._arrivals = reuse.arrivals(numbers, ledger.arrival_s, self._refusals)
        self._coordinator = Coordinator(parallel.size, lock_step=parallel.lock_step)
        servers = parallel.servers
        self._balancers = [RankBalancer(parallel.size, servers, k) for k in range(servers)]
        kind = LockStep if parallel.lock_step else Independent
        self._engines: LockStep | Independent = kind(
            parallel, engine, flags, ledger, self._coordinator, shares=bool(reuse)
        )
        self._ended: deque[tuple[float, int, int]] = deque()  # time, API server, engine
        self._server_of: dict[int, int] = {}
        self._came = 0

    def serve(self, *, drain: bool) -> list[Refusal]:
        """Serve all; without `drain`, until all were admitted."""
        arrivals = self._arrivals
        engines = self._engines
        coordinator = self._coordinator
        events = 0
        while arrivals.next_s < math.inf or engines.next_s < math.inf:
            events += 1
            if events % CHECK_EVERY == 0:
                check()
            now_s = min(arrivals.next_s, engines.next_s)
            if coordinator.due_s < now_s:
                published = coordinator.publish()
                for balancer in self._balancers:
                    balancer.hear(published)
            elif arrivals.next_s <= engines.next_s:
                self._arrive(arrivals.take(), now_s)
            else:
                engines.work(drain=drain or arrivals.left > 0, follow=arrivals.follow)
                for index, rank in enumerate(engines.ranks):
                    if rank.ends:
                        self._end(rank, index)
        for rank in engines.ranks:
            rank.close()
        return list(self._refusals.values())

    def _arrive(self, number: int, now_s: float) -> None:
        if number in self._refusals:
            self._follow([number], now_s, 0)
            return
        ended = self._ended
        while ended and ended[0][0] <= now_s:
            _, server, rank = ended.popleft()
            self._balancers[server].ended(rank)
        server = self._came % len(self._balancers)
        self._came += 1
        rank = self._balancers[server].choose()
        self._server_of[number] = server
        request = self._requests[number]
        output = self._ledger.output_tokens[number]
        row = PagedRequest(
            number,
            request.prompt_tokens,
            output,
            stops=output < request.max_new_tokens,
            limit=request.max_new_tokens,
            content=copy_of(self._leaves[number], self._copies[rank]) if self._shares else None,
            watched=self._shares and self._watched[number],
        )
        self._engines.arrive(rank, row, now_s)

    def _end(self, run: PagedRun, rank: int) -> None:
        """Requests ended with one pass."""
        end_s, _, running = run.ends[0]
        numbers = [number for _, number, _ in run.ends]
        for number in numbers:
            self._ended.append((end_s, self._server_of.pop(number), rank))
        run.ends.clear()
        run.first_tokens.clear()
        self._follow(numbers, end_s, running)

    def _follow(self, numbers: list[int], end_s: float, running: int) -> None:
        front = self._front or self._engine.front(running)
        self._arrivals.ended(numbers, end_s, front.last_s)
