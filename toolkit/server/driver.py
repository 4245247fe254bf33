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
from contextlib import contextmanager
from typing import Literal

from toolkit.engines.protocol import EnginePass, FinishReason, PassOutput, StepOutput
from toolkit.files.profile import EngineFacts
from toolkit.routing.admission import UNLIMITED, LatencyLimits
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Failure, Job, Moves, Pass, PassResult, Refusal, Request
from toolkit.server.forecast import Forecast
from toolkit.server.live import SHUTTING_DOWN, TIMED_OUT, LiveRequest, Status
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

TIMER_SLACK_S = 0.001  # a timer may fire this early, and a tick before its time decides nothing


class Driver:
    """Owns the scheduler, which is in its first state, and the workers of one server.

    Attributes:
        forecast: predicts latencies, for admission with the given limits.
        facts: of each worker's loaded engine, by worker.
        rows: of each worker, with the pass that it runs now.
        error: an exception of the scheduler or the driver, or why no worker can be loaded again.
        broke: set when there is an `error`: the driver cannot go on, and its owner has to stop it.
        on_end: called with each request that has ended, however it ended.
        start_s: the time of `start` by `time.monotonic`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        workers: Workers,
        stats: Stats,
        limits: LatencyLimits = UNLIMITED,
    ) -> None:
        self.scheduler = scheduler
        self.stats = stats
        self.forecast = Forecast(scheduler, limits)
        self.state: Literal["loading", "ready", "stopped"] = "loading"
        self.facts: dict[int, EngineFacts] = {}
        self.rows = [WorkerRows() for _ in range(workers.size)]
        self.error: Exception | None = None
        self.broke = asyncio.Event()
        self.on_end: Callable[[LiveRequest], None] | None = None
        self.start_s = 0.0
        self._workers = workers
        self._active: dict[str, LiveRequest] = {}  # requests that have not ended, by id
        self._next_tick: asyncio.Handle | None = None
        self._wake: asyncio.TimerHandle | None = None

    @property
    def now_s(self) -> float:
        """Seconds since `start`. The loop's own clock has a resolution of 1 ms on uvloop."""
        return time.monotonic() - self.start_s

    @property
    def running(self) -> int:
        """Requests in passes that run now."""
        return sum([self.running_on(k) for k, rows in enumerate(self.rows) if rows.batch])

    def running_on(self, worker: int) -> int:
        """Requests that have a row on a worker and have not ended."""
        jobs = self.scheduler.workers[worker].running.jobs
        return sum([job.request_id in self._active for job in jobs])

    @property
    def waiting(self) -> int:
        """Requests that no worker runs now: new ones, and ones between two slices."""
        return len(self._active) - self.running

    async def start(self) -> None:
        """Load the workers. Raises `EngineError` if one cannot load."""
        self.start_s = time.monotonic()
        await self._workers.start(self._on_event)
        self.state = "ready"

    async def stop(self) -> None:
        """Stop the workers. Requests that have not ended fail."""
        self.state = "stopped"
        for active in list(self._active.values()):
            self.abort(active, "failed", SHUTTING_DOWN)
        for handle in (self._next_tick, self._wake):
            if handle:
                handle.cancel()
        await self._workers.stop()

    # Requests

    def submit(self, active: LiveRequest) -> Refusal | None:
        """Submit a request. Return a refusal if it can never be served."""
        now_s = active.times.arrival_s = self.now_s
        active.predicted = self.forecast.predict_by_laws(now_s)
        prompt_tokens = len(active.prompt)
        submitted = Request(
            active.request_id, now_s, prompt_tokens, active.max_new_tokens, active.priority
        )
        refusal = self.scheduler.submit(submitted, now_s)
        if refusal:
            return refusal
        self._active[active.request_id] = active
        self.forecast.submitted(prompt_tokens)
        self.stats.prompt_tokens += prompt_tokens
        timeout_s = active.timeout_s
        if timeout_s < math.inf:
            late = f"{TIMED_OUT}, {timeout_s:g} s after it came"
            loop = asyncio.get_running_loop()
            active.deadline = loop.call_later(timeout_s, self.abort, active, "failed", late)
        self._tick_later()
        return None

    def abort(self, active: LiveRequest, status: Status = "cancelled", failure: str = "") -> None:
        """End a request before its last token, where its client has left, or for a `failure`. The
        scheduler sees a cancellation; a running row ends with its pass, or earlier.
        """
        if active.status:
            return
        self.scheduler.cancel(active.request_id, self.now_s)
        self._cancel_row(active)
        self._end(active, status, failure)
        self._tick_later()

    def _cancel_row(self, active: LiveRequest) -> None:
        """Tell the worker of a request's slice that the rest of its output is not needed."""
        batch = active.flight
        if batch:
            number = self.rows[batch.worker].numbers[active.request_id]
            self._workers.tell(batch.worker, Cancel(batch.pass_id, (number,)))

    def _end(self, active: LiveRequest, status: Status, failure: str = "") -> None:
        """Remove a request that has ended, count it, and tell its reply."""
        active.status = status
        active.failure = failure
        del self._active[active.request_id]
        if active.deadline:
            active.deadline.cancel()
        self.stats.count_end(status, active.times, len(active.tokens))
        if self.on_end:
            self.on_end(active)
        active.reply.tell(active)

    # Events of workers

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
                    self._break(event.error)

    def _progress(self, event: PassProgress) -> None:
        rows = self.rows[event.worker]
        if rows.batch is None or rows.batch.pass_id != event.pass_id:
            return  # of a pass that has ended
        now_s = self.now_s
        for number, (tokens, finish) in merge(event.steps).items():
            active = rows.receive(number, len(tokens), ended=bool(finish))
            if not active.status:
                self._deliver(active, tokens, finish, now_s)

    def _deliver(
        self, active: LiveRequest, tokens: list[int], finish: FinishReason, now_s: float
    ) -> None:
        """Pass new tokens to the client at once."""
        output = active.output
        before = output.tokens
        text, ended = output.feed(tokens, finish)
        new = output.tokens - before
        active.unsent += text
        active.tokens += tokens[:new]
        times = active.times
        if new:
            if math.isnan(times.first_s):
                self.forecast.first_token(active.predicted, now_s - times.arrival_s)
            self.stats.count_tokens(new, times, now_s, new)
        if not ended:
            active.reply.tell(active)
            return
        self._end(active, ended)
        self.forecast.ended(active.predicted, now_s - times.arrival_s, output.tokens)
        if finish and new == len(tokens):
            return
        # A stop string ended the request: the worker and the scheduler do not know it yet.
        if active.flight:  # the scheduler learns it from the pass's result
            self._cancel_row(active)
        else:
            self.scheduler.end(active.request_id, output.tokens, now_s)
            self._tick_later()

    def _pass_done(self, event: PassDone) -> None:
        worker = event.worker
        rows = self.rows[worker]
        batch, result = rows.end(event)
        now_s = self.now_s
        took_s, expected_s = self.stats.count_pass(
            batch, result, now_s, self.scheduler.workers[worker]
        )
        self.forecast.ran(took_s, expected_s)
        self.scheduler.complete(result, now_s)
        if event.failure == "crashed":
            self._tick_later()  # the event that reports the worker's loss comes next
            return
        # The worker is idle: give it a pass before writing to clients or reading from them.
        if self._next_tick:
            self._next_tick.cancel()
        if self.state != "stopped":
            self._tick()

    # Decisions of the scheduler

    def _tick_later(self) -> None:
        """Tick once for everything that happens in this turn of the event loop."""
        if self._next_tick is None and self.state != "stopped":
            self._next_tick = asyncio.get_running_loop().call_soon(self._tick)

    def _tick(self) -> None:
        """Do what the scheduler decides now."""
        with self._stop_on_bug():
            self._next_tick = None
            now_s = self.now_s
            for batch in self.scheduler.tick(now_s):
                self._launch(batch, now_s)
            for worker in self.scheduler.take_interrupts():
                running = self.rows[worker].batch
                assert running is not None
                self._workers.tell(worker, Interrupt(running.pass_id))
            for refusal in self.scheduler.take_refusals():
                if refused := self._active.get(refusal.request_id):
                    self._end(refused, "failed", refusal.reason)
            if self._wake:
                self._wake.cancel()
                self._wake = None
            wake_at_s = self.scheduler.wake_at_s
            if wake_at_s < math.inf:
                delay_s = max(wake_at_s - now_s, 0.0) + TIMER_SLACK_S
                self._wake = asyncio.get_running_loop().call_later(delay_s, self._tick_later)

    def _launch(self, batch: Pass, now_s: float) -> None:
        """Send a pass to its worker."""
        moves = batch.moves or NO_MOVES
        self.stats.preemptions += len(moves.pause) + len(moves.swap_out)
        self.stats.preemptions += sum([not job.cancelled for job in batch.evict])
        self.forecast.started(batch)
        entering = [self._active[job.request_id] for job in batch.jobs]
        for active in entering:
            if math.isnan(active.started_s):
                active.started_s = now_s
                self.stats.latencies["queue"].observe(now_s - active.times.arrival_s)
        plan = self.rows[batch.worker].begin(batch, entering)
        self._workers.run(batch.worker, plan, batch.estimated_s)

    @contextmanager
    def _stop_on_bug(self) -> Iterator[None]:
        """Stop the driver at an exception: the state is unknown. A loop would only log it."""
        try:
            yield
        except Exception as error:  # any error: the state is unknown, whatever it was
            self._break(error)
            raise

    def _break(self, error: Exception) -> None:
        self.error = self.error or error
        self.broke.set()


