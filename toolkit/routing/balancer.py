"""The balancer: routes requests to replicas and keeps what the router may know.

It is a sans-IO state machine like the scheduler: no clock, no I/O. The simulator and the front make
the same calls. Its log, replayed into a fresh one, gives the same choices.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import numpy as np

from toolkit.errors import InputError
from toolkit.routing.admission import UNLIMITED, Admission, LatencyLimits, Overload
from toolkit.routing.replicas import PrefixIndex, Replica, RouterView, Sent
from toolkit.routing.routers import Router, make_router
from toolkit.routing.types import PassLaw, ReplicaReport, ReplicaTraits, RoutedRequest
from toolkit.sched.eventlog import Lost, whole_lines

HISTORY = 1000  # outputs that the mean length is of
NONE_UP = -1
REFUSED = -2  # in the log, where a request went to no replica


class RoutingLogHeader(msgspec.Struct, frozen=True, tag="routing"):
    """The configuration of the balancer: with the law of a pass, enough to create an equal one."""

    router: str
    parameters: dict[str, bool | int | float | str]
    block_tokens: int
    index_limit: int
    seed: int = 0
    ttft_s: float | None = None  # the targets of admission; None: there is none
    e2e_s: float | None = None


class ReplicaAdded(msgspec.Struct, frozen=True, tag="added", omit_defaults=True):
    """A further replica, which is not up yet, with its traits except the law of its passes."""

    capacity_tokens: int
    pass_tokens: int
    max_rows: int
    has_law: bool


class Routed(msgspec.Struct, frozen=True, tag="route"):
    """A request, and the replica that it went to."""

    now_s: float
    request: RoutedRequest
    replica: int  # or `NONE_UP` or `REFUSED`
    excluded: tuple[int, ...] = ()
    is_offer: bool = False  # it could be refused


class FirstToken(msgspec.Struct, frozen=True, tag="first_token"):
    request_id: str
    now_s: float = 0.0


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """`generated` is -1 if the request went away unanswered: its replica failed it, say."""

    request_id: str
    generated: int


class Reported(msgspec.Struct, frozen=True, tag="report"):
    replica: int
    report: ReplicaReport


class ReplicaChange(msgspec.Struct, frozen=True, tag="replica"):
    """`is_fresh`: its cache is empty."""

    replica: int
    is_up: bool
    is_fresh: bool = False


BalancerEvent = (
    RoutingLogHeader | ReplicaAdded | Routed | FirstToken | Ended | Reported | ReplicaChange
)


class Balancer:
    """Routes requests.

    Args:
        traits: of each replica.
        block_tokens: of the blocks that requests carry.
        seed: of the random choice between equal replicas.
        limits: the targets by which `offer` refuses requests; with one, each replica needs a law.
        index_limit: bounds the blocks that are remembered for each replica, as the router does; the
            lesser bound holds; 0: none.
        sink: gets every call and every choice.
    """

    def __init__(
        self,
        router: Router,
        traits: Sequence[ReplicaTraits],
        *,
        block_tokens: int = 16,
        seed: int = 0,
        limits: LatencyLimits = UNLIMITED,
        index_limit: int = 0,
        sink: Callable[[BalancerEvent], None] | None = None,
    ) -> None:
        self.router = router
        self._sink = sink
        self._admission = Admission(limits, router) if limits != UNLIMITED else None
        self.replicas: list[Replica] = []
        self._index_limit = index_limit
        self._index = PrefixIndex(router.index_ttl_s)
        self._homes: dict[str, Replica] = {}
        self._lengths: deque[int] = deque(maxlen=HISTORY)
        self._length_sum = 0
        rng = np.random.default_rng(seed)
        self._view = RouterView(self.replicas, self._index, block_tokens, rng)
        for each in traits:
            self._add(each)
        self._up = list(self.replicas)  # made anew at each change, not at each request

    def add(self, traits: ReplicaTraits) -> int:
        """A further replica, which is not up yet. Returns its index."""
        replica = self._add(traits)
        replica.is_up = False
        if self._sink is not None:
            has_law = traits.law is not None
            sizes = traits.capacity_tokens, traits.pass_tokens, traits.max_rows
            self._sink(ReplicaAdded(*sizes, has_law))
        return replica.index

    def _add(self, traits: ReplicaTraits) -> Replica:
        replica = Replica(len(self.replicas), traits)
        self.replicas.append(replica)
        # How many blocks to remember for it; 0: any number.
        size = self._view.block_tokens
        bound = max(self.router.index_blocks or traits.capacity_tokens // size, 0)
        if self._index_limit:
            bound = min(bound or self._index_limit, self._index_limit)
        self._index.add_replica(bound)
        return replica

    def route(
        self, request: RoutedRequest, now_s: float, excluded: Iterable[int] = ()
    ) -> int | None:
        """The replica for a request, which is from now on counted there; None if none is up.

        `excluded` are replicas that failed it before: they get it only if no other is up.
        """
        barred = tuple(excluded)
        choice = self._route(request, now_s, barred, None)
        assert not isinstance(choice, Overload)
        if self._sink is not None:
            self._sink(Routed(now_s, request, _logged(choice), barred))
        return choice

    def offer(
        self, request: RoutedRequest, now_s: float, excluded: Iterable[int] = ()
    ) -> int | Overload | None:
        """As `route`, for a new request: it may be refused by the forecast."""
        barred = tuple(excluded)
        choice = self._route(request, now_s, barred, self._admission)
        if self._sink is not None:
            self._sink(Routed(now_s, request, _logged(choice), barred, is_offer=True))
        return choice

    def _route(
        self,
        request: RoutedRequest,
        now_s: float,
        barred: tuple[int, ...],
        admission: Admission | None,
    ) -> int | Overload | None:
        view = self._view
        up = self._up
        able = [replica for replica in up if replica.index not in barred] or up if barred else up
        if not able:
            return None
        view.begin(request, able, now_s)
        index = self.router.choose(request, view)
        view.routed += 1
        if admission is not None:
            placed = admission.place(request, view, able, index)
            if isinstance(placed, Overload):
                return placed
            index = placed
        replica = self.replicas[index]
        sent = Sent(request, now_s, view.cached_tokens(request, replica))
        replica.add(sent)
        if view.outlook is not None:
            replica.expect(sent, view.outlook)
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
        if self._sink is not None:
            self._sink(FirstToken(request_id, now_s))

    def ended(self, request_id: str, generated: int) -> None:
        """A request ended with so many output tokens; -1: it was not answered to its end."""
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
        if self._sink is not None:
            self._sink(Ended(request_id, generated))

    def report(self, index: int, report: ReplicaReport) -> None:
        """A replica's own figures came."""
        self.replicas[index].report = report
        if self._sink is not None:
            self._sink(Reported(index, report))

    def change(self, index: int, *, is_up: bool, is_fresh: bool = False) -> None:
        """A replica may be sent requests from now on, or may not. It keeps those that it has."""
        replica = self.replicas[index]
        replica.is_up = is_up
        self._up = [replica for replica in self.replicas if replica.is_up]
        if is_fresh:
            self._index.clear(index)
            replica.report = None
        if self._sink is not None:
            self._sink(ReplicaChange(index, is_up, is_fresh))


