"""One call: a trace, a policy, the laws, so many workers -> what would happen."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from toolkit.errors import InputError
from toolkit.estimators.edge import MemoryEdge, uniform_draw
from toolkit.estimators.load import Laws, laws_from_fit
from toolkit.files.fit import Fit
from toolkit.files.plan import Kind
from toolkit.metrics import Served, sla_ratios, summarize
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sched.protocols import AnyPolicy, BuiltIn, LatencyLaw, MemoryLaw, Oracle, Policy, SwapLaw
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import NO_LIMIT, Joining, Refusal, Request, Worker
from toolkit.sim.continuous import RoundWorker
from toolkit.sim.front import NO_DELAY, FrontDelay
from toolkit.sim.ledger import Ledger, RunsOut
from toolkit.sim.loop import VirtualWorker, run
from toolkit.sim.paged_engine import PagedEngine, PassRange, serve
from toolkit.sim.slab import SlabWorker
from toolkit.sim.token_gaps import TokenGaps
from toolkit.sim.validity import CountingRoundWorker, CountingSimWorker, CountingSlabWorker, Validity
from toolkit.sim.worker import SimWorker
from toolkit.traces.types import Trace


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
    clients see besides: HTTP, tokenizing and the stream.

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


@dataclass(slots=True, frozen=True)
class SimResult:
    """The requests' times, the counts that only a simulation knows, and who can never be served."""

    served: Served
    counters: dict[str, float]
    refusals: Sequence[Refusal] = ()

    def metrics(self, sla: Mapping[str, float]) -> dict[str, float]:
        """All metrics by name, the unit in the name."""
        return summarize(self.served, sla) | self.counters

    def sla_ratios(self, sla: Mapping[str, float]) -> dict[str, float]:
        """Each target's value over its limit."""
        return sla_ratios(self.served, sla)


def requests_of(trace: Trace, max_new_tokens: int, *, limits_hold: bool = True) -> tuple[list[Request], list[int]]:
    """The requests of a trace as a scheduler sees them, and the output lengths, which it does not."""
    requests, outputs = [], []
    rows = zip(
        trace.arrival_s.tolist(),
        trace.prompt_tokens.tolist(),
        trace.output_tokens.tolist(),
        trace.max_tokens.tolist(),
        trace.priorities,
        strict=True,
    )
    for k, (arrival_s, prompt, output, limit, priority) in enumerate(rows):
        limit = limit or max_new_tokens
        requests.append(Request(str(k), arrival_s, prompt, limit, priority))
        outputs.append(min(output, limit) if limits_hold else output)
    return requests, outputs


def simulate(trace: Trace, policy: AnyPolicy, world: World) -> SimResult:
    """Serve `trace` under `policy`: deterministic, in time proportional to the number of decisions.

    `InputError` where the policy is built into an engine that `world` has no laws of.
    """
    requests, outputs = requests_of(trace, world.max_new_tokens, limits_hold=world.limits_hold)
    ledger = Ledger(trace.arrival_s.tolist(), outputs, world.size)
    if world.token_gaps:
        ledger.token_gaps = TokenGaps()
    if isinstance(policy, VllmPolicy):
        engine = world.engine()
        refusals, capacity_tokens = serve(requests, policy, engine, ledger, drain=world.drain), engine.capacity_tokens
        rows = ledger.row_steps / max(ledger.decoding_steps, 1)
        front = engine.front(rows) if world.front == NO_DELAY else world.front
    else:
        assert not isinstance(policy, BuiltIn)
        world = world.under(policy)
        refusals, capacity_tokens = _run(requests, policy, world, ledger), world.memory.usable_tokens
        front = world.front
    return SimResult(front.seen(ledger.served()), counters(ledger, len(refusals), capacity_tokens), refusals)


def _run(requests: Sequence[Request], policy: Policy, world: World, ledger: Ledger) -> list[Refusal]:
    """Serve under a policy of our scheduler's."""
    if isinstance(policy, Oracle):
        outputs = zip(requests, ledger.output_tokens, strict=True)
        policy = policy.told({request.request_id: tokens for request, tokens in outputs})
    scheduler = Scheduler(policy, world.scheduled(), seed=world.seed, finished=world.finished)
    workers = [*virtual_workers(policy, world, ledger, requests)]
    books = [ledger.of_kind() for _ in world.others]
    for kind, book in zip(world.others, books, strict=True):
        workers += virtual_workers(policy, kind, book, requests, first=len(workers))
    refused = run(scheduler, requests, workers, drain=world.drain)
    for kind, book in zip(world.others, books, strict=True):
        ledger.add(book, world.memory.usable_tokens / kind.memory.usable_tokens)
    return refused


