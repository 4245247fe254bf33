"""What a tuning is about: a trace at a rate, its windows, and the part that the verdict judges.

The verdict is about the whole trace, at the rate that was asked for. Windows serve the search, and
the certainty of the gain. A trace that is longer than a policy can be judged on in reasonable time
is judged on its busiest part (`busiest`); rates are of the whole trace even so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolkit.errors import InputError, LimitsBrokenError
from toolkit.files.fit import Fit
from toolkit.files.recipe import Recipe
from toolkit.files.tuning import Evaluation, Settings
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.deployment import Deployment, Workload
from toolkit.traces.repeat import repeated
from toolkit.traces.types import Trace
from toolkit.traces.windows import (
    TraceWindow,
    Windows,
    busiest,
    fit_windows,
    mean_rate,
    prepare,
    scale_rate,
)
from toolkit.tuning.capacity import LASTING, longest_wait_s, rate_capacity
from toolkit.tuning.evaluate import Task

# Requests that are judged at most: some ten seconds of simulation for most policies. It is a number
# of requests and not of seconds, so that every machine gives the same verdict.
JUDGED_REQUESTS = 200_000
# vLLM's scheduler takes some ten seconds for a million. Of policies that look at every waiting
# request: to simulate an overloaded server takes minutes.
JUDGED_REQUESTS_BY_POLICY = {VllmPolicy.name: 2_000_000, "mlfq": 1_000}


@dataclass(slots=True, frozen=True)
class CutTrace:
    """A prepared trace at a rate, and its windows."""

    trace: Trace
    windows: Windows
    rate_rps: float

    def judged(self, policy: str) -> TraceWindow:
        """What the verdict on a policy is about: the whole trace, or its busiest part."""
        return busiest(self.trace, most_requests(policy))


@dataclass(slots=True, frozen=True)
class TuneInputs:
    """What a tuning starts from, read and checked."""

    recipe: Recipe
    fit: Fit
    cut: CutTrace

    @property
    def deployment(self) -> Deployment:
        """The recipe's own settings."""
        return Deployment.of(self.recipe, self.fit)

    def on_windows(self, label: str, windows: Sequence[TraceWindow]) -> Task:
        """The recipe's own settings on `windows`."""
        at_once = self.recipe.tune.concurrency or 0
        workloads = [Workload(window.trace, at_once) for window in windows]
        return Task(self.deployment, workloads, f"{label}, {self.recipe.workers} workers")

    def whole(self, settings: Settings) -> Task:
        """Where settings are judged: on the whole trace."""
        deployment = replace(self.deployment, settings=settings)
        return whole_task(deployment, self.cut.trace)


def cut_trace(recipe: Recipe, fit: Fit, trace: Trace) -> CutTrace:
    """The trace with the recipe's lengths, at the recipe's rate or load, or else at its own rate.
    At a fixed concurrency the times only cut it into windows.

    Raises `InputError` for a trace without requests, one with all requests at the same time, one
    that is shorter than the longest target on waiting, and windows without requests;
    `LimitsBrokenError` for a load where no rate keeps the limits.
    """
    spec = recipe.tune
    if not len(trace):
        raise InputError(f"{trace.source}: it has no requests", "give another trace with --trace")
    fitted = prepare(trace, recipe)
    rate_rps = spec.request_rate_rps
    if rate_rps is None and spec.load is not None:
        rate_rps = load_rate_rps(recipe, fit, fitted, spec.load)
        wait_s, _ = longest_wait_s(recipe.sla)
        lasts_s = (len(fitted) - 1) / rate_rps
        if lasts_s < wait_s:  # the rate follows from the load, so the length of the trace does, too
            times = math.ceil(LASTING * wait_s * rate_rps / len(fitted))
            fitted = repeated(fitted, times, spec.seed)
    if rate_rps is not None:
        fitted = scale_rate(fitted, rate_rps)
    if spec.concurrency is None:
        check_length(fitted, recipe)
    windows = fit_windows(
        fitted, spec.window_s, spec.windows, spec.held_out_windows, spec.seed, warm=True
    )
    return CutTrace(fitted, windows, rate_rps or mean_rate(fitted))


def check_length(trace: Trace, recipe: Recipe) -> None:
    """`InputError` where the trace is over before a request could miss a target on waiting."""
    wait_s, name = longest_wait_s(recipe.sla)
    lasts_s = float(trace.arrival_s[-1])
    if 0.0 < lasts_s < wait_s:
        raise InputError(
            f"{trace.source}: it lasts {lasts_s:.3g} s at {mean_rate(trace):.4g} requests/s, less "
            f"than the target {name}, {wait_s:g} s, which no request could then miss",
            f"give a longer trace, or a rate of at most {(len(trace) - 1) / wait_s:.3g} requests/s",
        )


def load_rate_rps(recipe: Recipe, fit: Fit, trace: Trace, load: float) -> float:
    """The rate that is `load` times the capacity of the recipe's own settings."""
    found = rate_capacity(whole_task(Deployment.of(recipe, fit), trace), in_process)
    if found is None:
        raise LimitsBrokenError(
            f"a load of {load:g} has no rate: the recipe's settings keep its limits at none",
            "give a rate with --rate, or looser targets in the recipe's sla",
        )
    return round(load * found.served_rps, 3)


def in_process(tasks: Sequence[Task]) -> list[Evaluation]:
    """Run tasks in this process."""
    return [task.run() for task in tasks]


def whole_task(deployment: Deployment, trace: Trace) -> Task:
    """Where a deployment is judged: on the whole trace, or its busiest part."""
    part = busiest(trace, most_requests(deployment.settings.policy)).trace
    label = f"whole trace, {deployment.workers} workers"
    own_rps = 0.0
    if len(part) < len(trace):
        label += f", its busiest {len(part)} requests"
        own_rps = mean_rate(trace)
    windows = [Workload(part, deployment.recipe.tune.concurrency or 0)]
    return Task(deployment, windows, label, whole=True, own_rps=own_rps)


def most_requests(policy: str) -> int:
    """The most requests that a policy is judged on."""
    return JUDGED_REQUESTS_BY_POLICY.get(policy, JUDGED_REQUESTS)
