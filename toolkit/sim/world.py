"""What is simulated besides the policy: the laws of workers, how many there are, how tokens reach
clients.

A world is made from a fit here; what a command may say about one besides is in `toolkit.sim.world`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from toolkit.errors import InputError, nearest
from toolkit.estimators.laws import unit_step
from toolkit.estimators.load import Laws, laws_from_fit
from toolkit.estimators.memory import MemoryEdge, ZetaMemory, uniform_draw
from toolkit.files.fit import Fit, Range
from toolkit.files.plan import Kind
from toolkit.files.recipe import ServeSpec
from toolkit.sched.policies import make_any
from toolkit.sched.policies.parameters import Value, check, choice, knob, knobs
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sched.protocols import AnyPolicy, LatencyLaw, MemoryLaw, SwapLaw
from toolkit.sched.types import NO_LIMIT, Batch, Joining, Request, RoundResult, Worker
from toolkit.sim.continuous import RoundWorker
from toolkit.sim.ledger import RunsOut
from toolkit.sim.paged_engine import PagedEngine, PassRange
from toolkit.sim.slab import SlabWorker
from toolkit.sim.worker import NO_DELAY, FrontDelay, SimWorker
from toolkit.traces.types import Trace

# Where the laws were measured, and how many batches of a simulation lie outside: their times are
# extrapolated.
#
# Workers that count are subclasses, so that a simulation which cannot leave the range pays
# nothing for it.


@dataclass(slots=True, frozen=True)
class Validity:
    """The largest batch and the longest input or cached length at which each law was measured."""

    prefill: Range
    decode: Range

    @classmethod
    def of(cls, fit: Fit) -> Validity:
        """That of a fit."""
        return cls(fit.prefill.valid, fit.decode.valid)

    def __str__(self) -> str:
        return (
            f"prefill up to N {self.prefill.batch_size_max}, L {self.prefill.length_max:,}; "
            f"decode up to N {self.decode.batch_size_max}, l {self.decode.length_max:,}"
        )

    def holds(self, requests: Sequence[Request], outputs: Sequence[int]) -> bool:
        """Whether no batch of these can be outside. The prompt of who returns holds what was
        generated.
        """
        limit = min(self.prefill.length_max, self.decode.length_max)
        rows = min(self.prefill.batch_size_max, self.decode.batch_size_max)
        lengths = (
            request.prompt_tokens + output
            for request, output in zip(requests, outputs, strict=True)
        )
        return len(requests) <= rows and all(length <= limit for length in lengths)

    def left_by(self, entering: int, input_length: int, rows: int, cached_length: float) -> bool:
        """Whether a prefill of `entering` rows, or decode steps of `rows` up to `cached_length`,
        are outside.
        """
        prefill, decode = self.prefill, self.decode
        return (
            rows > decode.batch_size_max
            or cached_length > decode.length_max
            or entering > prefill.batch_size_max
            or input_length > prefill.length_max
        )


class CountingSimWorker(SimWorker):
    """A worker of static batches that counts those outside `valid`."""

    def __init__(self, valid: Validity, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._valid = valid

    def _count(self, batch: Batch, generated: list[int], ran: int) -> None:
        super()._count(batch, generated, ran)
        size, length = len(batch.jobs), batch.input_length
        self._ledger.extrapolated += self._valid.left_by(size, length, size, length + ran)


class CountingRoundWorker(RoundWorker):
    """A worker of rounds that counts those outside `valid`."""

    def __init__(self, valid: Validity, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._valid = valid

    def finish(self) -> RoundResult:
        batch, rows = self._batch, len(self._resident)
        if batch is not None and rows:
            entering = self._prefilled_rows(batch)
            self._ledger.extrapolated += self._valid.left_by(
                entering, batch.input_length if entering else 0, rows, self._length() + self._ran
            )
        return super().finish()

    def _prefilled_rows(self, batch: Batch) -> int:
        return len(batch.jobs)


class CountingSlabWorker(CountingRoundWorker, SlabWorker):
    """A padded worker that counts rounds outside `valid`."""

    def _prefilled_rows(self, batch: Batch) -> int:
        return len(self._resident) if batch.jobs and self._shapes else len(batch.jobs)


def extrapolation_warning(percent: float, valid: object) -> str:
    """One line about `extrapolated_batches_percent`, with the range that was measured; empty where
    there is none.
    """
    if not percent:
        return ""
    return f"{percent:.3g} % of the batches are outside what the fit measured, so extrapolated: {valid}"


@dataclass(slots=True, frozen=True)
class RoundLaws:
    """What a worker takes and holds when it runs rounds. `believed` and `front` as in `World`."""

    latency: LatencyLaw
    memory: MemoryLaw
    believed: LatencyLaw | None = None
    front: FrontDelay = NO_DELAY


@dataclass(slots=True, frozen=True)
class World:
    """What is simulated besides the policy: the laws of a worker, how many there are, and how
    tokens reach clients.

    `runs_out` is the truth about the memory of static batches, which are reserved whole, and
    `round_runs_out` that of rounds, which hold what they use (None: the law is right);
    `max_new_tokens` is the limit of requests whose trace names none; `seed` that of the policy's
    draws. `future_memory` asks for the true peak of memory to come, `token_gaps` for the
    percentiles of all gaps between tokens (ITL); without `drain` the simulation stops when the last
    request has been admitted. Where limits do not hold, outputs may be longer than the limits that
    the policy sees, as they are in Past-Future's Table 1. `believed` is the latency law that the
    scheduler knows, where it is not the one that holds. `valid` is where the laws were measured;
    None: they hold everywhere. Where there is a law `swap`, caches can be swapped to `host_tokens`
    of host memory per worker. `rounds` has the laws under continuous policies, where they are
    others. `finished` are the output lengths of requests that ended before the first arrives, for
    policies that look back. `joining` is how rows join a worker's running batch where that is one
    padded slab, as on the engine `rebatch`; None: memory is paged. `front` is what clients see
    besides: HTTP, tokenizing and the stream. `arrival_cost_s` is what each request that arrives
    adds to every static batch that runs then, where workers compute on the front's cores.

    A fleet has `others`: further kinds of workers behind the same scheduler, each a world of its
    own as far as its workers go. They are numbered after these, kind by kind.
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
        taken = replace(
            self, latency=laws.latency, memory=laws.memory, believed=laws.believed, rounds=None
        )
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
        """Where the laws were measured that hold under the policy of this name; of several kinds in
        words.
        """
        if self.others:
            return (
                "; or ".join(dict.fromkeys(str(kind.valid) for kind in self.kinds if kind.valid))
                or None
            )
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


