"""An engine under measurement, in a process of its own.

A probe past the memory edge or a bug in a kernel may kill that process; the profile goes on, with a
new one.

Order: what profiling needs of an engine (`TimedEngine`, `ProfileBench`), the frames between parent
and child, `EngineProcess`, and `busy_neighbours`, other engines that run during a measurement.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar, cast

import msgspec
from pydantic import Field

from toolkit.engines.protocol import (
    Engine,
    EnginePass,
    OutOfMemory,
    Part,
    Row,
    SamplingParams,
    slice_of,
)
from toolkit.engines.resources import engine_environment
from toolkit.errors import EngineError, InputError
from toolkit.files.profile import (
    EngineFacts,
    FrontPoint,
    StepPoint,
    StepsProfile,
)
from toolkit.files.recipe import Recipe
from toolkit.files.strict import Strict
from toolkit.processes.channel import Channel, ChannelClosedError
from toolkit.processes.child import Child
from toolkit.profiling.grid import GridPoint, SliceShape
from toolkit.workers.protocol import Workers

Clock = Literal["cpu", "wall"]
CLOCKS: dict[Clock, Callable[[], float]] = {"cpu": time.process_time, "wall": time.perf_counter}

# A visit to a cheap point ends after this long, setup included, or with `VISIT_SAMPLES` samples.
# More would tell little: disturbances last longer than a visit, and another visit sees another
# moment.
VISIT_S = 0.02
VISIT_SAMPLES = 3


class Unmeasurable(Exception):  # noqa: N818  (a result of the point, not a failure of the profile)
    """Why a point could not be measured. The engine, perhaps a new one, is ready for the next."""


class Passes(Strict):
    """The passes of an engine that reports them, in order, and what clients waited besides.

    `sampler_s` is the least time that a launch went on after the end that `StepPoint.launch_s`
    has here; None: not known.
    """

    steps: list[StepPoint] = Field([])
    front: list[FrontPoint] = Field([])
    sampler_s: float | None = None


class TimedEngine(ABC):
    """An engine that times points."""

    facts: EngineFacts

    @abstractmethod
    def time(self, point: GridPoint, warmups: int) -> list[float]:
        """Seconds of one or several runs of the point. Raises `Unmeasurable` with the reason."""

    @abstractmethod
    def fits(self, shape: SliceShape) -> bool:
        """Whether a slice of this shape runs without running out of memory."""

    def admit(self, length: int, limit: int) -> tuple[int, bool]:
        """How many rows of `length` tokens enter, one per pass, up to `limit`, and whether the
        next one ran out of memory. Raises `Unmeasurable` with the reason.
        """
        raise NotImplementedError("the engine does not keep its rows between passes")

    @property
    def steps(self) -> StepsProfile | None:
        """The limits of its passes, without points; None if it reports no passes."""
        return None

    def take_passes(self) -> Passes:
        """The passes since the last call."""
        return Passes()

    def prepare(self, points: Sequence[GridPoint]) -> None:  # noqa: B027  (most need nothing)
        """Run some of the points before any is timed, where the engine needs that."""


class ProfileBench(TimedEngine):
    """A `TimedEngine` with the workers that run whole slices."""

    @abstractmethod
    def stop(self) -> None:
        """End its use; its memory is then free for the workers."""

    @abstractmethod
    def workers(self, recipe: Recipe) -> Workers:
        """The workers that run slices, the same as when serving."""


def visit(run: Callable[[], float], warmups: int) -> list[float]:
    """The seconds that `run` returns, of as many runs as one visit has, after the warmups."""
    for _ in range(warmups):
        run()
    samples: list[float] = []
    end_s = time.perf_counter() + VISIT_S
    while not samples or (len(samples) < VISIT_SAMPLES and time.perf_counter() < end_s):
        samples.append(run())
    return samples


class LocalTimedEngine(TimedEngine):
    """An engine in this process."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.facts = engine.facts
        self._engine = engine
        self._clock = CLOCKS[clock]

    def time(self, point: GridPoint, warmups: int) -> list[float]:
        kind = point.kind
        rows = point.batch_size
        length = point.length
        clock = self._clock

        def run() -> float:
            if kind == "prefill":
                return self._engine.time_prefill(rows, length, clock)
            if kind == "decode":
                return self._engine.time_decode(rows, length, clock)
            return self._engine.time_part(cast(Part, kind), rows, length, point.others, clock)

        try:
            return visit(run, warmups)
        except OutOfMemory:
            raise Unmeasurable("out of memory") from None

    def admit(self, length: int, limit: int) -> tuple[int, bool]:
        (row,) = slice_rows(SliceShape(1, length, self.facts.max_model_len - length))
        engine = self._engine
        entered = 0
        runs_out = False
        while entered < limit and not runs_out:
            runs_out = engine.run(EnginePass(0, (row,), (entered,)), lambda _: True).is_short
            entered += not runs_out
        engine.run(EnginePass(0, evict=tuple(range(entered + runs_out))), lambda _: True)
        return entered, runs_out

    def fits(self, shape: SliceShape) -> bool:
        """See `TimedEngine.fits`. One step is enough: the engine allocates all at the start."""
        plan = slice_of(slice_rows(shape), shape.steps)
        return not self._engine.run(plan, lambda _: False).is_short


