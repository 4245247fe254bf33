"""What runs on the workers: batches are sent, and what workers say of them becomes tokens of requests and results.

Nothing is decided here, and nothing reaches a client: the driver says what starts, delivers the tokens, and hands the
results to the scheduler. A slice's rows go by their places in the batch, a round's by numbers that `KeptRows` gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from toolkit.engines.protocol import FinishReason
from toolkit.sched.types import Batch, BatchResult, RoundResult
from toolkit.serve.live import Flight, Live, merge
from toolkit.serve.rounds import KeptRows
from toolkit.workers.protocol import BatchDone, BatchProgress, RoundDone, Workers


class News(NamedTuple):
    """New tokens of a request, and how it ended, or ''."""

    live: Live
    tokens: list[int]
    finish: FinishReason


class UnderWay:
    """The batches that run now, at most one per worker.

    Args:
        workers: who run them.
        live_of: the request of an id, while it is on its way.
    """

    def __init__(self, workers: Workers, live_of: Callable[[str], Live]) -> None:
        self.flights: dict[int, Flight] = {}  # by worker
        self._workers = workers
        self._live_of = live_of
        self._kept = [KeptRows() for _ in range(workers.size)]  # of workers that run rounds
        self._just_freed: set[int] = set()

    @property
    def rows_in_slices(self) -> int:
        """Requests that slices run now."""
        return sum(not live.status for flight in self.flights.values() for live in flight.lives)

    def launch(self, batches: Iterable[Batch]) -> list[Live]:
        """Send what a tick wants started; whose requests begin to run. A worker it had nothing for waits for work."""
        started: list[Live] = []
        for batch in batches:
            lives = tuple(self._live_of(job.request_id) for job in batch.jobs)
            follows = batch.worker in self._just_freed
            if batch.keep_cache:
                self._launch_round(batch, Flight(batch, (), [], follows))
            else:
                self._launch_slice(batch, Flight(batch, lives, [0] * len(lives), follows))
            started += lives
        self._just_freed.clear()
        return started

    def _launch_slice(self, batch: Batch, flight: Flight) -> None:
        self.flights[batch.worker] = flight
        for live in flight.lives:
            live.flight = flight
        rows = [live.row() for live in flight.lives]
        self._workers.run(batch.worker, batch.batch_id, rows, batch.steps, batch.estimated_s)

    def _launch_round(self, batch: Batch, flight: Flight) -> None:
        self.flights[batch.worker] = flight
        plan = self._kept[batch.worker].begin(batch, self._live_of)
        self._workers.run_round(batch.worker, batch.batch_id, plan, batch.estimated_s)

    def interrupt(self, worker: int) -> None:
        """Its round should end at the next step where it may."""
        self._workers.interrupt(worker, self.flights[worker].batch.batch_id)

    def unwanted(self, live: Live) -> None:
        """Nobody reads what a slice gives for it."""
        flight = live.flight
        if flight:
            self._workers.cancel(flight.batch.worker, flight.batch.batch_id, (live.ask.request_id,))

    def progress(self, event: BatchProgress) -> list[News]:
        """Tokens that came while a batch runs; of one that is over, nothing."""
        flight = self.flights.get(event.worker)
        if flight is None or flight.batch.batch_id != event.batch_id:
            return []
        news = []
        for row, (tokens, finish) in merge(event.steps).items():
            if flight.batch.keep_cache:
                live = self._kept[event.worker].receive(row, len(tokens), ended=bool(finish))
            else:
                flight.received[row] += len(tokens)
                live = flight.lives[row]
            news.append(News(live, tokens, finish))
        return news

    def slice_done(self, event: BatchDone) -> tuple[Flight, list[News]]:
        """A slice is over: what it was, and the tokens that had not come. After these comes `slice_result`."""
        flight = self._land(event.worker)
        for live in flight.lives:
            live.flight = None
        rows = zip(flight.lives, flight.received, event.output.tokens, event.output.finish, strict=True)
        return flight, [News(live, list(tokens[received:]), finish) for live, received, tokens, finish in rows]

    def round_done(self, event: RoundDone) -> tuple[Flight, RoundResult]:
        """A round is over, whose tokens have all come: what it was, and its result."""
        flight, kept = self._land(event.worker), self._kept[event.worker]
        if event.output is None:
            return flight, kept.crashed(flight.batch)
        return flight, kept.result(flight.batch, event.output)

    def _land(self, worker: int) -> Flight:
        self._just_freed.add(worker)
        return self.flights.pop(worker)


def slice_result(flight: Flight, event: BatchDone) -> BatchResult:
    """A slice in the scheduler's words, once its last tokens were delivered: a stop string ends a request, too.

    What came behind a stop string does not count.
    """
    kept = zip(flight.lives, flight.batch.jobs, strict=True)
    return BatchResult(
        event.batch_id,
        event.worker,
        tuple(len(live.tokens) - job.generated for live, job in kept),
        tuple(bool(live.status) for live in flight.lives),
        event.failure,
    )
