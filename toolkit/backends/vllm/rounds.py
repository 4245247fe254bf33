"""Rounds out of the steps of an engine that schedules by itself: what it did is pieced together
from who got a token.

The engine asks before each of its steps (`plan`), is told who may run from now on (`StepOrders`), and
says afterwards what came of it (`stepped`). In between it is free: it prefills in chunks beside
others' decodes, leaves out whom it has no room for, drops the cache of one for another's. All of
that is in the `RoundResult`, so the scheduler's books hold what really is there, and a `Recorder`'s
log replays. The engine may be a step ahead: a step that it began before an order counts to the
round that the order began, and only those who are in both have a part in it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Batch, Job, Request, RoundResult


@dataclass(slots=True, frozen=True)
class StepOrders:
    """What the engine should do before its next step, by request ids, in this order.

    Those who `leave` lose their cache and wait; `pause` keeps the cache and the request out of the
    steps; who may `enter` is prefilled as soon as the engine can, first come first. Some who leave
    may have ended meanwhile.
    """

    leave: tuple[str, ...] = ()
    pause: tuple[str, ...] = ()
    resume: tuple[str, ...] = ()
    enter: tuple[str, ...] = ()


class Steps:
    """Drives a scheduler whose one worker is the engine.

    Args:
        scheduler: in its first state, with one worker; its policy is continuous and nothing is swapped to host memory.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        (self._worker,) = scheduler.workers
        self._emits = int(
            self._worker.latency.prefill_emits_token
        )  # books give it at once, this engine with a step
        self._entering: set[str] = set()  # may run, and have no token since
        self._news = False  # whether the policy could decide otherwise than when it was asked last
        self._begin()

    def submit(self, request: Request, now_s: float) -> bool:
        """A request arrives. False: it can never fit, by the scheduler's books, which know no more
        of it.
        """
        if self.scheduler.submit(request, now_s) is not None:
            return False
        self._news = True
        return True

    def cancel(self, request_id: str, now_s: float) -> None:
        """It was aborted; the engine has dropped its cache already."""
        self.scheduler.cancel(request_id, now_s)
        self._entering.discard(request_id)
        self._news = self._gone = True

    def drop(self, request_id: str) -> None:
        """The engine dropped its cache to make room, so that it waits again."""
        worker = self._worker
        if any(job.request_id == request_id for job in (*worker.residents.jobs, *worker.held.jobs)):
            self._dropped.append(request_id)
        self._entering.discard(request_id)

    def plan(self, now_s: float) -> StepOrders | None:
        """Who may run from now on; None: those who might before."""
        batch = self._worker.running
        if batch is not None:
            if self._news:
                self._news = False
                self.scheduler.tick(now_s)
                self.scheduler.take_interrupts()  # `batch.interrupted` says it
            if not (self._dropped or self._gone or self._should_stop(batch)):
                return None
            self._complete(batch, (), now_s)
        self._news = False
        started = self.scheduler.tick(now_s)
        return self._orders(started[0]) if started else None

    def stepped(self, tokens: Collection[str], ended: Sequence[str], now_s: float) -> None:
        """The engine has taken a step: who got a token in it, and who of them ended with it."""
        batch = self._worker.running
        if batch is None or not tokens:
            return
        for job in self._worker.residents.jobs:
            request_id = job.request_id
            if request_id in self._entering:
                if request_id in tokens:
                    self._entering.discard(request_id)
                    self._joined[request_id] = self._steps + self._emits
            elif request_id not in tokens:
                self._missed[request_id] = 1
        self._steps += 1
        if ended or self._missed or self._steps >= batch.steps or self._should_stop(batch):
            self._complete(batch, ended, now_s)

    def _should_stop(self, batch: Batch) -> bool:
        return (
            batch.interrupted
            and (self._worker.residents.steps + self._steps) % batch.stop_every == 0
        )

    def _begin(self) -> None:
        self._steps = 0  # of this round, as are all below
        self._joined: dict[str, int] = {}
        self._missed: dict[str, int] = {}
        self._dropped: list[str] = []
        self._gone = (
            False  # whether one was aborted: there may be nobody left who could take a step
        )

    def _orders(self, batch: Batch) -> StepOrders:
        entering = _ids(batch.jobs)
        self._entering.update(entering)
        leaving = _ids(batch.evict) + _ids(batch.release)
        self._entering.difference_update(leaving)
        if batch.moves is None:
            return StepOrders(leave=leaving, enter=entering)
        return StepOrders(leaving, _ids(batch.moves.pause), _ids(batch.moves.resume), entering)

    def _complete(self, batch: Batch, ended: Sequence[str], now_s: float) -> None:
        result = RoundResult(
            batch.batch_id,
            batch.worker,
            self._steps,
            tuple(ended),
            joined=tuple(self._joined.items()),
            missed=tuple(self._missed.items()),
            dropped=tuple(self._dropped),
        )
        self.scheduler.complete(result, now_s)
        self._begin()


def _ids(jobs: Sequence[Job]) -> tuple[str, ...]:
    return tuple(job.request_id for job in jobs)


# The queue of an engine that schedules by itself, with a gate: it sees those whom our policy lets
# in, in its order.
#
# Written for vLLM's queues (`vllm.v1.core.sched.request_queue.RequestQueue`), which it stands in
# for.


class Queued(Protocol):
    """A request as far as a queue goes."""

    @property
    def request_id(self) -> str: ...


T = TypeVar("T", bound=Queued)


class AdmissionGate(Generic[T]):
    """Requests that wait; true while the gate is open for one of them, and `pop_request` takes only
    such ones.

    Length, iteration and removal are about all who wait.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, T] = OrderedDict()
        self._open: set[str] = set()  # who may come in; also those who are in
        self._ready: OrderedDict[str, None] = (
            OrderedDict()
        )  # who may come in and waits, in their order

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
        """Wait before all others: back from an attempt to come in that could not be, or from
        running.
        """
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
