"""The simulator's prediction for the requests of a replay, under the server's plan.

In order: `predict`, under the conditions that a warm-up shows (`ServerConditions`); these
conditions read off what clients saw (`seen_by_clients`), for servers without counters; the counters
of llmctl's own servers (`counts`, `scheduling`); whether the server runs the plan's engine
(`check_server`); and the limits that requests must respect (`limits_of`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from toolkit.bench.report import served
from toolkit.endpoints.target import Target, front_state, scrape, version
from toolkit.endpoints.wire import Sample
from toolkit.engine_traits import traits_of
from toolkit.errors import ForeignError, InputError
from toolkit.estimators.laws import WithOverhead
from toolkit.files.bench import Front, Scheduling, Warmup
from toolkit.files.plan import Plan
from toolkit.files.profile import SAFE_VOCABULARY, Identity, OnForeign, refuse_foreign
from toolkit.metrics import Served
from toolkit.routing.admission import UNLIMITED, LatencyLimits
from toolkit.routing.routers import RoundRobinRouter, Router, make_router, router_parameters
from toolkit.sched.policies import make_any
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.api import SimResult, simulate
from toolkit.sim.replicas import Routing
from toolkit.sim.worker import NO_DELAY, FrontDelay
from toolkit.sim.world import World, fleet, world_of
from toolkit.traces.types import Trace
from toolkit.traces.windows import scale_lengths, scale_rate


@dataclass(slots=True, frozen=True)
class ServerConditions:
    """What a fit cannot know of a running server; a warm-up shows it.

    Every batch takes `slowdown` times the time that the scheduler believes. Clients see tokens
    later by the delay of the `front` (None: what the fit knows of it). `finished` are the output
    lengths that the scheduler has seen before: Past-Future admits by them. `arrival_cost_s` is what
    each arriving request adds to every static batch that runs then.
    """

    slowdown: float = 1.0
    front: FrontDelay | None = None
    finished: tuple[int, ...] = ()
    arrival_cost_s: float = 0.0


AS_FITTED = ServerConditions()


def predict(
    plan: Plan, trace: Trace, sla: Mapping[str, float], conditions: ServerConditions = AS_FITTED
) -> dict[str, float]:
    """The metrics of `trace` served by the plan, named as in `toolkit.metrics.summarize`."""
    return predicted(plan, trace, conditions).metrics(sla)


def predicted(plan: Plan, trace: Trace, conditions: ServerConditions = AS_FITTED) -> SimResult:
    """The outcome of each request of `trace` under the plan."""
    recipe = plan.recipe
    world = world_of(plan.kinds, max_new_tokens=recipe.serve.max_new_tokens, seed=recipe.tune.seed)
    policy = make_any(plan.policy.name, plan.policy.parameters)
    world = world.under(policy)
    world = fleet([_slowed(kind, conditions) for kind in world.kinds])
    front = world.front if conditions.front is None else conditions.front
    world = replace(world, finished=conditions.finished, front=front)
    if isinstance(policy, VllmPolicy) and routes(plan):
        refuses = recipe.serve.admission == "targets"
        limits = LatencyLimits.of(recipe.sla) if refuses else UNLIMITED
        world = replace(world, routing=Routing.of_front(router_of_plan(plan), limits))
    return simulate(trace, policy, world)


def routes(plan: Plan) -> bool:
    """Whether the plan's workers are replicas behind our front."""
    return plan.workers > 1 and traits_of(plan.recipe.engine.name).server


def router_of_plan(plan: Plan) -> Router:
    """The router before the plan's replicas."""
    spec = plan.replica_router
    return make_router(spec.name, spec.parameters) if spec else RoundRobinRouter()


def _slowed(world: World, conditions: ServerConditions) -> World:
    """The world with workers that are slower than their scheduler believes."""
    return replace(
        world,
        latency=WithOverhead(world.latency, 0.0, conditions.slowdown),
        believed=world.latency,
        arrival_cost_s=conditions.arrival_cost_s,
        paged=world.paged.slowed(conditions.slowdown) if world.paged else None,
    )


FACTOR_MAX = 16.0  # a slowdown is between this and its inverse
# A bisection of that range finds the slowdown to 0.14 %. It cannot be computed from one simulation:
# rows that last longer run beside other rows, so seconds are not linear in the slowdown.
HALVINGS = 12

Chosen = NDArray[np.bool_]


def seen_by_clients(
    plan: Plan, trace: Trace, samples: Sequence[Sample], finished: Sequence[int]
) -> Warmup | None:
    """What `samples`, the requests of `trace` as they were served, show of a server under `plan`.

    The result has two numbers, found in this order. The slowdown is the one at which the simulated
    requests take as long from their first to their last tokens as the measured ones, in total: it
    is of steps, and of the prefills of other requests between them. The front's delay is the rest
    of the mean time to first token: HTTP and text on a busy machine, while a profile sends one
    request at a time. Both are taken as constant over a minute.

    `finished` are the output lengths of earlier requests. None where no request had two tokens.
    """
    measured = served(samples)
    simulated = predicted(plan, trace, ServerConditions(finished=tuple(finished))).served
    both = measured.ok & simulated.ok
    seconds, expected = _streamed_s(measured, both), _streamed_s(simulated, both)
    if seconds <= 0.0 or expected <= 0.0:
        return None
    low, high = 1.0 / FACTOR_MAX, FACTOR_MAX
    for _ in range(HALVINGS):
        slowdown = math.sqrt(low * high)
        simulated = predicted(
            plan, trace, ServerConditions(slowdown, NO_DELAY, tuple(finished))
        ).served
        if _streamed_s(simulated, both) < seconds:
            low = slowdown
        else:
            high = slowdown
    left_s = max(_first_s(measured, both) - _first_s(simulated, both), 0.0)
    return Warmup(
        requests=len(samples),
        batch_s=seconds,
        predicted_batch_s=expected,
        slowdown=slowdown,
        front=Front(first_s=left_s, last_s=left_s),
    )