def _logged(choice: int | Overload | None) -> int:
    """A choice as the log has it."""
    if choice is None:
        return NONE_UP
    return REFUSED if isinstance(choice, Overload) else choice


_decode = msgspec.json.Decoder(BalancerEvent | Lost).decode


def read_routes(lines: Iterable[bytes]) -> tuple[Balancer, list[BalancerEvent]]:
    """A fresh balancer as the log's header describes it, and the events of the log.

    The events end where lines are missing. Raises `InputError` for a log of another kind.
    """
    events: list[BalancerEvent] = []
    try:
        for event in map(_decode, whole_lines(lines)):
            if isinstance(event, Lost):
                break
            events.append(event)
    except msgspec.DecodeError as error:
        raise InputError(f"not a log of a router: {error}", "it is from --event-log") from None
    if not events or not isinstance(header := events[0], RoutingLogHeader):
        raise InputError("the log of a router begins with its header", "it is from --event-log")
    balancer = Balancer(
        make_router(header.router, header.parameters),
        [],
        block_tokens=header.block_tokens,
        seed=header.seed,
        limits=LatencyLimits(header.ttft_s or math.inf, header.e2e_s or math.inf),
        index_limit=header.index_limit,
    )
    return balancer, events


def replay_routes(
    events: Iterable[BalancerEvent],
    balancer: Balancer,
    law: PassLaw | None = None,
) -> Iterator[str]:
    """Make the logged calls on a fresh balancer and yield a line for each choice that differs.

    `law` is that of the replicas that the log adds.
    """
    for number, event in enumerate(events, start=1):
        match event:
            case RoutingLogHeader():
                pass
            case ReplicaAdded(capacity, pass_tokens, rows, has_law):
                own = law if has_law else None
                balancer.add(ReplicaTraits(capacity, pass_tokens, rows, own))
            case Routed(now_s, request, logged, excluded, is_offer):
                choose = balancer.offer if is_offer else balancer.route
                chosen = _logged(choose(request, now_s, excluded))
                if chosen != logged:
                    went = f"{request.request_id} went to replica {chosen}"
                    yield f"event {number}: {went}, logged {logged}"
            case FirstToken(request_id, now_s):
                balancer.first_token(request_id, now_s)
            case Ended(request_id, generated):
                balancer.ended(request_id, generated)
            case Reported(replica, report):
                balancer.report(replica, report)
            case ReplicaChange(replica, is_up, is_fresh):
                balancer.change(replica, is_up=is_up, is_fresh=is_fresh)
