"""The law of rounds: what a worker that keeps its rows takes from the dispatch of a round to its result.

    seconds = batch_s + stretch * (groups' prefills and joins + decode steps and moves of the cache + rows that leave)

The parts are measured in one process; as with slices, the flat part is dispatch and pipe, and the stretch what workers
cost each other. Joins go into the law of prefills, and moves of the cache into that of decode steps: the round's law is
a law of the same form, which scheduler and simulator ask as any other.
"""

from __future__ import annotations

from dataclasses import replace

from toolkit.estimators.laws import SegmentedLaw
from toolkit.files.fit import PartFit, RoundsFit, Segment


def law_of_parts(engine: SegmentedLaw, join: PartFit, leave: PartFit, grow: PartFit) -> SegmentedLaw:
    """The engine's law with what joins, leaves and moves add to it."""
    return replace(
        engine,
        prefill=tuple(_with(segment, join) for segment in engine.prefill),
        decode=tuple(_with(segment, grow) for segment in engine.decode),
        leaving=(leave.flat_s + leave.row_s, leave.token_s),
    )


def law_of_rounds(engine: SegmentedLaw, fit: RoundsFit) -> SegmentedLaw:
    """The law that holds for rounds through a worker's process, all workers busy."""
    parts = law_of_parts(engine, fit.join, fit.leave, fit.grow)
    stretch = fit.overhead.stretch
    return replace(
        parts,
        prefill=tuple(_times(segment, stretch) for segment in parts.prefill),
        decode=tuple(_times(segment, stretch) for segment in parts.decode),
        round_s=fit.overhead.batch_s,
        leaving=(stretch * parts.leaving[0], stretch * parts.leaving[1]),
    )


def _with(segment: Segment, part: PartFit) -> Segment:
    return segment.model_copy(
        update={
            "const": segment.const + part.flat_s,
            "n": segment.n + part.row_s,
            "nl": segment.nl + part.token_s,
        }
    )


def _times(segment: Segment, factor: float) -> Segment:
    names = ("nl", "n", "l", "const", "nll")
    return segment.model_copy(update={name: getattr(segment, name) * factor for name in names})
