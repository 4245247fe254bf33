"""What profiling needs of an engine: time a point, and test whether a batch fits.

`LocalTimedEngine` uses an engine in this process, `toolkit.profiling.process.EngineProcess` one in
a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, cast, runtime_checkable

from toolkit.engines.protocol import Engine, OutOfMemory, Round, RoundEngine, Row, SamplingParams
from toolkit.files.profile import EngineFacts, FrontPoint, HitPoint, StepPoint, StepsProfile
from toolkit.profiling.grid import GridPoint, SliceShape

Clock = Literal["cpu", "wall"]
CLOCKS: dict[Clock, Callable[[], float]] = {"cpu": time.process_time, "wall": time.perf_counter}

# A visit to a cheap point lasts until it has taken this long, setup included, or has this many
# samples. More samples would tell little: disturbances last longer than a visit, and another visit
# sees another moment.
VISIT_S = 0.02
VISIT_SAMPLES = 3


class Unmeasurable(Exception):  # noqa: N818  (a result of the point, not a failure of the profile)
    """A point could not be measured, for the reason given. The engine is ready for the next point.

    The engine may have been restarted.
    """


class TimedEngine(Protocol):
    """An engine that times points."""

    facts: EngineFacts

    def time(self, point: GridPoint, warmups: int) -> list[float]:
        """Seconds of one or several runs of the point. Raises `Unmeasurable` with the reason."""
        ...

    def fits(self, shape: SliceShape) -> bool:
        """Whether a slice of this shape runs without running out of memory."""
        ...


class TimedRoundEngine(TimedEngine, Protocol):
    """A `TimedEngine` that keeps its rows between rounds."""

    def admit(self, length: int, limit: int) -> tuple[int, bool]:
        """(rows, ran out): how many rows of `length` tokens enter, one per round, up to `limit`.

        The second says whether the next row ran out of memory. Raises `Unmeasurable` with the
        reason.
        """
        ...


@runtime_checkable
class TimedPassEngine(Protocol):
    """A `TimedEngine` that reports its passes."""

    def take_passes(self) -> tuple[list[StepPoint], list[FrontPoint]]:
        """The passes since the last call."""
        ...

    @property
    def steps(self) -> StepsProfile:
        """The limits of the passes, without points."""
        ...


@runtime_checkable
class CachingEngine(Protocol):
    """A `TimedEngine` that may keep prompts in a prefix cache."""

    def time_hits(self, lengths: Sequence[int]) -> list[HitPoint]:
        """What a prompt of each length takes at first, and again."""
        ...


def visit(
    run: Callable[[], float], warmups: int, now_s: Callable[[], float] = time.perf_counter
) -> list[float]:
    """The seconds that `run` returns, of as many runs as one visit has, after the warmups."""
    for _ in range(warmups):
        run()
    samples: list[float] = []
    end_s = now_s() + VISIT_S
    while not samples or (len(samples) < VISIT_SAMPLES and now_s() < end_s):
        samples.append(run())
    return samples


class LocalTimedEngine:
    """An engine in this process. `now_s` is the clock that bounds a visit."""

    def __init__(
        self, engine: Engine, clock: Clock, now_s: Callable[[], float] = time.perf_counter
    ) -> None:
        self.facts = engine.facts
        self._engine = engine
        self._clock = CLOCKS[clock]
        self._now_s = now_s

    def time(self, point: GridPoint, warmups: int) -> list[float]:
        """See `TimedEngine.time`."""
        try:
            return visit(lambda: self._run(point), warmups, self._now_s)
        except OutOfMemory:
            raise Unmeasurable("out of memory") from None

    def _run(self, point: GridPoint) -> float:
        rows, length, clock = point.batch_size, point.length, self._clock
        if point.kind == "prefill":
            return self._engine.time_prefill(rows, length, clock)
        if point.kind == "decode":
            return self._engine.time_decode(rows, length, clock)
        assert point.kind != "mix"
        assert point.kind != "traffic"
        assert point.kind != "hit"
        return self._round_engine.time_part(point.kind, rows, length, point.others, clock)

    @property
    def _round_engine(self) -> RoundEngine:
        return cast(RoundEngine, self._engine)

    def admit(self, length: int, limit: int) -> tuple[int, bool]:
        """See `TimedRoundEngine.admit`."""
        (row,) = slice_rows(SliceShape(1, length, self.facts.max_model_len - length))
        engine = self._round_engine
        entered, runs_out = 0, False
        while entered < limit and not runs_out:
            runs_out = engine.run_round(Round(0, (row,), (entered,)), lambda _: True).is_short
            entered += not runs_out
        engine.run_round(Round(0, evict=tuple(range(entered + runs_out))), lambda _: True)
        return entered, runs_out

    def fits(self, shape: SliceShape) -> bool:
        """See `TimedEngine.fits`. The engine allocates all steps at the start, so one step is
        enough.
        """
        try:
            self._engine.run_slice(slice_rows(shape), shape.steps, lambda _: False)
        except OutOfMemory:
            return False
        return True


def slice_rows(shape: SliceShape, vocab_size: int = 2) -> list[Row]:
    """Rows of a slice that runs for all its steps.

    The first row is L tokens long, the others down to 3/4 of it, for real padding.
    """
    tokens = tuple(position % vocab_size for position in range(shape.input_length))
    spread, last = shape.input_length // 4, max(shape.batch_size - 1, 1)
    lengths = [shape.input_length - number * spread // last for number in range(shape.batch_size)]
    sampling = SamplingParams(ignore_eos=True)
    return [
        Row(
            f"profile-{number}",
            tokens[:length],
            generated=0,
            max_new_tokens=shape.steps,
            sampling=sampling,
        )
        for number, length in enumerate(lengths)
    ]
