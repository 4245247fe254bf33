"""The scheduler on the real clock: asyncio moves requests, batches and tokens between clients, scheduler and workers.

All decisions are the scheduler's. The driver tells it what happened, starts the batches that it wants (`underway`), and
passes tokens on as they come (`lives`). Each request's tokens are kept, so a slice that was lost goes on from what its
client has seen. Everything runs on one event loop and nothing here waits for a client.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from toolkit.errors import EngineError
from toolkit.files.profile import EngineFacts
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Batch, BatchResult, Request, RoundResult
from toolkit.serve.forecast import UNLIMITED, Forecast, Limits
from toolkit.serve.live import Ask, Flight, Live
from toolkit.serve.lives import Lives
from toolkit.serve.reply import Reply
from toolkit.serve.stats import Stats
from toolkit.serve.text import TextOutput
from toolkit.serve.underway import UnderWay, slice_result
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
from toolkit.workers.supervisor import Silent

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
        on_end: Callable[[Live, float], None] | None = None,
        limits: Limits = UNLIMITED,
        accept: Callable[[list[EngineFacts]], None] | None = None,
    ) -> None:
        if workers.size != len(scheduler.workers):
            raise ValueError(f"{workers.size} workers, and the scheduler has {len(scheduler.workers)}")
        self.scheduler = scheduler
        self.stats = stats
        self.forecast = Forecast(scheduler, limits)
        self.state: State = "loading"
        self.leaving = False  # the end was announced: balancers should look elsewhere, though requests are still taken
        self.facts: dict[int, EngineFacts] = {}
        self.bug: Exception | None = None  # what ended the driver, which whoever started it must then stop
        self.failed: EngineError | None = None  # the same of workers that cannot be loaded any more
        self.broke = asyncio.Event()
        self._workers = workers
        self._on_end = on_end
        self._accept = accept
        self._lives = Lives(stats, self.forecast, self._ended)
        self._under_way = UnderWay(workers, self._lives.__getitem__)
        self._start_s = 0.0
        self._tick_soon: asyncio.Handle | None = None
        self._wake: asyncio.TimerHandle | None = None

    @property
    def now_s(self) -> float:
        """Seconds since `start`. The loop's own clock is no finer than a millisecond on uvloop."""
        return time.monotonic() - self._start_s

    @property
    def flights(self) -> dict[int, Flight]:
        """What each worker runs now."""
        return self._under_way.flights

    def silent(self) -> list[Silent]:
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
        """Take nothing new, and wait until all requests have ended; those that have not in time fail. How many did."""
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

    def submit(self, ask: Ask, output: TextOutput, reply: Reply, index: int) -> Live:
        """A request whose text goes to choice `index` of `reply`. `RefusedError` if it can never fit."""
        if self.state != "ready":
            raise ValueError(f"submitted while the driver is {self.state}")
        now_s = self.now_s
        told = self.forecast.raw(now_s)
        request = Request(ask.request_id, now_s, len(ask.prompt), ask.max_new_tokens, ask.priority)
        refusal = self.scheduler.submit(request, now_s)
        if refusal:
            raise RefusedError(refusal.reason)
        self.stats.arrived += 1
        live = Live(ask, output, reply, index, now_s, told)
        self._lives.begin(live)
        if ask.timeout_s < math.inf:
            loop = asyncio.get_running_loop()
            live.deadline = loop.call_later(ask.timeout_s, self._expire, live)
        self._tick_later()
        return live

    def _expire(self, live: Live) -> None:
        """Its deadline has come: to the scheduler that is a cancel like any other."""
        self._give_up(live, f"{TIMED_OUT}, {live.ask.timeout_s:g} s after it came")
        self._tick_later()

    def cancel(self, live: Live) -> None:
        """Its client is gone. A row that runs ends with its batch, or sooner where the worker can."""
        if live.status:
            return
        self.scheduler.cancel(live.ask.request_id, self.now_s)
        self._under_way.unwanted(live)
        self._lives.end(live, "cancelled")
        self._tick_later()

    def _give_up(self, live: Live, reason: str) -> None:
        self.scheduler.cancel(live.ask.request_id, self.now_s)
        self._under_way.unwanted(live)
        self._lives.fail(live, reason)

    def _ended(self, live: Live) -> None:
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
        """A worker waits: it gets its next batch before anything is written to clients, or anybody else is heard."""
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
        law, arrived = self.scheduler.workers[event.worker].latency, self.stats.arrived - flight.arrived
        self.stats.count_batch(flight.batch, result, event.steps, now_s, law, arrived)
        self._complete(flight, event, result, now_s)

    def _round_done(self, event: RoundDone) -> None:
        flight, result = self._under_way.round_done(event)
        now_s = self.now_s
        self.stats.count_round(flight.batch, result, now_s, self.scheduler.workers[event.worker])
        self._complete(flight, event, result, now_s)

    def _complete(
        self, flight: Flight, event: BatchDone | RoundDone, result: BatchResult | RoundResult, now_s: float
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
        """An event loop logs what its callbacks raise and goes on; a scheduler in an unknown state must not."""
        try:
            yield
        except Exception as error:
            self.bug = self.bug or error
            self.broke.set()
            raise
