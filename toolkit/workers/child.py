"""A worker's process: it loads an engine and serves slices and rounds over a channel to its front.

One thread does the work: between two steps it looks whether the front wants something, so a
cancelled batch stops. An unexpected error ends the process: after it, nothing is known of the
engine's state, and the front knows how to start another. Beside it, threads give signs of life and
end the process with its front (`toolkit.workers.lifeline`).
"""

from __future__ import annotations

import contextlib
import gc
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from typing import cast

from toolkit.engines.factory import make_engine
from toolkit.engines.protocol import (
    Engine,
    OnStep,
    OutOfMemory,
    Round,
    RoundEngine,
    Row,
    StepOutput,
)
from toolkit.errors import LlmctlError
from toolkit.files.recipe import EngineSpec, HardwareSpec, ModelSpec
from toolkit.workers.frames import (
    Cancel,
    Channel,
    Done,
    DoneRound,
    FrontGoneError,
    Interrupt,
    Progress,
    Ready,
    Refused,
    RunRound,
    RunSlice,
    SocketChannel,
    Start,
    Stop,
)
from toolkit.workers.lifeline import FrontSocket, LifeSigns
from toolkit.workers.protocol import Times

WARM_UP_ROWS = (Row("warm-up-0", (0,) * 8, 0, 3), Row("warm-up-1", (0,) * 5, 0, 3))


class Outbox:
    """Tokens on their way to the front.

    A slice's first ones, and in rounds each row's first one, go out at once; later ones wait up to
    `flush_s` for company, a row's last one too, so that the front handles a few frames per second
    and worker, and not one per token or per end of a row.
    """

    def __init__(self, channel: Channel, flush_s: float, clock: Callable[[], float]) -> None:
        self._channel = channel
        self._flush_s = flush_s
        self._clock = clock
        self._batch_id = -1
        self._unsent: list[StepOutput] = []
        self._sent_s = -1.0
        self._awaited: set[int] = set()  # rows of rounds that have no token yet

    def begin(self, batch_id: int) -> None:
        """A slice starts."""
        self._batch_id = batch_id
        self._sent_s = -1.0

    def begin_round(self, batch_id: int, plan: Round) -> None:
        """A round starts. Its newcomers may get their first tokens in later ones."""
        self._batch_id = batch_id
        self.forget(plan.evict)
        self._awaited.update(plan.numbers)

    def forget(self, numbers: Iterable[int]) -> None:
        """These rows are gone."""
        self._awaited.difference_update(numbers)

    def put(self, step: StepOutput) -> None:
        """A step's tokens."""
        self._unsent.append(step)
        is_first = not self._awaited.isdisjoint(step.rows)
        if is_first:
            self._awaited.difference_update(step.rows)
        now_s = self._clock()
        if is_first or self._sent_s < 0 or now_s - self._sent_s >= self._flush_s:
            self._channel.send(Progress(self._batch_id, self.take()))
            self._sent_s = now_s

    def take(self) -> tuple[StepOutput, ...]:
        """What has not gone out."""
        steps = tuple(self._unsent)
        self._unsent.clear()
        return steps


class RunningSlice:
    """What happens between two steps of a slice: tokens go out, cancellations come in."""

    def __init__(self, run: RunSlice, channel: Channel, outbox: Outbox) -> None:
        self._run = run
        self._channel = channel
        self._outbox = outbox
        self._wanted = {row.request_id for row in run.rows}

    def on_step(self, step: StepOutput) -> bool:
        """False where nobody wants the batch any more."""
        self._outbox.put(step)
        for index, _ in step.ended:
            self._wanted.discard(self._run.rows[index].request_id)
        return self._look() and bool(self._wanted)

    def _look(self) -> bool:
        """Take what the front sent. False: end the slice."""
        for frame in self._channel.poll():
            if isinstance(frame, Cancel) and frame.batch_id == self._run.batch_id:
                self._wanted.difference_update(frame.request_ids)
            elif isinstance(frame, Stop):
                self._channel.put_back(frame)
                return False
        return True


