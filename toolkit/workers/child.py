"""A worker's process: it loads an engine and runs passes over a channel to its front.

One thread does the work. Between two steps it reads frames from the front, so that a cancelled
pass stops. An unexpected error ends the process, because the engine's state is then unknown and
the front can start another process. Other threads send signs of life and end the process with its
front (`toolkit.processes.lifeline`).
"""

from __future__ import annotations

import gc
import signal
import time
import traceback
from collections.abc import Callable

from toolkit.engines.protocol import (
    Engine,
    EnginePass,
    PassOutput,
    Row,
    StepOutput,
    make_engine,
    slice_of,
)
from toolkit.errors import LlmctlError
from toolkit.files.recipe import Recipe
from toolkit.processes.channel import Channel, ChannelClosedError
from toolkit.processes.lifeline import LifeSigns
from toolkit.sched.types import Failure
from toolkit.workers.protocol import (
    TO_WORKER,
    Cancel,
    Interrupt,
    PassDone,
    PassProgress,
    Ready,
    Refused,
    Start,
    Stop,
)

WARM_UP_ROWS = (Row("warm-up-0", (0,) * 8, 0, 3), Row("warm-up-1", (0,) * 5, 0, 3))


class RunningPass:
    """The pass that the worker runs, between two of its steps: sends tokens, and reads the frames
    that end it early.

    The first token of each row that enters is sent at once. Later tokens, also a row's last one,
    wait up to `flush_s` and are sent together. So the front handles a few frames per second and
    worker, instead of one per token or per end of a row.

    Attributes:
        stops: the front has told the worker to end.
    """

    def __init__(self, channel: Channel, flush_s: float, clock: Callable[[], float]) -> None:
        self.stops = False
        self._channel = channel
        self._flush_s = flush_s
        self._clock = clock
        self._pass_id = -1
        # Rows of a pass that keeps no caches: it ends when none is left.
        self._wanted: set[int] | None = None
        self._unsent: list[StepOutput] = []
        self._sent_s = -1.0
        self._without_token: set[int] = set()  # rows that entered and have no token yet

    def begin(self, plan: EnginePass) -> None:
        """Start a pass. Its newcomers may get their first tokens in later passes."""
        self._pass_id = plan.pass_id
        self._wanted = None if plan.keep_cache else set(plan.numbers)
        self._without_token.difference_update(plan.evict)
        self._without_token.update(plan.numbers)

    def on_step(self, step: StepOutput) -> bool:
        """Whether the pass goes on: not if it is interrupted, if the worker stops, or if it keeps
        no caches and no row is wanted.
        """
        self._report(step)
        wanted = self._wanted
        goes_on = True
        for frame in self._channel.poll(TO_WORKER):
            if isinstance(frame, Stop):
                self.stops = True
            elif isinstance(frame, Interrupt) and frame.pass_id == self._pass_id:
                goes_on = False
            elif isinstance(frame, Cancel) and frame.pass_id == self._pass_id and wanted:
                wanted.difference_update(frame.numbers)
        if wanted is not None:
            wanted.difference_update([number for number, _ in step.ended])
            goes_on = goes_on and bool(wanted)
        return goes_on and not self.stops

    def end(self, output: PassOutput) -> None:
        """Send the last tokens, and what the pass did."""
        self._without_token.difference_update(output.dropped)
        self._flush()
        failure: Failure = "oom" if output.is_short else ""
        self._channel.send(PassDone(-1, self._pass_id, output, failure))

    def _report(self, step: StepOutput) -> None:
        """Send a step's tokens now, or keep them for the next frame."""
        self._unsent.append(step)
        is_first = not self._without_token.isdisjoint(step.rows)
        if is_first:
            self._without_token.difference_update(step.rows)
        now_s = self._clock()
        if is_first or self._sent_s < 0 or now_s - self._sent_s >= self._flush_s:
            self._flush()
            self._sent_s = now_s

    def _flush(self) -> None:
        if self._unsent:
            self._channel.send(PassProgress(-1, self._pass_id, tuple(self._unsent)))
            self._unsent.clear()


def serve(channel: Channel, signs: LifeSigns) -> int:
    """Load the engine that the first frame names, and serve until `Stop`. Returns the exit code.

    `signs` gets the worker's state, which decides whether it sends signs of life.
    """
    start = channel.receive(TO_WORKER)
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
    running = RunningPass(channel, recipe.engine.flush_s, time.perf_counter)
    while True:
        frame = channel.receive(TO_WORKER)
        if isinstance(frame, Stop):
            return 0
        if not isinstance(frame, EnginePass):
            continue  # it is for a pass that has ended
        signs.state = "busy"
        running.begin(frame)
        output = engine.run(frame, running.on_step)
        running.end(output)
        if running.stops:
            return 0
        signs.state = "idle"


def _load(recipe: Recipe) -> Engine:
    engine = make_engine(recipe.model, recipe.engine, recipe.hardware)
    # The first passes choose kernels and fill caches.
    engine.run(slice_of(WARM_UP_ROWS, 3), lambda _: True)
    gc.collect()
    gc.freeze()  # the model's objects stay, so later collections can skip them
    return engine


def run(channel: Channel, signs: LifeSigns) -> int:
    """Serve a front over a channel. Returns the exit code."""
    # The front decides when to end, also if the worker's own process group gets SIGINT.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return serve(channel, signs)
    except ChannelClosedError:
        return 0
    except Exception:  # noqa: BLE001  (the process ends here; the front keeps the end of stderr)
        traceback.print_exc()
        return 1
