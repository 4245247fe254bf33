"""When requests come: at the times of the trace, or in a closed loop after others have ended.

The clocks of a simulation (`toolkit.sim.loop`, `toolkit.sim.replicas`) take requests from a
`DueRequests`, and tell it of each end that a client will see. In a closed loop
of sessions, a turn comes when the turn before has ended and its client has thought about it. With
`FixedConcurrency` the next request of the trace comes when any one ends, as in
`vllm bench serve --max-concurrency`.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from heapq import heapify, heappop, heappush

from toolkit.traces.types import Sessions

Later = tuple[int, float]  # a request's number, and its think time in seconds


class DueRequests:
    """Requests in the order in which they come: by time, then by number.

    Args:
        arrival_s: the time of each request, by number; requests that follow others get theirs.
        first: the numbers of the requests that come at these times, ascending.
        turns: of a request, those that follow it.

    Attributes:
        next_s: when the next request comes; infinity: none comes before another has ended.
        left: requests that have not come.
        follow: whether requests follow the ends of others.
    """

    def __init__(
        self,
        arrival_s: list[float],
        first: Sequence[int],
        turns: Mapping[int, Sequence[Later]],
    ) -> None:
        self._arrival_s = arrival_s
        self._turns = turns
        self._coming = [(arrival_s[number], number) for number in first]  # a heap
        heapify(self._coming)
        self.follow = bool(turns)
        self.left = len(first) + sum([len(after) for after in turns.values()])
        self.next_s = math.inf
        self._look()

    def take(self) -> int:
        """Return the number of the request that comes at `next_s`."""
        at_s, number = heappop(self._coming)
        self._arrival_s[number] = at_s
        self.left -= 1
        self._look()
        return number

    def ended(
        self, numbers: Sequence[int], end_s: float, delay_s: float, known_s: float = 0.0
    ) -> None:
        """Requests end together at `end_s`, and their clients see that `delay_s` later.

        No turn that follows comes before `known_s`, when the scheduler knows of the end.
        """
        for number in numbers:
            for later, think_s in self._turns.get(number, ()):
                heappush(self._coming, (max(end_s + (delay_s + think_s), known_s), later))
        self._look()

    def _look(self) -> None:
        """Set when the next request comes."""
        self.next_s = self._coming[0][0] if self.left and self._coming else math.inf


class FixedConcurrency(DueRequests):
    """A fixed number of requests at once, in order of their numbers: the next one comes when any
    one ends.

    Args:
        arrival_s: gets the time of each request when it comes.
        concurrency: requests at once.
    """

    def __init__(self, arrival_s: list[float], concurrency: int) -> None:
        super().__init__(arrival_s, [], {})
        # when each place becomes free; the request that takes it is known only then
        self._coming = [(0.0, 0)] * concurrency
        self._last_s = 0.0
        self.follow = True
        self.left = len(arrival_s)
        self._look()

    def take(self) -> int:
        number = len(self._arrival_s) - self.left
        # a pass with several prefills tells of an end within it when all are over: too late for a
        # place that another request has taken meanwhile
        self._last_s = max(heappop(self._coming)[0], self._last_s)
        self._arrival_s[number] = self._last_s
        self.left -= 1
        self._look()
        return number

    def ended(
        self, numbers: Sequence[int], end_s: float, delay_s: float, known_s: float = 0.0
    ) -> None:
        """The front passes on the ends of one pass, and the requests that follow, one after the
        other: evenly, and on average `delay_s` later. Otherwise requests of one length that began
        together would all begin together for ever.
        """
        for place in range(len(numbers)):
            heappush(self._coming, (end_s + delay_s * (2 * place + 1) / len(numbers), 0))
        self._look()


def arrivals_of(
    arrival_s: list[float],
    turns: Sessions | None,
    concurrency: int,
    refused: Container[int] = (),
) -> DueRequests:
    """Return when each request comes; `arrival_s` has and gets the times of all.

    Args:
        turns: the sessions of a closed loop.
        concurrency: requests at once; 0: not fixed.
        refused: requests that do not come, except where others follow them.
    """
    if concurrency:
        return FixedConcurrency(arrival_s, concurrency)
    later: dict[int, list[Later]] = {}
    numbers = range(len(arrival_s))
    previous = [-1] * len(arrival_s)
    if turns is not None:
        previous = turns.previous.tolist()
        think_s = turns.think_s.tolist()
        for number in numbers:
            if previous[number] >= 0:
                later.setdefault(previous[number], []).append((number, think_s[number]))
    first = [
        number
        for number in numbers
        if previous[number] < 0 and (number not in refused or number in later)
    ]
    return DueRequests(arrival_s, first, later)
