"""Drive the scheduler on the real clock: move requests, batches and tokens on one asyncio loop.

The scheduler makes all decisions. `Driver` reports events to it, starts the batches that it returns
and passes tokens to clients as they arrive. It keeps each request's tokens, so a request that lost
its slice continues after the last token that its client has seen. Nothing here waits for a client.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Literal

from toolkit.engines.protocol import EnginePass, FinishReason, PassOutput
from toolkit.errors import EngineError
from toolkit.files.profile import EngineFacts
from toolkit.routing.admission import UNLIMITED, LatencyLimits
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Failure, Job, Moves, Pass, PassResult, Request
from toolkit.server.forecast import Forecast
from toolkit.server.live import (
    ActiveRequests,
    LiveRequest,
    merge,
)
from toolkit.server.stats import Stats
from toolkit.workers.protocol import (
    Cancel,
    Interrupt,
    PassDone,
    PassProgress,
    WorkerEvent,
    WorkerLost,
    WorkerReady,
    Workers,
    WorkersFailed,
)

SHUTTING_DOWN = "the server is shutting down"
TIMED_OUT = "it was not done at its deadline"
TIMER_SLACK_S = 0.001  # a timer may fire this early, and a tick before its time decides nothing

State = Literal["loading", "ready", "draining", "stopped"]


class RefusedError(Exception):
    """A request that can never be served. The client may see the message."""


class Driver:
    """Owns the scheduler, which is in its first state, and the workers of one server.

    Args:
        on_end: called with each request that has ended, however it ended, and with the time of
            `start` on the clock of `time.monotonic`.
        limits: the latency targets of admission.
        accept: called before any request with the facts of each worker's loaded engine; may raise.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        workers: Workers,
        stats: Stats,
        *,
        on_end: Callable[[LiveRequest, float], None] | None = None,
        limits: LatencyLimits = UNLIMITED,
        accept: Callable[[list[EngineFacts]], None] | None = None,
    ) -> None:
        expected = len(scheduler.workers)
        if workers.size != expected:
            raise ValueError(f"{workers.size} workers, and the scheduler has {expected}")
        self.scheduler = scheduler
        self.stats = stats
        self.forecast = Forecast(scheduler, limits)
        self.state: State = "loading"
        self.facts: dict[int, EngineFacts] = {}  # by worker
        # Set when the driver cannot go on; the owner then has to stop it.
        self.broke = asyncio.Event()
        self.bug: Exception | None = None  # an exception of the scheduler or the driver
        self.failed: EngineError | None = None  # no worker is left and none can be loaded
        self._workers = workers
        self.on_end = on_end
        self._accept = accept
        self._active = ActiveRequests(stats, self.forecast, self._ended)
        self._activity = WorkerActivity(workers, self._active.by_id.__getitem__)
        self.flights = self._activity.flights  # the pass that each worker runs now
        self._start_s = 0.0
        self._next_tick: asyncio.Handle | None = None
        self._wake: asyncio.TimerHandle | None = None

    @property
    def now_s(self) -> float:
        """Seconds since `start`. The loop's own clock has a resolution of 1 ms on uvloop."""
        return time.monotonic() - self._start_s

    @property
    def running(self) -> int:
        """Requests in passes that run now."""
        return sum([self.running_on(worker) for worker in self.flights])

    def running_on(self, worker: int) -> int:
        """Requests that have a row on a worker and have not ended."""
        active = self._active.by_id
        jobs = self.scheduler.workers[worker].running.jobs
        return sum([job.request_id in active for job in jobs])

    @property
    def waiting(self) -> int:
        """Requests that no worker runs now: new ones, and ones between two slices."""
        return len(self._active.by_id) - self.running

    async def start(self) -> None:
        """Load the workers. Raises `EngineError` if one cannot load, and what `accept` raises."""
        self._start_s = time.monotonic()
        await self._workers.start(self._on_event)
        if self._accept:
            self._accept([self.facts[worker] for worker in sorted(self.facts)])
        self.state = "ready"

    async def drain(self, timeout_s: float) -> int:
        """Accept no more requests, and wait up to `timeout_s` seconds until all have ended.

        Requests that have not ended by then fail. Returns how many failed.
        """
        self.state = "draining"
        with suppress(TimeoutError):
            await asyncio.wait_for(self._active.empty.wait(), timeout_s)
        return self._fail_all()

    async def stop(self) -> None:
        """Stop the workers. Requests that have not ended fail."""
        self.state = "stopped"
        self._fail_all()
        for handle in (self._next_tick, self._wake):
            if handle:
                handle.cancel()
        await self._workers.stop()

    def submit(self, active: LiveRequest) -> None:
        """Submit a request. Raises `RefusedError` if it can never fit."""
        if self.state != "ready":
            raise ValueError(f"submitted while the driver is {self.state}")
        now_s = active.times.arrival_s = self.now_s
        active.predicted = self.forecast.predict_by_laws(now_s)
        submitted = Request(
            active.request_id, now_s, len(active.prompt), active.max_new_tokens, active.priority
        )
        refusal = self.scheduler.submit(submitted, now_s)
        if refusal:
            raise RefusedError(refusal.reason)
        self._active.begin(active)
        if active.timeout_s < math.inf:
            loop = asyncio.get_running_loop()
            active.deadline = loop.call_later(active.timeout_s, self._expire, active)
        self._tick_later()

    def _expire(self, active: LiveRequest) -> None:
        """The deadline of a request has passed. The scheduler sees a cancellation."""
        self._fail(active, f"{TIMED_OUT}, {active.timeout_s:g} s after it came")
        self._tick_later()

    def cancel(self, active: LiveRequest) -> None:
        """The client has disconnected. A running row ends with its pass, or earlier."""
        if active.status:
            return
        self.scheduler.cancel(active.request_id, self.now_s)
        self._activity.cancel_row(active)
        self._active.end(active, "cancelled")
        self._tick_later()

    def _fail_all(self) -> int:
        left = list(self._active.by_id.values())
        for active in left:
            self._fail(active, SHUTTING_DOWN)
        return len(left)

    def _fail(self, active: LiveRequest, reason: str) -> None:
        self.scheduler.cancel(active.request_id, self.now_s)
        self._activity.cancel_row(active)
        self._active.fail(active, reason)

    def _ended(self, active: LiveRequest) -> None:
        if active.deadline:
            active.deadline.cancel()
            active.deadline = None
        if self.on_end:
            self.on_end(active, self._start_s)

    def _tick_later(self) -> None:
        """Tick once for everything that happens in this turn of the event loop."""
        if self._next_tick is None and self.state != "stopped":
            self._next_tick = asyncio.get_running_loop().call_soon(self._tick)

    def _tick(self) -> None:
        with self._stop_on_bug():
            self._next_tick = None
            now_s = self.now_s
            with self._timing_scheduler():
                batches = self.scheduler.tick(now_s)
            for batch in batches:
                self.stats.count_start(batch)
                self.forecast.started(batch)
            for active in self._activity.launch(batches):
                if math.isnan(active.started_s):
                    active.started_s = now_s
                    self.stats.queue.observe(now_s - active.times.arrival_s)
            for worker in self.scheduler.take_interrupts():
                self._activity.interrupt(worker)
            for refusal in self.scheduler.take_refusals():
                if refused := self._active.by_id.get(refusal.request_id):
                    self._active.fail(refused, refusal.reason)
            if self._wake:
                self._wake.cancel()
                self._wake = None
            wake_at_s = self.scheduler.wake_at_s
            if wake_at_s < math.inf:
                delay_s = max(wake_at_s - now_s, 0.0) + TIMER_SLACK_S
                self._wake = asyncio.get_running_loop().call_later(delay_s, self._tick_later)

    def _on_event(self, event: WorkerEvent) -> None:
        with self._stop_on_bug():
            match event:
                case PassProgress():
                    self._progress(event)
                case PassDone():
                    self._pass_done(event)
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

    def _progress(self, event: PassProgress) -> None:
        now_s = self.now_s
        for active, tokens, finish in self._activity.progress(event):
            if not self._active.deliver(active, tokens, finish, now_s):
                continue
            if active.flight:  # the scheduler learns it from the pass's result
                self._activity.cancel_row(active)
            else:
                self.scheduler.end(active.request_id, len(active.tokens), now_s)
                self._tick_later()

    def _pass_done(self, event: PassDone) -> None:
        batch, result = self._activity.done(event)
        now_s = self.now_s
        self.stats.count_pass(batch, result, now_s, self.scheduler.workers[event.worker])
        if self._activity.follows[event.worker] and event.failure != "crashed":
            self.stats.hop.observe(event.gap_s)
        self.forecast.pace.ran(self.stats.batch_s, self.stats.predicted_batch_s)
        with self._timing_scheduler():
            self.scheduler.complete(result, now_s)
        if event.failure == "crashed":
            self._tick_later()  # the event that reports the worker's loss comes next
            return
        # The worker is idle: give it a pass before writing to clients or reading from them.
        if self._next_tick:
            self._next_tick.cancel()
        if self.state != "stopped":
            self._tick()

    @contextmanager
    def _timing_scheduler(self) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self.stats.deciding.observe(time.perf_counter() - start_s)

    @contextmanager
    def _stop_on_bug(self) -> Iterator[None]:
        """Stop the driver at an exception: the state is unknown. A loop would only log it."""
        try:
            yield
        except Exception as error:  # any error: the state is unknown, whatever it was
            self.bug = self.bug or error
            self.broke.set()
            raise


