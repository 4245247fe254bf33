"""How much of the prompts of a trace a prefix cache could reuse, at every size of the cache.

`reusable_tokens` counts what a cache without limit reuses. `reuse_curve` gives the hit rate over
every capacity at once: Mattson's stack distance, in one pass, for an LRU cache that evicts the tail
of a prompt before its head, as vLLM's does. Blocks that are only ever used together are one unit,
so the cost follows the requests and the points where prompts part, not the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from toolkit.traces.types import SharedBlocks, Trace

DERIVED_BLOCK = 16  # tokens of a block of sessions that come without blocks: vLLM's default
CURVE_POINTS = 49  # sizes of caches in a description: four to a doubling, for 2**12 blocks

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def block_lengths(trace: Trace) -> Ints:
    """The tokens in each block of a trace with blocks; only a prompt's last block may have fewer
    than the others.
    """
    assert trace.shared
    shared = trace.shared
    tokens = np.full(len(shared.ids), shared.block_tokens, dtype=np.int64)
    rows = np.flatnonzero(shared.counts)
    last = shared.offsets[rows + 1] - 1
    tokens[last] = trace.prompt_tokens[rows] - (shared.counts[rows] - 1) * shared.block_tokens
    return tokens


def reusable_tokens(trace: Trace) -> Ints:
    """The first tokens of each prompt with which an earlier prompt of the trace begins."""
    if trace.shared is None:
        return np.zeros(len(trace), dtype=np.int64)
    shared = trace.shared
    rows = np.repeat(np.arange(len(trace)), shared.counts)
    _, firsts, inverse = np.unique(shared.ids, return_index=True, return_inverse=True)
    origin = firsts[inverse]
    tokens = block_lengths(trace)
    seen = np.where(rows[origin] < rows, np.minimum(tokens, tokens[origin]), 0)
    return np.bincount(rows, seen, minlength=len(trace)).astype(np.int64)


def with_blocks(trace: Trace) -> Trace:
    """`trace`; where it has sessions but no blocks, with the blocks that follow from the sessions.

    The prompts of a session are the beginnings of one text, and sessions share nothing. A prompt's
    last block is its own if it is not full.
    """
    if trace.shared is not None or trace.sessions is None:
        return trace
    first = trace.sessions.first
    counts = -(-trace.prompt_tokens // DERIVED_BLOCK)
    longest = np.zeros(len(trace), dtype=np.int64)
    np.maximum.at(longest, first, counts)
    starts = np.cumsum(longest) - longest  # of each session's ids, at its first row
    offsets = np.concatenate([[0], np.cumsum(counts)])
    ids = np.arange(offsets[-1]) + np.repeat(starts[first] - offsets[:-1], counts)
    partial = np.flatnonzero(trace.prompt_tokens % DERIVED_BLOCK)
    ids[offsets[partial + 1] - 1] = longest.sum() + partial
    return replace(trace, shared=SharedBlocks(DERIVED_BLOCK, ids, offsets))


def cold_tokens(trace: Trace, first: int, last: int) -> int:
    """The prompt tokens of the rows `first` to `last` (excluded) that only earlier rows hold: what
    a cache that is empty at `first` must compute, and a warm one need not.
    """
    if trace.shared is None:
        return 0
    until = replace(trace, sessions=None).take(slice(0, last))
    return int(
        reusable_tokens(until)[first:].sum() - reusable_tokens(until.take(slice(first, last))).sum()
    )


@dataclass(slots=True, frozen=True)
class ReuseCurve:
    """The hits of an LRU cache of blocks by its capacity. Between two points hits grow evenly.

    The cache looks a prompt up as a whole, so a block hits only behind blocks that hit. An answer's
    blocks are not in it.
    """

    block_tokens: int
    capacity_blocks: Ints  # ascending, from 0 on
    hit_blocks: Floats
    hit_tokens: Floats
    blocks: int  # looked up
    prompt_tokens: int  # of all requests, also of those without blocks
    different_blocks: int

    def at(self, capacity_blocks: float) -> tuple[float, float]:
        """The shares of blocks and of prompt tokens that hit at a capacity."""
        hits = (
            float(np.interp(capacity_blocks, self.capacity_blocks, found))
            for found in (self.hit_blocks, self.hit_tokens)
        )
        return next(hits) / max(self.blocks, 1), next(hits) / self.prompt_tokens


@dataclass(slots=True, frozen=True)
class CacheHits:
    """What an LRU cache of one size reuses of a trace's prompts."""

    cache_tokens: int
    cache_bytes: int | None  # None: the bytes of a token are not known
    hit_percent: float  # of all prompt tokens


@dataclass(slots=True, frozen=True)
class PromptReuse:
    """What the prompts of a trace share, in numbers.

    `derived`: the trace has no blocks, and these follow from its sessions (`with_blocks`).
    """

    block_tokens: int
    prompt_tokens: int
    different_tokens: int  # what a cache holds that keeps everything
    reusable_tokens: int  # by such a cache
    reusable_percent: float
    caches: list[CacheHits]  # from one block to the smallest cache that reuses all
    derived: bool = False


