"""The points of a profile (the grid, mixes, traffic, hits and parts of rounds), the order of visits
to them, and the shapes of slices.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from toolkit.files.profile import EngineFacts, FailedPoint, PointKind
from toolkit.files.recipe import ProfileSpec


@dataclass(slots=True, frozen=True, order=True)
class GridPoint:
    """A prefill of [N, L] tokens, a decode step of N rows at cached `length`, or another kind.

    In a part of a round, N rows join, leave or move while `others` run. In a mix, `others` prompts
    of `length` tokens arrive while N rows decode. In traffic, `others` is the number of requests.
    In a hit, a prompt has `length` tokens that the prefix cache holds and `others` new ones.

    Where passes overlap: `others` prompts arrive while N rows decode, one at a time and at least
    `APART` passes apart in `lone`, at once in `burst`. A `load` is traffic at `others` percent of
    what the engine can serve with N rows, for `LOAD_S` seconds, with prompts of about `length`.
    """

    kind: PointKind
    batch_size: int
    length: int
    others: int = 0

    @property
    def tokens(self) -> int:
        if self.kind == "hit":
            return self.length + self.others
        if self.kind == "load":
            return self.batch_size * self.length
        return (self.batch_size + self.others) * self.length

    @property
    def key(self) -> str:
        """Its key in the journal, where a visit adds its number."""
        beside = f"/{self.others}" if self.others else ""
        return f"{self.kind}/{self.batch_size}/{self.length}{beside}"

    def failed(self, reason: str) -> FailedPoint:
        """The record that it could not be measured, and why."""
        return FailedPoint(
            kind=self.kind, batch_size=self.batch_size, length=self.length, reason=reason
        )

    def __str__(self) -> str:
        beside = f" beside {self.others}" if self.others else ""
        length = f"{'L' if self.kind == 'prefill' else 'l'}={self.length}"
        return f"{self.kind} N={self.batch_size} {length}{beside}"


def grid(spec: ProfileSpec, facts: EngineFacts) -> tuple[list[GridPoint], list[FailedPoint]]:
    """Return the recipe's points that fit the engine, and the others with the reason."""
    lengths: dict[PointKind, list[int]] = {
        "prefill": spec.input_lengths,
        "decode": spec.cached_lengths,
    }
    wanted = [
        GridPoint(kind, batch_size, length)
        for kind in lengths
        for length in sorted(set(lengths[kind]))
        for batch_size in sorted(set(spec.batch_sizes))
    ]
    reasons = {point: _too_large(point, facts) for point in wanted}
    skipped = [point.failed(reason) for point, reason in reasons.items() if reason]
    return [point for point, reason in reasons.items() if not reason], skipped


def _too_large(point: GridPoint, facts: EngineFacts) -> str:
    """Why the point cannot be measured, or ''. Each point generates one token."""
    if point.length + 1 > facts.max_model_len:
        return f"longer than the model's {facts.max_model_len} tokens"
    if facts.max_rows is not None and point.batch_size > facts.max_rows:
        return f"more than the {facts.max_rows} requests that run at once"
    if point.batch_size * (point.length + 1) > facts.capacity_tokens:
        return f"more than the {facts.capacity_tokens} tokens that the KV cache holds"
    return ""


PROMPTS = 4  # of a mix: prompts that arrive


def mix_points(spec: ProfileSpec, facts: EngineFacts) -> list[GridPoint]:
    """Prompts of each length that arrive while N rows decode, as in most passes when serving."""
    return [
        GridPoint("mix", batch_size, length, PROMPTS)
        for length in sorted(set(spec.input_lengths))
        for batch_size in sorted(set(spec.batch_sizes))
        if length < facts.max_model_len
        and batch_size + PROMPTS <= (facts.max_rows or batch_size + PROMPTS)
        and PROMPTS * (length + 1) + 2 * batch_size * MIX_STEPS <= facts.capacity_tokens
    ]


def traffic_points(spec: ProfileSpec, facts: EngineFacts, longest: int) -> list[GridPoint]:
    """Requests that arrive at random, N of them at once on average, as in serving.

    Long caches run next to chunks of prompts while other requests begin and end, which no other
    point covers. Prompts have about `length` tokens, outputs up to `longest`.
    """
    return [
        GridPoint("traffic", batch_size, length, WAVES * batch_size)
        for length in sorted(set(spec.input_lengths))
        for batch_size in sorted(set(spec.batch_sizes))
        if 1 < batch_size <= (facts.max_rows or batch_size) / 2
        and batch_size * (length + longest / 3) <= facts.capacity_tokens
        and length < facts.max_model_len
    ]


