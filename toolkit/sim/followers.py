"""Closed loops: which requests start when one ends.

In a closed loop of sessions, a turn starts when the turn before has ended and its client has
thought about it. At a fixed concurrency, the next request of the trace starts when any one ends, as
in `vllm bench serve --max-concurrency`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

NEXT = -1  # stands for the next request that waits, whichever that is when it starts

Later = tuple[int, float]  # a request's number, and its think time in seconds


class Followers:
    """The requests that start after others.

    Args:
        turns: of a request, the turns of its session that follow it.
        waiting: at a fixed concurrency, the requests after the first ones, in their order.

    Attributes:
        later: the numbers of all requests that start after another.
    """

    def __init__(self, turns: Mapping[int, Sequence[Later]], waiting: Sequence[int] = ()) -> None:
        self._turns = dict(turns)
        self._waiting = deque(waiting)
        self._promised = 0  # of those that wait
        self.later = set(waiting)
        for after in self._turns.values():
            self.later.update([number for number, _ in after])

    def __bool__(self) -> bool:
        return bool(self.later)

    def followed(self) -> set[int]:
        """The requests that a turn follows. At a fixed concurrency it is not known before."""
        return set(self._turns)

    def after(self, number: int) -> Sequence[Later]:
        """What starts when this request ends; `NEXT` for the next that waits."""
        if self._promised < len(self._waiting):
            self._promised += 1
            return [(NEXT, 0.0)]
        return self._turns.get(number, ())

    def starts(self, number: int) -> int:
        """The number of the request that starts now. `NEXT` becomes the next that waits."""
        if number != NEXT:
            return number
        self._promised -= 1
        return self._waiting.popleft()
