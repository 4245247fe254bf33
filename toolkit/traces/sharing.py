"""What prompts share, as files say it: collected row by row, checked, and scaled with the lengths.

A row with impossible blocks or an impossible session is read without them, counted, and named;
nothing is guessed. `Sharing` does that for the readers. `scale_blocks` and `keep_sessions` follow
lengths that were divided or clipped. `reuse_curve` says how much a cache of each size reuses.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import InputError
from toolkit.traces.formats import ANEW, MOONCAKE_BLOCK, Format, block_ids, length, number
from toolkit.traces.types import Sessions, SharedBlocks, Trace

# Tokens of a block where scaled lengths do not fit whole ones: vLLM's block, so its cache loses
# nothing more.
MAX_SPLIT = 16

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

NO_LIST = "with hash_ids that are not a list of whole numbers"
MISCOUNTED = "with hash_ids that contradict the length"
NO_CHAIN = "with hash_ids that are no chain"
EARLY = "that arrive before the turn before"
SHORT = "shorter than the turn before and its answer"
DIFFERENT = "with other blocks than the turn before"
ORPHANED = "after a dropped turn"
THOUGHTLESS = "with an impossible time to think"
EDITED = "that do not continue an earlier prompt and its answer"


@dataclass(slots=True)
class Problems:
    """What was wrong: how many rows for each reason, and the first of them."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, example: str, count: int = 1) -> None:
        self.counts[reason] += count
        self.examples.setdefault(reason, example)

    def line(self, read_as: str) -> str:
        """'3 rows READ_AS: 2 this (row 4: ...); 1 that (row 9: ...)'."""
        total = self.counts.total()
        each = "; ".join(
            f"{count:,} {reason} ({self.examples[reason]})"
            for reason, count in sorted(self.counts.items())
        )
        return f"{total:,} {'row is' if total == 1 else 'rows are'} read {read_as}: {each}"


