"""Routers that look at one number of each replica, or at none."""

from __future__ import annotations

from toolkit.routing.base import Router
from toolkit.routing.replicas import RouterView
from toolkit.sched.policies.parameters import policy
from toolkit.sched.types import Request


@policy("round-robin")
class RoundRobinRouter(Router):
    """To each replica in turn."""

    def choose(self, request: Request, view: RouterView) -> int:
        return view.replicas[view.routed % len(view.replicas)].index


@policy("least-requests")
class LeastRequestsRouter(Router):
    """To the replica with the fewest requests that have not ended."""

    def choose(self, request: Request, view: RouterView) -> int:
        return fewest_requests(view)


@policy("future-memory")
class LeastMemoryRouter(Router):
    """To the replica with the smallest share of its cache in use once outputs have mean length."""

    def choose(self, request: Request, view: RouterView) -> int:
        size = view.block_tokens
        expected = view.expected_tokens
        costs: list[float] = []
        for replica in view.replicas:
            new = request.prompt_tokens - view.cached_tokens(request, replica)
            tokens = replica.blocks * size + new + (len(replica.sent) + 1) * expected
            costs.append(tokens / replica.capacity_tokens)
        return view.least(costs)


def fewest_requests(view: RouterView) -> int:
    """Return the index of the replica with the fewest requests."""
    return view.least([float(len(replica.sent)) for replica in view.replicas])
