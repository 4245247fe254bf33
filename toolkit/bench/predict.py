"""The simulator's prediction for the requests of a replay, under the server's plan.

A shared machine is not as fast as it was while it was profiled. So a warm-up, other requests before
the replay, shows how fast it is today, and corrects the prediction before anything is measured:

- Slowdown: the server counts how long its batches took, and how long its laws predict. Passes that
  overlap have two: the GPU's, and that of their launches on the CPU.
- Cost of arrivals: where workers compute on the front's cores, an arriving request takes time from
  the batches that run. The server counts the arrivals during each batch.
- Delay of the front: clients see a token later than the server, by the time of HTTP, tokenizing and
  streams, which is in no law.

A server that has just started is slow, so its first requests are not counted.

In order: `predict`, under such conditions (`ServerConditions`); conditions from what clients saw
(`seen_by_clients`), for servers without counters; the counters of llmctl's own servers (`counts`,
`scheduling`); the warm-up (`warm_up`) and its counters (`times_between`); and whether the server
runs the plan's engine (`check_server`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from toolkit.bench.client import LoadSpec, Replay, client_times, run_whole, served
from toolkit.endpoints.load import Sample
from toolkit.endpoints.target import Target, front_state, scrape, version
from toolkit.engine_traits import traits_of
from toolkit.errors import ForeignError, InputError
from toolkit.files.bench import BenchReport, Front, Scheduling, Warmup
from toolkit.files.plan import Plan
from toolkit.files.profile import Identity, OnForeign, refuse_foreign
from toolkit.metrics import Served
from toolkit.routing.admission import UNLIMITED, LatencyLimits
from toolkit.routing.routers import RoundRobinRouter, Router, make_router
from toolkit.sched.policies import make_any
from toolkit.sched.policies.parameters import parameters
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.serve.stats import SliceSums
from toolkit.sim.api import SimResult, simulate
from toolkit.sim.conditions import AS_FITTED, ServerConditions, in_conditions
from toolkit.sim.replicas import Routing
from toolkit.sim.worker import NO_DELAY, FrontDelay
from toolkit.sim.world import world_of
from toolkit.traces.types import Trace
from toolkit.traces.windows import mean_rate


def predict(
    plan: Plan, trace: Trace, sla: Mapping[str, float], conditions: ServerConditions = AS_FITTED
) -> dict[str, float]:
    """The metrics of `trace` served by the plan, named as in `toolkit.metrics.summarize`."""
    return predicted(plan, trace, conditions).metrics(sla)


def predicted(
    plan: Plan,
    trace: Trace,
    conditions: ServerConditions = AS_FITTED,
    *,
    load: LoadSpec | None = None,
) -> SimResult:
    """The outcome of each request of `trace` under the plan, at the concurrency of `load`."""
    recipe = plan.recipe
    world = world_of(recipe, plan.fit, plan.workers)
    policy = make_any(plan.policy.name, plan.policy.parameters)
    world = in_conditions(world, conditions)
    if not isinstance(policy, VllmPolicy):  # which has a law of its own, and a front
        world = world.under(policy)
    if load is not None:
        world = replace(world, concurrency=load.concurrency, ramp_s=load.ramp_s)
    if isinstance(policy, VllmPolicy) and plan.workers > 1 and traits_of(recipe.engine.name).server:
        refuses = recipe.serve.admission == "targets"
        limits = LatencyLimits.of(recipe.sla) if refuses else UNLIMITED
        world = replace(world, routing=Routing.of_front(router_of_plan(plan), limits))
    return simulate(trace, policy, world)


def router_of_plan(plan: Plan) -> Router:
    """The router before the plan's replicas."""
    spec = plan.replica_router
    return make_router(spec.name, spec.parameters) if spec else RoundRobinRouter()


FACTOR_MAX = 16.0  # a slowdown is between this and its inverse
# A bisection of that range finds the slowdown to 0.14 %. It cannot be computed from one simulation:
# rows that last longer run beside other rows, so seconds are not linear in the slowdown.
HALVINGS = 12