def virtual_workers(
    policy: Policy, world: World, ledger: Ledger, requests: Sequence[Request], *, first: int = 0
) -> Sequence[VirtualWorker]:
    """The workers that run what `policy` decides, and write into `ledger`, whose order is that of `requests`.

    Of a fleet those of the first kind, numbered from `first`; each kind has a ledger (`Ledger.of_kind`).
    """
    number = {request.request_id: k for k, request in enumerate(requests)}
    latency, valid = world.latency, world.valid
    if valid is not None and valid.holds(requests, ledger.output_tokens):
        valid = None  # nothing to count
    if policy.continuous:
        rounds: Callable[..., RoundWorker] = RoundWorker if valid is None else partial(CountingRoundWorker, valid)
        if world.joining is not None:
            padded = SlabWorker if valid is None else partial(CountingSlabWorker, valid)
            rounds = partial(padded, joining=world.joining, capacity_tokens=world.memory.usable_tokens)
        return [
            rounds(
                first + k, latency, ledger, number, world.round_runs_out, swap=world.swap, future=world.future_memory
            )
            for k in range(world.workers)
        ]
    batches = SimWorker if valid is None else partial(CountingSimWorker, valid)
    return [
        batches(latency, ledger, number, world.runs_out, streams=world.streams, flush_s=world.flush_s)
        for _ in range(world.workers)
    ]


def counters(ledger: Ledger, refused: int, usable_tokens: int) -> dict[str, float]:
    """What is counted besides the requests' times, by name with the unit in it; of all policies, but `rounds`.

    A batch of a continuous worker is a prefill of those who enter; its size is the mean number of residents.
    """
    batches, requests, steps = max(ledger.batches, 1), max(sum(ledger.ok), 1), max(ledger.decoding_steps, 1)
    found = {
        "refused": float(refused),
        "unfinished": float(len(ledger.ok) - sum(ledger.ok) - refused),
        "batches": float(ledger.batches),
        "batch_size_mean": ledger.row_steps / steps if ledger.rounds else ledger.rows / batches,
        "slices_per_request": ledger.rows / requests,
        "pad_tokens_per_request": ledger.pad_tokens / requests,
        "invalid_tokens_per_request": ledger.invalid_tokens / requests,
        "early_return_percent": 100.0 * ledger.early_returns / batches,
        "decoding_steps": float(ledger.decoding_steps),
        "oom_percent": 100.0 * ledger.oom_batches / (batches + ledger.oom_batches),
        "evicted_percent": 100.0 * ledger.evictions / requests,
        "consumed_memory_percent": 100.0 * ledger.memory_token_steps / steps / usable_tokens,
        "peak_memory_percent": 100.0 * ledger.peak_tokens / usable_tokens,
        "extrapolated_batches_percent": 100.0 * ledger.extrapolated / max(ledger.rounds or ledger.batches, 1),
    }
    if ledger.rounds:
        found["rounds"] = float(ledger.rounds)
        found["swaps_out"] = float(ledger.swaps_out)
        found["swaps_in"] = float(ledger.swaps_in)
        found["swapped_tokens"] = float(ledger.swapped_tokens)
        found["swap_wait_s"] = ledger.swap_wait_s
        found["peak_host_tokens"] = float(ledger.peak_host_tokens)
        found["rerouted_percent"] = 100.0 * ledger.reroutes / requests
    if ledger.attempts:
        future = ledger.future_token_attempts / ledger.attempts
        found["future_required_memory_percent"] = 100.0 * future / usable_tokens
    if ledger.token_gaps is not None:
        found |= ledger.token_gaps.summary()
    return found | _of_workers(ledger)


def _of_workers(ledger: Ledger) -> dict[str, float]:
    """How evenly, and how much, the workers worked; CT STD is the SCLS paper's."""
    makespan_s = max(ledger.completed_s, default=0.0)
    shares = [100.0 * busy_s / makespan_s if makespan_s else 0.0 for busy_s in ledger.busy_s]
    return {
        "completion_time_std_s": statistics.pstdev(ledger.completed_s),
        "utilisation_percent": statistics.fmean(shares),
    } | {f"utilisation_worker_{k}_percent": share for k, share in enumerate(shares)}
