"""The grid, measured in rounds, every sample kept.

Back-to-back repeats of a point all share what the machine was doing at that moment; a round apart, they do not, and a
disturbance spoils a few samples of every point, in the same proportion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from toolkit.files.profile import DecodePoint, FailedPoint, PartPoint, PrefillPoint
from toolkit.files.recipe import ProfileSpec
from toolkit.profiling.bench import Bench, PassBench, Unmeasurable
from toolkit.profiling.grid import CHEAP_VISITS, GridPoint, in_rounds
from toolkit.profiling.journal import Journal, Result, Visit


def visit_key(point: GridPoint, number: int) -> str:
    return f"{failure_key(point)}/{number}"


def failure_key(point: GridPoint) -> str:
    beside = f"/{point.others}" if point.others else ""
    return f"{point.kind}/{point.batch_size}/{point.length}{beside}"


def visits_left(points: Sequence[GridPoint], spec: ProfileSpec, journal: Journal) -> list[tuple[int, GridPoint]]:
    """(number, point) of every visit that the journal does not know."""
    return [
        (number, point)
        for number, point in in_rounds(points, spec)
        if visit_key(point, number) not in journal.results and failure_key(point) not in journal.results
    ]


def measure(
    visits: Sequence[tuple[int, GridPoint]],
    bench: Bench,
    spec: ProfileSpec,
    journal: Journal,
    advance: Callable[[str], None],
) -> None:
    """Make the visits. A point that cannot be measured is recorded as failed, and not visited again."""
    for number, point in visits:
        if failure_key(point) not in journal.results:
            try:
                seconds = bench.time(point, warmups(number, spec))
            except Unmeasurable as reason:
                failure = FailedPoint(
                    kind=point.kind, batch_size=point.batch_size, length=point.length, reason=str(reason)
                )
                journal.put(failure_key(point), failure)
            else:
                steps, front = bench.take_passes() if isinstance(bench, PassBench) else ([], [])
                journal.put(visit_key(point, number), Visit(seconds=seconds, steps=steps, front=front))
        advance(str(point))


def warmups(number: int, spec: ProfileSpec) -> int:
    """Runs before the first sample of a visit: for what is compiled or allocated once, so at the first visit alone.

    After that, a prefill follows work of another shape, as it does in serving. A decode step follows another one there;
    the engine sees to that itself.
    """
    return spec.warmups if number == 0 else 0


def grid_points(
    points: Sequence[GridPoint], spec: ProfileSpec, results: dict[str, Result]
) -> tuple[list[PrefillPoint], list[DecodePoint]]:
    """The points of the profile, with the samples of all their visits."""
    prefill, decode = [], []
    for point, seconds in _measured(points, spec, results):
        if point.kind == "prefill":
            prefill.append(PrefillPoint(batch_size=point.batch_size, input_length=point.length, seconds=seconds))
        elif point.kind == "decode":
            decode.append(DecodePoint(batch_size=point.batch_size, cached_length=point.length, seconds=seconds))
    return prefill, decode


def round_parts(points: Sequence[GridPoint], spec: ProfileSpec, results: dict[str, Result]) -> list[PartPoint]:
    """The parts of rounds, with the samples of all their visits."""
    return [
        PartPoint(part=point.kind, rows=point.batch_size, length=point.length, others=point.others, seconds=seconds)
        for point, seconds in _measured(points, spec, results)
        if point.kind not in ("prefill", "decode", "mix", "traffic")
    ]


def _measured(
    points: Sequence[GridPoint], spec: ProfileSpec, results: dict[str, Result]
) -> Iterator[tuple[GridPoint, list[float]]]:
    """Points that were measured and never failed, with all their samples."""
    for point in points:
        visits = [results.get(visit_key(point, number)) for number in range(spec.repeats * CHEAP_VISITS)]
        seconds = [second for visit in visits if isinstance(visit, Visit) for second in visit.seconds]
        if seconds and failure_key(point) not in results:
            yield point, seconds
