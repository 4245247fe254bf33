"""What is simulated besides the policy: workers, their laws, and how tokens reach clients.

The parts, in this order:

- `World` and `world_from_fit`: a world, made from a fit; a recipe with its fit are a `Deployment`
  (`toolkit.sim.deployment`), which makes its own;
- `WorldSettings`, `assign_settings` and `make_world`: the worlds that a command may simulate, a
  fit's or the token-step world, with the settings that the command gives;
- `policy_for`: the policy that runs in such a world.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType

from toolkit.errors import InputError, nearest
from toolkit.estimators.laws import unit_step
from toolkit.estimators.load import laws_from_fit
from toolkit.estimators.memory import DrawnEdge, ZetaMemory
from toolkit.files.fit import Fit
from toolkit.files.recipe import AcceptanceSpec, Recipe, ServeSpec
from toolkit.laws.passes import PassRange
from toolkit.routing.admission import UNLIMITED, LatencyLimits
from toolkit.routing.base import Router
from toolkit.routing.routers import ROUTERS, make_router, targets_of
from toolkit.routing.simple import RoundRobinRouter
from toolkit.sched.policies import make_any
from toolkit.sched.policies.parameters import Value, choice, declared, parameter, validate
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sched.protocols import AnyPolicy, MemoryLaw, SwapLaw
from toolkit.sched.types import NO_LIMIT, Joining, LatencyLaw, Worker
from toolkit.sim.fleet import Fleet
from toolkit.sim.ledger import RunsOut
from toolkit.sim.paged_engine import PagedEngine
from toolkit.traces.types import Trace


@dataclass(slots=True, frozen=True)
class World:
    """What is simulated besides the policy."""

    latency: LatencyLaw
    memory: MemoryLaw
    workers: int
    max_new_tokens: int  # the output limit of a request for which the trace gives none
    # which static batches really run out of memory, of which they reserve all at once; None: the
    # law is right
    runs_out: RunsOut | None = None
    streams: bool = True  # False: tokens reach the client with their batch, not as they come
    flush_s: float = 0.0  # the least seconds between two reports of a worker's tokens
    seed: int = 0  # of the policy's random draws
    future_memory: bool = False  # whether the true peak of memory to come is computed
    token_gaps: bool = False  # whether percentiles of all gaps between tokens (ITL) are computed
    drain: bool = True  # False: the simulation stops when the last request has been admitted
    # False: outputs may be longer than the limits that the policy sees, as in Past-Future's Table 1
    limits_hold: bool = True
    slowdown: float = 1.0  # batches take so many times what the laws say; the scheduler knows these
    # where the laws of prefills and of decode steps were measured
    prefill_range: PassRange = field(default_factory=PassRange)
    decode_range: PassRange = field(default_factory=PassRange)
    swap: SwapLaw | None = None  # to host memory; None: caches cannot be swapped
    host_tokens: int = 0  # of swapped caches that a worker's host memory holds
    # How rows join a running batch that is one padded slab, as on the engine `rebatch`; None:
    # memory is paged.
    joining: Joining | None = None
    slots: int = NO_LIMIT  # rows that run at once on a worker, in rounds
    # the laws under continuous policies, and `front_s`; None, 0: no others
    round_latency: LatencyLaw | None = None
    round_memory: MemoryLaw | None = None
    round_front_s: float = 0.0
    # output lengths of requests that ended before the first arrival, for policies that look back
    finished: tuple[int, ...] = ()
    # What HTTP, tokenizing and the stream add for clients, to the first token as to the last. Not
    # modelled: it grows when the front is short of CPU.
    front_s: float = 0.0
    paged: PagedEngine | None = None  # the engine with its own scheduler, for the policy `vllm`
    acceptance: AcceptanceSpec | None = None  # of its drafts; None: not known
    router: Router | None = None  # before replicas of that engine; None: each has its turn
    limits: LatencyLimits = UNLIMITED  # the targets by which their front refuses requests
    fleet: Fleet | None = None  # replicas come and go; None: there are always as many
    # A session's turn arrives when the turn before has ended and its client has thought about it;
    # False: when the trace says so.
    closed_loop: bool = True
    # So many requests at once: the next one starts when one ends. 0: they start when the trace, or
    # a closed loop of sessions, says so.
    concurrency: int = 0

    def under(self, policy: AnyPolicy) -> World:
        """The same world with the laws for what `policy` runs: static batches or rounds.

        `InputError` for a policy that does not know the groups of caches of the model.
        """
        if self.paged is not None and self.paged.caches and policy.name != VllmPolicy.name:
            groups = len(self.paged.caches.groups)
            raise InputError(
                f"policy '{policy.name}': it counts tokens in one cache, and this model has "
                f"{groups} groups of KV caches with windows or states",
                f"policy '{VllmPolicy.name}' knows them",
            )
        if not policy.continuous or self.round_latency is None:
            return self
        return replace(
            self,
            latency=self.round_latency,
            memory=self.round_memory or self.memory,
            front_s=self.round_front_s or self.front_s,
        )

    def engine_of(self, flags: VllmPolicy) -> PagedEngine:
        """The engine with its own scheduler under these flags. `InputError` if there is none, and
        for a number of drafts without a known law or a known acceptance.
        """
        if self.paged is None:
            raise InputError(
                "policy 'vllm' needs the law of vLLM's forward passes, which is not in this fit",
                "set engine.name to vllm, then: llmctl profile RECIPE; llmctl fit PROFILE",
            )
        tokens = flags.num_speculative_tokens
        engine = self.paged.with_drafts(tokens, self.acceptance, self.seed)
        return engine if self.slowdown == 1.0 else engine.slowed(self.slowdown)

    def range_of(self, policy: str) -> str:
        """Return where the laws that apply under the policy of this name were measured."""
        if self.paged and policy == VllmPolicy.name:
            return str(self.paged.steps.valid)
        return f"prefill {self.prefill_range}; decode {self.decode_range}"

    def scheduled(self) -> list[Worker]:
        """The workers as the scheduler knows them, numbered from 0."""
        return [
            Worker(
                index,
                self.latency,
                self.memory,
                swap=self.swap,
                host_tokens=self.host_tokens if self.swap else 0,
                joining=self.joining,
                slots=self.slots,
            )
            for index in range(self.workers)
        ]


def world_from_fit(
    fit: Fit,
    *,
    workers: int,
    max_new_tokens: int,
    seed: int = 0,
    flush_s: float = 0.0,
    slowdown: float = 1.0,
) -> World:
    """The world that a fit describes: its laws, and a memory edge that is drawn for each static
    batch. Rounds have none: their probe counts as usable only what ran at every length.
    """
    laws = laws_from_fit(fit)
    return World(
        laws.latency,
        laws.memory,
        workers,
        max_new_tokens,
        slowdown=slowdown,
        runs_out=DrawnEdge(laws.memory, fit.memory.zeta_std, seed),
        flush_s=flush_s,
        seed=seed,
        prefill_range=fit.prefill.valid,
        decode_range=fit.decode.valid,
        swap=laws.swap,
        host_tokens=laws.host_tokens,
        round_latency=laws.rounds,
        round_memory=laws.round_memory,
        round_front_s=laws.front_s,
        joining=fit.engine.joining,
        slots=fit.engine.max_rows or NO_LIMIT,
        paged=PagedEngine.of(fit),
    )


# `unit-step` is the world of Past-Future's Table 1: a decode step takes 1, a prefill takes 0, and
# one worker holds `TABLE_1_CAPACITY` tokens. Its defaults are those of the authors' artifact. Two
# of them fit no real server:
#
# - `overfill` (a parameter of the policy): a new request needs no free memory now, only the
#   policy's consent, and an evicted job counts with its prompt alone. It is therefore admitted at
#   the next attempt and evicted again one step later.
# - `limits_hold` false: outputs of D2 reach 5,000 tokens while schedulers see a limit of 4,096.

UNIT_STEP = "unit-step"
NO_TARGETS: Mapping[str, float] = MappingProxyType({})
TABLE_1_CAPACITY = 120_000
TABLE_1_LIMIT = 4_096
MEMORIES: dict[str, Joining | None] = {"paged": None, "slab": "embed", "slab-shaped": "shape"}
# Parameters of Table 1's artifact that differ from the defaults of the policies here.
ARTIFACT: dict[str, dict[str, Value]] = {
    "past-future": {"overfill": True, "initial_count": 500},
    "past-future-oracle": {"overfill": True},
    "aggressive": {"overfill": True},
    "conservative": {"overfill": True},
}


@dataclass(frozen=True, slots=True)
class WorldSettings:
    """The settings of a world besides its fit. No policy has parameters of these names."""

    capacity_tokens: int = parameter(
        0, doc="tokens of KV cache that a worker holds; 0: as fitted, in unit-step 120,000"
    )
    drain: bool = parameter(
        True, doc="false: stop when the last request is admitted; the default in unit-step"
    )
    limits_hold: bool = parameter(
        True, doc="false: outputs may pass the limits that policies see; the default in unit-step"
    )
    closed_loop: bool = parameter(
        True, doc="false: turns of sessions arrive at the trace's times, not after the turn before"
    )
    replica_router: str = choice(
        "in-turn",
        ("in-turn", *ROUTERS),
        doc="which replica of an engine with its own scheduler gets a request",
    )
    admission: str = choice(
        "queue",
        ("queue", "targets"),
        doc="'targets': the front of such replicas refuses what would miss --sla, by its forecast",
    )
    acceptance_length: float = parameter(
        0.0,
        doc="tokens that a row gets from a pass of vLLM with speculative decoding, on average; 0: "
        "as the recipe's serve.acceptance says",
    )
    memory: str = choice(
        "engine", ("engine", *MEMORIES), doc="how rows take memory: " + ", ".join(MEMORIES)
    )

    def __post_init__(self) -> None:
        validate(self, "world")

    def front(
        self, parameters: Mapping[str, Value], targets: Mapping[str, float]
    ) -> tuple[Router | None, LatencyLimits]:
        """Return `World.router` and `World.limits`; `parameters` are the router's, and `targets`
        those of a router and a front that have no others.
        """
        limits = LatencyLimits.of(targets) if self.admission == "targets" else UNLIMITED
        if self.admission == "targets" and limits == UNLIMITED:
            raise InputError(
                "admission is 'targets', and no target for TTFT or E2E is given",
                "add one, such as --sla ttft_p99_s=1",
            )
        name = self.replica_router
        if name == "in-turn":
            return None if limits == UNLIMITED else RoundRobinRouter(), limits
        return make_router(name, targets_of(name, targets) | dict(parameters)), limits


def assign_settings(
    policies: Sequence[str], given: Mapping[str, Value]
) -> tuple[dict[str, Value], dict[str, dict[str, Value]]]:
    """Split `given` into the settings of the world and the parameters of each policy.

    `policy.key` belongs to that policy, `router.key` to the world's router; `key` to the world, or
    to every policy that has it. `InputError` for a key that none has.
    """
    # `make_any` refuses an unknown policy.
    known = {name: declared(type(make_any(name, {}))).keys() for name in policies}
    own = {f.name for f in fields(WorldSettings)}
    of_world: dict[str, Value] = {}
    of_policy: dict[str, dict[str, Value]] = {name: {} for name in policies}
    for key, value in given.items():
        name, dot, parameter = key.partition(".")
        if name in ROUTERS and given.get("replica_router") != name:
            raise InputError(
                f"--set {key}: replica_router is not '{name}'", f"add --set replica_router={name}"
            )
        if name in ROUTERS or key in own:
            of_world[key] = value
        elif dot and name in known:
            of_policy[name][parameter or key] = value
        elif dot:
            raise InputError(
                f"--set {key}: policy '{name}' is not among those that run", nearest(name, known)
            )
        else:
            owners = [policy for policy, parameters in known.items() if key in parameters]
            if not owners:
                subject = f"policy '{policies[0]}'" if len(policies) == 1 else "any of the policies"
                raise InputError(
                    f"neither {subject} nor the world has a setting '{key}'",
                    nearest(key, own.union(*known.values())),
                )
            for policy in owners:
                of_policy[policy][key] = value
    return of_world, of_policy


def make_world(
    fit: Fit | None,
    given: Mapping[str, Value],
    *,
    workers: int = 0,
    max_new_tokens: int = 0,
    seed: int = 0,
    targets: Mapping[str, float] = NO_TARGETS,
    recipe: Recipe | None = None,
) -> World:
    """The world of a fit, or without one the token-step world; `given` are `WorldSettings`. The
    engine reports tokens, and drafts are accepted, as its `recipe` says.

    `workers` 0: as many as were profiled, or 1. `max_new_tokens` 0: the default of recipes, or
    Table 1's 4,096. `InputError` for a setting that is not possible.
    """
    given = dict(given)
    of_router = {key.partition(".")[2]: given.pop(key) for key in list(given) if "." in key}
    if fit is None:
        settings = WorldSettings(**({"drain": False, "limits_hold": False} | given))  # type: ignore[arg-type]
        memory = ZetaMemory(settings.capacity_tokens or TABLE_1_CAPACITY)
        limit = max_new_tokens or TABLE_1_LIMIT
        world = World(unit_step(), memory, workers or 1, limit, seed=seed)
    else:
        settings = WorldSettings(**given)  # type: ignore[arg-type]
        if settings.capacity_tokens and fit.memory.form == "rules":
            raise InputError(
                f"capacity_tokens is {settings.capacity_tokens}, but the fitted memory is a table "
                "of batch sizes, which has none",
                "leave capacity_tokens out",
            )
        if settings.capacity_tokens:
            fitted = fit.memory.model_copy(update={"capacity_tokens": settings.capacity_tokens})
            fit = fit.model_copy(update={"memory": fitted})
        limit = max_new_tokens or ServeSpec().max_new_tokens
        world = world_from_fit(fit, workers=workers or fit.workers, max_new_tokens=limit, seed=seed)
    length = settings.acceptance_length
    acceptance = AcceptanceSpec(length=length) if length else None
    if recipe is not None:
        world = replace(world, flush_s=recipe.engine.flush_s)
        acceptance = acceptance or recipe.serve.acceptance
    router, limits = settings.front(of_router, targets)
    return replace(
        world,
        future_memory=True,
        token_gaps=True,
        drain=settings.drain,
        limits_hold=settings.limits_hold,
        closed_loop=settings.closed_loop,
        router=router,
        limits=limits,
        joining=world.joining if settings.memory == "engine" else MEMORIES[settings.memory],
        acceptance=acceptance,
    )


def check_capacity(given: Mapping[str, Value], world: World, trace: Trace) -> None:
    """`InputError` if the capacity in `given` is too small for the longest prompt of the trace."""
    usable = world.memory.usable_tokens
    longest = int(trace.prompt_tokens.max())
    if given.get("capacity_tokens") and usable <= longest:
        raise InputError(
            f"capacity_tokens is {given['capacity_tokens']}, of which {usable:,} are usable; "
            f"the trace's longest prompt has {longest:,} tokens",
            "give more, or a trace with shorter prompts",
        )


def policy_for(fit: Fit | None, name: str, given: Mapping[str, Value]) -> AnyPolicy:
    """The policy with the parameters `given`, in the token-step world over the artifact's."""
    return make_any(name, dict(given) if fit else ARTIFACT.get(name, {}) | dict(given))
