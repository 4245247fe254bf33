"""Short bursts of a trace on a running server, and what the simulator says of the same bursts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from toolkit.bench.client import LoadSpec, run_whole, served
from toolkit.bench.session import unused_seed
from toolkit.endpoints.target import Target
from toolkit.files.live import BurstFigures
from toolkit.metrics import Served, latencies, meets_sla
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.api import simulate
from toolkit.sim.world import World
from toolkit.traces.types import Trace
from toolkit.traces.windows import TraceWindow

TIE_BREAK = 0.01  # of the score: what the lowest mean E2E is worth, also where no target is kept
LONGEST = 4.0  # windows that a request may take; a longer one missed every target
LEAST_TIMEOUT_S = 10.0


def figures(result: Served, sla: Mapping[str, float], window_s: float) -> BurstFigures:
    """What a burst that arrived within `window_s` was served like. Without targets, requests that
    were served within twice that time count.
    """
    good = meets_sla(result, sla)
    if not sla:
        good = result.ok & (result.finish_s - result.arrival_s.min() <= 2.0 * window_s)
    seconds = latencies(result)
    e2e_s = float(seconds["e2e"].mean()) if len(seconds["e2e"]) else LONGEST * window_s
    ttft_s = float(seconds["ttft"].mean()) if len(seconds["ttft"]) else LONGEST * window_s
    goodput_rps = float(good.sum()) / window_s
    rate_rps = len(result) / window_s
    return BurstFigures(
        score=(1.0 - TIE_BREAK) * goodput_rps + TIE_BREAK * rate_rps / (1.0 + e2e_s),
        goodput_rps=goodput_rps,
        attained_percent=100.0 * float(good.mean()),
        ttft_mean_s=ttft_s,
        e2e_mean_s=e2e_s,
    )


def mean_of(several: Sequence[BurstFigures]) -> BurstFigures:
    """The means of several bursts' figures."""
    names = BurstFigures.model_fields
    return BurstFigures(
        **{name: float(np.mean([getattr(one, name) for one in several])) for name in names}
    )


@dataclass(frozen=True, slots=True)
class Bursts:
    """The windows that bursts are taken from, and the server that gets them.

    Every burst has other prompts, so that no prefix cache holds those of the burst before.
    """

    target: Target
    load: LoadSpec
    windows: Sequence[TraceWindow]
    sla: Mapping[str, float]
    window_s: float

    def measure(self, window: int, on_done: Callable[[], None] = lambda: None) -> BurstFigures:
        """Send a window's requests at their times, and wait until all have ended. Raises
        `InterruptedReplayError`.
        """
        limit_s = max(LONGEST * self.window_s, LEAST_TIMEOUT_S)
        load = replace(self.load, seed=unused_seed(), timeout_s=limit_s)
        trace = self.windows[window].trace
        whole = run_whole(self.target, trace, load, on_done)
        return figures(served(whole.samples), self.sla, self.window_s)

    def predict(self, window: int, policy: VllmPolicy, world: World) -> BurstFigures:
        """The same burst in a simulation."""
        trace: Trace = self.windows[window].trace
        return figures(simulate(trace, policy, world).served, self.sla, self.window_s)
