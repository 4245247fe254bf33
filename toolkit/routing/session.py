"""The router `session`: what belongs together goes to one replica."""

from __future__ import annotations

import hashlib
from bisect import bisect_left

from toolkit.routing.base import Router
from toolkit.routing.replicas import RouterView
from toolkit.routing.simple import fewest_requests
from toolkit.sched.policies.parameters import policy
from toolkit.sched.types import Request

RING_POINTS = 160  # of each replica on the ring


@policy("session")
class SessionRouter(Router):
    """Consistent hashing of the session, or of the prompt's first block where there is none; to the
    replica with the fewest requests where there is neither.
    """

    def choose(self, request: Request, view: RouterView) -> int:
        key = request.session or (str(request.blocks[0]) if request.blocks else "")
        if not key:
            return fewest_requests(view)
        points, owners = _ring(view)
        return owners[bisect_left(points, _point(key)) % len(owners)]


def _ring(view: RouterView) -> tuple[list[int], list[int]]:
    """Points of the replicas that are up on a ring, ascending, and the replica of each."""
    up = tuple([replica.index for replica in view.replicas])
    if up not in view.rings:
        pairs = sorted(
            [(_point(f"{index}:{k}"), index) for index in up for k in range(RING_POINTS)]
        )
        view.rings[up] = [point for point, _ in pairs], [index for _, index in pairs]
    return view.rings[up]


def _point(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
