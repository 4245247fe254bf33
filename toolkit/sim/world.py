"""What is simulated besides the policy: the laws of workers, how many there are, how tokens reach clients.

A world is made from a fit here; what a command may say about one besides is in `toolkit.sim.settings`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolkit.errors import InputError
from toolkit.estimators.edge import MemoryEdge, uniform_draw
from toolkit.estimators.load import Laws, laws_from_fit
from toolkit.files.fit import Fit
from toolkit.files.plan import Kind
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sched.protocols import AnyPolicy, LatencyLaw, MemoryLaw, SwapLaw
from toolkit.sched.types import NO_LIMIT, Joining, Worker
from toolkit.sim.front import NO_DELAY, FrontDelay
from toolkit.sim.ledger import RunsOut
from toolkit.sim.paged_engine import PagedEngine, PassRange
from toolkit.sim.validity import Validity


@dataclass(slots=True, frozen=True)
class RoundLaws:
    """What a worker takes and holds when it runs rounds. `believed` and `front` as in `World`."""

    latency: LatencyLaw
    memory: MemoryLaw
    believed: LatencyLaw | None = None
    front: FrontDelay = NO_DELAY


@dataclass(slots=True, frozen=True)
class World:
    """What is simulated besides the policy: the laws of a worker, how many there are, and how tokens reach clients.

    `runs_out` is the truth about the memory of static batches, which are reserved whole, and `round_runs_out` that of
    rounds, which hold what they use (None: the law is right); `max_new_tokens` is the limit of requests whose trace
    names none; `seed` that of the policy's draws. `future_memory` asks for the true peak of memory to come,
    `token_gaps` for the percentiles of all gaps between tokens (ITL);
    without `drain` the simulation stops when the last request has been admitted. Where limits do not hold, outputs may
    be longer than the limits that the policy sees, as they are in Past-Future's Table 1. `believed` is the latency law
    that the scheduler knows, where it is not the one that holds. `valid` is where the laws were measured; None: they
    hold everywhere. Where there is a law `swap`, caches can be swapped to `host_tokens` of host memory per worker.
    `rounds` has the laws under continuous policies, where they are others. `finished` are the output lengths of
    requests that ended before the first arrives, for policies that look back. `joining` is how rows join a worker's
    running batch where that is one padded slab, as on the engine `rebatch`; None: memory is paged. `front` is what
    clients see besides: HTTP, tokenizing and the stream. `arrival_cost_s` is what each request that arrives
    adds to every static batch that runs then, where workers compute on the front's cores.

    A fleet has `others`: further kinds of workers behind the same scheduler, each a world of its own as far as
    its workers go. They are numbered after these, kind by kind.
    """

    latency: LatencyLaw
    memory: MemoryLaw
    workers: int
    max_new_tokens: int
    runs_out: RunsOut | None = None
    round_runs_out: RunsOut | None = None
    streams: bool = True
    flush_s: float = 0.0  # but workers report tokens at most this often
    seed: int = 0
    future_memory: bool = False
    token_gaps: bool = False
    drain: bool = True
    limits_hold: bool = True
    believed: LatencyLaw | None = None
    valid: Validity | None = None
    swap: SwapLaw | None = None
    host_tokens: int = 0
    joining: Joining | None = None
    slots: int = NO_LIMIT  # rows that run at once on a worker, in rounds
    rounds: RoundLaws | None = None
    finished: tuple[int, ...] = ()
    front: FrontDelay = NO_DELAY
    arrival_cost_s: float = 0.0
    paged: PagedEngine | None = None
    others: tuple[World, ...] = ()

    @property
    def kinds(self) -> tuple[World, ...]:
        """This and the others."""
        return (self, *self.others)

    @property
    def size(self) -> int:
        """Workers of all kinds."""
        return sum(kind.workers for kind in self.kinds)

    def under(self, policy: AnyPolicy) -> World:
        """The same world with the laws of what `policy` runs: batches or rounds."""
        if self.others:
            alone = replace(self, others=()).under(policy)
            return replace(alone, others=tuple(kind.under(policy) for kind in self.others))
        laws = self.rounds if policy.continuous else None
        if laws is None:
            return self
        taken = replace(self, latency=laws.latency, memory=laws.memory, believed=laws.believed, rounds=None)
        return taken if laws.front == NO_DELAY else replace(taken, front=laws.front)

    def engine(self) -> PagedEngine:
        """The engine whose own scheduler is simulated. `InputError` where there is none."""
        if self.others:
            raise InputError(
                "policy 'vllm' is one engine's own scheduler: no fleet is behind it",
                "choose a policy of ours, or simulate each kind with its own fit",
            )
        if self.paged is None:
            raise InputError(
                "policy 'vllm' needs the law of vLLM's forward passes, which is not in this fit",
                "set engine.name to vllm, then: llmctl profile RECIPE; llmctl fit PROFILE",
            )
        return self.paged

    def range_of(self, policy: str) -> Validity | PassRange | str | None:
        """Where the laws were measured that hold under the policy of this name; of several kinds in words."""
        if self.others:
            return "; or ".join(dict.fromkeys(str(kind.valid) for kind in self.kinds if kind.valid)) or None
        return self.valid if self.paged is None or policy != VllmPolicy.name else self.paged.valid

    def worker(self, index: int) -> Worker:
        """A worker as the scheduler knows it."""
        host_tokens = self.host_tokens if self.swap else 0
        latency = self.believed or self.latency
        return Worker(
            index,
            latency,
            self.memory,
            swap=self.swap,
            host_tokens=host_tokens,
            joining=self.joining,
            slots=self.slots,
        )

    def scheduled(self) -> list[Worker]:
        """All workers as the scheduler knows them, numbered from 0."""
        kinds = [kind for kind in self.kinds for _ in range(kind.workers)]
        return [kind.worker(index) for index, kind in enumerate(kinds)]


def fleet(kinds: Sequence[World]) -> World:
    """One world with the workers of all `kinds`; what is not of workers is as in the first."""
    first, *others = kinds
    return replace(first, others=tuple(others))


def world_from_fit(fit: Fit, *, workers: int, max_new_tokens: int, seed: int = 0, flush_s: float = 0.0) -> World:
    """The world that a fit describes: its laws, and for static batches a memory edge drawn per batch from `seed`.

    Rounds have no such edge: where they were probed, what counts as usable ran at every length.
    """
    laws = laws_from_fit(fit)
    return World(
        laws.latency,
        laws.memory,
        workers,
        max_new_tokens,
        runs_out=DrawnEdge(laws.edge, seed),
        flush_s=flush_s,
        seed=seed,
        valid=Validity.of(fit),
        swap=laws.swap,
        host_tokens=laws.host_tokens,
        rounds=None if laws.rounds is laws.latency else _round_laws(laws),
        joining=laws.joining,
        slots=laws.slots,
        paged=PagedEngine.of(fit.steps, fit.memory.capacity_tokens) if fit.steps else None,
    )


def _round_laws(laws: Laws) -> RoundLaws:
    return RoundLaws(laws.rounds, laws.round_memory, front=FrontDelay(laws.front_s, laws.front_s))


def world_of(kinds: Sequence[Kind], *, max_new_tokens: int, seed: int = 0) -> World:
    """The world that the fits of a plan's or a fleet's workers describe together."""
    return fleet(
        [
            world_from_fit(
                kind.fit,
                workers=kind.workers,
                max_new_tokens=max_new_tokens,
                seed=seed,
                flush_s=kind.recipe.engine.flush_s,
            )
            for kind in kinds
        ]
    )


@dataclass(slots=True, frozen=True)
class DrawnEdge:
    """The memory edge that a batch meets, drawn by its id. An object, so that worlds can go to other processes."""

    edge: MemoryEdge
    seed: int

    def __call__(self, batch_id: int, size: int, length: int, steps: int) -> bool:
        return self.edge.runs_out(size, length, steps, uniform_draw(self.seed, batch_id))
