"""The scheduler on the real clock: asyncio moves requests, batches and tokens between clients,
scheduler and workers.

All decisions are the scheduler's. The driver tells it what happened, starts the batches that it
wants (`underway`), and passes tokens on as they come (`lives`). Each request's tokens are kept, so
a slice that was lost goes on from what its client has seen. Everything runs on one event loop and
nothing here waits for a client.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

from toolkit.engines.protocol import FinishReason, Round, RoundOutput
from toolkit.errors import EngineError
from toolkit.files.profile import EngineFacts
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Batch, BatchResult, Failure, Job, Request, RoundResult
from toolkit.serve.forecast import UNLIMITED, Forecast, LatencyLimits
from toolkit.serve.live import (
    ActiveRequest,
    ActiveRequests,
    GenerationRequest,
    InFlightBatch,
    Reply,
    TextOutput,
    merge,
)
from toolkit.serve.stats import Stats
from toolkit.workers.protocol import (
    BatchDone,
    BatchProgress,
    RoundDone,
    WorkerEvent,
    WorkerLost,
    WorkerReady,
    Workers,
    WorkersFailed,
)
from toolkit.workers.supervisor import SilentWorkerError

# The rows that a worker keeps between rounds: which request has which number there, and what came
# of a round.
#
# The scheduler speaks of jobs, the engine of numbers, which a row gets when it enters and loses
# when its cache is gone.


class ResidentRows:
    """One worker's rows, and the round that it runs."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}  # by request
        self._lives: dict[int, ActiveRequest] = {}
        self._next = 0
        self._prefilling: dict[int, None] = {}  # whose first token has not come since they entered
        self._waited: tuple[int, ...] = ()  # those of them when the round began
        self._received: dict[int, int] = {}  # tokens in this round, by number
        self._ended: list[int] = []  # in this round
        self._steps = (
            0  # decode steps as the scheduler counts them, who decides where a round may stop
        )

    def begin(self, batch: Batch, live_of: Callable[[str], ActiveRequest]) -> Round:
        """The round for the engine. `live_of` knows the requests of those who enter."""
        evict = (*self._forget(batch.evict), *self._forget(batch.release))
        moves = batch.moves
        kept = self._numbers_of
        lives = [live_of(job.request_id) for job in batch.jobs]
        entered = tuple(range(self._next, self._next + len(lives)))
        self._next += len(lives)
        self._lives.update(zip(entered, lives, strict=True))
        self._numbers.update(
            (job.request_id, number) for job, number in zip(batch.jobs, entered, strict=True)
        )
        self._prefilling.update(dict.fromkeys(entered))
        self._waited = tuple(self._prefilling)
        self._received, self._ended = {}, []
        return Round(
            batch.steps,
            tuple(live.row() for live in lives),
            entered,
            evict,
            kept(moves.pause) if moves else (),
            kept(moves.swap_out) if moves else (),
            kept(moves.swap_in) if moves else (),
            kept(moves.resume) if moves else (),
            bool(moves and moves.overlap),
            batch.stop_every,
            batch.chunk_tokens,
            self._steps,
        )

    def receive(self, number: int, tokens: int, *, ended: bool) -> ActiveRequest:
        """So many tokens came for a row; whose it is."""
        self._received[number] = self._received.get(number, 0) + tokens
        self._prefilling.pop(number, None)
        if ended:
            self._ended.append(number)
        return self._lives[number]

    def result(self, batch: Batch, output: RoundOutput) -> RoundResult:
        """What a round did, in the scheduler's words."""
        joined = self._joined(dict(output.joined))
        for number, _ in output.joined:
            self._prefilling.pop(number, None)
        dropped = tuple([self._lives[number].ask.request_id for number in output.dropped])
        for number, request_id in zip(output.dropped, dropped, strict=True):
            del self._numbers[request_id]
            self._drop(number)
        failure: Failure = "oom" if output.is_short else ""
        self._steps += output.steps
        ended = self._end(output.ended)
        return RoundResult(
            batch.batch_id, batch.worker, output.steps, ended, joined, failure, dropped=dropped
        )

    def crashed(self, batch: Batch) -> RoundResult:
        """What came of a round before its worker was lost, by the tokens that came. All rows went
        with it.
        """
        received, waited = self._received, self._waited
        first = {
            number: received[number] - 1 for number in waited if number in received
        }  # steps since they joined
        went_on = [count for number, count in received.items() if number not in waited]
        steps = max([*first.values(), *went_on], default=0)
        joined = self._joined({number: steps - since for number, since in first.items()})
        ended = self._end(self._ended)
        self._numbers.clear()
        self._lives.clear()
        self._prefilling.clear()
        self._steps += steps
        return RoundResult(batch.batch_id, batch.worker, steps, ended, joined, "crashed")

    def _joined(self, after: Mapping[int, int]) -> tuple[tuple[str, int], ...] | None:
        """Whose prefill ended after how many steps, by request; None: everybody's before the first."""
        if len(after) == len(self._waited) and not any(after.values()):
            return None
        return tuple(
            [(self._lives[number].ask.request_id, steps) for number, steps in after.items()]
        )

    def _end(self, numbers: Iterable[int]) -> tuple[str, ...]:
        """These rows have ended; whose they were."""
        ended = tuple(self._lives.pop(number).ask.request_id for number in numbers)
        for request_id in ended:
            del self._numbers[request_id]
        return ended

    def _numbers_of(self, jobs: Iterable[Job]) -> tuple[int, ...]:
        return tuple(self._numbers[job.request_id] for job in jobs)

    def _forget(self, jobs: Iterable[Job]) -> list[int]:
        """The numbers of jobs whose caches are dropped; some have gone already."""
        found = [
            self._numbers.pop(job.request_id) for job in jobs if job.request_id in self._numbers
        ]
        for number in found:
            self._drop(number)
        return found

    def _drop(self, number: int) -> None:
        del self._lives[number]
        self._prefilling.pop(number, None)


