"""The points of a profile where passes overlap, as vLLM's on a GPU do.

There a pass may end with the launch of the next one, and how it is launched depends on its tokens:
as a CUDA graph up to the largest size that was captured. So these points differ from the points of
other engines. Prompts arrive one at a time, several passes apart, so that each shows its own launch
and its own work; others arrive at once, so that chunk follows chunk. Their tokens lie around the
sizes of graphs, and beyond. Decodes go beyond the sizes, too. Traffic at two loads shows launches
and the front as they are when serving.

Launches drift in spells of seconds. So the visits to all points are in random order, and points
that cost little are visited several times.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from toolkit.files.profile import EngineFacts, StepsProfile
from toolkit.files.recipe import ProfileSpec
from toolkit.profiling.grid import BESIDE_STEPS, MIX_STEPS, STEPS, GridPoint

DECODE_ROWS = (1, 8, 32, 96, 256)
CACHED = (256, 1024)
PREFILL_ROWS = (1, 2, 4, 16)
LEAST_ROWS = 4  # different numbers of rows, for a law in them
PREFILLS = (64, 256, 1024, 2048)
BESIDE = (0, 1, 32, 128)  # rows that decode while prompts come one at a time
BURST_BESIDE = (1, 32)
BURSTS = (64, 256, 512, 1024, 2048, 4096)  # tokens of each prompt of a burst
LONE_PROMPTS = 2
BURST_PROMPTS = 4
SHORT = (16, 64)  # tokens of the shortest lone prompts
USUAL_SIZE = 512  # the largest graph, of a server that has none
BESIDE_SIZE = 8  # tokens below and above a size of graphs
LOADS = (30, 60)  # percent of the rate that the engine can serve
LOAD_ROWS = 96
LOAD_LENGTH = 512
ROWS_MAX = 1024  # of a server without a limit
# A point is visited three times if a run computes few tokens of prompts, twice, or once.
FEW_TOKENS = 16_384
SOME_TOKENS = 65_536


def grid(facts: EngineFacts, steps: StepsProfile) -> list[GridPoint]:
    """Prefills and decode steps, of as many rows as the engine takes at once."""
    context = facts.max_model_len
    past = _largest(steps) + BESIDE_SIZE
    cached = sorted({min(CACHED[0], context // 4), min(CACHED[1], context // 2)})
    points = [
        GridPoint("decode", rows, length)
        for length in cached
        for rows in _rows((*DECODE_ROWS, past), length + STEPS, facts)
    ]
    points += [
        GridPoint("prefill", rows, length)
        for length in sorted({min(length, context - 1) for length in PREFILLS})
        for rows in _rows(PREFILL_ROWS, length + 1, facts)
    ]
    return points


def _rows(wanted: Sequence[int], tokens: int, facts: EngineFacts) -> list[int]:
    """Return numbers of rows, of `tokens` tokens each: the wanted numbers that run at once, and the
    most that do. They are at least four where as many run at once.
    """
    most = min(facts.max_rows or ROWS_MAX, facts.capacity_tokens // tokens, max(wanted))
    rows = {number for number in wanted if number < most} | {most}
    if len(rows) < LEAST_ROWS:
        rows |= {max(most * part // LEAST_ROWS, 1) for part in range(1, LEAST_ROWS)}
    return sorted(rows - {0})


def other_points(facts: EngineFacts, steps: StepsProfile) -> list[GridPoint]:
    """Prompts beside decodes, one at a time and at once, hits, and traffic, as far as they fit."""
    context = facts.max_model_len
    budget = steps.max_num_batched_tokens
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
    length = min(LOAD_LENGTH, context // 4)
    rows = min(LOAD_ROWS, (facts.max_rows or ROWS_MAX) // 2, facts.capacity_tokens // (3 * length))
    points += [GridPoint("load", rows, length, load) for load in LOADS]
    return [point for point in points if _fits(point, facts)]


def chunk_tokens(steps: StepsProfile) -> list[int]:
    """Tokens of lone prompts: few, just below and above a quarter, a half and all of the largest
    graph, and then doubled up to a whole pass.
    """
    largest = _largest(steps)
    budget = steps.max_num_batched_tokens
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
    rows = point.batch_size
    most = facts.max_rows or ROWS_MAX
    if point.kind == "hit":
        return point.tokens < min(facts.max_model_len, facts.capacity_tokens)
    if point.kind == "load":
        return rows > 1
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
