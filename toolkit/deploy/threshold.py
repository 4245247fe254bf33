"""How many may wait before first tokens come too late: where an autoscaler should add a replica.

A backlog of n requests comes to an idle replica all at once, and the simulator says when each gets its first token,
with the plan's policy and the fit's laws. The threshold is the largest n that keeps the recipe's TTFT targets, less
those that start at once: what /metrics then calls waiting. How long a new replica takes to load is not in it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping

import numpy as np

from toolkit.deploy.order import Reckoned
from toolkit.files.plan import Plan
from toolkit.files.recipe import Recipe
from toolkit.sched.policies import make_any
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sched.protocols import AnyPolicy, BuiltIn
from toolkit.sched.scheduler import Scheduler
from toolkit.sim.api import requests_of, simulate
from toolkit.sim.world import World, fleet, world_from_fit
from toolkit.traces.prepare import prepare
from toolkit.traces.types import Trace

MOST = 4096  # nobody needs to wait in a longer queue than that


def ttft_targets(recipe: Recipe) -> dict[str, float]:
    """The recipe's targets for first tokens, in seconds."""
    return {key: limit for key, limit in recipe.sla.items() if key.startswith("ttft_")}


def waiting_threshold(plan: Plan, trace: Trace | None) -> Reckoned[int] | None:
    """Requests that may wait for one replica; None where the recipe has no TTFT target.

    Lengths are the trace's, in its order and from its start again when it is over; without a trace, the longest that
    the recipe allows, which errs to the early side.
    """
    targets = ttft_targets(plan.recipe)
    if not targets:
        return None
    policy = make_any(plan.policy.name, plan.policy.parameters)
    limit, seed = plan.recipe.serve.max_new_tokens, plan.recipe.tune.seed
    kinds = plan.kinds
    world = fleet([world_from_fit(one.fit, workers=one.workers, max_new_tokens=limit, seed=seed) for one in kinds])
    lengths = _longest(plan.recipe) if trace is None else prepare(trace, plan.recipe)
    served = most(lambda count: _keeps(backlog(lengths, count), policy, world, targets))
    waiting = max(served - _start_at_once(backlog(lengths, max(served, 1)), policy, world), 1)
    kept = ", ".join(f"{key} {value:g}" for key, value in targets.items())
    whose = "the longest requests that the recipe allows" if trace is None else f"the lengths of {trace.source}"
    beyond = f"{served} at once keep {kept}" if served else f"not even one at once keeps {kept}"
    if served >= MOST:
        beyond = f"even {MOST} at once keep {kept}, and nobody looked further"
    return Reckoned(waiting, f"simulated with the fit, {whose}: {beyond}; those that start at once do not wait")


def most(keeps: Callable[[int], bool]) -> int:
    """The largest count up to `MOST` that `keeps`, as all smaller ones do; 0 where 1 does not."""
    return bisect_left(range(1, MOST + 1), True, key=lambda count: not keeps(count))


def backlog(lengths: Trace, count: int) -> Trace:
    """So many requests at once, with these lengths, repeated where there are fewer."""
    chosen = np.arange(count) % len(lengths)
    return Trace(
        np.zeros(count), lengths.prompt_tokens[chosen], lengths.output_tokens[chosen], lengths.max_tokens[chosen]
    )


def _keeps(trace: Trace, policy: AnyPolicy, world: World, targets: Mapping[str, float]) -> bool:
    result = simulate(trace, policy, world)
    return bool(result.served.ok.all()) and max(result.sla_ratios(targets).values()) <= 1.0


def _start_at_once(trace: Trace, policy: AnyPolicy, world: World) -> int:
    if isinstance(policy, VllmPolicy):  # it fills its rows in the first passes
        return min(policy.max_num_seqs * world.workers, len(trace))
    assert not isinstance(policy, BuiltIn)
    world = world.under(policy)
    scheduler = Scheduler(policy, world.scheduled(), seed=world.seed)
    for request in requests_of(trace, world.max_new_tokens)[0]:
        scheduler.submit(request, 0.0)
    return sum(batch.size for batch in scheduler.tick(0.0))


def _longest(recipe: Recipe) -> Trace:
    output = recipe.serve.max_new_tokens
    one = np.ones(1, dtype=np.int64)
    return Trace(np.zeros(1), one * max(recipe.model.max_model_len - output, 1), one * output, one * output)
