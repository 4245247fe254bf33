"""Measuring: visits to the grid's points, and the search for the memory edge.

The grid is measured in rounds, and every sample is kept. Repeats of a point one after the other all
share the state of the machine at that moment. Repeats in different rounds do not: a disturbance
then spoils a few samples of every point, in equal shares.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from toolkit.files.profile import (
    DecodePoint,
    EngineFacts,
    FailedPoint,
    MemoryPoint,
    PartPoint,
    PrefillPoint,
)
from toolkit.files.recipe import ProfileSpec
from toolkit.profiling.grid import CHEAP_VISITS, GridPoint, SliceShape, in_rounds
from toolkit.profiling.journal import Journal, PointVisit, Result
from toolkit.profiling.process import TimedEngine, TimedPassEngine, TimedRoundEngine, Unmeasurable


def visit_key(point: GridPoint, number: int) -> str:
    return f"{failure_key(point)}/{number}"


def failure_key(point: GridPoint) -> str:
    beside = f"/{point.others}" if point.others else ""
    return f"{point.kind}/{point.batch_size}/{point.length}{beside}"


def visits_left(
    points: Sequence[GridPoint], spec: ProfileSpec, journal: Journal
) -> list[tuple[int, GridPoint]]:
    """(number, point) of every visit that the journal lacks."""
    return [
        (number, point)
        for number, point in in_rounds(points, spec)
        if visit_key(point, number) not in journal.results
        and failure_key(point) not in journal.results
    ]


def measure(
    visits: Sequence[tuple[int, GridPoint]],
    bench: TimedEngine,
    spec: ProfileSpec,
    journal: Journal,
    advance: Callable[[str], None],
) -> None:
    """Make the visits. A point that cannot be measured is recorded as failed and left out then."""
    for number, point in visits:
        if failure_key(point) not in journal.results:
            try:
                seconds = bench.time(point, warmups(number, spec))
            except Unmeasurable as reason:
                failure = FailedPoint(
                    kind=point.kind,
                    batch_size=point.batch_size,
                    length=point.length,
                    reason=str(reason),
                )
                journal.put(failure_key(point), failure)
            else:
                steps, front = (
                    bench.take_passes() if isinstance(bench, TimedPassEngine) else ([], [])
                )
                journal.put(
                    visit_key(point, number), PointVisit(seconds=seconds, steps=steps, front=front)
                )
        advance(str(point))


def warmups(number: int, spec: ProfileSpec) -> int:
    """Runs before the first sample of a point's first visit, for one-time compilation and
    allocation.

    Later visits have none. A prefill then follows work of another shape, as in serving. A decode
    step follows another decode step there; the engine takes care of that itself.
    """
    return spec.warmups if number == 0 else 0


def grid_points(
    points: Sequence[GridPoint], spec: ProfileSpec, results: dict[str, Result]
) -> tuple[list[PrefillPoint], list[DecodePoint]]:
    """The points of the profile, with the samples of all their visits."""
    prefill, decode = [], []
    for point, seconds in _measured(points, spec, results):
        if point.kind == "prefill":
            prefill.append(
                PrefillPoint(
                    batch_size=point.batch_size, input_length=point.length, seconds=seconds
                )
            )
        elif point.kind == "decode":
            decode.append(
                DecodePoint(
                    batch_size=point.batch_size, cached_length=point.length, seconds=seconds
                )
            )
    return prefill, decode


def round_parts(
    points: Sequence[GridPoint], spec: ProfileSpec, results: dict[str, Result]
) -> list[PartPoint]:
    """The parts of rounds, with the samples of all their visits."""
    return [
        PartPoint(
            part=point.kind,
            rows=point.batch_size,
            length=point.length,
            others=point.others,
            seconds=seconds,
        )
        for point, seconds in _measured(points, spec, results)
        if point.kind not in ("prefill", "decode", "mix", "traffic")
    ]


def _measured(
    points: Sequence[GridPoint], spec: ProfileSpec, results: dict[str, Result]
) -> Iterator[tuple[GridPoint, list[float]]]:
    """Points that were measured and never failed, with all their samples."""
    for point in points:
        visits = [
            results.get(visit_key(point, number)) for number in range(spec.repeats * CHEAP_VISITS)
        ]
        seconds = [
            second for visit in visits if isinstance(visit, PointVisit) for second in visit.seconds
        ]
        if seconds and failure_key(point) not in results:
            yield point, seconds


ROWS_MAX = 4096
# Probes end at this multiple of the capacity: an engine that holds more has no edge to find.
PROBE_SHARE_MAX = 2.0
PRECISION = 0.005  # as a share of the batch size: half a percent is precise enough
TIME_LIMIT_S = 300.0  # for all lengths
SAFE_SHARE = 0.9


def find_edge(
    fits: Callable[[int], bool], guess: int, limit: int, enough: Callable[[], bool] = lambda: False
) -> tuple[int, int | None]:
    """(largest size that fits, smallest that does not), by galloping from `guess` and bisecting.

    The two are neighbours, or `PRECISION` apart, or what is known when `enough` returns True. The
    second is None if no probe up to `limit` failed.
    """
    fitted, failed = 0, limit + 1
    size, step = min(max(guess, 1), limit), 1
    while True:
        if fits(size):
            fitted = size
        else:
            failed = size
        if failed - fitted <= max(1, int(PRECISION * fitted)) or enough():
            return fitted, failed if failed <= limit else None
        if fitted and failed <= limit:
            size = (fitted + failed) // 2
        else:
            size = min(fitted + step, limit) if fitted else max(failed - step, 1)
            step *= 2


def probe_shapes(spec: ProfileSpec, facts: EngineFacts) -> list[tuple[int, int]]:
    """(L, S) of every probe of the memory edge.

    At each memory length these are the recipe's longest slice, and all steps that the model can
    generate. The two ends separate the memory of a row's prompt from that of its output. A server
    is not probed: it queues.
    """
    if facts.is_server:
        return []
    lengths = [
        length for length in sorted(set(spec.memory_lengths)) if length < facts.max_model_len
    ]
    return [
        (length, steps)
        for length in lengths
        for steps in sorted(
            {
                min(max(spec.slice_tokens), facts.max_model_len - length),
                facts.max_model_len - length,
            }
        )
    ]


def admission_lengths(spec: ProfileSpec, facts: EngineFacts) -> list[int]:
    """The lengths at which rows are admitted one by one; each row can still generate two tokens."""
    return [
        length for length in sorted(set(spec.memory_lengths)) if length + 2 <= facts.max_model_len
    ]


def probe_admission(bench: TimedRoundEngine, length: int) -> MemoryPoint:
    """The memory edge of rounds at one input length: rows enter until the next one has no room.

    The search also ends at `PROBE_SHARE_MAX` times the capacity.
    """
    limit = min(ROWS_MAX, max(1, int(PROBE_SHARE_MAX * bench.facts.capacity_tokens / (length + 1))))
    rows, ran_out = bench.admit(length, limit)
    return MemoryPoint(
        input_length=length, steps=1, largest_ok=rows, smallest_oom=rows + 1 if ran_out else None
    )


def safe_tokens(probes: Iterable[MemoryPoint], facts: EngineFacts) -> float:
    """N * (L + S) that runs at any length: `SAFE_SHARE` of the edge, without probes of the
    capacity.
    """
    known = [
        probe.largest_ok * (probe.input_length + probe.steps)
        for probe in probes
        if probe.largest_ok
    ]
    return SAFE_SHARE * min([*known, facts.capacity_tokens])


def probe_memory(bench: TimedEngine, length: int, steps: int, deadline_s: float) -> MemoryPoint:
    """The memory edge at one input length. The search stops at `deadline_s`, a monotonic time."""
    total = length + steps
    capacity = bench.facts.capacity_tokens
    largest_ok, smallest_oom = find_edge(
        lambda size: bench.fits(SliceShape(size, length, steps)),
        guess=capacity // total,
        limit=min(ROWS_MAX, max(1, int(PROBE_SHARE_MAX * capacity / total))),
        enough=lambda: time.monotonic() > deadline_s,
    )
    return MemoryPoint(
        input_length=length, steps=steps, largest_ok=largest_ok, smallest_oom=smallest_oom
    )