def _streamed_s(requests: Served, chosen: Chosen) -> float:
    return float((requests.finish_s - requests.first_token_s)[chosen].sum())


def _first_s(requests: Served, chosen: Chosen) -> float:
    return float((requests.first_token_s - requests.arrival_s)[chosen].mean())


COUNTED = {  # field of `Scheduling`: the growth of this series (docs/how-to/serve.md)
    "batches": "llmctl_batches_total",
    "steps": "llmctl_engine_steps_total",
    "engine_s": "llmctl_engine_seconds_total",
    "reporting_s": "llmctl_reporting_seconds_total",
    "deciding_s": "llmctl_deciding_seconds_sum",
    "hops": "llmctl_hop_seconds_count",
    "hop_s": "llmctl_hop_seconds_sum",
}


def counts(target: Target) -> dict[str, float]:
    """The counters of a server of llmctl's, by series: `name`, or `name:OF` with a label `of`.

    `InputError` where it does not answer.
    """
    found: dict[str, float] = {}
    for name, labels, value in scrape(target):
        key = f"{name}:{labels['of']}" if "of" in labels else name
        found[key] = found.get(key, 0.0) + value  # over the replicas of a front
    return found


def counts_or_none(target: Target) -> dict[str, float]:
    """As `counts`, but empty where the server does not answer."""
    try:
        return counts(target)
    except InputError:
        return {}


def scheduling(before: dict[str, float], after: dict[str, float]) -> Scheduling | None:
    """The scheduling cost between two readings; None where nothing ran, or the server does not
    count it.
    """
    if not set(COUNTED.values()) <= before.keys() & after.keys():
        return None
    grown = {field: after[series] - before[series] for field, series in COUNTED.items()}
    return Scheduling.model_validate(grown) if grown["batches"] and grown["engine_s"] else None


ENGINE_INFO = "llmctl_engine_info"
PREDICTED = "llmctl_predicted_batch_seconds_total"


def check_server(plan: Plan, target: Target, on_foreign: OnForeign | None = None) -> None:
    """`ForeignError` where the plan's fit is of another engine, model or device than `target`'s;
    see `refuse_foreign`.

    llmctl's own servers name all of these in /metrics; of other servers, /version and the model's
    name are compared. Of a front, the versions of its replicas, and also their number and its
    router.
    """
    if not target.front:
        refuse_foreign(plan.fit.engine, [_served(plan, target)], on_foreign)
        return
    shown, engine = front_state(target), plan.fit.engine.engine
    versions = [{"engine": f"{engine} {each.version}".strip()} for each in shown.up]
    refuse_foreign(plan.fit.engine, versions, on_foreign)
    planned = router_of_plan(plan)
    runs = f"router '{shown.router}' before {len(shown.up)} replicas"
    says = f"router '{planned.name}' before {plan.workers}"
    changed = {
        name: value
        for name, value in router_parameters(planned).items()
        if shown.parameters.get(name, value) != value
    }
    if runs != f"{says} replicas":
        message = f"the server runs {runs}, the plan has {says}"
    elif changed:
        name, value = next(iter(changed.items()))
        message = f"router '{shown.router}' has {name} {shown.parameters[name]}, the plan {value}"
    else:
        return
    if on_foreign is None:
        raise ForeignError(message, "render a plan with that router and workers, or --force")
    on_foreign(message)


def reports_batch_times(plan: Plan, target: Target) -> bool:
    """Whether the server reports batch times, which the plan's laws predict.

    Servers of llmctl's and vLLM started by it do. A server that was fitted from outside does not.
    """
    if not traits_of(plan.fit.engine.engine).started:
        return False
    return target.own or PREDICTED in counts_or_none(target)


def _served(plan: Plan, target: Target) -> Identity:
    engine = plan.fit.engine.engine
    # a server that llmctl did not start: the same two facts were recorded when it was profiled
    if not traits_of(engine).started:
        return {"engine": f"{engine} {version(target)}".strip(), "model": target.model}
    if not target.own:
        return {"engine": f"{engine} {version(target)}".strip()}
    return next((labels for name, labels, _ in scrape(target) if name == ENGINE_INFO), {})


DEFAULT_LIMIT = 256  # output tokens, as in recipes


class LengthLimits(NamedTuple):
    """Limits of requests, in tokens."""

    context: int | None  # prompt + output; None: the server does not say
    output: int
    vocabulary: int


def limits_of(
    plan: Plan | None, target: Target, output: int | None = None, vocabulary: int | None = None
) -> LengthLimits:
    """The given limits, else the plan's, else the server's, else limits that any server accepts."""
    if plan is not None:
        recipe = plan.recipe
        given = recipe.model.max_model_len, recipe.serve.max_new_tokens, plan.fit.engine.vocab_size
        return LengthLimits(given[0], output or given[1], vocabulary or given[2])
    context = target.max_model_len
    usual = DEFAULT_LIMIT if context is None else min(DEFAULT_LIMIT, context // 2)
    return LengthLimits(context, output or usual, vocabulary or SAFE_VOCABULARY)


def fitted(trace: Trace, limits: LengthLimits, rate: float | None) -> Trace:
    """The trace with lengths that the server accepts, at the given rate in requests per second."""
    if limits.context is not None:
        trace = scale_lengths(trace, limits.context, limits.output)
    return trace if rate is None else scale_rate(trace, rate)