def merge(steps: Sequence[StepOutput]) -> dict[int, tuple[list[int], FinishReason]]:
    """The tokens of each row over all `steps`, and how the row ended, or ''."""
    tokens: dict[int, list[int]] = {}
    ended: dict[int, FinishReason] = {}
    for step in steps:
        for row, token in zip(step.rows, step.tokens, strict=True):
            tokens.setdefault(row, []).append(token)
        ended.update(step.ended)
    return {row: (tokens.get(row, []), ended.get(row, "")) for row in {**tokens, **ended}}


NO_MOVES = Moves()


class WorkerRows:
    """The rows that one worker has, and what they got of the pass that it runs.

    The scheduler identifies a job by its request, the engine by a row number. A row gets its number
    when it enters, and loses it when its cache is dropped.

    Attributes:
        batch: the pass that runs now; None: the worker is idle.
        numbers: by request id.
    """

    def __init__(self) -> None:
        self.batch: Pass | None = None
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
        self.batch = batch
        evicted = (*self._forget(batch.evict), *self._forget(batch.release))
        entered = tuple(range(self._next_number, self._next_number + len(entering)))
        self._next_number += len(entering)
        self._requests.update(zip(entered, entering, strict=True))
        for active, number in zip(entering, entered, strict=True):
            self.numbers[active.request_id] = number
            active.flight = None if batch.keep_cache else batch
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

    def end(self, event: PassDone) -> tuple[Pass, PassResult]:
        """Return the pass that has ended, and its result. All its tokens have arrived."""
        batch = self.batch
        assert batch is not None
        self.batch = None
        if not batch.keep_cache:
            return batch, self.dropped(batch, event.failure)
        if event.output is None:
            return batch, self.crashed(batch)
        return batch, self.kept(batch, event.output)

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
