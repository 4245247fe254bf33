"""What the simulator says of the very requests that are replayed, under the plan that the server runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from toolkit.estimators.laws import WithOverhead
from toolkit.files.plan import Plan
from toolkit.sched.policies import make_policy
from toolkit.sim.api import SimResult, simulate, world_from_fit
from toolkit.traces.types import Trace


def predict(
    plan: Plan, trace: Trace, sla: Mapping[str, float], slowdown: float = 1.0, finished: Iterable[int] = ()
) -> dict[str, float]:
    """Metric name to value, as in `toolkit.metrics.summarize`, for `trace` served by the plan; see `predicted`."""
    return predicted(plan, trace, slowdown, finished).metrics(sla)


def predicted(plan: Plan, trace: Trace, slowdown: float = 1.0, finished: Iterable[int] = ()) -> SimResult:
    """What becomes of each request of `trace` under the plan.

    With a `slowdown` every batch takes so many times as long as the scheduler believes. `finished` are the output
    lengths that the server's scheduler has seen before, as those of a warm-up: Past-Future admits by them.
    """
    recipe = plan.recipe
    world = world_from_fit(
        plan.fit,
        workers=plan.workers,
        max_new_tokens=recipe.serve.max_new_tokens,
        seed=recipe.tune.seed,
        flush_s=recipe.engine.flush_s,
    )
    policy = make_policy(plan.policy.name, plan.policy.parameters)
    world = world.under(policy)
    slowed = WithOverhead(world.latency, 0.0, slowdown)
    world = replace(world, latency=slowed, believed=world.latency, finished=tuple(finished))
    return simulate(trace, policy, world)
