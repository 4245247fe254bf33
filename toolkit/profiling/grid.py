"""Which points are measured, in which order, and how long that will take."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from toolkit.files.profile import EngineFacts, FailedPoint
from toolkit.files.recipe import ProfileSpec

Kind = Literal["prefill", "decode"]


@dataclass(slots=True, frozen=True, order=True)
class GridPoint:
    """A prefill of [N, L] tokens, or a decode step of N rows at cached length `length`."""

    kind: Kind
    batch_size: int
    length: int

    @property
    def tokens(self) -> int:
        return self.batch_size * self.length

    def __str__(self) -> str:
        return f"{self.kind} N={self.batch_size} {'L' if self.kind == 'prefill' else 'l'}={self.length}"


def grid(spec: ProfileSpec, facts: EngineFacts) -> tuple[list[GridPoint], list[FailedPoint]]:
    """The recipe's points that the engine can hold, and those that it cannot, with the reason."""
    lengths: dict[Kind, list[int]] = {"prefill": spec.input_lengths, "decode": spec.cached_lengths}
    points: list[GridPoint] = []
    skipped: list[FailedPoint] = []
    for kind, wanted in lengths.items():
        for length in sorted(set(wanted)):
            for batch_size in sorted(set(spec.batch_sizes)):
                point = GridPoint(kind, batch_size, length)
                reason = _too_large(point, facts)
                if reason:
                    skipped.append(FailedPoint(kind=kind, batch_size=batch_size, length=length, reason=reason))
                else:
                    points.append(point)
    return points, skipped


def _too_large(point: GridPoint, facts: EngineFacts) -> str:
    """Why the point cannot be measured, or ''. One token is generated in each."""
    if point.length + 1 > facts.max_model_len:
        return f"longer than the model's {facts.max_model_len} tokens"
    if point.batch_size * (point.length + 1) > facts.capacity_tokens:
        return f"more than the {facts.capacity_tokens} tokens that the KV cache holds"
    return ""


# Decode steps are visited this often in a round: they are short, so one visit sees one moment of the machine, and a
# slice is made of many of them.
DECODE_VISITS = 3


def in_rounds(points: Sequence[GridPoint], spec: ProfileSpec) -> Iterator[tuple[int, GridPoint]]:
    """(number, point) for every visit; the number counts the visits to that point.

    Each of the `spec.repeats` rounds visits all points, in an order of its own: a machine that is disturbed for a while
    then spoils one visit to many points, not all visits to one.
    """
    prefill = sorted(point for point in points if point.kind == "prefill")
    decode = sorted(point for point in points if point.kind == "decode")
    for number in range(spec.repeats):
        rng = random.Random(f"{spec.seed}/{number}")
        dealt = rng.sample(prefill, len(prefill))
        for part in range(DECODE_VISITS):
            visits = [(number, point) for point in dealt[part::DECODE_VISITS]]
            visits += [(number * DECODE_VISITS + part, point) for point in decode]
            rng.shuffle(visits)
            yield from visits


@dataclass(slots=True, frozen=True)
class Shape:
    """A slice: N rows padded to L, run for S steps."""

    batch_size: int
    input_length: int
    steps: int


SLICE_SHARE = 0.9  # of the KV cache: the edge has its own probes
TRIES = 200


def slice_shapes(spec: ProfileSpec, facts: EngineFacts, count: int) -> list[Shape]:
    """Random slices over the grid's ranges that fit the engine; each depends on the seed and its number alone.

    Sizes and lengths are log-uniform, like the grid. Empty where nothing fits.
    """
    drawn = (_draw_shape(spec, facts, random.Random(f"{spec.seed}/slice/{number}")) for number in range(count))
    return [shape for shape in drawn if shape]


def _draw_shape(spec: ProfileSpec, facts: EngineFacts, rng: random.Random) -> Shape | None:
    for _ in range(TRIES):
        steps = rng.choice(spec.slice_tokens)
        length = _log_uniform(spec.input_lengths, rng)
        batch_size = _log_uniform(spec.batch_sizes, rng)
        fits = batch_size * (length + steps) <= SLICE_SHARE * facts.capacity_tokens
        if fits and length + steps <= facts.max_model_len:
            return Shape(batch_size, length, steps)
    return None


def _log_uniform(values: Sequence[int], rng: random.Random) -> int:
    return round(math.exp(rng.uniform(math.log(min(values)), math.log(max(values)))))