# What runs on the workers: batches are sent, and what workers say of them becomes tokens of
# requests and results.
#
# Nothing is decided here, and nothing reaches a client: the driver says what starts, delivers the
# tokens, and hands the results to the scheduler. A slice's rows go by their places in the batch,
# a round's by numbers that `ResidentRows` gives.


class News(NamedTuple):
    """New tokens of a request, and how it ended, or ''."""

    live: ActiveRequest
    tokens: list[int]
    finish: FinishReason


class WorkerActivity:
    """The batches that run now, at most one per worker.

    Args:
        workers: who run them.
        live_of: the request of an id, while it is on its way.
    """

    def __init__(self, workers: Workers, live_of: Callable[[str], ActiveRequest]) -> None:
        self.flights: dict[int, InFlightBatch] = {}  # by worker
        self._workers = workers
        self._live_of = live_of
        self._kept = [ResidentRows() for _ in range(workers.size)]  # of workers that run rounds
        self._just_freed: set[int] = set()

    @property
    def rows_in_slices(self) -> int:
        """Requests that slices run now."""
        return sum(not live.status for flight in self.flights.values() for live in flight.lives)

    def launch(self, batches: Iterable[Batch]) -> list[ActiveRequest]:
        """Send what a tick wants started; whose requests begin to run. A worker it had nothing for
        waits for work.
        """
        started: list[ActiveRequest] = []
        for batch in batches:
            lives = tuple(self._live_of(job.request_id) for job in batch.jobs)
            follows = batch.worker in self._just_freed
            if batch.keep_cache:
                self._launch_round(batch, InFlightBatch(batch, (), [], follows))
            else:
                self._launch_slice(batch, InFlightBatch(batch, lives, [0] * len(lives), follows))
            started += lives
        self._just_freed.clear()
        return started

    def _launch_slice(self, batch: Batch, flight: InFlightBatch) -> None:
        self.flights[batch.worker] = flight
        for live in flight.lives:
            live.flight = flight
        rows = [live.row() for live in flight.lives]
        self._workers.run(batch.worker, batch.batch_id, rows, batch.steps, batch.estimated_s)

    def _launch_round(self, batch: Batch, flight: InFlightBatch) -> None:
        self.flights[batch.worker] = flight
        plan = self._kept[batch.worker].begin(batch, self._live_of)
        self._workers.run_round(batch.worker, batch.batch_id, plan, batch.estimated_s)

    def interrupt(self, worker: int) -> None:
        """Its round should end at the next step where it may."""
        self._workers.interrupt(worker, self.flights[worker].batch.batch_id)

    def unwanted(self, live: ActiveRequest) -> None:
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

    def slice_done(self, event: BatchDone) -> tuple[InFlightBatch, list[News]]:
        """A slice is over: what it was, and the tokens that had not come. After these comes
        `slice_result`.
        """
        flight = self._land(event.worker)
        for live in flight.lives:
            live.flight = None
        rows = zip(
            flight.lives, flight.received, event.output.tokens, event.output.finish, strict=True
        )
        return flight, [
            News(live, list(tokens[received:]), finish) for live, received, tokens, finish in rows
        ]

    def round_done(self, event: RoundDone) -> tuple[InFlightBatch, RoundResult]:
        """A round is over, whose tokens have all come: what it was, and its result."""
        flight, kept = self._land(event.worker), self._kept[event.worker]
        if event.output is None:
            return flight, kept.crashed(flight.batch)
        return flight, kept.result(flight.batch, event.output)

    def _land(self, worker: int) -> InFlightBatch:
        self._just_freed.add(worker)
        return self.flights.pop(worker)


