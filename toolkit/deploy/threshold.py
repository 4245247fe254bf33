"""How many may wait before first tokens come too late: where an autoscaler should add a replica.

A backlog of n requests comes to an idle replica all at once, and the simulator says when each gets its first token,
with the plan's policy and the fit's laws. The threshold is the largest n that keeps the recipe's TTFT targets, less
those that start at once: what /metrics then calls waiting. How long a new replica takes to load is not in it. Where
no number of waiting requests tells whether the target holds, there is no threshold, and the reason is said instead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

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
from toolkit.traces.read import read_trace
from toolkit.traces.shipped import trace_path
from toolkit.traces.types import Trace

MOST = 4096  # nobody needs to wait in a longer queue than that
DEFAULT_TRACE = "chat-small"  # which ships; what `tune` takes as well


def ttft_targets(recipe: Recipe) -> dict[str, float]:
    """The recipe's targets for first tokens, in seconds."""
    return {key: limit for key, limit in recipe.sla.items() if key.startswith("ttft_")}


def waiting_threshold(plan: Plan, trace: Trace | None) -> Reckoned[int | None]:
    """Requests that may wait for one replica, 1 at least; None, and why, where no such number tells of the target.

    Lengths are the trace's, made ready for the recipe, in its order and from its start again when it is over; without
    a trace, those of one that ships. The longest that the recipe allows say nothing: a batch of them alone takes the
    whole target, so that none could wait.
    """
    targets = ttft_targets(plan.recipe)
    if not targets:
        return Reckoned(None, "the recipe has no TTFT target that would say how many may wait")
    whose = f"the lengths of {trace.source}" if trace else f"no trace was given, so with the lengths of {DEFAULT_TRACE}"
    trace = trace or read_trace(trace_path(DEFAULT_TRACE))[0]
    policy = make_any(plan.policy.name, plan.policy.parameters)
    limit, seed = plan.recipe.serve.max_new_tokens, plan.recipe.tune.seed
    kinds = plan.kinds
    world = fleet([world_from_fit(one.fit, workers=one.workers, max_new_tokens=limit, seed=seed) for one in kinds])
    lengths = prepare(trace, plan.recipe)
    served = most(lambda count: _keeps(backlog(lengths, count), policy, world, targets))
    kept = ", ".join(f"{key} {value:g}" for key, value in targets.items())
    simulated = f"simulated with the fit, {whose}"
    if not served:
        return Reckoned(None, f"{simulated}: not even one request alone keeps {kept}")
    waiting = served - _start_at_once(backlog(lengths, served), policy, world)
    if waiting < 1:
        return Reckoned(
            None, f"{simulated}: {served} at once keep {kept}, and all of them start at once: none can wait"
        )
    beyond = f"even {MOST} at once keep {kept}, and more were not tried"
    beyond = beyond if served >= MOST else f"{served} at once keep {kept}"
    return Reckoned(waiting, f"{simulated}: {beyond}; {served - waiting} of them start at once and do not wait")


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
    if isinstance(policy, VllmPolicy):
        return sum(_first_pass(trace.prompt_tokens[k :: world.workers], policy) for k in range(world.workers))
    assert not isinstance(policy, BuiltIn)
    world = world.under(policy)
    scheduler = Scheduler(policy, world.scheduled(), seed=world.seed)
    for request in requests_of(trace, world.max_new_tokens)[0]:
        scheduler.submit(request, 0.0)
    return sum(batch.size for batch in scheduler.tick(0.0))


def _first_pass(prompts: NDArray[np.int64], policy: VllmPolicy) -> int:
    """How many vLLM admits in its first pass: as many as have tokens of it, the last perhaps a part of its prompt."""
    ends = np.cumsum(prompts)
    begun = (
        ends - prompts < policy.max_num_batched_tokens
        if policy.chunked_prefill
        else (ends <= policy.max_num_batched_tokens)
    )
    return min(int(begun.sum()), policy.max_num_seqs)
