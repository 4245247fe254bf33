"""The simulator's prediction for the requests of a replay, under the server's plan.

A shared machine is not as fast as it was while it was profiled. So a warm-up, other requests before
the replay, shows how fast it is today: the server counts how long its batches take, and how long
its laws predict. The ratio of the two is the slowdown, one factor for every batch of the
prediction. A server that has just started is slow, so its first requests are not counted.

In order: `predict`, at a slowdown; the counters of llmctl's own servers (`counts`,
`slowdown_between`); the warm-up (`warm_up`); and whether the server runs the plan's engine
(`check_server`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from toolkit.bench.client import LoadSpec, client_times, run_whole
from toolkit.endpoints.target import Target, front_state, scrape, version
from toolkit.engine_traits import traits_of
from toolkit.errors import ForeignError, InputError
from toolkit.files.bench import BenchReport, Warmup
from toolkit.files.plan import Plan
from toolkit.files.profile import Identity, OnForeign, refuse_foreign
from toolkit.files.tuning import Outcome
from toolkit.metrics import sla_ratios
from toolkit.routing.admission import LatencyLimits
from toolkit.routing.base import Router
from toolkit.routing.routers import make_router
from toolkit.routing.simple import RoundRobinRouter
from toolkit.sched.policies.parameters import parameters
from toolkit.sim.api import SimResult, simulate
from toolkit.sim.deployment import Deployment, Workload
from toolkit.traces.types import Trace
from toolkit.traces.windows import mean_rate


def predicted(
    plan: Plan,
    trace: Trace,
    slowdown: float = 1.0,
    finished: Sequence[int] = (),
    *,
    load: LoadSpec | None = None,
) -> SimResult:
    """Return the outcome of each request of `trace` under the plan, at the concurrency of `load`.

    Args:
        slowdown: factor of every batch time; the scheduler believes the fit.
        finished: output lengths of earlier requests, by which Past-Future admits.
    """
    deployment = replace(Deployment.of_plan(plan), slowdown=slowdown)
    if plan.recipe.serve.admission == "targets":
        deployment = replace(deployment, admission=LatencyLimits.of(plan.recipe.sla))
    at_once = load.concurrency if load else 0
    workload = Workload(trace, at_once, finished=tuple(finished))
    return simulate(trace, deployment.policy(), deployment.world(workload))


def outcome_of(result: SimResult, sla: Mapping[str, float]) -> Outcome:
    """Return what came out of a simulation. Shares of targets are of served requests."""
    used = sla_ratios(result.served, sla) if result.served.ok.any() else {}
    return Outcome(metrics=result.metrics(sla), used=used)


def router_of_plan(plan: Plan) -> Router:
    """The router before the plan's replicas."""
    spec = plan.settings.replica_router
    return make_router(spec.name, spec.parameters) if spec else RoundRobinRouter()


def counts(target: Target) -> dict[str, float]:
    """Return the counters of a server of llmctl's, by series, summed over the replicas of a front.

    Raises InputError where it does not answer.
    """
    sums: defaultdict[str, float] = defaultdict(float)
    for name, _, value in scrape(target):
        sums[name] += value
    return dict(sums)


def counts_or_none(target: Target) -> dict[str, float]:
    """Return `counts`; empty where the server does not answer."""
    try:
        return counts(target)
    except InputError:
        return {}


TOOK = "llmctl_batch_seconds_total"
PREDICTED = "llmctl_predicted_batch_seconds_total"
SETTLING = 0.25  # of a warm-up's requests, which the server runs slowly (new shapes, memory, code)


def other_requests(trace: Trace, after_s: float, count: int, rate_rps: float = 0.0) -> Trace:
    """`count` requests of `trace` from `after_s` on, with their gaps; from the start of the trace
    again after its end. They arrive by time, requests of sessions too, and at `rate_rps` on
    average; 0: at the trace's own rate there.
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


def slowdown_between(before: dict[str, float], after: dict[str, float]) -> float | None:
    """Return measured over predicted batch time between two readings of a server's counters.

    None where no batch ended that the laws can be compared with, and without counters.
    """
    took_s, predicted_s = _times_between(before, after)
    return took_s / predicted_s if predicted_s > 0.0 else None


def _times_between(before: dict[str, float], after: dict[str, float]) -> tuple[float, float]:
    if not {TOOK, PREDICTED} <= before.keys() & after.keys():
        return 0.0, 0.0
    return after[TOOK] - before[TOOK], after[PREDICTED] - before[PREDICTED]


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
    took_s, predicted_s = _times_between(before, counts_of_times(target))
    if predicted_s <= 0.0:
        return None
    return Warmup(
        requests=requests,
        batch_s=took_s,
        predicted_batch_s=predicted_s,
        slowdown=took_s / predicted_s,
        client=client_times(replay, {}),
    )


def slowdown_of(report: BenchReport) -> float:
    """Return the slowdown that a replay showed, which has more requests than its warm-up; without
    the server's counters of the replay, the slowdown of the warm-up.

    Raises InputError without either, and where the client was late.
    """
    if report.late:
        raise InputError(
            f"the bench does not count as measured: {report.late}",
            "run it again on a quieter machine, or from another one",
        )
    if report.replay_slowdown:
        return report.replay_slowdown
    if report.warmup is None:
        raise InputError(
            "the bench had no warm-up, and its server counted no batches: no speed is known",
            "run the bench again with --warmup 20",
        )
    return report.warmup.slowdown


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