def seen_by_clients(
    plan: Plan, trace: Trace, replay: Replay, finished: Sequence[int]
) -> Warmup | None:
    """What a `replay` of `trace` shows of a server under `plan`.

    At the slowdown, the simulated requests take as long in total from their first to their last
    tokens (steps, and the prefills of other requests between them) as the measured ones. The
    front's delay is the rest of the mean time to first token: HTTP and text on a busy machine,
    while a profile sends one request at a time. Both are taken as constant over a minute.

    `finished` are the output lengths of earlier requests. None where no request had two tokens.
    """
    measured = served(replay.samples)
    simulated = predicted(plan, trace, ServerConditions(finished=tuple(finished))).served
    both = measured.ok & simulated.ok
    seconds = _streamed_s(measured, both)
    expected = _streamed_s(simulated, both)
    if seconds <= 0.0 or expected <= 0.0:
        return None
    low = 1.0 / FACTOR_MAX
    high = FACTOR_MAX
    for _ in range(HALVINGS):
        slowdown = math.sqrt(low * high)
        slowed = ServerConditions(slowdown, NO_DELAY, tuple(finished))
        simulated = predicted(plan, trace, slowed).served
        if _streamed_s(simulated, both) < seconds:
            low = slowdown
        else:
            high = slowdown
    first_s, simulated_s = (
        float((one.first_token_s - one.arrival_s)[both].mean()) for one in (measured, simulated)
    )
    left_s = max(first_s - simulated_s, 0.0)
    return Warmup(
        requests=len(trace),
        batch_s=seconds,
        predicted_batch_s=expected,
        slowdown=slowdown,
        front=Front(first_s=left_s, last_s=left_s),
        client=client_times(replay, plan.recipe.sla),
    )


def _streamed_s(requests: Served, chosen: NDArray[np.bool_]) -> float:
    return float((requests.finish_s - requests.first_token_s)[chosen].sum())


