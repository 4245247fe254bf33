"""A policy on a set of trace windows, in the simulator: the metrics that the search and the verdict compare.

Every candidate meets the same windows and the same draws (common random numbers): differences are the candidates' own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import numpy as np

from toolkit.files.tuning import Outcome, Value
from toolkit.metrics import Served, meets_sla, sla_ratios
from toolkit.sched.policies import make_any
from toolkit.sched.policies.parameters import parameters
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sched.protocols import AnyPolicy
from toolkit.sim.api import simulate
from toolkit.sim.world import World
from toolkit.traces.types import Trace
from toolkit.tuning.attainment import lower_bound_percent

TIE_BREAK = 1e-3  # how much of the goodput the mean latency may weigh: enough to order equals, too little to trade
ATTAINMENT = "sla_attainment_percent"
ATTAINMENT_LOWER = "sla_attainment_lower_percent"


@dataclass(slots=True, frozen=True)
class Limits:
    """What a candidate must keep besides the latency targets; None asks for nothing."""

    max_oom_percent: float
    max_evicted_percent: float | None = None
    min_attainment_percent: float | None = None


@dataclass(slots=True, frozen=True)
class Evaluation:
    """An outcome, and each latency target's value over its limit."""

    outcome: Outcome
    ratios: dict[str, float]

    @property
    def goodput_rps(self) -> float:
        """Requests per second that meet every latency target."""
        return self.outcome.metrics["goodput_rps"]

    @property
    def score(self) -> float:
        """Goodput; between equals, the lower mean E2E latency."""
        latency_s = self.outcome.metrics.get("e2e_mean_s", 0.0)
        return self.goodput_rps * (1.0 - TIE_BREAK * latency_s / (1.0 + latency_s))

    def usage(self, limits: Limits) -> dict[str, float]:
        """Each limit's share that is used up: above 1 it is broken.

        Of the attainment it is the share of requests that may be late, judged by its confidence bound.
        """
        metrics = self.outcome.metrics
        found = dict(self.ratios) | {"oom_percent": _share(metrics.get("oom_percent", 0.0), limits.max_oom_percent)}
        if limits.max_evicted_percent is not None:
            found["evicted_percent"] = _share(metrics.get("evicted_percent", 0.0), limits.max_evicted_percent)
        if limits.min_attainment_percent is not None:
            late = 100.0 - metrics.get(ATTAINMENT_LOWER, 0.0)
            found[ATTAINMENT] = _share(late, 100.0 - limits.min_attainment_percent)
        return found

    def feasible(self, limits: Limits) -> bool:
        """Whether every limit is kept."""
        return all(share <= 1.0 for share in self.usage(limits).values())


def _share(value: float, limit: float) -> float:
    return value / limit if limit else (1.0 + value if value else 0.0)


@dataclass(slots=True, frozen=True)
class Bench:
    """Where candidates are tried: the world, the windows, the targets. `label` tells one bench from another."""

    world: World
    windows: Sequence[Trace]
    sla: Mapping[str, float]
    label: str = "search"


@dataclass(slots=True, frozen=True)
class Seen:
    """What one window showed."""

    served: Served
    metrics: dict[str, float]


@dataclass(slots=True, frozen=True)
class Task:
    """A candidate to be tried on a bench: window by window, in whatever order, and then summed up."""

    bench: Bench
    policy: str
    parameters: Mapping[str, Value] = field(default_factory=dict)

    def on(self, window: int) -> Task:
        """The same candidate on one window of the bench."""
        return replace(self, bench=replace(self.bench, windows=[self.bench.windows[window]]))

    def simulate(self, window: int) -> Seen:
        """One window of the bench."""
        result = simulate(self.bench.windows[window], self._candidate(), self.bench.world)
        return Seen(result.served, result.metrics(self.bench.sla))

    def sum_up(self, seen: Sequence[Seen]) -> Evaluation:
        """The evaluation: metrics are means over windows; targets are judged on all their requests together."""
        sla, first = self.bench.sla, seen[0].metrics
        metrics = {key: fmean(one.metrics[key] for one in seen) for key in first if all(key in o.metrics for o in seen)}
        metrics[ATTAINMENT_LOWER] = lower_bound_percent([meets_sla(one.served, sla) for one in seen])
        whole = parameters(self._candidate())
        outcome = Outcome(policy=self.policy, parameters=whole, metrics=metrics)
        return Evaluation(outcome, sla_ratios(_joined([one.served for one in seen]), sla))

    def _candidate(self) -> AnyPolicy:
        """The policy. Parameters are drawn each by itself; where one bounds another, the nearest that may be."""
        within = VllmPolicy.within if self.policy == VllmPolicy.name else dict
        return make_any(self.policy, within(self.parameters))

    def run(self) -> Evaluation:
        """All windows, here and now."""
        return self.sum_up([self.simulate(window) for window in range(len(self.bench.windows))])


def _joined(served: Sequence[Served]) -> Served:
    columns = Served.__dataclass_fields__
    return Served(**{name: np.concatenate([getattr(one, name) for one in served]) for name in columns})
