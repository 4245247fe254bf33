"""The worlds that a command may simulate, and their settings: what a fit describes, or a clock that counts steps.

`unit-step` is the world of Past-Future's Table 1: a decode step takes 1, a prefill nothing, one worker holds so many
tokens. Its defaults are those of the authors' artifact. Two of them no server would have:

- `overfill` (of the policy): a newcomer needs no room at the moment, only the policy's consent, and one who was evicted
  is counted by his prompt alone; so he comes back at the next attempt and is evicted again one step later.
- limits do not hold: D2's outputs go to 5,000 tokens while schedulers are told 4,096.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from toolkit.errors import InputError, nearest
from toolkit.estimators.laws import unit_step
from toolkit.estimators.memory import ZetaMemory
from toolkit.files.fit import Fit
from toolkit.files.plan import Kind
from toolkit.files.recipe import ServeSpec
from toolkit.sched.policies import make_any
from toolkit.sched.policies.parameters import Value, check, choice, knob, knobs
from toolkit.sched.protocols import AnyPolicy
from toolkit.sched.types import Joining
from toolkit.sim.world import World, fleet, world_from_fit
from toolkit.traces.types import Trace

UNIT_STEP = "unit-step"
TABLE_1_CAPACITY = 120_000
TABLE_1_LIMIT = 4_096
MEMORIES: dict[str, Joining | None] = {"paged": None, "slab": "embed", "slab-shaped": "shape"}
ARTIFACT: dict[str, dict[str, Value]] = {  # what Table 1's artifact does, and policies here do not by default
    "past-future": {"overfill": True, "initial_count": 500},
    "past-future-oracle": {"overfill": True},
    "aggressive": {"overfill": True},
    "conservative": {"overfill": True},
}


@dataclass(frozen=True, slots=True)
class WorldSettings:
    """What may be said about a world besides its fit. No policy has parameters of these names."""

    capacity_tokens: int = knob(0, doc="tokens of KV cache that a worker holds; 0: as fitted, in unit-step 120,000")
    drain: bool = knob(True, doc="false: stop when the last request is admitted; the default in unit-step")
    limits_hold: bool = knob(True, doc="false: outputs may pass the limits that policies see; the default in unit-step")
    memory: str = choice("engine", ("engine", *MEMORIES), doc="how rows take memory: " + ", ".join(MEMORIES))

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

    `policy.key` is that policy's; `key` the world's, or that of every policy which has it. `InputError` for a key that
    belongs to nobody.
    """
    known = {name: knobs(type(make_any(name, {}))).keys() for name in policies}  # refuses an unknown policy
    own = {f.name for f in fields(WorldSettings)}
    of_world: dict[str, Value] = {}
    of_policy: dict[str, dict[str, Value]] = {name: {} for name in policies}
    for key, value in given.items():
        name, dot, parameter = key.partition(".")
        if dot and name not in known:
            raise InputError(f"--set {key}: policy '{name}' is not among those that run", nearest(name, known))
        owners = [name] if dot else [name for name, parameters in known.items() if key in parameters]
        if key in own:
            of_world[key] = value
        elif not owners:
            who = f"policy '{policies[0]}'" if len(policies) == 1 else "any of the policies"
            raise InputError(
                f"neither {who} nor the world has a setting '{key}'", nearest(key, own.union(*known.values()))
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
            [make_world(one, given, workers=count, max_new_tokens=max_new_tokens, seed=seed) for one, count in kinds]
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


def _unit_step_world(given: Mapping[str, Value], workers: int, max_new_tokens: int, seed: int) -> World:
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
    """`InputError` where the capacity that somebody set is too small for the trace's longest prompt."""
    usable, longest = world.memory.usable_tokens, int(trace.prompt_tokens.max())
    if given.get("capacity_tokens") and usable <= longest:
        raise InputError(
            f"capacity_tokens is {given['capacity_tokens']}, of which {usable:,} are usable; "
            f"the trace's longest prompt has {longest:,} tokens",
            "give more, or scale the lengths: llmctl trace convert --max-model-len",
        )


def policy_for(fit: Fit | None, name: str, given: Mapping[str, Value]) -> AnyPolicy:
    """The policy; in the token-step world with the artifact's parameters where nothing else is `given`."""
    return make_any(name, dict(given) if fit else ARTIFACT.get(name, {}) | dict(given))
