"""What a profile will measure, and about how long that will take, said before it starts."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from toolkit.files.profile import FailedPoint
from toolkit.files.recipe import ProfileSpec
from toolkit.profiling.bench import VISIT_S, VISIT_SAMPLES, Bench, Unmeasurable
from toolkit.profiling.grid import GridPoint, Kind, Shape
from toolkit.profiling.measure import warmups
from toolkit.profiling.sequences import ROUNDS

PROBES_PER_LENGTH = 2  # that run; those that do not fit cost next to nothing
SHORTEST_S = 1e-6  # of a run; where no point of a kind fits, nothing is known
SEQUENCE_PREFILLS = 2  # of a usual batch, in a sequence of rounds: the first one, and who replaces it


@dataclass(slots=True, frozen=True)
class Work:
    """What is left to do."""

    visits: Sequence[tuple[int, GridPoint]]
    memory: Sequence[tuple[int, int]]  # (input length, steps)
    slices: dict[int, Shape]  # by number
    admissions: Sequence[int] = ()  # input lengths at which rows are admitted
    sequences: Sequence[int] = ()  # of rounds, their numbers

    @property
    def steps(self) -> int:
        """How often a progress bar moves."""
        parts = self.visits, self.memory, self.slices, self.admissions, self.sequences
        return sum(map(len, parts))


@dataclass(slots=True, frozen=True)
class Plan:
    """What a person is told before the work starts."""

    points: int  # of the grid, all in all
    steps: int
    about_s: float
    resumed: int  # results that an earlier run left
    skipped: dict[str, int]  # reason to the number of points
    set_aside: str  # why an earlier run's results are not used, '' where they are or there are none


def skip_reasons(skipped: Iterable[FailedPoint]) -> dict[str, int]:
    return dict(Counter(point.reason for point in skipped))


def estimate_s(work: Work, points: Sequence[GridPoint], spec: ProfileSpec, bench: Bench, workers: int) -> float:
    """About how long the work takes, from up to four quick timings: the smallest and the largest point of each kind."""
    kinds: tuple[Kind, ...] = ("prefill", "decode")
    lines = {kind: _Line.timed([point for point in points if point.kind == kind], bench) for kind in kinds}

    def visit_s(number: int, point: GridPoint) -> float:
        once_s = lines[point.kind if point.kind == "prefill" else "decode"].at(point.tokens)
        samples = min(VISIT_SAMPLES, max(1.0, VISIT_S / max(once_s, SHORTEST_S)))
        return once_s * (warmups(number, spec) + samples)

    def slice_s(shape: Shape) -> float:
        tokens = shape.batch_size * shape.input_length
        return lines["prefill"].at(tokens) + shape.steps * lines["decode"].at(tokens)

    capacity = bench.facts.capacity_tokens
    probe_s = PROBES_PER_LENGTH * lines["prefill"].at(capacity)
    visits_s = sum(visit_s(number, point) for number, point in work.visits)
    slices_s = sum(slice_s(shape) for shape in work.slices.values()) / workers
    admissions_s = sum(capacity / length * lines["prefill"].at(length) for length in work.admissions)
    tokens = round(math.prod(math.sqrt(min(grid) * max(grid)) for grid in (spec.batch_sizes, spec.input_lengths)))
    steps = ROUNDS * math.sqrt(max(spec.slice_tokens))
    sequence_s = SEQUENCE_PREFILLS * lines["prefill"].at(tokens) + steps * lines["decode"].at(tokens)
    return visits_s + slices_s + len(work.memory) * probe_s + admissions_s + len(work.sequences) * sequence_s / workers


@dataclass(slots=True, frozen=True)
class _Line:
    """Seconds of a point, as a line in its tokens."""

    flat_s: float
    token_s: float

    @classmethod
    def timed(cls, points: Sequence[GridPoint], bench: Bench) -> _Line:
        ends = sorted(points, key=lambda point: point.tokens)
        if not ends:
            return cls(0.0, 0.0)
        small, large = ends[0], ends[-1]
        small_s = _wall_s(small, bench)
        large_s = max(_wall_s(large, bench), small_s)
        slope = (large_s - small_s) / max(large.tokens - small.tokens, 1)
        return cls(max(small_s - slope * small.tokens, 1e-6), slope)

    def at(self, tokens: int) -> float:
        return self.flat_s + self.token_s * tokens


def _wall_s(point: GridPoint, bench: Bench) -> float:
    """Wall seconds of one run and all that it takes around it; 0 where it cannot be measured."""
    start_s = time.perf_counter()
    try:
        samples = bench.time(point, 1)
    except Unmeasurable:
        return 0.0
    return (time.perf_counter() - start_s) / (len(samples) + 1)
