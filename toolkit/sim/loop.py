"""The scheduler on a virtual clock: arrivals, completions and wake-ups in order of time.

The loop is the same as the live driver's: report events to the scheduler, tick it, and start the
batches that it returns.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, Protocol

from toolkit.errors import LlmctlError
from toolkit.interrupts import check
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Pass, PassResult, Refusal, Request
from toolkit.sim.arrivals import DueRequests
from toolkit.sim.ledger import RequestOutcome

# Wake-ups in a row that start nothing while nothing runs; no policy needs as many.
MAX_IDLE_WAKES = 1000
CHECK_EVERY: Final = 64  # events between two looks for Ctrl-C


class SimulationStalledError(LlmctlError):
    """Requests wait, but no event will ever come."""


class PassEnds:
    """When each worker's batch ends. A worker has one end: a new one replaces it.

    `next_s` is when the next batch ends; infinity: none runs.
    """

    def __init__(self, workers: int) -> None:
        self.next_s = math.inf
        self._at_s = [math.inf] * workers
        self._batch_ids = [0] * workers

    def put(self, worker: int, at_s: float, pass_id: int) -> None:
        """The worker's batch ends then."""
        self._at_s[worker] = at_s
        self._batch_ids[worker] = pass_id
        self.next_s = min(self._at_s)

    def of(self, worker: int) -> float:
        """When what a worker runs ends; infinity: it runs nothing."""
        return self._at_s[worker]

    def take(self) -> int:
        """Return the worker of the next batch that ends; from now on the worker runs nothing. Of
        passes with one end the smallest id is the first; an interrupted pass has the id -1.
        """
        found = self._at_s.index(self.next_s)
        if self._at_s.count(self.next_s) > 1:
            at_once = [worker for worker, at_s in enumerate(self._at_s) if at_s == self.next_s]
            found = min(at_once, key=self._batch_ids.__getitem__)
        self._at_s[found] = math.inf
        self.next_s = min(self._at_s)
        return found


class VirtualWorker(Protocol):
    """A worker on virtual time."""

    def run(self, batch: Pass, now_s: float) -> float:
        """Start a pass. Returns when it will end, in seconds, unless it is interrupted."""

    def finish(self) -> PassResult:
        """Return the result of the pass, which has ended."""

    def interrupt(self, now_s: float) -> float:
        """Stop a pass that keeps caches at its next allowed step. Returns the new end, in
        seconds.
        """


class Clients:
    """The clients of a closed loop: they see requests end, and then send those that follow.

    Args:
        arrivals: gets the ends.
        requests: all of the trace, by number.
        outcomes: of the requests, as the workers write them.
        delay_s: by which a client sees a last token later than the scheduler.
        continuous: whether passes keep their caches.
    """

    def __init__(
        self,
        arrivals: DueRequests,
        requests: Sequence[Request],
        outcomes: list[RequestOutcome],
        delay_s: float,
        continuous: bool,
    ) -> None:
        self.arrivals = arrivals
        self._continuous = continuous
        self._outcomes = outcomes
        self._delay_s = delay_s
        self._numbers = {request.request_id: number for number, request in enumerate(requests)}

    def started(self, batch: Pass, end_s: float) -> None:
        """A batch runs until `end_s`. A static worker knows already which rows will have ended, and
        when: perhaps long before that.
        """
        if not self._continuous:
            ended = [job.number for job in batch.jobs if self._outcomes[job.number].ok]
            self._saw_ends(ended, end_s)

    def completed(self, result: PassResult, now_s: float) -> None:
        """A pass has ended, and some of its rows with it."""
        if self._continuous:
            self._saw_ends([self._numbers[request_id] for request_id in result.ended], now_s)

    def refused(self, refusal: Refusal, now_s: float) -> None:
        """A client learns that its request is not served."""
        self.arrivals.ended([self._numbers[refusal.request_id]], now_s, 0.0, now_s)

    def _saw_ends(self, ended: Sequence[int], known_s: float) -> None:
        by_time: dict[float, list[int]] = {}
        for number in ended:
            outcome = self._outcomes[number]
            last_s = max(outcome.last_token_s, outcome.first_token_s)
            by_time.setdefault(last_s, []).append(number)
        for last_s, together in by_time.items():
            self.arrivals.ended(together, last_s, self._delay_s, known_s)


