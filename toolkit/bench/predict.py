"""What the simulator says of the very requests that are replayed, under the plan that the server runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from toolkit.estimators.laws import WithOverhead
from toolkit.files.plan import Plan
from toolkit.sched.policies import make_any
from toolkit.sim.api import SimResult, simulate
from toolkit.sim.front import FrontDelay
from toolkit.sim.world import World, fleet, world_of
from toolkit.traces.types import Trace


@dataclass(slots=True, frozen=True)
class Conditions:
    """What a fit cannot know of a server as it runs now; a warm-up shows it.

    Every batch takes `slowdown` times as long as the scheduler believes; clients see tokens later by the `front`'s
    delay (None: what the fit knows of it). `finished` are the output lengths that the scheduler has seen before:
    Past-Future admits by them. `arrival_cost_s` is what each request that arrives adds to every static batch
    that runs then.
    """

    slowdown: float = 1.0
    front: FrontDelay | None = None
    finished: tuple[int, ...] = ()
    arrival_cost_s: float = 0.0


AS_FITTED = Conditions()


def predict(plan: Plan, trace: Trace, sla: Mapping[str, float], conditions: Conditions = AS_FITTED) -> dict[str, float]:
    """Metric name to value, as in `toolkit.metrics.summarize`, for `trace` served by the plan."""
    return predicted(plan, trace, conditions).metrics(sla)


def predicted(plan: Plan, trace: Trace, conditions: Conditions = AS_FITTED) -> SimResult:
    """What becomes of each request of `trace` under the plan."""
    recipe = plan.recipe
    world = world_of(plan.kinds, max_new_tokens=recipe.serve.max_new_tokens, seed=recipe.tune.seed)
    policy = make_any(plan.policy.name, plan.policy.parameters)
    world = world.under(policy)
    world = fleet([_slowed(kind, conditions) for kind in world.kinds])
    paged = world.paged.slowed(conditions.slowdown) if world.paged else None
    front = world.front if conditions.front is None else conditions.front
    world = replace(world, finished=conditions.finished, front=front, paged=paged)
    return simulate(trace, policy, world)


def _slowed(world: World, conditions: Conditions) -> World:
    """Its workers take so much longer than their scheduler believes."""
    return replace(
        world,
        latency=WithOverhead(world.latency, 0.0, conditions.slowdown),
        believed=world.latency,
        arrival_cost_s=conditions.arrival_cost_s,
    )