def slice_rows(shape: SliceShape, vocab_size: int = 2) -> list[Row]:
    """Rows of a slice that runs for all its steps, of L tokens down to 3/4 of that, for padding."""
    tokens = tuple(position % vocab_size for position in range(shape.input_length))
    spread = shape.input_length // 4
    last = max(shape.batch_size - 1, 1)
    lengths = [shape.input_length - number * spread // last for number in range(shape.batch_size)]
    sampling = SamplingParams(ignore_eos=True)
    return [
        Row(f"profile-{number}", tokens[:length], 0, shape.steps, sampling)
        for number, length in enumerate(lengths)
    ]


class LoadEngine(msgspec.Struct, tag=True, frozen=True):
    """The first frame: the recipe of the engine to load."""

    recipe_json: str


class Time(msgspec.Struct, tag=True, frozen=True):
    """Time a point."""

    point: GridPoint
    warmups: int


class Fits(msgspec.Struct, tag=True, frozen=True):
    """Try a slice."""

    shape: SliceShape


class Admit(msgspec.Struct, tag=True, frozen=True):
    """Admit rows one by one."""

    length: int
    limit: int


class KeepBusy(msgspec.Struct, tag=True, frozen=True):
    """Serve these slices over and over until the process is ended. There is no reply."""

    shapes: tuple[SliceShape, ...]


class Returned(msgspec.Struct, tag=True, frozen=True):
    """What the method of `LocalTimedEngine` returned, or the facts of the loaded engine as JSON."""

    result: Any


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The request failed. `exit_code` belongs to the error to raise, 0 for this point only."""

    message: str
    hint: str = ""
    exit_code: int = 0


Request = LoadEngine | Time | Fits | Admit | KeepBusy
Reply = Returned | Failed
Result = TypeVar("Result")

REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)

COMMAND = (sys.executable, "-m", "toolkit.profiling.child")
DEATHS_MAX = 5  # per profile: if every point kills its process, the fault is elsewhere
END_S = 5.0


class Died(Unmeasurable):
    """The point killed the process; a new process has been started."""


class EngineProcess(ProfileBench):
    """An engine in a child process, restarted when it dies. `start` and `wait` are separate so that
    several engines can load at the same time.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe_json = recipe.model_dump_json()
        self._environment = engine_environment(recipe.engine.threads, recipe.hardware.device)
        self._child: Child | None = None
        self._deaths = 0

    def start(self) -> None:
        """Start the child, which begins to load its engine."""
        ours, theirs = socket.socketpair()
        self._child = Child(COMMAND, self._environment, gives=theirs, shows=True)
        self._channel = Channel(ours)
        self._send(LoadEngine(self._recipe_json))

    def wait(self) -> None:
        """Wait until the engine is loaded. Raises `EngineError` or `InputError` if it cannot be."""
        try:
            reply = self._channel.receive(REPLIES)
        except ChannelClosedError:
            why = f"the engine's process ended while it loaded: {self._end()}"
            raise EngineError(why) from None
        if isinstance(reply, Failed):
            self.stop()
            is_input = reply.exit_code == InputError.exit_code
            raise (InputError if is_input else EngineError)(reply.message, reply.hint)
        self.facts = EngineFacts.model_validate_json(reply.result)

    def stop(self) -> None:
        """End the child, if there is one."""
        if self._child is not None:
            self._child.terminate()
            self._end()

    def time(self, point: GridPoint, warmups: int) -> list[float]:
        """See `TimedEngine.time`. Raises `Died` if the point killed the process."""
        return self._request(Time(point, warmups), list[float])

    def fits(self, shape: SliceShape) -> bool:
        """See `TimedEngine.fits`. A shape that kills the process did not fit: the kernel kills it
        when memory is short.
        """
        try:
            return self._request(Fits(shape), bool)
        except Died:
            return False

    def workers(self, recipe: Recipe) -> Workers:
        """The processes that will serve: several equal workers."""
        from toolkit.workers.pool import ProcessWorkers

        return ProcessWorkers(recipe, recipe.workers)

    def admit(self, length: int, limit: int) -> tuple[int, bool]:
        """See `TimedEngine.admit`. Raises `Died` if it killed the process."""
        return self._request(Admit(length, limit), tuple[int, bool])

    def keep_busy(self, shapes: Sequence[SliceShape]) -> None:
        """Serve these slices over and over until `stop`."""
        self._send(KeepBusy(tuple(shapes)))

    def _request(self, request: Request, kind: type[Result]) -> Result:
        self._send(request)
        try:
            reply = self._channel.receive(REPLIES)
        except ChannelClosedError:
            reason = self._end()
            self._deaths += 1
            if self._deaths >= DEATHS_MAX:
                raise EngineError(
                    f"the engine's process ended {self._deaths} times, the last time: {reason}",
                    "look at its output above; smaller profile.batch_sizes may help",
                ) from None
            self.start()
            self.wait()
            raise Died(f"the engine's process ended: {reason}") from None
        if isinstance(reply, Failed):
            raise Unmeasurable(reply.message)
        return msgspec.convert(reply.result, kind)

    def _send(self, request: Request) -> None:
        # A dead child is noticed by the end of the channel in the place of its reply.
        with contextlib.suppress(ChannelClosedError):
            self._channel.send(request)

    def _end(self) -> str:
        """Reap the child and return how it ended. Also end what it has started: the other ranks of
        a model would keep the device's memory and compute beside the next measurement.
        """
        child = self._child
        self._child = None
        assert child
        self._channel.close()
        return child.end(END_S)


@contextlib.contextmanager
def engine_process(recipe: Recipe) -> Iterator[EngineProcess]:
    """Yield a process with its engine loaded."""
    bench = EngineProcess(recipe)
    bench.start()
    try:
        bench.wait()
        yield bench
    finally:
        bench.stop()


@contextlib.contextmanager
def busy_neighbours(recipe: Recipe, count: int, shapes: Sequence[SliceShape]) -> Iterator[None]:
    """Run `count` other engines meanwhile, as when all workers serve: they share the processor's
    caches and memory bandwidth with the measured one.
    """
    others = [EngineProcess(recipe) for _ in range(count if shapes else 0)]
    with contextlib.ExitStack() as stack:
        for other in others:
            stack.callback(other.stop)
            other.start()
        for other in others:
            other.wait()
            other.keep_busy(shapes)
        yield
