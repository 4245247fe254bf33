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
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Pass, PassResult, Refusal, Request
from toolkit.sim.arrivals import DueRequests, arrivals_of
from toolkit.sim.clock import ENDS, Clock
from toolkit.sim.ledger import RequestOutcome

# Wake-ups in a row that start nothing while nothing runs; no policy needs as many.
MAX_IDLE_WAKES: Final = 1000


class SimulationStalledError(LlmctlError):
    """Requests wait, but no event will ever come."""


class VirtualWorker(Protocol):
    """A worker on virtual time.

    Attributes:
        known_s: when the result of its pass is known: which rows end, and when. Clients may see
            these ends before the pass ends.
    """

    known_s: float

    def run(self, batch: Pass, now_s: float) -> float:
        """Start a pass. Returns when it will end, in seconds, unless it is interrupted."""

    def finish(self) -> PassResult:
        """Return the result of the pass, once it is known."""

    def interrupt(self, now_s: float) -> float:
        """Stop a pass that keeps caches at its next allowed step. Returns the new end, in
        seconds.
        """


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
    arrivals: DueRequests | None = None,
    outcomes: Sequence[RequestOutcome] = (),
    delay_s: float = 0.0,
) -> list[Refusal]:
    """Drive `scheduler` through `requests` (sorted by arrival) until all have ended; returns the
    refusals. Each job's number is its request's place.

    Without `drain` it stops when the last request has been admitted. Raises
    `SimulationStalledError` with the state if the scheduler leaves requests waiting for ever.

    Args:
        arrivals: when each request comes; None: at its own time.
        outcomes: of the requests, as the workers write them; needed where requests follow others.
        delay_s: by which a client sees a last token later than the scheduler.
    """
    if arrivals is None:
        arrivals = arrivals_of([request.arrival_s for request in requests], None, 0)
    driver = SimulatedDriver(
        scheduler, list(requests), list(workers), arrivals, list(outcomes), delay_s, drain
    )
    driver.run()
    return driver.refused


class SimulatedDriver(Clock):
    """Makes the calls of the live driver, at the times of the virtual clock.

    A pass ends at an event with the pass's id as its order, and the worker as its index. The
    scheduler ticks when all that happens at one time has happened, and when it asked for that. In a
    closed loop, clients see requests end, and then send the following ones.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        requests: list[Request],
        workers: list[VirtualWorker],
        arrivals: DueRequests,
        outcomes: list[RequestOutcome],
        delay_s: float,
        drain: bool,
    ) -> None:
        super().__init__(arrivals)
        self._scheduler = scheduler
        self._requests = requests
        self._workers = workers
        self._outcomes = outcomes
        self._delay_s = delay_s
        self._drain = drain
        self._follows = arrivals.follow
        self._numbers: dict[str, int] = {}
        if arrivals.follow:
            self._numbers = {request.request_id: k for k, request in enumerate(requests)}
        self._ends_s = [math.inf] * len(workers)  # when the pass of each ends
        self._results: dict[int, PassResult] = {}  # of passes that run, where clients have seen it
        self._idle_wakes = 0
        self.refused: list[Refusal] = []

    def run(self) -> None:
        """Serve all requests. Raises SimulationStalledError where some are left waiting."""
        super().run()
        scheduler = self._scheduler
        if scheduler.jobs if self._drain else scheduler.waiting_jobs:
            raise _stalled(scheduler, len(self._requests), math.inf)
        self.refused += scheduler.take_refusals()

    def happen(self, rank: int, order: int, index: int) -> None:
        if self.now_s == self._ends_s[index]:
            self._complete(index)
        elif self._follows and self._ends_s[index] < math.inf:
            self._tell(index)

    def arrive(self, number: int, came_s: float) -> None:
        request = self._requests[number]
        if self._follows:
            request = replace(request, arrival_s=came_s)
        refusal = self._scheduler.submit(request, self.now_s, number)
        if refusal is not None:
            self._refuse(refusal)
        self._idle_wakes = 0
        self.ticks_s = self.now_s

    def tick(self) -> None:
        scheduler = self._scheduler
        self._idle_wakes += 1
        for batch in scheduler.tick(self.now_s):
            end_s = self._workers[batch.worker].run(batch, self.now_s)
            self._end_at(batch.worker, end_s, batch.pass_id)
            self._idle_wakes = 0
        if scheduler.interrupts:
            for index in scheduler.take_interrupts():
                end_s = self._workers[index].interrupt(self.now_s)
                if self._ends_s[index] < math.inf:
                    self._end_at(index, end_s, -1)
        if not self._drain and not self.arrivals.left and not scheduler.waiting_jobs:
            self.events.clear()
            self.ticks_s = math.inf
            return
        if self._idle_wakes > MAX_IDLE_WAKES:
            raise _stalled(scheduler, len(self._requests), self.now_s)
        self.ticks_s = max(scheduler.wake_at_s, self.now_s)

    def _end_at(self, index: int, end_s: float, order: int) -> None:
        """A worker's pass ends at `end_s`."""
        if end_s != self._ends_s[index]:
            self._ends_s[index] = end_s
            self.add(end_s, ENDS, order, index)
        if self._follows and self._workers[index].known_s < end_s:
            self.add(self._workers[index].known_s, ENDS, order, index)

    def _tell(self, index: int) -> None:
        """The result of a pass that still runs may be known: then clients see the ends."""
        if self.now_s == self._workers[index].known_s and index not in self._results:
            result = self._results[index] = self._workers[index].finish()
            self._show(result, self._ends_s[index])

    def _show(self, result: PassResult, end_s: float) -> None:
        """Let clients see the ends in a pass. The scheduler learns of them at `end_s`."""
        by_time: dict[float, list[int]] = {}
        for request_id in result.ended:
            number = self._numbers[request_id]
            outcome = self._outcomes[number]
            last_s = max(outcome.last_token_s, outcome.first_token_s)
            by_time.setdefault(last_s, []).append(number)
        for last_s, together in by_time.items():
            self.arrivals.ended(together, last_s, self._delay_s, end_s)

    def _complete(self, index: int) -> None:
        self._ends_s[index] = math.inf
        if index in self._results:
            result = self._results.pop(index)
        else:
            result = self._workers[index].finish()
            if self._follows:
                self._show(result, self.now_s)
        self._scheduler.complete(result, self.now_s)
        if self._follows:
            for refusal in self._scheduler.take_refusals():
                self._refuse(refusal)
        self._idle_wakes = 0
        self.ticks_s = self.now_s

    def _refuse(self, refusal: Refusal) -> None:
        self.refused.append(refusal)
        if self._follows:
            number = self._numbers[refusal.request_id]
            self.arrivals.ended([number], self.now_s, 0.0, self.now_s)


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
