"""A policy on a set of trace windows, in the simulator: the metrics that the search and the verdict compare.

Every candidate meets the same windows and the same draws (common random numbers): differences are the candidates' own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from toolkit.files.tuning import Outcome, Value
from toolkit.metrics import Served, sla_ratios
from toolkit.sched.policies import make_policy
from toolkit.sched.policies.parameters import parameters
from toolkit.sim.api import World, simulate
from toolkit.traces.types import Trace

TIE_BREAK = 1e-3  # how much of the goodput the mean latency may weigh: enough to order equals, too little to trade


@dataclass(slots=True, frozen=True)
class Evaluation:
    """An outcome, each SLA target's value over its limit, and whether all limits hold."""

    outcome: Outcome
    ratios: dict[str, float]
    oom_percent: float

    @property
    def score(self) -> float:
        """Goodput; between equals, the lower mean E2E latency."""
        metrics = self.outcome.metrics
        latency_s = metrics.get("e2e_mean_s", 0.0)
        return metrics["goodput_rps"] * (1.0 - TIE_BREAK * latency_s / (1.0 + latency_s))

    def constraints(self, max_oom_percent: float) -> dict[str, float]:
        """Constraint to violation: at most 0 where it holds."""
        return {"oom_percent": self.oom_percent - max_oom_percent} | {
            key: ratio - 1.0 for key, ratio in self.ratios.items()
        }

    def feasible(self, max_oom_percent: float) -> bool:
        """Whether every constraint holds."""
        return all(violation <= 0.0 for violation in self.constraints(max_oom_percent).values())


@dataclass(slots=True, frozen=True)
class Bench:
    """Where candidates are tried: the world, the windows, the targets."""

    world: World
    windows: Sequence[Trace]
    sla: Mapping[str, float]

    def evaluate(self, policy: str, given: Mapping[str, Value]) -> Evaluation:
        """Simulate every window. Metrics are means over windows; targets are judged on all their requests together."""
        candidate = make_policy(policy, given)
        results = [simulate(window, candidate, self.world) for window in self.windows]
        per_window = [result.metrics(self.sla) for result in results]
        metrics = {key: fmean(m[key] for m in per_window) for key in per_window[0] if all(key in m for m in per_window)}
        ratios = sla_ratios(_joined([result.served for result in results]), self.sla)
        return Evaluation(
            Outcome(policy=policy, parameters=parameters(candidate), metrics=metrics), ratios, metrics["oom_percent"]
        )


def _joined(served: Sequence[Served]) -> Served:
    columns = Served.__dataclass_fields__
    return Served(**{name: np.concatenate([getattr(one, name) for one in served]) for name in columns})