def world_from_fit(
    fit: Fit, *, workers: int, max_new_tokens: int, seed: int = 0, flush_s: float = 0.0
) -> World:
    """The world that a fit describes: its laws, and for static batches a memory edge drawn per
    batch from `seed`.

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
    """The memory edge that a batch meets, drawn by its id. An object, so that worlds can go to
    other processes.
    """

    edge: MemoryEdge
    seed: int

    def __call__(self, batch_id: int, size: int, length: int, steps: int) -> bool:
        return self.edge.runs_out(size, length, steps, uniform_draw(self.seed, batch_id))


# The worlds that a command may simulate, and their settings: what a fit describes, or a clock
# that counts steps.
#
# `unit-step` is the world of Past-Future's Table 1: a decode step takes 1, a prefill nothing, one
# worker holds so many tokens. Its defaults are those of the authors' artifact. Two of them no
# server would have:
#
# - `overfill` (of the policy): a newcomer needs no room at the moment, only the policy's consent,
# and one who was evicted is counted by his prompt alone; so he comes back at the next attempt and
# is evicted again one step later. - limits do not hold: D2's outputs go to 5,000 tokens while
# schedulers are told 4,096.

UNIT_STEP = "unit-step"
TABLE_1_CAPACITY = 120_000
TABLE_1_LIMIT = 4_096
MEMORIES: dict[str, Joining | None] = {"paged": None, "slab": "embed", "slab-shaped": "shape"}
ARTIFACT: dict[
    str, dict[str, Value]
] = {  # what Table 1's artifact does, and policies here do not by default
    "past-future": {"overfill": True, "initial_count": 500},
    "past-future-oracle": {"overfill": True},
    "aggressive": {"overfill": True},
    "conservative": {"overfill": True},
}


@dataclass(frozen=True, slots=True)
class WorldSettings:
    """What may be said about a world besides its fit. No policy has parameters of these names."""

    capacity_tokens: int = knob(
        0, doc="tokens of KV cache that a worker holds; 0: as fitted, in unit-step 120,000"
    )
    drain: bool = knob(
        True, doc="false: stop when the last request is admitted; the default in unit-step"
    )
    limits_hold: bool = knob(
        True, doc="false: outputs may pass the limits that policies see; the default in unit-step"
    )
    memory: str = choice(
        "engine", ("engine", *MEMORIES), doc="how rows take memory: " + ", ".join(MEMORIES)
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            check("world", f.name, type(f.default), getattr(self, f.name), f.metadata["knob"])

    def joining(self, engines: Joining | None) -> Joining | None:
        """See `World.joining`; `engines` is what the engine does."""
        return engines if self.memory == "engine" else MEMORIES[self.memory]


def assign_settings(
    policies: Sequence[str], given: Mapping[str, Value]
) -> tuple[dict[str, Value], dict[str, dict[str, Value]]]:
    """What `given` says of the world, and of each policy.

    `policy.key` is that policy's; `key` the world's, or that of every policy which has it.
    `InputError` for a key that belongs to nobody.
    """
    known = {
        name: knobs(type(make_any(name, {}))).keys() for name in policies
    }  # refuses an unknown policy
    own = {f.name for f in fields(WorldSettings)}
    of_world: dict[str, Value] = {}
    of_policy: dict[str, dict[str, Value]] = {name: {} for name in policies}
    for key, value in given.items():
        name, dot, parameter = key.partition(".")
        if dot and name not in known:
            raise InputError(
                f"--set {key}: policy '{name}' is not among those that run", nearest(name, known)
            )
        owners = (
            [name] if dot else [name for name, parameters in known.items() if key in parameters]
        )
        if key in own:
            of_world[key] = value
        elif not owners:
            who = f"policy '{policies[0]}'" if len(policies) == 1 else "any of the policies"
            raise InputError(
                f"neither {who} nor the world has a setting '{key}'",
                nearest(key, own.union(*known.values())),
            )
        for owner in owners:
            of_policy[owner][parameter or key] = value
    return of_world, of_policy


def make_world(
    fit: Fit | None,
    given: Mapping[str, Value],
    *,
    workers: int = 0,
    max_new_tokens: int = 0,
    seed: int = 0,
    others: Sequence[Kind] = (),
) -> World:
    """The world of a fit, or without one the token-step world; `given` are `WorldSettings`.

    `workers` 0: as many as were profiled, or 1; `max_new_tokens` 0: as recipes that do not say
    it, or Table 1's 4,096. `others` are a fleet's
    kinds of workers besides those of `fit`. `InputError` for a setting that cannot be.
    """
    if others:
        if given.get("capacity_tokens"):
            raise InputError(
                "capacity_tokens is one number, and the fleet's kinds of workers have memories of their own",
                "leave it out, or simulate each kind with its own fit",
            )
        kinds = [(fit, workers), *((kind.fit, kind.workers) for kind in others)]
        return fleet(
            [
                make_world(one, given, workers=count, max_new_tokens=max_new_tokens, seed=seed)
                for one, count in kinds
            ]
        )
    if fit is None:
        return _unit_step_world(given, workers or 1, max_new_tokens or TABLE_1_LIMIT, seed)
    settings = WorldSettings(**given)  # type: ignore[arg-type]
    if settings.capacity_tokens:
        fit = _with_capacity(fit, settings.capacity_tokens)
    limit = max_new_tokens or ServeSpec().max_new_tokens
    world = world_from_fit(fit, workers=workers or fit.workers, max_new_tokens=limit, seed=seed)
    return replace(
        world,
        future_memory=True,
        token_gaps=True,
        drain=settings.drain,
        limits_hold=settings.limits_hold,
        joining=settings.joining(world.joining),
    )


def _unit_step_world(
    given: Mapping[str, Value], workers: int, max_new_tokens: int, seed: int
) -> World:
    settings = WorldSettings(**({"drain": False, "limits_hold": False} | dict(given)))  # type: ignore[arg-type]
    return World(
        unit_step(),
        ZetaMemory(settings.capacity_tokens or TABLE_1_CAPACITY),
        workers,
        max_new_tokens,
        seed=seed,
        future_memory=True,
        token_gaps=True,
        drain=settings.drain,
        limits_hold=settings.limits_hold,
        joining=settings.joining(None),
    )


def _with_capacity(fit: Fit, capacity_tokens: int) -> Fit:
    if fit.memory.form == "rules":
        raise InputError(
            f"capacity_tokens is {capacity_tokens}, but the fitted memory is a table of batch sizes, which has none",
            "leave capacity_tokens out",
        )
    memory = fit.memory.model_copy(update={"capacity_tokens": capacity_tokens})
    return fit.model_copy(update={"memory": memory})


def check_capacity(given: Mapping[str, Value], world: World, trace: Trace) -> None:
    """`InputError` where the capacity that somebody set is too small for the trace's longest
    prompt.
    """
    usable, longest = world.memory.usable_tokens, int(trace.prompt_tokens.max())
    if given.get("capacity_tokens") and usable <= longest:
        raise InputError(
            f"capacity_tokens is {given['capacity_tokens']}, of which {usable:,} are usable; "
            f"the trace's longest prompt has {longest:,} tokens",
            "give more, or scale the lengths: llmctl trace convert --max-model-len",
        )


def policy_for(fit: Fit | None, name: str, given: Mapping[str, Value]) -> AnyPolicy:
    """The policy; in the token-step world with the artifact's parameters where nothing else is
    `given`.
    """
    return make_any(name, dict(given) if fit else ARTIFACT.get(name, {}) | dict(given))
