"""The points of a profile of an engine whose passes overlap, as vLLM's on a GPU do.

There a pass may end with the launch of the next one, and how it is launched depends on its tokens:
as a CUDA graph up to the largest size that was captured. So these points differ from those of other
engines. Prompts arrive one at a time, several passes apart, so that each shows its own launch and
its own work; others arrive at once, so that chunk follows chunk. Their tokens lie around the sizes
of graphs, and beyond. Decodes go beyond the sizes, too. Traffic at two loads shows launches and the
front as they are when serving.

Launches drift in spells of seconds. So the visits to all points are in random order, and points
that cost little are visited several times.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from toolkit.files.profile import EngineFacts, FailedPoint, StepsProfile
from toolkit.files.recipe import ProfileSpec
from toolkit.profiling.grid import BESIDE_STEPS, MIX_STEPS, GridPoint, too_large

DECODE_ROWS = (1, 8, 32, 96, 256)
CACHED = (256, 1024)
PREFILL_ROWS = (1, 2, 4, 16)
PREFILLS = (64, 256, 1024, 2048)
BESIDE = (0, 1, 32, 128)  # rows that decode while prompts come one at a time
BURST_BESIDE = (1, 32)
BURSTS = (64, 256, 512, 1024, 2048, 4096)  # tokens of each prompt of a burst
LONE_PROMPTS, BURST_PROMPTS = 2, 4
SHORT = (16, 64)  # tokens of the shortest lone prompts
USUAL_SIZE = 512  # the largest graph, of a server that has none
BESIDE_SIZE = 8  # tokens below and above a size of graphs
LOADS = (30, 60)  # percent of the rate that the engine can serve
LOAD_ROWS, LOAD_LENGTH = 96, 512
ROWS_MAX = 1024  # of a server without a limit
# A point is visited three times if a run computes few tokens of prompts, twice, or once.
FEW_TOKENS, SOME_TOKENS = 16_384, 65_536


def overlaps(steps: StepsProfile | None) -> bool:
    """Whether the engine says that its passes overlap."""
    return steps is not None and steps.async_scheduling


def grid(facts: EngineFacts, steps: StepsProfile) -> tuple[list[GridPoint], list[FailedPoint]]:
    """Prefills and decode steps that fit the engine, and those that do not, with the reason."""
    most = facts.max_rows or ROWS_MAX
    context = facts.max_model_len
    sizes = {min(rows, most) for rows in (*DECODE_ROWS, _largest(steps) + BESIDE_SIZE)}
    if len(sizes) < len(PREFILL_ROWS):
        sizes |= {max(most // share, 1) for share in PREFILL_ROWS}
    cached = {min(CACHED[0], context // 4), min(CACHED[1], context // 2)}
    wanted = [GridPoint("decode", rows, each) for each in sorted(cached) for rows in sorted(sizes)]
    lengths = sorted({min(length, context - 1) for length in PREFILLS})
    prefill_rows = sorted({min(rows, most) for rows in PREFILL_ROWS})
    wanted += [GridPoint("prefill", rows, length) for length in lengths for rows in prefill_rows]
    reasons = {point: too_large(point, facts) for point in wanted}
    skipped = [point.failed(reason) for point, reason in reasons.items() if reason]
    return [point for point, reason in reasons.items() if not reason], skipped


def other_points(facts: EngineFacts, steps: StepsProfile) -> list[GridPoint]:
    """Prompts beside decodes, one at a time and at once, hits, and traffic, as far as they fit."""
    context, budget = facts.max_model_len, steps.max_num_batched_tokens
    points = [
        GridPoint("lone", rows, length, LONE_PROMPTS)
        for length in chunk_tokens(steps)
        for rows in BESIDE
        if length + rows <= budget
    ]
    points += [
        GridPoint("burst", rows, length, BURST_PROMPTS)
        for length in BURSTS
        for rows in BURST_BESIDE
    ]
    points += [GridPoint("hit", 1, length, new) for length in (512, 4096) for new in (64, 512)]
    rows = min(LOAD_ROWS, (facts.max_rows or ROWS_MAX) // 2)
    points += [GridPoint("load", rows, min(LOAD_LENGTH, context // 4), load) for load in LOADS]
    return [point for point in points if _fits(point, facts)]


def chunk_tokens(steps: StepsProfile) -> list[int]:
    """Tokens of lone prompts: few, just below and above a quarter, a half and all of the largest
    graph, and then doubled up to a whole pass.
    """
    largest, budget = _largest(steps), steps.max_num_batched_tokens
    sizes = (largest // 4, largest // 2, largest)
    near = [size + side for size in sizes for side in (-BESIDE_SIZE, BESIDE_SIZE)]
    whole = budget - max(BESIDE)
    doubled = []
    tokens = 2 * largest
    while tokens < whole:
        doubled.append(tokens)
        tokens *= 2
    return sorted({one for one in (*SHORT, *near, *doubled, whole) if 0 < one <= whole})


def _largest(steps: StepsProfile) -> int:
    """The tokens of the largest graph."""
    return steps.graph_sizes[-1] if steps.graph_sizes else USUAL_SIZE


def _fits(point: GridPoint, facts: EngineFacts) -> bool:
    """Whether its requests fit the context, the rows and the cache at once."""
    rows, most = point.batch_size, facts.max_rows or ROWS_MAX
    if point.kind == "hit":
        return point.tokens < min(facts.max_model_len, facts.capacity_tokens)
    if point.kind == "load":
        return rows > 1 and rows * 2 * point.length <= facts.capacity_tokens
    if point.length >= facts.max_model_len or rows + point.others > most:
        return False
    cached = rows * (MIX_STEPS + BESIDE_STEPS) + point.others * (point.length + 1)
    return cached <= facts.capacity_tokens


def visits_of(point: GridPoint) -> int:
    """How often a point is visited."""
    if point.kind not in ("decode", "prefill"):
        return 2
    tokens = point.batch_size * point.length
    return 1 + (tokens <= SOME_TOKENS) + (tokens <= FEW_TOKENS)


def in_rounds(points: Sequence[GridPoint], spec: ProfileSpec) -> Iterator[tuple[int, GridPoint]]:
    """(number, point) for every visit; the number counts the visits to that point. Each round has
    its own random order.
    """
    for number in range(max(map(visits_of, points), default=0)):
        visits = [point for point in sorted(points) if visits_of(point) > number]
        random.Random(f"{spec.seed}/{number}").shuffle(visits)
        yield from ((number, point) for point in visits)
