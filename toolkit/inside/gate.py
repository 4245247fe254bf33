"""The queue of an engine that schedules by itself, with a gate: it sees those whom our policy lets in, in its order.

Written for vLLM's queues (`vllm.v1.core.sched.request_queue.RequestQueue`), which it stands in for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar


class Queued(Protocol):
    """A request as far as a queue goes."""

    @property
    def request_id(self) -> str: ...


T = TypeVar("T", bound=Queued)


class Gate(Generic[T]):
    """Requests that wait; true while the gate is open for one of them, and `pop_request` takes only such ones.

    Length, iteration and removal are about all who wait.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, T] = OrderedDict()
        self._open: set[str] = set()  # who may come in; also those who are in
        self._ready: OrderedDict[str, None] = OrderedDict()  # who may come in and waits, in their order

    def open(self, request_ids: Iterable[str]) -> None:
        """These may come in, after those who may already."""
        for request_id in request_ids:
            self._open.add(request_id)
            if request_id in self._waiting:
                self._ready[request_id] = None

    def close(self, request_id: str) -> None:
        """This one may not come in, nor come in again."""
        self._open.discard(request_id)
        self._ready.pop(request_id, None)

    def add_request(self, request: T) -> None:
        """Wait behind all others."""
        self._waiting[request.request_id] = request
        if request.request_id in self._open:
            self._ready[request.request_id] = None

    def prepend_request(self, request: T) -> None:
        """Wait before all others: back from an attempt to come in that could not be, or from running."""
        self.add_request(request)
        self._waiting.move_to_end(request.request_id, last=False)
        if request.request_id in self._ready:
            self._ready.move_to_end(request.request_id, last=False)

    def prepend_requests(self, requests: Iterable[T]) -> None:
        """One after the other before all others."""
        for request in requests:
            self.prepend_request(request)

    def peek_request(self) -> T:
        """The next who may come in. `IndexError` where there is none."""
        for request_id in self._ready:
            return self._waiting[request_id]
        raise IndexError("nobody who waits may come in")

    def pop_request(self) -> T:
        """The next who may come in, who waits no longer."""
        request = self.peek_request()
        self.remove_request(request)
        return request

    def remove_request(self, request: T) -> None:
        """It waits no longer."""
        del self._waiting[request.request_id]
        self._ready.pop(request.request_id, None)

    def remove_requests(self, requests: Iterable[T]) -> None:
        """Those of them who wait, wait no longer."""
        for request in list(requests):
            if request.request_id in self._waiting:
                self.remove_request(request)

    def __bool__(self) -> bool:
        return bool(self._ready)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._waiting.values()))
