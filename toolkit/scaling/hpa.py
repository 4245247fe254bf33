"""The rule `hpa`: Kubernetes' HorizontalPodAutoscaler on one metric of each replica.

The two functions are its algorithm (kubernetes/pkg/controller/podautoscaler/replica_calculator.go):
`for_pods` of a metric that each pod has, `for_total` of an external metric with AverageValue. Other
rules reach a cluster through the second one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from toolkit.scaling.base import Rule
from toolkit.scaling.types import FleetView, ReplicaLoad
from toolkit.sched.policies.parameters import choice, parameter, policy

TOLERANCE = 0.1  # of the ratio of a metric to its target: within it nothing changes
EPSILON = 1e-9  # of a sum of floats; Kubernetes counts in thousandths
METRICS = ("waiting", "running", "requests", "kv_usage")


def value_of(load: ReplicaLoad, metric: str) -> float:
    """Return a metric of one replica; `requests` are those that wait or run."""
    if metric == "waiting":
        return load.waiting
    if metric == "running":
        return load.running
    return load.kv_usage if metric == "kv_usage" else load.waiting + load.running


def for_pods(
    values: Sequence[float],
    current: int,
    target: float,
    *,
    silent: int = 0,
    pending: int = 0,
    tolerance: float = TOLERANCE,
) -> int:
    """Return how many pods bring the mean of a metric to its target.

    Args:
        values: of the pods that have the metric; without any, nothing changes.
        current: pods that are wanted now.
        target: the wanted mean.
        silent: pods that run without the metric: a model is loaded. They count as 0 where there
            would be more pods, and as the target where there would be fewer.
        pending: pods that wait for a GPU. They count as 0 where there would be more pods.
        tolerance: by how much the ratio may differ from 1.
    """
    if not values:
        return current
    total = sum(values)
    count = len(values)
    ratio = total / count / target
    rises = ratio > 1.0
    if not silent and not (pending and rises):
        return current if abs(ratio - 1.0) <= tolerance + EPSILON else _rounded_up(ratio * count)
    if not rises:
        total += silent * target
    count += silent + (pending if rises else 0)
    ratio_of_all = total / count / target
    if abs(ratio_of_all - 1.0) <= tolerance + EPSILON or (ratio_of_all > 1.0) != rises:
        return current
    found = _rounded_up(ratio_of_all * count)
    return current if (found > current) != rises else found


def for_total(total: float, target: float, pods: int, tolerance: float = TOLERANCE) -> int:
    """Return how many pods bring a total, divided by them, to its target.

    Args:
        total: the value of the external metric.
        target: the wanted value for each pod.
        pods: that exist, ready or not; 0: any total makes a difference.
        tolerance: by how much the ratio may differ from 1.
    """
    if pods and abs(total / (target * pods) - 1.0) <= tolerance + EPSILON:
        return pods
    return _rounded_up(total / target)


def _rounded_up(number: float) -> int:
    """Return the next whole number; what exceeds one by a rounding error is that one."""
    return math.ceil(number - EPSILON)


@policy("hpa")
class HpaRule(Rule):
    """Brings the mean of one metric of the ready replicas to a target."""

    metric: str = choice("requests", METRICS, doc="which metric: requests are waiting and running")
    target: float = parameter(
        32.0, low=1e-3, search=(0.05, 512.0), log=True, doc="the wanted mean of a replica"
    )
    tolerance: float = parameter(
        TOLERANCE, high=1.0, doc="the ratio to the target may differ by this from 1"
    )

    def decide(self, view: FleetView) -> int:
        sample = view.history.latest
        if sample is None:
            return view.wanted
        values = [value_of(load, self.metric) for load in sample.ready]
        pending = max(view.wanted - len(values) - sample.starting, 0)
        return for_pods(
            values,
            view.wanted,
            self.target,
            silent=sample.starting,
            pending=pending,
            tolerance=self.tolerance,
        )
