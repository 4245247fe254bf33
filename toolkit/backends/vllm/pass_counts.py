"""How long an engine's passes took and how long the fitted law says they take; when its requests
had their tokens.

Both are sums, under the names that llmctl's own server gives them: whoever reads one server's reads
the other's. A pass counts from its beginning to its end, and what lies between it and the next
where requests were there all the time.

A request that arrives during a pass is seen by the engine when that is over. When it arrived nobody
tells; on average it was in the middle between two looks, so that is what is taken. What is before,
HTTP and tokenizing, and what comes behind a pass's end, is the front's.
"""

from __future__ import annotations

from typing import Protocol

from toolkit.estimators.steps import StepLaw, shape_of_rows
from toolkit.sched.iterations import LoggedPass


class Sums(Protocol):
    """Where it is counted, in seconds."""

    def batch(self, took_s: float, predicted_s: float) -> None:
        """A pass, with what lay between it and the one before."""
        ...

    def ttft(self, seconds: float) -> None:
        """A request had its first token so long after it arrived."""
        ...

    def e2e(self, seconds: float) -> None:
        """It had its last."""
        ...


class PassCounts:
    """The books between an engine's scheduler and the sums. Times are of one clock, in seconds."""

    def __init__(self, law: StepLaw, sums: Sums) -> None:
        self._law, self._sums = law, sums
        self._arrived_s: dict[str, float] = {}  # of requests that have not ended
        self._first: set[str] = set()  # of them, those without a token
        self._looked_s: float | None = (
            None  # when the engine looked for requests last; None: nobody was there since
        )
        self._ended_s: float | None = None  # the last pass, in the same way
        self._rows = 0  # of the last pass

    def arrived(self, request_id: str, now_s: float) -> None:
        """The engine sees a request."""
        looked_s = now_s if self._looked_s is None else self._looked_s
        self._arrived_s[request_id] = (looked_s + now_s) / 2
        self._first.add(request_id)

    def looked(self, now_s: float) -> None:
        """It has taken in who was there, and plans a pass."""
        if self._arrived_s:
            self._looked_s = now_s

    def gone(self, request_id: str) -> None:
        """A request was aborted."""
        self._first.discard(request_id)
        if self._arrived_s.pop(request_id, None) is not None:
            self._rest()

    def passed(self, one: LoggedPass) -> None:
        """A pass is over, and its tokens are there."""
        if one.rows:
            self._count(one)
        for row in one.rows:
            if row.request_id in self._first and row.computed + row.new >= row.prompt_tokens:
                self._first.discard(row.request_id)
                self._sums.ttft(one.end_s - self._arrived_s[row.request_id])
        for request_id in one.ended:
            arrived_s = self._arrived_s.pop(request_id, None)
            if arrived_s is not None:
                self._sums.e2e(one.end_s - arrived_s)
        self._rest()

    def _count(self, one: LoggedPass) -> None:
        shape = shape_of_rows(one.rows)
        start_s, predicted_s = one.start_s, self._law.forward_s(shape)
        if self._ended_s is not None:
            start_s = self._ended_s
            predicted_s += self._law.after_s(self._rows)
        self._sums.batch(one.end_s - start_s, predicted_s)
        self._ended_s, self._rows = one.end_s, shape.rows

    def _rest(self) -> None:
        if not self._arrived_s:
            self._looked_s = self._ended_s = None
