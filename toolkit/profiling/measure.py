"""The grid, measured in rounds, every sample kept.

Back-to-back repeats of a point all share what the machine was doing at that moment; a round apart,
they do not, and a disturbance spoils a few samples of every point, in the same proportion.
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
from toolkit.profiling.bench import TimedEngine, TimedPassEngine, TimedRoundEngine, Unmeasurable
from toolkit.profiling.grid import CHEAP_VISITS, GridPoint, SliceShape, in_rounds
from toolkit.profiling.journal import Journal, PointVisit, Result


def visit_key(point: GridPoint, number: int) -> str:
    return f"{failure_key(point)}/{number}"


def failure_key(point: GridPoint) -> str:
    beside = f"/{point.others}" if point.others else ""
    return f"{point.kind}/{point.batch_size}/{point.length}{beside}"


def visits_left(
    points: Sequence[GridPoint], spec: ProfileSpec, journal: Journal
) -> list[tuple[int, GridPoint]]:
    """(number, point) of every visit that the journal does not know."""
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
    """Make the visits. A point that cannot be measured is recorded as failed, and not visited
    again.
    """
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
    """Runs before the first sample of a visit: for what is compiled or allocated once, so at the
    first visit alone.

    After that, a prefill follows work of another shape, as it does in serving. A decode step
    follows another one there; the engine sees to that itself.
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


# Where memory ends: the largest batch that runs at each length, and the smallest that does not.

ROWS_MAX = 4096
BEYOND = (
    2.0  # probes end at this many times the capacity: an engine that holds more has no edge to find
)
PRECISION = 0.005  # of the batch size: an edge known to half a percent is known well enough
TIME_LIMIT_S = 300.0  # for all lengths
SAFE_SHARE = 0.9


def find_edge(
    fits: Callable[[int], bool], guess: int, limit: int, enough: Callable[[], bool] = lambda: False
) -> tuple[int, int | None]:
    """(largest that fits, smallest that does not), by galloping away from `guess` and bisecting.

    They are neighbours, or `PRECISION` apart, or what is known when `enough` says so. The second is
    None where no probe up to `limit` failed.
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
    """(L, S) of every probe: at each memory length the recipe's longest slice, and all that the
    model can generate.

    The two ends tell what a row's prompt takes from what its output takes. A server is not probed:
    it queues.
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
    """The lengths at which rows are admitted one by one; each may still get a token, and another."""
    return [
        length for length in sorted(set(spec.memory_lengths)) if length + 2 <= facts.max_model_len
    ]


def probe_admission(bench: TimedRoundEngine, length: int) -> MemoryPoint:
    """The edge of rounds at one input length: rows enter until the next one has no room, or nobody
    else would.
    """
    limit = min(ROWS_MAX, max(1, int(BEYOND * bench.facts.capacity_tokens / (length + 1))))
    rows, ran_out = bench.admit(length, limit)
    return MemoryPoint(
        input_length=length, steps=1, largest_ok=rows, smallest_oom=rows + 1 if ran_out else None
    )


def safe_tokens(probes: Iterable[MemoryPoint], facts: EngineFacts) -> float:
    """N * (L + S) that runs at any length, a little below the edge; without probes, a little below
    the capacity.
    """
    known = [
        probe.largest_ok * (probe.input_length + probe.steps)
        for probe in probes
        if probe.largest_ok
    ]
    return SAFE_SHARE * min([*known, facts.capacity_tokens])


def probe_memory(bench: TimedEngine, length: int, steps: int, deadline_s: float) -> MemoryPoint:
    """The edge at one input length. `deadline_s`, on the monotonic clock, ends the search where it
    is then.
    """
    total = length + steps
    capacity = bench.facts.capacity_tokens
    largest_ok, smallest_oom = find_edge(
        lambda size: bench.fits(SliceShape(size, length, steps)),
        guess=capacity // total,
        limit=min(ROWS_MAX, max(1, int(BEYOND * capacity / total))),
        enough=lambda: time.monotonic() > deadline_s,
    )
    return MemoryPoint(
        input_length=length, steps=steps, largest_ok=largest_ok, smallest_oom=smallest_oom
    )