def describe_reuse(trace: Trace, bytes_per_token: int | None = None) -> PromptReuse | None:
    """What the prompts of `trace` share; None where it says neither blocks nor sessions."""
    derived = trace.shared is None
    trace = with_blocks(trace)
    curve = reuse_curve(trace)
    if curve is None:
        return None
    prompt_tokens, reusable = curve.prompt_tokens, int(reusable_tokens(trace).sum())
    largest = max(int(curve.capacity_blocks[-1]), 1)
    sizes = np.unique(np.geomspace(1, largest, CURVE_POINTS).round().astype(np.int64))
    return PromptReuse(
        curve.block_tokens,
        prompt_tokens,
        int(block_lengths(trace).sum()) - reusable,
        reusable,
        100.0 * reusable / prompt_tokens,
        [
            CacheHits(
                size * curve.block_tokens,
                bytes_per_token and size * curve.block_tokens * bytes_per_token,
                100.0 * curve.at(size)[1],
            )
            for size in sizes.tolist()
        ],
        derived,
    )


def reuse_curve(trace: Trace) -> ReuseCurve | None:
    """The curve of `trace`; None where it does not say what prompts share."""
    shared = trace.shared
    if shared is None or not len(shared.ids):
        return None
    _, unit = np.unique(shared.ids, return_inverse=True)
    starts, rows = _runs(unit, shared.offsets, block_lengths(trace) < shared.block_tokens)
    tokens = np.add.reduceat(block_lengths(trace), starts)
    size = np.diff(np.append(starts, len(unit)))
    # A request uses its runs from the tail to the head, so that the head is the last to be evicted.
    order = np.lexsort((-starts, rows))
    distance, again = _distances(unit[starts][order], size[order], rows[order])
    size, tokens = size[order][again], tokens[order][again]
    # Of a run at distance d, block j from its head hits at a capacity of d + j.
    places = np.concatenate([[0], distance, distance + size])
    slopes = [np.concatenate([[0.0], rise, -rise]) for rise in (np.ones(len(size)), tokens / size)]
    capacity, index = np.unique(places, return_inverse=True)
    hits = []
    for slope in slopes:
        rising = np.cumsum(np.bincount(index, slope, minlength=len(capacity)))
        hits.append(np.concatenate([[0.0], np.cumsum(rising[:-1] * np.diff(capacity))]))
    return ReuseCurve(
        shared.block_tokens,
        capacity,
        hits[0],
        hits[1],
        len(shared.ids),
        int(trace.prompt_tokens.sum()),
        int(unit.max()) + 1,
    )


def _runs(unit: Ints, offsets: Ints, partial: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Where runs of blocks start that every prompt holds together, and the rows of these starts.

    Every prompt with a block holds the one before it, so two neighbours that are used equally often
    are always used together.
    """
    used = np.bincount(unit)[unit]
    alone = np.zeros(int(unit.max()) + 1, dtype=np.bool_)
    alone[unit[partial]] = True  # blocks that are the shorter last block of some prompt
    begins = np.ones(len(unit), dtype=np.bool_)
    begins[1:] = (used[1:] != used[:-1]) | alone[unit[1:]] | alone[unit[:-1]]
    begins[offsets[:-1][np.diff(offsets) > 0]] = True
    starts = np.flatnonzero(begins)
    return starts, np.searchsorted(offsets, starts, side="right") - 1


def _distances(unit: Ints, size: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """For each repeated use of a unit: the blocks that were used after its previous use and before
    this request, each counted once; and the places of these repeated uses.
    """
    count = len(unit)
    order = np.argsort(unit, kind="stable")
    previous = np.full(count, -1, dtype=np.int64)
    same = unit[order][1:] == unit[order][:-1]
    previous[order[1:][same]] = order[:-1][same]
    again = np.flatnonzero(previous >= 0)
    before = np.concatenate([[0], np.cumsum(size)])
    request = np.searchsorted(rows, rows[again])  # where the request of each use begins
    between = before[request] - before[previous[again] + 1]
    # A unit that was used several times in between counts once, at the first of these uses. Of its
    # other uses, the previous use is in between, too.
    return between - _later_before(previous[again], size[again]), again


def _later_before(values: Ints, weights: Ints) -> Ints:
    """For each place, the weights of the places before it with greater values, in total.

    The places are compared in pairs of halves of growing size, as in a merge sort. `values` are
    different.
    """
    found = np.zeros(len(values), dtype=np.int64)
    by_value = np.argsort(-values, kind="stable")
    half = 1
    while half < len(values):
        order = by_value[np.argsort(by_value // (2 * half), kind="stable")]
        left = (order // half) % 2 == 0
        weight = np.where(left, weights[order], 0)
        group = order // (2 * half)
        total = np.cumsum(weight)
        starts = np.flatnonzero(np.append(True, group[1:] != group[:-1]))
        at_start = np.repeat(total[starts] - weight[starts], np.diff(np.append(starts, len(group))))
        found[order] += np.where(left, 0, total - at_start)
        half *= 2
    return found