class Sharing:
    """Collects the blocks and sessions of rows, in the file's order."""

    def __init__(self, form: Format, source: str) -> None:
        self.unshared = Problems()  # rows that are read as sharing nothing
        self.unlinked = Problems()  # turns that are read as first turns
        self._form = form
        self._source = source
        self._block_tokens = 0
        self._said_in = 0  # and the row that says it first
        self._ids = array("q")
        self._counts = array("q")
        self._rows = array("q")  # the numbers of the kept rows in the file
        self._previous = array("q")
        self._think_s = array("d")
        self._latest: dict[str | int, int] = {}  # the last row by session; -1: it was dropped

    def lost(self, record: Mapping[str, object] | None) -> None:
        """A row that was dropped: no turn continues it."""
        label = record.get(self._form.session) if record and self._form.session else None
        if isinstance(label, str | int):
            self._latest[label] = -1

    def add(self, record: Mapping[str, object], row: int, prompt: int) -> None:
        """The row with this number, which is kept. `InputError` for blocks of another size."""
        self._rows.append(row)
        given = record.get(self._form.blocks)
        self._counts.append(0)
        if given is not None:
            block = self._size(record, row)
            ids = block_ids(given)
            wanted = -(-prompt // block)
            if ids is None:
                self.unshared.add(NO_LIST, f"row {row:,}")
            elif len(ids) != wanted:
                said = f"{len(ids)} for {prompt:,} tokens in blocks of {block}, must be {wanted}"
                self.unshared.add(MISCOUNTED, f"row {row:,}: {said}")
            else:
                self._ids.extend(ids)
                self._counts[-1] = wanted
        label = record.get(self._form.session)
        previous = -1
        think_s = 0.0
        if label is not None:
            if isinstance(label, str | int):
                previous = self._latest.get(label, -2)
                self._latest[label] = len(self._previous)
            if previous == -1:
                self.unlinked.add(ORPHANED, f"row {row:,}")
            elif previous >= 0:
                given = record.get(self._form.think)
                try:
                    think_s = 0.0 if given is None else number(given) / 1000.0
                    if not 0.0 <= think_s < np.inf:
                        raise ValueError
                except (ValueError, OverflowError):
                    shown = f"row {row:,}: {self._form.think} is {given!r}, must be at least 0 ms"
                    self.unlinked.add(THOUGHTLESS, shown)
                    previous = -1
                    think_s = 0.0
            elif ANEW in record:
                self.unlinked.add(EDITED, f"row {row:,}")
        self._previous.append(max(previous, -1))
        self._think_s.append(think_s)

    def _size(self, record: Mapping[str, object], row: int) -> int:
        given = record.get("block_tokens", MOONCAKE_BLOCK)
        if self._block_tokens and given == self._block_tokens:
            return self._block_tokens
        try:
            block = length(given)
        except (ValueError, OverflowError):
            block = 0
        if block < 1:
            raise InputError(
                f"{self._source}: row {row:,}: block_tokens is {given!r}",
                "must be a whole number of tokens from 1 on",
            )
        if self._block_tokens:
            raise InputError(
                f"{self._source}: row {row:,} has blocks of {block} tokens, "
                f"row {self._said_in:,} of {self._block_tokens}",
                "a trace has blocks of one size: split the file",
            )
        self._block_tokens = block
        self._said_in = row
        return block

    def attach(self, trace: Trace) -> Trace:
        """`trace` with its blocks and sessions; its rows are in the file's order."""
        trace = replace(trace, shared=self._blocks())
        return replace(trace, sessions=self._sessions(trace))

    def _blocks(self) -> SharedBlocks | None:
        ids = np.frombuffer(self._ids, dtype=np.int64).copy()
        counts = np.frombuffer(self._counts, dtype=np.int64).copy()
        if not len(ids):
            return None
        if self._form.whole:  # ids that the reader made are negative
            made = ids < 0
            ids[made] = max(int(ids.max()), -1) - ids[made]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        bad = self._no_chain(ids, offsets)
        if bad.any():
            ids = ids[np.repeat(~bad, counts)]
            offsets = np.concatenate([[0], np.cumsum(np.where(bad, 0, counts))])
        return SharedBlocks(self._block_tokens, ids, offsets) if len(ids) else None

    def _no_chain(self, ids: Ints, offsets: Ints) -> Flags:
        """The rows in which an id stands behind another id than where it stands first."""
        first = np.zeros(len(ids), dtype=np.bool_)
        first[offsets[:-1][np.diff(offsets) > 0]] = True
        behind = np.where(first, 0, np.roll(ids, 1))
        origin = first_places(ids)
        wrong = (behind != behind[origin]) | (first != first[origin])
        row_of = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        bad = np.zeros(len(offsets) - 1, dtype=np.bool_)
        bad[row_of[wrong]] = True
        if wrong.any():
            places = int(np.flatnonzero(wrong)[0]), int(origin[wrong][0])
            row, other = (self._rows[row_of[place]] for place in places)
            now, then = ("first" if first[place] else f"after {behind[place]}" for place in places)
            shown = f"row {row:,}: {ids[places[0]]} stands {now}, and {then} in row {other:,}"
            self.unshared.add(NO_CHAIN, shown, int(bad.sum()))
        return bad

    def _sessions(self, trace: Trace) -> Sessions | None:
        previous = np.frombuffer(self._previous, dtype=np.int64).copy()
        think_s = np.frombuffer(self._think_s, dtype=np.float64).copy()
        linked = np.flatnonzero(previous >= 0)
        before = previous[linked]
        early = trace.arrival_s[linked] < trace.arrival_s[before]
        short = trace.prompt_tokens[linked] < (trace.prompt_tokens + trace.output_tokens)[before]
        other = _other_blocks(trace, linked, before) & ~short
        for reason, wrong in ((EARLY, early), (SHORT, short & ~early), (DIFFERENT, other & ~early)):
            if wrong.any():
                row = int(linked[wrong][0])
                shown = self._shown(reason, trace, row, int(previous[row]))
                self.unlinked.add(reason, shown, int(wrong.sum()))
        cut = linked[early | short | other]
        previous[cut] = -1
        think_s[cut] = 0.0
        return Sessions(previous, think_s) if (previous >= 0).any() else None

    def _shown(self, reason: str, trace: Trace, row: int, before: int) -> str:
        here = f"row {self._rows[row]:,}"
        there = f"row {self._rows[before]:,}"
        if reason == EARLY:
            here += f": at {trace.arrival_s[row]:.6g} s"
            there += f" at {trace.arrival_s[before]:.6g} s"
        if reason == SHORT:
            here += f": {trace.prompt_tokens[row]:,} tokens"
            there += f": {trace.prompt_tokens[before]:,} + {trace.output_tokens[before]:,}"
        return f"{here}, {there}"


def first_places(ids: Ints) -> Ints:
    """For each id, the place where it stands first."""
    _, firsts, inverse = np.unique(ids, return_index=True, return_inverse=True)
    return np.asarray(firsts[inverse], dtype=np.int64)


def _other_blocks(trace: Trace, turns: Ints, before: Ints) -> Flags:
    """Which of these turns do not begin with all whole blocks of the turn before."""
    shared = trace.shared
    wrong = np.zeros(len(turns), dtype=np.bool_)
    if shared is None:
        return wrong
    whole = trace.prompt_tokens[before] // shared.block_tokens
    counts = shared.counts
    known = (whole > 0) & (counts[turns] >= whole) & (counts[before] >= whole)
    mine, theirs = (shared.offsets[rows][known] + whole[known] - 1 for rows in (turns, before))
    wrong[known] = shared.ids[mine] != shared.ids[theirs]
    return wrong


def scale_blocks(trace: Trace, divisor: float, prompts: Ints) -> tuple[SharedBlocks | None, str]:
    """The blocks of `trace` for its prompts divided by `divisor` and clipped to `prompts`, and a
    note.

    A block of B tokens becomes one of B / `divisor`, where that is a whole number. Otherwise new
    blocks have `MAX_SPLIT` tokens, or the whole part of B / `divisor` if that is less (at least 1).
    Such a block covers parts of one or more old ones, and is shared where all of these are. So
    nothing new is shared, and of what two prompts share less than one new block is lost.
    """
    shared = trace.shared
    if shared is None:
        return None, ""
    exact = shared.block_tokens / divisor
    whole = exact >= 1.0 and abs(exact - round(exact)) < 1e-9
    block = round(exact) if whole else max(min(int(exact), MAX_SPLIT), 1)
    counts = -(-prompts // block)
    counts[shared.counts == 0] = 0
    offsets = np.concatenate([[0], np.cumsum(counts)])
    rows = np.repeat(np.arange(len(prompts)), counts)
    place = np.arange(offsets[-1]) - offsets[rows]
    # The tokens of the original prompt that end with the new block.
    ends = np.minimum((place + 1) * (block * divisor), trace.prompt_tokens[rows])
    old = np.ceil(ends / shared.block_tokens - 1e-9).astype(np.int64) - 1
    old = np.minimum(np.maximum(old, 0), shared.counts[rows] - 1)
    ids = shared.ids[shared.offsets[:-1][rows] + old]
    if whole:
        return SharedBlocks(block, ids, offsets), ""
    # Several new blocks may end in one old one: the place tells them apart.
    _, ids = np.unique(np.stack([place, ids]), axis=1, return_inverse=True)
    note = (
        f"blocks of {shared.block_tokens} tokens became blocks of {block}: "
        f"{shared.block_tokens} / {divisor:.4g} is not a whole number, "
        "so up to one of them is lost of what two prompts share"
    )
    return SharedBlocks(block, ids.reshape(-1).astype(np.int64), offsets), note


def keep_sessions(trace: Trace) -> Trace:
    """`trace` without the links of turns that do not hold the turn before and its answer (after
    lengths were divided or clipped), with a note.
    """
    if trace.sessions is None:
        return trace
    previous = trace.sessions.previous
    linked = np.flatnonzero(previous >= 0)
    before = previous[linked]
    room = trace.prompt_tokens[linked] - trace.output_tokens[before] - trace.prompt_tokens[before]
    cut = linked[room < 0]
    if not len(cut):
        return trace
    kept = np.ones(len(trace), dtype=np.bool_)
    kept[cut] = False
    note = (
        f"{len(cut):,} of {len(linked):,} later turns start a session of their own, at their own "
        "times: scaled, they no longer hold the turn before and its answer"
    )
    sessions = Sessions(np.where(kept, previous, -1), np.where(kept, trace.sessions.think_s, 0.0))
    return replace(trace, sessions=sessions, notes=(*trace.notes, note))


# How much of the prompts of a trace a prefix cache could reuse, at every size of the cache.
#
# `reusable_tokens` counts what a cache without limit reuses. `reuse_curve` gives the hit rate
# over every capacity at once: Mattson's stack distance, in one pass, for an LRU cache that evicts
# the tail of a prompt before its head, as vLLM's does. Blocks that are only ever used together
# are one unit, so the cost follows the requests and the points where prompts part, not the
# blocks.

DERIVED_BLOCK = 16  # tokens of a block of sessions that come without blocks: vLLM's default
CURVE_POINTS = 49  # sizes of caches in a description: four to a doubling, for 2**12 blocks

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
    origin = first_places(shared.ids)
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
    hit_tokens: Floats
    prompt_tokens: int  # of all requests, also of those without blocks

    def at(self, capacity_blocks: float) -> float:
        """The share of prompt tokens that hit at a capacity."""
        tokens = float(np.interp(capacity_blocks, self.capacity_blocks, self.hit_tokens))
        return tokens / self.prompt_tokens


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
    derived: bool


def describe_reuse(trace: Trace, bytes_per_token: int | None = None) -> PromptReuse | None:
    """What the prompts of `trace` share; None where it says neither blocks nor sessions."""
    derived = trace.shared is None
    trace = with_blocks(trace)
    curve = reuse_curve(trace)
    if curve is None:
        return None
    prompt_tokens = curve.prompt_tokens
    reusable = int(reusable_tokens(trace).sum())
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
                100.0 * curve.at(size),
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
    lengths = block_lengths(trace)
    starts, rows = _runs(unit, shared.offsets, lengths < shared.block_tokens)
    tokens = np.add.reduceat(lengths, starts)
    size = np.diff(np.append(starts, len(unit)))
    # A request uses its runs from the tail to the head, so that the head is the last to be evicted.
    order = np.lexsort((-starts, rows))
    distance, again = _distances(unit[starts][order], size[order], rows[order])
    size = size[order][again]
    tokens = tokens[order][again]
    # Of a run at distance d, block j from its head hits at a capacity of d + j.
    rise = tokens / size
    places = np.concatenate([[0], distance, distance + size])
    capacity, index = np.unique(places, return_inverse=True)
    slope = np.bincount(index, np.concatenate([[0.0], rise, -rise]), minlength=len(capacity))
    rising = np.cumsum(slope)
    hits = np.concatenate([[0.0], np.cumsum(rising[:-1] * np.diff(capacity))])
    return ReuseCurve(shared.block_tokens, capacity, hits, int(trace.prompt_tokens.sum()))


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
    """For each repeated use of a unit: how many different blocks were used between its previous use
    and this request; and the places of these repeated uses.
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
