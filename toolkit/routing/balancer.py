"""The balancer: routes requests to replicas and keeps what the router may know.

It is a sans-IO state machine like the scheduler: no clock, no I/O. The simulator and the front make
the same calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

import numpy as np

from toolkit.routing.admission import UNLIMITED, Admission, LatencyLimits, Overload
from toolkit.routing.base import Router
from toolkit.routing.replicas import PrefixIndex, Replica, RouterView, Sent
from toolkit.routing.types import ReplicaReport, ReplicaTraits
from toolkit.sched.types import Request

HISTORY = 1000  # outputs that the mean length is of
INDEX_LIMIT = 1 << 18  # blocks remembered for a replica; of 64 tokens each, 16 M tokens


class Balancer:
    """Routes requests.

    Args:
        traits: of each replica.
        block_tokens: of the blocks that requests carry.
        seed: of the random choice between equal replicas.
        limits: the targets by which `route` refuses requests; with one, each replica needs a law.
    """

    def __init__(
        self,
        router: Router,
        traits: Sequence[ReplicaTraits],
        *,
        block_tokens: int = 16,
        seed: int = 0,
        limits: LatencyLimits = UNLIMITED,
    ) -> None:
        self.router = router
        self._admission = Admission(limits, router) if limits != UNLIMITED else None
        self.replicas: list[Replica] = []
        self._index = PrefixIndex(router.index_ttl_s)
        self._homes: dict[str, Replica] = {}
        self._lengths: deque[int] = deque(maxlen=HISTORY)
        self._length_sum = 0
        rng = np.random.default_rng(seed)
        self._view = RouterView(self.replicas, self._index, block_tokens, rng)
        self._up: list[Replica] = []  # made anew at each change, not at each request
        for each in traits:
            self.change(self.add(each), is_up=True)

    def add(self, traits: ReplicaTraits) -> int:
        """Add a replica, which is not up yet. Returns its index."""
        replica = Replica(len(self.replicas), traits)
        self.replicas.append(replica)
        size = self._view.block_tokens
        bound = self.router.index_blocks or traits.capacity_tokens // size
        self._index.add_replica(bound if 0 < bound < INDEX_LIMIT else INDEX_LIMIT)
        return replica.index

    def route(
        self,
        request: Request,
        now_s: float,
        excluded: Collection[int] = (),
        *,
        accepted: bool = False,
    ) -> int | Overload | None:
        """Return the replica for a request, which is from now on counted there; None if none is up.

        `excluded` are replicas that failed it before: they get it only if no other is up. A new
        request may be refused by the forecast, one that was `accepted` before is not.
        """
        view = self._view
        able = self._up
        if excluded:
            able = [replica for replica in able if replica.index not in excluded] or able
        if not able:
            return None
        view.begin(request, able, now_s)
        index = self.router.choose(request, view)
        view.routed += 1
        if self._admission is not None and not accepted:
            placed = self._admission.place(request, view, able, index)
            if isinstance(placed, Overload):
                return placed
            index = placed
        replica = self.replicas[index]
        sent = view.expected
        if sent is None:
            sent = Sent(request, now_s, view.cached_tokens(request, replica))
        replica.add(sent)
        self._homes[request.request_id] = replica
        self._index.add(index, request.blocks, now_s)
        return index

    def first_token(self, request_id: str, now_s: float = 0.0) -> None:
        """The first token of a request came back."""
        home = self._homes.get(request_id)
        if home is not None:
            sent = home.first_token(request_id)
            if sent is not None and self._admission is not None:
                self._admission.first_token(sent, now_s)

    def ended(self, request_id: str, generated: int) -> None:
        """A request ended with this number of output tokens; -1: it was not answered to its end."""
        home = self._homes.pop(request_id, None)
        if home is not None:
            home.remove(request_id)
            if generated >= 0:
                lengths = self._lengths
                if len(lengths) == HISTORY:
                    self._length_sum -= lengths[0]
                lengths.append(generated)
                self._length_sum += generated
                self._view.expected_tokens = self._length_sum / len(lengths)

    def report(self, index: int, report: ReplicaReport) -> None:
        """Note a replica's own figures."""
        replica = self.replicas[index]
        replica.reported_waiting = report.waiting
        replica.reported_usage = report.kv_usage

    def change(self, index: int, *, is_up: bool, is_fresh: bool = False) -> None:
        """A replica may be sent requests from now on, or may not. It keeps its requests."""
        replica = self.replicas[index]
        replica.is_up = is_up
        self._up = [replica for replica in self.replicas if replica.is_up]
        if is_fresh:
            self._index.clear(index)
            replica.reported_waiting = -1
