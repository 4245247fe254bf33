"""The gateway's status page: that of one engine, with replicas for workers.

Replicas are numbered in the order of /replicas, since the page shows no address.
"""

from __future__ import annotations

from typing import Any

from toolkit.gateway.front import Gateway
from toolkit.gateway.passing import NO_REPLICA
from toolkit.gateway.replicas import LiveReplica
from toolkit.routing.routers import router_parameters
from toolkit.serve.metrics import Gauges
from toolkit.serve.status import Facts, MetricHistory, StatusPage

OUT = {
    "down": "replica {} is down",
    "hung": "replica {} hangs",
    "left out": "replica {} is left out",
}


class GatewayStatus(StatusPage):
    """The status of a gateway."""

    def __init__(self, gateway: Gateway, facts: Facts) -> None:
        self._gateway, self._start_s = gateway, gateway.now_s()
        self._states: dict[LiveReplica, str] = {}
        super().__init__(MetricHistory(gateway.stats, self._gauges, lambda: self._uptime_s), facts)

    def sample(self) -> None:
        """See `StatusPage.sample`. Replicas that went down since the last one are noted."""
        before, self._states = self._states, {}
        for number, replica in enumerate(self._gateway.pool.replicas):
            self._states[replica] = replica.state
            if replica.state in OUT and before.get(replica) != replica.state:
                self.history.note(OUT[replica.state].format(number))
        if self._gateway.pool.up or self._gateway.stats.ended:
            self.history.sample()

    @property
    def _uptime_s(self) -> float:
        return self._gateway.now_s() - self._start_s

    def _gauges(self) -> Gauges:
        gateway = self._gateway
        known = [gateway.balancer.replicas[replica.index] for replica in gateway.pool.up]
        usage = sum(each.kv_usage for each in known) / max(len(known), 1)
        waiting = gateway.waiting
        return Gauges(gateway.running - waiting, waiting, usage, 0, (), 0.0, {})

    def _now(self) -> dict[str, Any]:
        gateway, stats = self._gateway, self._gateway.stats
        router = gateway.balancer.router
        return {
            "state": gateway.state,
            "problem": NO_REPLICA if gateway.state == NO_REPLICA else "",
            "uptime_s": round(self._uptime_s, 1),
            "router": router.name,
            "knobs": router_parameters(router),
            "workers": [],
            "replicas": [self._replica(replica) for replica in gateway.pool.replicas],
            "totals": {
                "ended": dict(stats.ended),
                "input_tokens": stats.prompt_tokens,
                "output_tokens": stats.generation_tokens,
                "refused": stats.refused,
                "continued": sum(gateway.moved.values()),
                "retry_budget": gateway.budget.share,
            },
        }

    def _replica(self, replica: LiveReplica) -> dict[str, Any]:
        known = self._gateway.balancer.replicas[replica.index]
        waiting = known.waiting
        return {
            "state": replica.state,
            "running": max(len(replica.attempts) - waiting, 0),
            "waiting": waiting,
            "kv_share": known.kv_usage,
            "cached_share": replica.cached_tokens / replica.prompt_tokens
            if replica.prompt_tokens
            else None,
            "requests": replica.requests,
            "failures": replica.failures,
            "moved": replica.moved,
        }