RowOutput = tuple[LiveRequest, list[int], FinishReason]  # new tokens, and how it ended, or ''


class WorkerActivity:
    """The passes that run now, at most one per worker.

    It decides nothing and writes nothing to clients: the driver says what starts, delivers the
    tokens, and gives the results to the scheduler. `find` returns the active request with an id.
    `follows[worker]`: whether its pass was sent as soon as the last one had ended.
    """

    def __init__(self, workers: Workers, find: Callable[[str], LiveRequest]) -> None:
        self.flights: dict[int, Pass] = {}  # by worker
        self.follows = [False] * workers.size
        self._workers = workers
        self._find = find
        self._rows = [WorkerRows() for _ in range(workers.size)]
        self._just_freed: set[int] = set()

    def launch(self, batches: Iterable[Pass]) -> list[LiveRequest]:
        """Send the passes of a tick, and return the requests that begin to run.

        A worker that gets no pass stays idle, so its next pass does not follow the last one at
        once.
        """
        started: list[LiveRequest] = []
        for batch in batches:
            worker = batch.worker
            requests = [self._find(job.request_id) for job in batch.jobs]
            started += requests
            self.flights[worker] = batch
            self.follows[worker] = worker in self._just_freed
            if not batch.keep_cache:
                for active in requests:
                    active.flight = batch
            plan = self._rows[worker].begin(batch, requests)
            self._workers.run(worker, plan, batch.estimated_s)
        self._just_freed.clear()
        return started

    def interrupt(self, worker: int) -> None:
        """Ask the worker to end its pass at the next step where the pass may stop."""
        self._workers.tell(worker, Interrupt(self.flights[worker].pass_id))

    def cancel_row(self, active: LiveRequest) -> None:
        """Tell the worker of a request's slice that the rest of its output is not needed."""
        batch = active.flight
        if batch:
            number = self._rows[batch.worker].numbers[active.request_id]
            self._workers.tell(batch.worker, Cancel(batch.pass_id, (number,)))

    def progress(self, event: PassProgress) -> list[RowOutput]:
        """The tokens of a running pass. Events of a pass that has ended are ignored."""
        batch = self.flights.get(event.worker)
        if batch is None or batch.pass_id != event.pass_id:
            return []
        rows = self._rows[event.worker]
        return [
            (rows.receive(number, len(tokens), ended=bool(finish)), tokens, finish)
            for number, (tokens, finish) in merge(event.steps).items()
        ]

    def done(self, event: PassDone) -> tuple[Pass, PassResult]:
        """Return the pass that has ended, and its result. All its tokens have arrived."""
        batch = self.flights.pop(event.worker)
        self._just_freed.add(event.worker)
        rows = self._rows[event.worker]
        if not batch.keep_cache:
            return batch, rows.dropped(batch, event.failure)
        if event.output is None:
            return batch, rows.crashed(batch)
        return batch, rows.kept(batch, event.output)