COUNTED = {  # field of `Scheduling`: the counter that it is the growth of (docs/how-to/serve.md)
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
    sums: defaultdict[str, float] = defaultdict(float)  # over the replicas of a front
    for name, labels, value in scrape(target):
        sums[f"{name}:{labels['of']}" if "of" in labels else name] += value
    return dict(sums)


def counts_or_none(target: Target) -> dict[str, float]:
    """As `counts`, but empty where the server does not answer."""
    try:
        return counts(target)
    except InputError:
        return {}


def scheduling(before: dict[str, float], after: dict[str, float]) -> Scheduling | None:
    """The scheduling cost between two readings; None where nothing ran or counted it."""
    if not set(COUNTED.values()) <= before.keys() & after.keys():
        return None
    grown = {field: after[series] - before[series] for field, series in COUNTED.items()}
    return Scheduling.model_validate(grown) if grown["batches"] and grown["engine_s"] else None


TOOK = "llmctl_batch_seconds_total"
PREDICTED = "llmctl_predicted_batch_seconds_total"
# of passes that overlap: their launches, and their work on the GPU
LAUNCHES = "llmctl_launch_seconds_total", "llmctl_predicted_launch_seconds_total"
GPU = "llmctl_gpu_seconds_total", "llmctl_predicted_gpu_seconds_total"
SUMS = {name: f"llmctl_slice_sums_total:{name}" for name in SliceSums()}
MIN_BATCHES = 40  # over fewer batches the machine's own drift looks like the cost of arrivals
ROUNDING = 1e-9  # a smaller share of a sum is the rounding error of a difference of equals
SURE = 2.0  # a cost must be above 0 by so many standard errors
MAX_ARRIVAL_SHARE = 0.9  # of the batches' time; arrivals cost no more
SETTLING = 0.25  # of a warm-up's requests, which the server runs slowly (new shapes, memory, code)
TTFT = "llmctl_ttft_seconds"
E2E = "llmctl_e2e_seconds"  # until the driver has the token


def other_requests(trace: Trace, after_s: float, count: int, rate_rps: float = 0.0) -> Trace:
    """`count` requests of `trace` from `after_s` on, with their gaps; from the start of the trace
    again after its end. They arrive by time, also those of sessions, and at `rate_rps` on average;
    0: at the trace's own rate there.
    """
    first = int(np.searchsorted(trace.arrival_s, after_s))
    rows = (first + np.arange(count)) % len(trace)
    gaps_s = np.diff(trace.arrival_s[rows], prepend=trace.arrival_s[rows[:1]])
    # Time continues where the trace starts again.
    alone = replace(trace, sessions=None)
    others = replace(alone.take(rows), arrival_s=np.cumsum(np.maximum(gaps_s, 0.0)))
    own_rps = mean_rate(others) if count > 1 else 0.0
    if not rate_rps or not own_rps:
        return others
    return replace(others, arrival_s=others.arrival_s * own_rps / rate_rps)


class ArrivalCost(NamedTuple):
    """Seconds that each arriving request adds to running batches, and how many arrived then."""

    cost_s: float = 0.0
    arrived: float = 0.0


NO_COST = ArrivalCost()


@dataclass(slots=True, frozen=True)
class ServerTimes:
    """What a server of llmctl's counted between two readings of its metrics, in seconds.

    `launches` and `gpu` are measured and predicted seconds of passes that overlap; None: the
    server has no such passes, or did not see these parts of them.
    """

    batch_s: float
    predicted_batch_s: float  # by its laws, for the same batches
    front: Front | None  # None: it counted other requests than the clients did
    arrivals: ArrivalCost = NO_COST
    launches: tuple[float, float] | None = None
    gpu: tuple[float, float] | None = None

    @property
    def launch_slowdown(self) -> float | None:
        """The time of launches over the predicted time; None: not known."""
        if self.launches is None:
            return None
        took_s, predicted_s = self.launches
        return took_s / predicted_s

    @property
    def slowdown(self) -> float | None:
        """The batches' time over the predicted time, without the cost of requests that arrived
        meanwhile; where launches are known, that of the GPU. None where no comparable batch ended.
        """
        if self.predicted_batch_s <= 0.0:
            return None
        if self.launches is not None:
            took_s, predicted_s = self.gpu or (1.0, 1.0)  # it never held back a pass
            return took_s / predicted_s
        arrivals_s = self.arrivals.cost_s * self.arrivals.arrived
        return (self.batch_s - arrivals_s) / self.predicted_batch_s

    def at(self, load: LoadSpec | None) -> ServerTimes:
        """The same for the simulation of `load`. At a fixed concurrency it knows no arrivals ahead
        that would cost batches, so that the slowdown covers these.
        """
        return replace(self, arrivals=NO_COST) if load and load.concurrency else self


def arrival_cost_of(sums: Mapping[str, float]) -> ArrivalCost:
    """The cost per arrival, from a server's `llmctl_slice_sums` over some batches.

    The model: a batch takes `slowdown` times the law's time, plus `cost_s` for each request that
    arrives meanwhile. By the first equation, these add up to the time of all batches. The second
    weighs each batch by the arrivals that were due in the law's time. Plain least squares would be
    biased: a batch that is late for another reason meets more arrivals, which would seem to be the
    reason. A cost below `SURE` standard errors (as where requests arrive so evenly that the two
    effects cannot be separated) is 0, and the slowdown covers everything.
    """
    count = sums["batches"]
    took = sums["took"]
    expected = sums["expected"]
    arrived = sums["arrived"]
    if count < MIN_BATCHES or expected <= 0.0 or arrived <= 0.0:
        return NO_COST
    mean_due = sums["due_expected"] / expected
    covariance = sums["due_arrived"] - mean_due * arrived
    if covariance <= ROUNDING * sums["due_arrived"]:
        return NO_COST
    cost_s = (sums["due_took"] - mean_due * took) / covariance
    slowdown = (took - cost_s * arrived) / expected
    residual = sums["took_took"] + slowdown**2 * sums["expected_expected"]
    residual += cost_s**2 * sums["arrived_arrived"]
    residual -= 2.0 * (slowdown * sums["took_expected"] + cost_s * sums["took_arrived"])
    residual += 2.0 * slowdown * cost_s * sums["expected_arrived"]
    spread = sums["due_due"] - 2.0 * mean_due * sums["due"] + count * mean_due**2
    error_s = math.sqrt(max(residual, 0.0) / (count - 2) * max(spread, 0.0)) / covariance
    if cost_s <= 0.0 or cost_s < SURE * error_s:
        return NO_COST
    return ArrivalCost(min(cost_s, MAX_ARRIVAL_SHARE * took / arrived), arrived)


def times_between(
    before: dict[str, float], after: dict[str, float], samples: Sequence[Sample]
) -> ServerTimes | None:
    """The growth of a server's counters while it served `samples`; None if it has no counters."""
    if not {TOOK, PREDICTED} <= before.keys() & after.keys():
        return None
    sums = {name: after.get(key, 0.0) - before.get(key, 0.0) for name, key in SUMS.items()}
    return ServerTimes(
        after[TOOK] - before[TOOK],
        after[PREDICTED] - before[PREDICTED],
        _front_delay(before, after, samples),
        arrival_cost_of(sums),
        _grown(before, after, LAUNCHES),
        _grown(before, after, GPU),
    )


def _grown(
    before: dict[str, float], after: dict[str, float], names: tuple[str, str]
) -> tuple[float, float] | None:
    """The growth of two sums, measured and predicted; None where nothing was predicted."""
    took_s, predicted_s = (after.get(name, 0.0) - before.get(name, 0.0) for name in names)
    return (took_s, predicted_s) if predicted_s > 0.0 else None


def _front_delay(
    before: dict[str, float], after: dict[str, float], samples: Sequence[Sample]
) -> Front | None:
    """Mean latencies at the clients minus those at the server's driver, of the same requests.

    Refused requests never reach the driver. None where the driver counted other requests than those
    that were served.
    """
    served = [one for one in samples if not one.failure]
    clients = [
        (one.first_token_s - one.scheduled_s, one.last_token_s - one.scheduled_s) for one in served
    ]
    if not clients or any(one.failure and not one.refused for one in samples):
        return None
    delays_s = []
    for name, seen_s in zip((TTFT, E2E), np.mean(clients, axis=0).tolist(), strict=True):
        count, total_s = (
            after.get(key, 0.0) - before.get(key, 0.0) for key in (f"{name}_count", f"{name}_sum")
        )
        if count != len(clients):
            return None
        delays_s.append(max(seen_s - total_s / count, 0.0))
    return Front(first_s=delays_s[0], last_s=delays_s[1])


def counts_of_times(target: Target) -> dict[str, float]:
    """The counters of a server of llmctl's. `InputError` where it does not report its batches."""
    found = counts(target)
    missing = sorted({TOOK, PREDICTED} - found.keys())
    if missing:
        raise InputError(
            f"{target.url}/metrics has no {missing[0]}",
            "is it a server of llmctl's? --warmup 0 needs no counters",
        )
    return found


SEEDS = 3  # of prompts: of a replay's, its warm-up's, and those that settle


def settle(target: Target, trace: Trace, load: LoadSpec, on_done: Callable[[], None]) -> Trace:
    """Serve the first requests of `trace`, to their end, and return the others.

    Raises `InterruptedReplayError`.
    """
    count = int(SETTLING * len(trace))
    if not count:
        return trace
    first = trace.take(np.arange(count))
    rest = trace.take(np.arange(count, len(trace)))
    run_whole(target, first, replace(load, seed=load.seed + 2), on_done)
    return replace(rest, arrival_s=rest.arrival_s - rest.arrival_s[0])


def warm_up(
    target: Target, trace: Trace, load: LoadSpec, on_done: Callable[[], None]
) -> Warmup | None:
    """Serve `trace`, with other prompts than the replay's, and measure once the server has settled.

    None where no batch ended that the laws can be compared with. Raises `InterruptedReplayError`.
    """
    requests = len(trace)
    counts_of_times(target)  # a server without counters is named before the load
    trace = settle(target, trace, load, on_done)
    before = counts_of_times(target)
    replay = run_whole(target, trace, replace(load, seed=load.seed + 1), on_done)
    times = times_between(before, counts_of_times(target), replay.samples)
    times = times and times.at(load)
    if times is None or times.slowdown is None:
        return None
    return Warmup(
        requests=requests,
        batch_s=times.batch_s,
        predicted_batch_s=times.predicted_batch_s,
        slowdown=times.slowdown,
        launch_slowdown=times.launch_slowdown,
        arrival_cost_s=times.arrivals.cost_s,
        front=times.front,
        client=client_times(replay, {}),
    )


def conditions_of(report: BenchReport) -> ServerConditions:
    """The conditions that a replay showed, which has more requests than its warm-up; without the
    server's counters of the replay, those of the warm-up. `InputError` without either, and where
    the client was late.
    """
    if report.late:
        raise InputError(
            f"the bench does not count as measured: {report.late}",
            "run it again on a quieter machine, or from another one",
        )
    if report.replay_slowdown:
        return conditions(
            report.replay_slowdown,
            report.replay_front,
            (),
            report.replay_arrival_cost_s,
            report.replay_launch_slowdown,
        )
    warmup = report.warmup
    if warmup is None:
        raise InputError(
            "the bench had no warm-up, and its server counted no batches: no speed is known",
            "run the bench again with --warmup 20",
        )
    return seen_by(warmup, ())


def conditions(
    slowdown: float,
    front: Front | None,
    finished: Sequence[int],
    arrival_cost_s: float = 0.0,
    launch_slowdown: float | None = None,
) -> ServerConditions:
    """The conditions of a prediction; without a `front` its delay is that of the fit."""
    delay = FrontDelay(front.first_s, front.last_s) if front else None
    return ServerConditions(slowdown, delay, tuple(finished), arrival_cost_s, launch_slowdown)


def seen_by(warm: Warmup, finished: Sequence[int]) -> ServerConditions:
    """The conditions that a warm-up saw."""
    return conditions(
        warm.slowdown, warm.front, finished, warm.arrival_cost_s, warm.launch_slowdown
    )


def in_hindsight(
    plan: Plan | None,
    trace: Trace,
    sla: Mapping[str, float],
    times: ServerTimes | None,
    finished: Sequence[int],
    load: LoadSpec | None = None,
) -> dict[str, float]:
    """The metrics with the server's `times` during the replay; empty where they are unknown."""
    if plan is None or times is None:
        return {}
    times = times.at(load)
    if not times.slowdown:
        return {}
    meanwhile = conditions(
        times.slowdown, times.front, finished, times.arrivals.cost_s, times.launch_slowdown
    )
    return predicted(plan, trace, meanwhile, load=load).metrics(sla)


def check_server(plan: Plan, target: Target, on_foreign: OnForeign | None = None) -> None:
    """`ForeignError` where the plan's fit is of another engine, model or device than `target`'s;
    see `refuse_foreign`.

    Compared are: of llmctl's own servers, what they name in /metrics; of other servers, /version
    and the model's name; of a front, its router, and the number and versions of its replicas.
    """
    if not target.front:
        refuse_foreign(plan.fit.engine, [_served(plan, target)], on_foreign)
        return
    shown = front_state(target)
    engine = plan.fit.engine.engine
    versions = [{"engine": f"{engine} {each.version}".strip()} for each in shown.up]
    refuse_foreign(plan.fit.engine, versions, on_foreign)
    planned = router_of_plan(plan)
    runs = f"router '{shown.router}' before {len(shown.up)} replicas"
    says = f"router '{planned.name}' before {plan.workers}"
    changed = {
        name: value
        for name, value in parameters(planned).items()
        if shown.parameters.get(name, value) != value
    }
    if runs != f"{says} replicas":
        message = f"the server runs {runs}, the plan has {says}"
    elif changed:
        name, value = next(iter(changed.items()))
        message = f"router '{shown.router}' has {name} {shown.parameters[name]}, the plan {value}"
    else:
        return
    _refuse(message, on_foreign)


def _refuse(message: str, on_foreign: OnForeign | None) -> None:
    if on_foreign is None:
        raise ForeignError(message, "render a plan with that router and workers, or --force")
    on_foreign(message)


def reports_batch_times(plan: Plan, target: Target) -> bool:
    """Whether the server reports batch times: llmctl's own, and vLLM started by it."""
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
    return next((labels for name, labels, _ in scrape(target) if name == "llmctl_engine_info"), {})
