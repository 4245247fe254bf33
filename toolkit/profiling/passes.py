"""Forward passes of an engine's log as points of a profile: their composition, and what they and the host took."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import fmean

from toolkit.estimators.steps import StepShape, shape_of_rows
from toolkit.files.profile import StepPoint
from toolkit.sched.iterations import Pass


@dataclass(slots=True, frozen=True)
class Timed:
    """A pass that computed something. `host_s`: until the next one began; None where there was nothing to do."""

    shape: StepShape
    start_s: float
    end_s: float
    host_s: float | None

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def timed(passes: Sequence[Pass]) -> list[Timed]:
    """Passes that follow one another. One that was asked for before the last had ended began when that ended."""
    found: list[Timed] = []
    end_s = -1.0
    for one, following in pairwise([*[one for one in passes if one.rows], None]):
        assert one is not None
        start_s, end_s = max(one.start_s, end_s), one.end_s
        busy = following is not None and (one.waiting or {row.request_id for row in one.rows} - set(one.ended))
        host_s = max(following.start_s - end_s, 0.0) if busy and following else None
        found.append(Timed(shape_of_rows(one.rows), start_s, end_s, host_s))
    return found


def points(passes: Sequence[Timed]) -> list[StepPoint]:
    """One for each pass that has chunks, and one for each stretch of decodes of as many rows."""
    found = []
    for chunked, group in groupby(passes, key=lambda one: one.shape.prefills > 0):
        if chunked:
            found += [_point([one]) for one in group]
        else:
            found += [_point(stretch) for stretch in _stretches(list(group))]
    return found


def _stretches(passes: Sequence[Timed]) -> Iterator[list[Timed]]:
    for _, stretch in groupby(passes, key=lambda one: one.shape.decodes):
        yield list(stretch)


def _point(stretch: Sequence[Timed]) -> StepPoint:
    shape = stretch[0].shape
    return StepPoint(
        decodes=shape.decodes,
        decode_cached=fmean(one.shape.decode_cached for one in stretch),
        prefills=shape.prefills,
        prefill_tokens=shape.prefill_tokens,
        prefill_attended=shape.prefill_attended,
        seconds=[one.seconds for one in stretch],
        host_s=[one.host_s for one in stretch if one.host_s is not None],
    )