def hit_points(spec: ProfileSpec, facts: EngineFacts) -> list[GridPoint]:
    """Prompts that begin like an earlier one: short chunks behind long caches, which no other point
    has, and most passes of a server with a prefix cache do.
    """
    lengths = sorted(set(spec.input_lengths))
    return [
        GridPoint("hit", 1, length, new)
        for length in lengths
        for new in lengths
        if new < length and length + new < min(facts.max_model_len, facts.capacity_tokens)
    ]


STEPS = 48  # tokens of a request with timed decode steps
HITS = 4  # prompts that begin like the one before them, in one run of such a point
APART = 8  # decode steps between two lone prompts
BESIDE_STEPS = 48  # tokens of the rows that decode beside lone prompts and bursts
LOAD_S = 12.0  # in which the requests of a load arrive
WAVES = 3  # requests of traffic, as a multiple of those that run at once
MIX_STEPS = 24  # prompt and output tokens of the decoding rows of a mix
JOINING = (1, 4, 16)  # rows at once
OTHERS = (3, 15, 31)  # rows that run meanwhile
# Kind, rows, others, and the memory that the part needs, as a multiple of its batch.
PARTS: tuple[tuple[PointKind, tuple[int, ...], tuple[int, ...], float], ...] = (
    ("join", JOINING, OTHERS[:2], 2.0),
    ("leave", JOINING[:1], OTHERS, 1.5),
    ("grow", JOINING[:1], OTHERS, 2.5),
    ("swap_out", JOINING[:1], OTHERS[:2], 1.5),
    ("swap_in", JOINING[:1], OTHERS[:2], 1.5),
)


def part_points(spec: ProfileSpec, facts: EngineFacts) -> list[GridPoint]:
    """The parts of rounds at the recipe's cached lengths, as far as they fit the memory."""
    return [
        point
        for kind, rows, others, batches in PARTS
        for length in sorted(set(spec.cached_lengths))
        for point in (GridPoint(kind, count, length, beside) for count in rows for beside in others)
        if length < facts.max_model_len and batches * point.tokens <= facts.capacity_tokens
    ]


# Cheap points are visited this often in a round. A short visit sees one moment of the machine, so
# several are needed to see as much as one long prefill does.
CHEAP_VISITS = 3


def in_rounds(points: Sequence[GridPoint], spec: ProfileSpec) -> Iterator[tuple[int, GridPoint]]:
    """(number, point) for every visit; the number counts the visits to that point.

    Each of the `spec.repeats` rounds visits all points in its own random order. A temporary
    disturbance of the machine then spoils one visit to many points, not all visits to one. Decode
    steps, and the smaller half of the prefills by tokens, are visited three times per round.
    """
    parts = sorted(point for point in points if point.kind not in ("prefill", "decode"))
    prefill = sorted(
        (point for point in points if point.kind == "prefill"),
        key=lambda point: (point.tokens, point),
    )
    half = len(prefill) // 2
    cheap = sorted(point for point in points if point.kind == "decode") + prefill[:half]
    for number in range(spec.repeats):
        rng = random.Random(f"{spec.seed}/{number}")
        dealt = rng.sample(prefill[half:], len(prefill) - half) + rng.sample(parts, len(parts))
        for part in range(CHEAP_VISITS):
            visits = [(number, point) for point in dealt[part::CHEAP_VISITS]]
            visits += [(number * CHEAP_VISITS + part, point) for point in cheap]
            rng.shuffle(visits)
            yield from visits


@dataclass(slots=True, frozen=True)
class SliceShape:
    """A slice: N rows padded to L tokens, run for S steps."""

    batch_size: int
    input_length: int
    steps: int


DRAWS_MAX = 200


def slice_shapes(spec: ProfileSpec, tokens_max: float, length_max: int) -> dict[int, SliceShape]:
    """Random slices by number, with N * (L + S) <= `tokens_max` and L + S <= `length_max`.

    Each slice depends on the seed and its number only. Sizes and lengths are log-uniform over the
    grid's ranges. A number is left out if no draw fits.
    """
    shapes: dict[int, SliceShape] = {}
    for number in range(spec.slices):
        rng = random.Random(f"{spec.seed}/slice/{number}")
        for _ in range(DRAWS_MAX):
            steps = rng.choice(spec.slice_tokens)
            length = log_uniform(spec.input_lengths, rng)
            batch_size = log_uniform(spec.batch_sizes, rng)
            if batch_size * (length + steps) <= tokens_max and length + steps <= length_max:
                shapes[number] = SliceShape(batch_size, length, steps)
                break
    return shapes


def log_uniform_mean(least: float, greatest: float) -> float:
    """The mean of a log-uniform number between the two."""
    if greatest <= least:
        return least
    return (greatest - least) / math.log(greatest / least)


def log_uniform(values: Sequence[int], rng: random.Random) -> int:
    """A log-uniform random integer between the least and the greatest of `values`."""
    return round(math.exp(rng.uniform(math.log(min(values)), math.log(max(values)))))