NO_MOVES = Moves()


class WorkerRows:
    """The rows that one worker has, and what they got of the pass that it runs.

    The scheduler identifies a job by its request, the engine by a row number. A row gets its number
    when it enters, and loses it when its cache is dropped.

    Attributes:
        numbers: by request id.
    """

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self._requests: dict[int, LiveRequest] = {}  # by row number
        self._next_number = 0
        self._prefilling: dict[int, None] = {}  # rows without a token since they entered
        self._prefilling_before: tuple[int, ...] = ()  # those of them when the pass began
        self._received: dict[int, int] = {}  # tokens in this pass, by row number
        self._ended: list[int] = []  # rows that ended in this pass
        self._steps = 0  # decode steps over all passes, by which possible stops count

    def begin(self, batch: Pass, entering: Sequence[LiveRequest]) -> EnginePass:
        """The pass for the engine; `entering` are the active requests of its jobs."""
        evicted = (*self._forget(batch.evict), *self._forget(batch.release))
        entered = tuple(range(self._next_number, self._next_number + len(entering)))
        self._next_number += len(entering)
        self._requests.update(zip(entered, entering, strict=True))
        for job, number in zip(batch.jobs, entered, strict=True):
            self.numbers[job.request_id] = number
        self._prefilling.update(dict.fromkeys(entered))
        self._prefilling_before = tuple(self._prefilling)
        self._received = {}
        self._ended = []

        def numbers(jobs: Iterable[Job]) -> tuple[int, ...]:
            return tuple(self.numbers[job.request_id] for job in jobs)

        moves = batch.moves or NO_MOVES
        return EnginePass(
            batch.steps,
            tuple(active.row() for active in entering),
            entered,
            evicted,
            numbers(moves.pause),
            numbers(moves.swap_out),
            numbers(moves.swap_in),
            numbers(moves.resume),
            moves.overlap,
            batch.stop_every,
            batch.chunk_tokens,
            self._steps,
            batch.keep_cache,
            batch.pass_id,
        )

    def receive(self, number: int, tokens: int, *, ended: bool) -> LiveRequest:
        """Count `tokens` new tokens of a row, and return its request."""
        self._received[number] = self._received.get(number, 0) + tokens
        self._prefilling.pop(number, None)
        if ended:
            self._ended.append(number)
        return self._requests[number]

    def dropped(self, batch: Pass, failure: Failure) -> PassResult:
        """The result of a pass that kept no caches, from the tokens that arrived."""
        steps = max(self._received.values(), default=0)
        ended: list[str] = []
        missed: list[tuple[str, int]] = []
        for job in batch.jobs:
            active = self._requests[self.numbers[job.request_id]]
            active.flight = None
            # A stop string may have ended a request: tokens after it do not count.
            short = steps - (len(active.tokens) - job.generated)
            if active.status:
                ended.append(job.request_id)
            if short:
                missed.append((job.request_id, short))
        self._clear()
        ran = batch.pass_id, batch.worker, steps
        return PassResult(*ran, tuple(ended), failure=failure, missed=tuple(missed))

    def kept(self, batch: Pass, output: PassOutput) -> PassResult:
        """The result of a pass that kept its caches."""
        joined = self._joined(dict(output.joined))
        for number, _ in output.joined:
            self._prefilling.pop(number, None)
        dropped = tuple([self._remove(number) for number in output.dropped])
        failure: Failure = "oom" if output.is_short else ""
        self._steps += output.steps
        ended = tuple([self._remove(number) for number in output.ended])
        ran = batch.pass_id, batch.worker, output.steps
        return PassResult(*ran, ended, joined, failure, dropped=dropped)

    def crashed(self, batch: Pass) -> PassResult:
        """The result of a pass with kept caches that lost its worker, and so all rows, from the
        tokens so far.
        """
        received = self._received
        prefilling = self._prefilling_before
        # Steps that a row ran after its prefill ended: one token came from the prefill itself.
        steps_after = {number: received[number] - 1 for number in prefilling if number in received}
        decoded = [count for number, count in received.items() if number not in prefilling]
        steps = max([*steps_after.values(), *decoded], default=0)
        joined = self._joined({number: steps - after for number, after in steps_after.items()})
        ended = tuple([self._remove(number) for number in self._ended])
        self._clear()
        self._steps += steps
        return PassResult(batch.pass_id, batch.worker, steps, ended, joined, "crashed")

    def _joined(self, before: Mapping[int, int]) -> tuple[tuple[str, int], ...] | None:
        """After how many steps each prefill ended, by request id; None: all before the first."""
        if len(before) == len(self._prefilling_before) and not any(before.values()):
            return None
        requests = self._requests
        return tuple([(requests[row].request_id, steps) for row, steps in before.items()])

    def _forget(self, jobs: Iterable[Job]) -> list[int]:
        """Remove the rows that jobs with dropped caches still have; return their numbers."""
        numbers = [self.numbers[job.request_id] for job in jobs if job.request_id in self.numbers]
        for number in numbers:
            self._remove(number)
        return numbers

    def _remove(self, number: int) -> str:
        """Remove a row, and return the id of its request."""
        self._prefilling.pop(number, None)
        request_id = self._requests.pop(number).request_id
        del self.numbers[request_id]
        return request_id

    def _clear(self) -> None:
        """Remove all rows."""
        self.numbers.clear()
        self._requests.clear()
        self._prefilling.clear()