@contextmanager
def collector_off() -> Iterator[None]:
    """Switch Python's garbage collector off until the block ends, unless it was off before.

    A simulation makes many objects and few reference cycles: looking for these would be a fifth of
    its time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def run(
    scheduler: Scheduler,
    requests: Sequence[Request],
    workers: Sequence[VirtualWorker],
    *,
    drain: bool = True,
    clients: Clients | None = None,
) -> list[Refusal]:
    """Drive `scheduler` through `requests` (sorted by arrival) until all have ended; returns the
    refusals. Each job's number is its request's place. In a closed loop, `clients` say when each
    request comes.

    Without `drain` it stops when the last request has been admitted. Raises
    `SimulationStalledError` with the state if the scheduler leaves requests waiting for ever.
    """
    with collector_off():  # no request makes a reference cycle
        return SimulatedDriver(scheduler, list(requests), list(workers), clients).run(drain)


class SimulatedDriver:
    """Makes the calls of the live driver, at the times of the virtual clock."""

    def __init__(
        self,
        scheduler: Scheduler,
        requests: list[Request],
        workers: list[VirtualWorker],
        clients: Clients | None,
    ) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self._workers = workers
        self._clients = clients
        if clients is None:
            arrival_s = [request.arrival_s for request in requests]
            self._arrivals = DueRequests(arrival_s, range(len(requests)), {})
        else:
            self._arrivals = clients.arrivals
        self._ends = PassEnds(len(workers))
        self._refused: list[Refusal] = []

    def run(self, drain: bool) -> list[Refusal]:
        """Go from event to event until no request is left; the refusals."""
        scheduler = self._scheduler
        arrivals = self._arrivals
        ends = self._ends
        idle_wakes = 0
        events = 0
        while True:
            events += 1
            if events % CHECK_EVERY == 0:
                check()
            now_s = min(ends.next_s, arrivals.next_s)
            wake_s = scheduler.wake_at_s
            if wake_s < now_s:
                now_s = wake_s
                idle_wakes += 1
            elif now_s == math.inf:
                break
            else:
                idle_wakes = 0
            while ends.next_s <= now_s:
                self._complete(ends.take(), now_s)
            while arrivals.next_s <= now_s:
                self._submit(arrivals.next_s, arrivals.take(), now_s)
            for batch in scheduler.tick(now_s):
                self._start(batch, now_s)
                idle_wakes = 0
            if scheduler.interrupts:
                for index in scheduler.take_interrupts():
                    self._interrupt(index, now_s)
            if not drain and not arrivals.left and not scheduler.waiting_jobs:
                return self._refused + scheduler.take_refusals()
            if idle_wakes > MAX_IDLE_WAKES:
                break
        if scheduler.jobs:
            raise _stalled(scheduler, len(self._requests), now_s)
        return self._refused + scheduler.take_refusals()

    def _complete(self, index: int, now_s: float) -> None:
        result = self._workers[index].finish()
        self._scheduler.complete(result, now_s)
        if self._clients is not None:
            self._clients.completed(result, now_s)
            for refusal in self._scheduler.take_refusals():
                self._refuse(refusal, now_s)

    def _submit(self, came_s: float, number: int, now_s: float) -> None:
        request = self._requests[number]
        if self._clients is not None:
            request = replace(request, arrival_s=came_s)
        refusal = self._scheduler.submit(request, now_s, number)
        if refusal is not None:
            self._refuse(refusal, now_s)

    def _refuse(self, refusal: Refusal, now_s: float) -> None:
        self._refused.append(refusal)
        if self._clients is not None:
            self._clients.refused(refusal, now_s)

    def _start(self, batch: Pass, now_s: float) -> None:
        end_s = self._workers[batch.worker].run(batch, now_s)
        self._ends.put(batch.worker, end_s, batch.pass_id)
        if self._clients is not None:
            self._clients.started(batch, end_s)

    def _interrupt(self, index: int, now_s: float) -> None:
        end_s = self._workers[index].interrupt(now_s)
        known_s = self._ends.of(index)
        if known_s < math.inf and known_s != end_s:
            self._ends.put(index, end_s, -1)


def _stalled(scheduler: Scheduler, count: int, now_s: float) -> SimulationStalledError:
    """The error for requests left at `now_s`; at infinity no event was left."""
    when = "" if now_s == math.inf else f" at {now_s:.6g} s"
    running = scheduler.running_jobs
    memory = max(worker.capacity_tokens for worker in scheduler.workers)
    return SimulationStalledError(
        f"the simulation stalled{when}: {scheduler.jobs:,} of {count:,} requests have not ended, "
        f"{scheduler.waiting_jobs:,} wait and {running:,} run; a worker's memory holds "
        f"{memory:,} tokens",
        f"policy '{scheduler.policy.name}' starts nothing; check its parameters against that "
        "memory",
    )
