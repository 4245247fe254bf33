"""The rule `tokens`: llm-d's workload variant autoscaler, version 2: tokens over token capacity.

The rule and its constants are those of the project's engine of version 2
(llm-d/llm-d-workload-variant-autoscaler). Its capacity is a stock of tokens, not a rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean
from typing import ClassVar

from toolkit.scaling.base import Rule
from toolkit.scaling.saturation import BEHAVIOUR
from toolkit.scaling.types import FleetView, arrived, ended, output_tokens, prompt_tokens
from toolkit.sched.policies.parameters import Value, parameter, policy

KV_SHARE = 0.80  # of a cache, that is planned for
QUEUE = 5  # waiting requests of a replica that is as full as it gets
OBSERVED = 10  # that the mean of full replicas is of
MEANS_S = 300.0  # that mean lengths are over
STALE_S = 1800.0


@policy("tokens")
class TokensRule(Rule):
    """Compares the tokens that requests hold and will hold with what the replicas can hold.

    The capacity of a replica is what full ones were seen to hold, else an estimate of its batch,
    and at most 0.8 of the cache.
    """

    usual_behaviour: ClassVar[Mapping[str, Value]] = BEHAVIOUR

    cache_tokens: int = parameter(100_000, low=1, doc="tokens that a replica's KV cache holds")
    pass_tokens: int = parameter(8192, low=1, doc="new tokens of a pass of a replica, at most")
    rows: int = parameter(256, low=1, doc="requests that a replica runs at once")
    up: float = parameter(
        0.85, low=0.05, high=2, search=(0.4, 1.0), doc="more above this used share of the capacity"
    )
    down: float = parameter(
        0.70, low=0.05, high=2, search=(0.2, 0.9), doc="fewer below this used share"
    )

    @property
    def memory_s(self) -> float:
        return STALE_S

    def decide(self, view: FleetView) -> int:
        sample = view.history.latest
        if sample is None:
            return view.wanted
        history = view.history
        prompt = _mean(history.rate(prompt_tokens, MEANS_S), history.rate(arrived, MEANS_S))
        output = _mean(history.rate(output_tokens, MEANS_S), history.rate(ended, MEANS_S))
        if prompt is None or output is None:
            return view.wanted
        capacity = self._capacity(view, prompt, output)
        waiting = sample.queued + sum([load.waiting for load in sample.ready])
        held = sum([load.kv_usage for load in sample.ready]) * self.cache_tokens
        demand = held + waiting * (prompt + output)
        lacking = demand / self.up - view.wanted * capacity
        if lacking > 0:
            return view.wanted + math.ceil(lacking / capacity)
        spare = view.ready * capacity - demand / self.down
        return max(view.wanted - max(int(spare / capacity), 0), 1)

    def _capacity(self, view: FleetView, prompt: float, output: float) -> float:
        """Return the tokens that one replica can hold."""
        full = [
            load.kv_usage * self.cache_tokens
            for sample in view.history.last(STALE_S)
            for load in sample.ready
            if load.waiting >= QUEUE
        ]
        if full:
            batch = fmean(full[-OBSERVED:])
        else:
            rows = min(self.pass_tokens * output / (prompt + output), self.rows)
            batch = rows * (prompt + output / 2)
        return max(min(KV_SHARE * self.cache_tokens, batch), 1.0)


def _mean(total: float | None, count: float | None) -> float | None:
    return total / count if total is not None and count else None
