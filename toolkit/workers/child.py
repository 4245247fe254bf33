"""A worker's process: it loads an engine and serves slices and rounds over a channel to its front.

One thread does the work. Between two steps it reads frames from the front, so that a cancelled
batch stops. An unexpected error ends the process, because the engine's state is then unknown and
the front can start another process. Other threads send signs of life and end the process with its
front (`toolkit.workers.lifeline`).
"""

from __future__ import annotations

import gc
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from typing import cast

from toolkit.engines.protocol import (
    Engine,
    OutOfMemory,
    RoundEngine,
    Row,
    StepOutput,
    make_engine,
)
from toolkit.errors import LlmctlError
from toolkit.files.recipe import Recipe
from toolkit.workers.lifeline import FrontSocket, LifeSigns
from toolkit.workers.protocol import (
    Cancel,
    Channel,
    Done,
    FrontGoneError,
    Interrupt,
    Progress,
    Ready,
    Refused,
    RunBatch,
    RunRound,
    RunSlice,
    SocketChannel,
    Start,
    Stop,
)

WARM_UP_ROWS = (Row("warm-up-0", (0,) * 8, 0, 3), Row("warm-up-1", (0,) * 5, 0, 3))


class Outbox:
    """Sends tokens to the front.

    The first tokens of a slice, and in rounds the first token of each row, are sent at once. Later
    tokens, also a row's last one, wait up to `flush_s` and are sent together. So the front handles
    a few frames per second and worker, instead of one per token or per end of a row.
    """

    def __init__(self, channel: Channel, flush_s: float, clock: Callable[[], float]) -> None:
        self._channel = channel
        self._flush_s = flush_s
        self._clock = clock
        self._batch_id = -1
        self._unsent: list[StepOutput] = []
        self._sent_s = -1.0
        self._without_token: set[int] = set()  # rows of rounds that have no token yet

    def begin(self, batch: RunBatch) -> None:
        """Start a batch. The newcomers of a round may get their first tokens in later rounds."""
        self._batch_id = batch.pass_id
        if isinstance(batch, RunSlice):
            self._sent_s = -1.0
        else:
            self.forget(batch.plan.evict)
            self._without_token.update(batch.plan.numbers)

    def forget(self, numbers: Iterable[int]) -> None:
        self._without_token.difference_update(numbers)

    def put(self, step: StepOutput) -> None:
        """Send a step's tokens now, or keep them for the next frame."""
        self._unsent.append(step)
        is_first = not self._without_token.isdisjoint(step.rows)
        if is_first:
            self._without_token.difference_update(step.rows)
        now_s = self._clock()
        if is_first or self._sent_s < 0 or now_s - self._sent_s >= self._flush_s:
            self._channel.send(Progress(self._batch_id, self.take()))
            self._sent_s = now_s

    def take(self) -> tuple[StepOutput, ...]:
        """Remove and return the steps that were not sent."""
        steps = tuple(self._unsent)
        self._unsent.clear()
        return steps


class BatchInProgress:
    """Between two steps of a batch: sends tokens, and reads the frames that end it early.

    Attributes:
        stops: the front has told the worker to end.
    """

    def __init__(self, batch: RunBatch, channel: Channel, outbox: Outbox) -> None:
        self.stops = False
        self._batch = batch
        self._channel = channel
        self._outbox = outbox
        rows = batch.rows if isinstance(batch, RunSlice) else ()
        self._wanted = {row.request_id for row in rows}

    def on_step(self, step: StepOutput) -> bool:
        """Whether the batch goes on: not if no row of a slice is wanted, if a round is interrupted
        or if the worker stops.
        """
        self._outbox.put(step)
        batch = self._batch
        goes_on = True
        for frame in self._channel.poll():
            if isinstance(frame, Stop):
                self.stops = True
            elif isinstance(frame, Interrupt) and frame.pass_id == batch.pass_id:
                goes_on = False
            elif isinstance(frame, Cancel) and frame.pass_id == batch.pass_id:
                self._wanted.difference_update(frame.request_ids)
        if isinstance(batch, RunSlice):
            self._wanted.difference_update(batch.rows[index].request_id for index, _ in step.ended)
            goes_on = bool(self._wanted)
        return goes_on and not self.stops


def serve(channel: Channel, signs: LifeSigns) -> int:
    """Load the engine that the first frame names, and serve until `Stop`. Returns the exit code.

    `signs` gets the worker's state, which decides whether it sends signs of life.
    """
    start = channel.receive()
    if not isinstance(start, Start):
        raise ValueError(f"the first frame must be 'start', not {start}")
    recipe = Recipe.model_validate_json(start.recipe)
    try:
        engine = _load(recipe)
    except LlmctlError as error:
        channel.send(Refused(error.message, error.hint))
        return error.exit_code
    signs.state = "idle"
    channel.send(Ready(engine.facts.model_dump_json()))
    outbox = Outbox(channel, recipe.engine.flush_s, time.perf_counter)
    ended_s: float | None = None  # the last batch
    while True:
        frame = channel.receive()
        if isinstance(frame, Stop):
            return 0
        if not isinstance(frame, RunSlice | RunRound):
            continue  # it is for a batch that has ended
        signs.state = "busy"
        gap_s = 0.0 if ended_s is None else time.perf_counter() - ended_s
        outbox.begin(frame)
        running = BatchInProgress(frame, channel, outbox)
        output = None
        ran_out = False
        if isinstance(frame, RunSlice):
            try:
                engine.run_slice(frame.rows, frame.steps, running.on_step)
            except OutOfMemory:
                ran_out = True
        else:
            output = cast(RoundEngine, engine).run_round(frame.plan, running.on_step)
            outbox.forget(output.dropped)
            ran_out = output.is_short
        ended_s = time.perf_counter()
        channel.send(Done(frame.pass_id, outbox.take(), gap_s, ran_out, output))
        if running.stops:
            return 0
        signs.state = "idle"


def _load(recipe: Recipe) -> Engine:
    engine = make_engine(recipe.model, recipe.engine, recipe.hardware)
    # The first passes choose kernels and fill caches.
    engine.run_slice(WARM_UP_ROWS, 3, lambda _: True)
    gc.collect()
    gc.freeze()  # the model's objects stay, so later collections can skip them
    return engine


def run(line: FrontSocket, signs: LifeSigns) -> int:
    """Serve a front over a socket. Returns the exit code."""
    # The front decides when to end, also if the worker's own process group gets SIGINT.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return serve(SocketChannel(line), signs)
    except FrontGoneError:
        return 0
    except Exception:  # noqa: BLE001  (the process ends here; the front keeps the end of stderr)
        traceback.print_exc()
        return 1