def slice_result(flight: InFlightBatch, event: BatchDone) -> BatchResult:
    """A slice in the scheduler's words, once its last tokens were delivered: a stop string ends a
    request, too.

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


SHUTTING_DOWN = "the server is shutting down"
TIMED_OUT = "it was not done at its deadline"
State = Literal["loading", "ready", "draining", "stopped"]

TIMER_SLACK_S = 0.001  # event loops may fire this early, and a tick before its time decides nothing


class RefusedError(Exception):
    """A request that can never be served; the message may be shown to its client."""


class Driver:
    """Owns the scheduler and the workers.

    Args:
        scheduler: in its first state; a `Recorder` for a log that replays.
        workers: as many as the scheduler has.
        stats: what is counted.
        on_end: called with each request that has ended, whatever became of it, and when `now_s` was 0, on
            `time.monotonic`'s clock.
        limits: what requests are promised, which admission looks at.
        accept: called with what the loaded engines say of themselves, by worker, before any request; may raise.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        workers: Workers,
        stats: Stats,
        *,
        on_end: Callable[[ActiveRequest, float], None] | None = None,
        limits: LatencyLimits = UNLIMITED,
        accept: Callable[[list[EngineFacts]], None] | None = None,
    ) -> None:
        if workers.size != len(scheduler.workers):
            raise ValueError(
                f"{workers.size} workers, and the scheduler has {len(scheduler.workers)}"
            )
        self.scheduler = scheduler
        self.stats = stats
        self.forecast = Forecast(scheduler, limits)
        self.state: State = "loading"
        # the end was announced: balancers should look elsewhere, though requests are still taken
        self.leaving = False
        self.facts: dict[int, EngineFacts] = {}
        self.bug: Exception | None = (
            None  # what ended the driver, which whoever started it must then stop
        )
        self.failed: EngineError | None = None  # the same of workers that cannot be loaded any more
        self.broke = asyncio.Event()
        self._workers = workers
        self._on_end = on_end
        self._accept = accept
        self._lives = ActiveRequests(stats, self.forecast, self._ended)
        self._under_way = WorkerActivity(workers, self._lives.__getitem__)
        self._start_s = 0.0
        self._tick_soon: asyncio.Handle | None = None
        self._wake: asyncio.TimerHandle | None = None

    @property
    def now_s(self) -> float:
        """Seconds since `start`. The loop's own clock is no finer than a millisecond on uvloop."""
        return time.monotonic() - self._start_s

    @property
    def flights(self) -> dict[int, InFlightBatch]:
        """What each worker runs now."""
        return self._under_way.flights

    def silent(self) -> list[SilentWorkerError]:
        """Workers that take too long now, for what they do."""
        return self._workers.silent()

    @property
    def running(self) -> int:
        """Requests in batches that run now."""
        rounds = (worker for worker, flight in self.flights.items() if flight.batch.keep_cache)
        in_rounds = sum(len(self.scheduler.workers[worker].residents) for worker in rounds)
        return self._under_way.rows_in_slices + in_rounds

    @property
    def waiting(self) -> int:
        """Requests that no worker runs now: new ones, and ones between two slices."""
        return len(self._lives) - self.running

    async def start(self) -> None:
        """Load the workers. `EngineError` if one cannot, and whatever `accept` raises."""
        self._start_s = time.monotonic()
        await self._workers.start(self._on_event)
        if self._accept:
            self._accept([self.facts[worker] for worker in sorted(self.facts)])
        self.state = "ready"

    async def drain(self, timeout_s: float) -> int:
        """Take nothing new, and wait until all requests have ended; those that have not in time
        fail. How many did.
        """
        self.state = "draining"
        try:
            await asyncio.wait_for(self._lives.empty.wait(), timeout_s)
        except TimeoutError:
            late = list(self._lives)
            for live in late:
                self._give_up(live, SHUTTING_DOWN)
            return len(late)
        return 0

    async def stop(self) -> None:
        """End the workers; whoever still waits, fails."""
        self.state = "stopped"
        for live in self._lives:
            self._give_up(live, SHUTTING_DOWN)
        for handle in (self._tick_soon, self._wake):
            if handle:
                handle.cancel()
        await self._workers.stop()

    def submit(
        self, ask: GenerationRequest, output: TextOutput, reply: Reply, index: int
    ) -> ActiveRequest:
        """A request whose text goes to choice `index` of `reply`. `RefusedError` if it can never
        fit.
        """
        if self.state != "ready":
            raise ValueError(f"submitted while the driver is {self.state}")
        now_s = self.now_s
        told = self.forecast.raw(now_s)
        request = Request(ask.request_id, now_s, len(ask.prompt), ask.max_new_tokens, ask.priority)
        refusal = self.scheduler.submit(request, now_s)
        if refusal:
            raise RefusedError(refusal.reason)
        self.stats.arrived += 1
        live = ActiveRequest(ask, output, reply, index, now_s, told)
        self._lives.begin(live)
        if ask.timeout_s < math.inf:
            loop = asyncio.get_running_loop()
            live.deadline = loop.call_later(ask.timeout_s, self._expire, live)
        self._tick_later()
        return live

    def _expire(self, live: ActiveRequest) -> None:
        """Its deadline has come: to the scheduler that is a cancel like any other."""
        self._give_up(live, f"{TIMED_OUT}, {live.ask.timeout_s:g} s after it came")
        self._tick_later()

    def cancel(self, live: ActiveRequest) -> None:
        """Its client is gone. A row that runs ends with its batch, or sooner where the worker can."""
        if live.status:
            return
        self.scheduler.cancel(live.ask.request_id, self.now_s)
        self._under_way.unwanted(live)
        self._lives.end(live, "cancelled")
        self._tick_later()

    def _give_up(self, live: ActiveRequest, reason: str) -> None:
        self.scheduler.cancel(live.ask.request_id, self.now_s)
        self._under_way.unwanted(live)
        self._lives.fail(live, reason)

    def _ended(self, live: ActiveRequest) -> None:
        if live.deadline:
            live.deadline.cancel()
            live.deadline = None
        if self._on_end:
            self._on_end(live, self._start_s)

    def _tick_later(self) -> None:
        """One tick for all that happens in this turn of the loop."""
        if self._tick_soon is None and self.state != "stopped":
            self._tick_soon = asyncio.get_running_loop().call_soon(self._tick)

    def _tick_now(self) -> None:
        """A worker waits: it gets its next batch before anything is written to clients, or anybody
        else is heard.
        """
        if self._tick_soon:
            self._tick_soon.cancel()
        if self.state != "stopped":
            self._tick()

    def _tick(self) -> None:
        with self._loud():
            self._tick_soon = None
            now_s = self.now_s
            with self._deciding():
                batches = self.scheduler.tick(now_s)
            self._launch(batches, now_s)
            for worker in self.scheduler.take_interrupts():
                self._under_way.interrupt(worker)
            for refusal in self.scheduler.take_refusals():
                if refusal.request_id in self._lives:
                    self._lives.fail(self._lives[refusal.request_id], refusal.reason)
            self._arm(now_s)

    def _arm(self, now_s: float) -> None:
        if self._wake:
            self._wake.cancel()
            self._wake = None
        wake_at_s = self.scheduler.wake_at_s
        if wake_at_s < math.inf:
            delay_s = max(wake_at_s - now_s, 0.0) + TIMER_SLACK_S
            self._wake = asyncio.get_running_loop().call_later(delay_s, self._tick_later)

    def _launch(self, batches: Sequence[Batch], now_s: float) -> None:
        for batch in batches:
            self.stats.count_start(batch)
            self.forecast.started(batch)
        started = self._under_way.launch(batches)
        for batch in batches:
            self.flights[batch.worker].arrived = self.stats.arrived
        for live in started:
            if math.isnan(live.started_s):
                live.started_s = now_s
                self.stats.queue.observe(now_s - live.arrival_s)

    def _on_event(self, event: WorkerEvent) -> None:
        with self._loud():
            match event:
                case BatchProgress():
                    self._progress(event)
                case BatchDone():
                    self._done(event)
                case RoundDone():
                    self._round_done(event)
                case WorkerReady():
                    self.facts[event.worker] = event.facts
                    if not self.scheduler.workers[event.worker].alive:
                        self.scheduler.worker_ready(event.worker, self.now_s)
                        self._tick_later()
                case WorkerLost():
                    self.stats.restarts[event.worker] += 1
                    self.scheduler.worker_lost(event.worker, self.now_s)
                    self._tick_later()
                case WorkersFailed():
                    self.failed = event.error
                    self.broke.set()

    def _progress(self, event: BatchProgress) -> None:
        now_s = self.now_s
        for live, tokens, finish in self._under_way.progress(event):
            if not self._lives.deliver(live, tokens, finish, now_s):
                continue
            if live.flight:  # its slice's result will say so
                self._under_way.unwanted(live)
            else:
                self.scheduler.end(live.ask.request_id, len(live.tokens), now_s)
                self._tick_later()

    def _done(self, event: BatchDone) -> None:
        flight, news = self._under_way.slice_done(event)
        now_s = self.now_s
        for live, tokens, finish in news:
            self._lives.deliver(live, tokens, finish, now_s)
        result = slice_result(flight, event)
        law, arrived = (
            self.scheduler.workers[event.worker].latency,
            self.stats.arrived - flight.arrived,
        )
        self.stats.count_batch(flight.batch, result, event.steps, now_s, law, arrived)
        self._complete(flight, event, result, now_s)

    def _round_done(self, event: RoundDone) -> None:
        flight, result = self._under_way.round_done(event)
        now_s = self.now_s
        self.stats.count_round(flight.batch, result, now_s, self.scheduler.workers[event.worker])
        self._complete(flight, event, result, now_s)

    def _complete(
        self,
        flight: InFlightBatch,
        event: BatchDone | RoundDone,
        result: BatchResult | RoundResult,
        now_s: float,
    ) -> None:
        self.stats.count_engine(event, follows=flight.follows)
        self.forecast.pace.ran(self.stats.batch_s, self.stats.predicted_batch_s)
        with self._deciding():
            self.scheduler.complete(result, now_s)
        if event.failure == "crashed":
            self._tick_later()  # the scheduler has yet to hear that the worker is lost
        else:
            self._tick_now()

    @contextmanager
    def _deciding(self) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self.stats.deciding.observe(time.perf_counter() - start_s)

    @contextmanager
    def _loud(self) -> Iterator[None]:
        """An event loop logs what its callbacks raise and goes on; a scheduler in an unknown state
        must not.
        """
        try:
            yield
        except Exception as error:
            self.bug = self.bug or error
            self.broke.set()
            raise