class RunningRound:
    """The same of a round, which the front may interrupt."""

    def __init__(self, run: RunRound, channel: Channel, outbox: Outbox) -> None:
        self._run = run
        self._channel = channel
        self._outbox = outbox

    def on_step(self, step: StepOutput) -> bool:
        """False where the round should end."""
        self._outbox.put(step)
        for frame in self._channel.poll():
            if isinstance(frame, Interrupt) and frame.batch_id == self._run.batch_id:
                return False
            if isinstance(frame, Stop):
                self._channel.put_back(frame)
                return False
        return True


class Stopwatch:
    """What a batch's time goes into, on the worker's clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start_s = self._gap_s = self._reporting_s = 0.0
        self._end_s: float | None = None  # of the last batch

    def start(self) -> None:
        """A batch starts."""
        self._start_s, self._reporting_s = self._clock(), 0.0
        self._gap_s = 0.0 if self._end_s is None else self._start_s - self._end_s

    def reporting(self, on_step: OnStep) -> OnStep:
        """`on_step`, and its time is taken."""

        def timed(step: StepOutput) -> bool:
            begin_s = self._clock()
            wanted = on_step(step)
            self._reporting_s += self._clock() - begin_s
            return wanted

        return timed

    def stop(self) -> Times:
        """The batch has ended."""
        self._end_s = self._clock()
        return Times(self._end_s - self._start_s, self._reporting_s, self._gap_s)


def serve(
    channel: Channel, signs: LifeSigns, clock: Callable[[], float] = time.perf_counter
) -> int:
    """Load what the first frame says and serve until the front stops or goes. Returns the exit
    code.

    `signs` are told what the worker does.
    """
    start = channel.receive()
    if not isinstance(start, Start):
        raise ValueError(f"the first frame must be 'start', not {start}")
    try:
        engine = _load(start)
    except LlmctlError as error:
        channel.send(Refused(error.message, error.hint))
        return error.exit_code
    signs.state = "idle"
    channel.send(Ready(engine.facts.model_dump_json()))
    outbox, watch = Outbox(channel, start.flush_s, clock), Stopwatch(clock)
    while True:
        frame = channel.receive()
        if isinstance(frame, Stop):
            return 0
        signs.state = "busy"
        if isinstance(frame, RunSlice):
            channel.send(_run(engine, frame, channel, outbox, watch))
        elif isinstance(frame, RunRound):
            channel.send(_run_round(cast(RoundEngine, engine), frame, channel, outbox, watch))
        signs.state = "idle"


def _load(start: Start) -> Engine:
    engine = make_engine(
        ModelSpec.model_validate_json(start.model),
        EngineSpec.model_validate_json(start.engine),
        HardwareSpec.model_validate_json(start.hardware),
    )
    engine.run_slice(
        WARM_UP_ROWS, 3, lambda _: True
    )  # kernels are chosen and caches filled at the first pass
    gc.collect()
    gc.freeze()  # the model's objects stay: no collection needs to walk over them again
    return engine


def _run(engine: Engine, run: RunSlice, channel: Channel, outbox: Outbox, watch: Stopwatch) -> Done:
    watch.start()
    outbox.begin(run.batch_id)
    fitted = False
    with contextlib.suppress(OutOfMemory):
        engine.run_slice(
            run.rows, run.steps, watch.reporting(RunningSlice(run, channel, outbox).on_step)
        )
        fitted = True
    return Done(run.batch_id, outbox.take(), watch.stop(), out_of_memory=not fitted)


def _run_round(
    engine: RoundEngine, run: RunRound, channel: Channel, outbox: Outbox, watch: Stopwatch
) -> DoneRound:
    watch.start()
    outbox.begin_round(run.batch_id, run.plan)
    output = engine.run_round(run.plan, watch.reporting(RunningRound(run, channel, outbox).on_step))
    outbox.forget(output.dropped)
    return DoneRound(run.batch_id, outbox.take(), watch.stop(), output)


def run(line: FrontSocket, signs: LifeSigns) -> int:
    """Serve a front over a socket. Returns the exit code."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a Ctrl-C reaches the whole group; when to end is the front's to say
    try:
        return serve(SocketChannel(line), signs)
    except FrontGoneError:
        return 0
    except Exception:  # noqa: BLE001  (one of the two edges: what happened goes to stderr, which the front keeps)
        traceback.print_exc()
        return 1
