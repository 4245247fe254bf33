"""Several policies on one trace, at its own rate or at several: one run after the other, each given out when done."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from toolkit.files.fit import Fit
from toolkit.metrics import Floats, latencies
from toolkit.sched.policies import BUILT_IN, ORACLES, POLICIES
from toolkit.sched.policies.parameters import Value, parameters
from toolkit.sched.protocols import AnyPolicy
from toolkit.sched.types import Refusal
from toolkit.sim.api import simulate
from toolkit.sim.loop import SimulationStalledError
from toolkit.sim.world import World
from toolkit.traces.scale import mean_rate, scale_rate
from toolkit.traces.types import Trace


@dataclass(frozen=True, slots=True)
class Run:
    """One policy at one rate. `problem` says why there are no metrics."""

    policy: str
    parameters: Mapping[str, Value]
    rate_rps: float  # of arrivals; 0 where all come at once
    metrics: Mapping[str, float] = field(default_factory=dict)
    e2e_s: Floats = field(default_factory=lambda: np.empty(0))  # of those who ended
    refusals: Sequence[Refusal] = ()
    problem: str = ""


def usual_policies(fit: Fit | None) -> list[str]:
    """Those that are no oracles, and what is built into the fit's engine, where the fit has its laws."""
    built_in = [name for name, policy in BUILT_IN.items() if fit and fit.steps and fit.engine.engine == policy.engine]
    return [*built_in, *(name for name in POLICIES if name not in ORACLES)]


def compare(
    trace: Trace, policies: Sequence[AnyPolicy], world: World, rates: Sequence[float], sla: Mapping[str, float]
) -> Iterator[Run]:
    """Each policy at each of `rates` (none: the trace's own), all on the same requests and draws.

    A policy whose simulation stalls is a run with a problem; the others go on.
    """
    for scaled in [scale_rate(trace, rate) for rate in rates] or [trace]:
        for policy in policies:
            yield _run(scaled, policy, world, sla)


def _run(trace: Trace, policy: AnyPolicy, world: World, sla: Mapping[str, float]) -> Run:
    given, rate = parameters(policy), mean_rate(trace)
    try:
        result = simulate(trace, policy, world)
    except SimulationStalledError as error:
        return Run(policy.name, given, rate, problem=error.message)
    e2e = latencies(result.served)["e2e"]
    return Run(policy.name, given, rate, result.metrics(sla), e2e, result.refusals)
