"""What prompts share, as files say it: checked.

A row with impossible blocks or an impossible session is read without them, counted, and named;
nothing is guessed: `blocks_of` and `sessions_of`. `keep_sessions` follows lengths that were divided
or clipped. `reusable_tokens` says how much a cache without limit reuses.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import InputError
from toolkit.traces.columns import THINK, block_ids, length, number
from toolkit.traces.types import MOONCAKE_BLOCK, Sessions, SharedBlocks, Trace

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

NO_LIST = "with hash_ids that are not a list of whole numbers"
MISCOUNTED = "with hash_ids that contradict the length"
NO_CHAIN = "with hash_ids that are no chain"
SHORT = "shorter than the turn before and its answer"
DIFFERENT = "with other blocks than the turn before"
THOUGHTLESS = "with an impossible time to think"


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


def blocks_of(
    trace: Trace,
    blocks: Sequence[object],
    sizes: Sequence[object],
    rows: Sequence[int],
    unshared: Problems,
) -> SharedBlocks | None:
    """Return the blocks of the prompts of `trace`; None if no row has any.

    Args:
        blocks: what the file has as `hash_ids`, for each request.
        sizes: what it has as `block_tokens`.
        rows: their numbers in the file, for messages.
        unshared: counts the rows that are read as sharing nothing.

    Raises `InputError` if blocks have an impossible size, or two sizes.
    """
    ids = array("q")
    counts = np.zeros(len(trace), dtype=np.int64)
    size = 0
    said_in = 0  # the row that says the size first
    for place, (listed, tokens) in enumerate(zip(blocks, sizes, strict=True)):
        if listed is None:
            continue
        row = rows[place]
        block = size if size and tokens == size else _block_tokens(tokens, trace.source, row)
        if size and block != size:
            raise InputError(
                f"{trace.source}: row {row:,} has blocks of {block} tokens, "
                f"row {said_in:,} of {size}",
                "a trace has blocks of one size: split the file",
            )
        if not size:
            size = block
            said_in = row
        prompt = int(trace.prompt_tokens[place])
        wanted = -(-prompt // size)
        found = block_ids(listed)
        if found is None:
            unshared.add(NO_LIST, f"row {row:,}")
        elif len(found) != wanted:
            said = f"{len(found)} for {prompt:,} tokens in blocks of {size}, must be {wanted}"
            unshared.add(MISCOUNTED, f"row {row:,}: {said}")
        else:
            ids.extend(found)
            counts[place] = wanted
    if not len(ids):
        return None
    shared = SharedBlocks(
        size, np.frombuffer(ids, dtype=np.int64).copy(), np.concatenate([[0], np.cumsum(counts)])
    )
    return _chains(shared, rows, unshared)


def _block_tokens(given: object, source: str, row: int) -> int:
    """Return the size of a row's blocks. Raises `InputError` if it is impossible."""
    try:
        block = MOONCAKE_BLOCK if given is None else length(given)
    except (ValueError, OverflowError):
        block = 0
    if block < 1:
        raise InputError(
            f"{source}: row {row:,}: block_tokens is {given!r}",
            "must be a whole number of tokens from 1 on",
        )
    return block


def _chains(shared: SharedBlocks, rows: Sequence[int], unshared: Problems) -> SharedBlocks | None:
    """Return the blocks, without rows in which an id stands behind another id than where it stands
    first; None if none are left.
    """
    ids = shared.ids
    first = np.zeros(len(ids), dtype=np.bool_)
    first[shared.offsets[:-1][shared.counts > 0]] = True
    behind = np.where(first, 0, np.roll(ids, 1))
    origin = first_places(ids)
    wrong = (behind != behind[origin]) | (first != first[origin])
    if not wrong.any():
        return shared
    row_of = np.repeat(np.arange(len(shared)), shared.counts)
    bad = np.zeros(len(shared), dtype=np.bool_)
    bad[row_of[wrong]] = True
    places = int(np.flatnonzero(wrong)[0]), int(origin[wrong][0])
    row, other = (rows[row_of[place]] for place in places)
    now, then = ("first" if first[place] else f"after {behind[place]}" for place in places)
    shown = f"row {row:,}: {ids[places[0]]} stands {now}, and {then} in row {other:,}"
    unshared.add(NO_CHAIN, shown, int(bad.sum()))
    kept = ids[np.repeat(~bad, shared.counts)]
    offsets = np.concatenate([[0], np.cumsum(np.where(bad, 0, shared.counts))])
    return SharedBlocks(shared.block_tokens, kept, offsets) if len(kept) else None


def sessions_of(
    trace: Trace,
    labels: Sequence[object],
    think_ms: Sequence[object] | None,
    took_s: Sequence[float],
    rows: Sequence[int],
    unlinked: Problems,
) -> Sessions | None:
    """Return the sessions of `trace`, which is in order of arrival; None if no turn continues
    another.

    Args:
        labels: of each request's session; a number or a text, or else it has none.
        think_ms: what the file has as times to think; None: they follow from the arrivals.
        took_s: how long each request took; 0 where it is not known.
        rows: their numbers in the file, for messages.
        unlinked: counts the turns that are read as first turns.
    """
    previous = np.full(len(trace), -1, dtype=np.int64)
    think_s = np.zeros(len(trace))
    latest: dict[str | int, int] = {}  # the last request by session
    arrivals_s = trace.arrival_s.tolist()
    for place, label in enumerate(labels):
        if not isinstance(label, str | int):
            continue
        before = latest.get(label, -1)
        latest[label] = place
        if before < 0:
            continue
        if think_ms is None:
            think = max(arrivals_s[place] - arrivals_s[before] - took_s[before], 0.0)
        else:
            given = think_ms[place]
            think = _think_s(given)
            if think < 0.0:
                shown = f"row {rows[place]:,}: {THINK} is {given!r}, must be at least 0 ms"
                unlinked.add(THOUGHTLESS, shown)
                continue
        previous[place] = before
        think_s[place] = think
    linked = np.flatnonzero(previous >= 0)
    ahead = previous[linked]
    short = trace.prompt_tokens[linked] < (trace.prompt_tokens + trace.output_tokens)[ahead]
    other = _other_blocks(trace, linked, ahead) & ~short
    for reason, wrong in ((SHORT, short), (DIFFERENT, other)):
        if wrong.any():
            turn = int(linked[wrong][0])
            before = int(ahead[wrong][0])
            here, there = f"row {rows[turn]:,}", f"row {rows[before]:,}"
            if reason == SHORT:
                here += f": {trace.prompt_tokens[turn]:,} tokens"
                there += f": {trace.prompt_tokens[before]:,} + {trace.output_tokens[before]:,}"
            unlinked.add(reason, f"{here}, {there}", int(wrong.sum()))
    cut = linked[short | other]
    previous[cut] = -1
    think_s[cut] = 0.0
    return Sessions(previous, think_s) if (previous >= 0).any() else None


def _think_s(given: object) -> float:
    """Return the seconds of a time to think in ms; -1 if it is impossible."""
    try:
        think_s = 0.0 if given is None else number(given) / 1000.0
    except (ValueError, OverflowError):
        return -1.0
    return think_s if 0.0 <= think_s < np.inf else -1.0


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


def reusable_tokens(trace: Trace) -> Ints:
    """The first tokens of each prompt with which an earlier prompt of the trace begins: what a
    cache without limit reuses.
    """
    shared = trace.shared
    if shared is None:
        return np.zeros(len(trace), dtype=np.int64)
    rows = np.repeat(np.arange(len(trace)), shared.counts)
    origin = first_places(shared.ids)
    tokens = np.full(len(shared.ids), shared.block_tokens, dtype=np.int64)
    several = np.flatnonzero(shared.counts)
    last = shared.offsets[several + 1] - 1  # only a prompt's last block may have fewer tokens
    tokens[last] = trace.prompt_tokens[several] - (shared.counts[several] - 1) * shared.block_tokens
    seen = np.where(rows[origin] < rows, np.minimum(tokens, tokens[origin]), 0)
    return np.bincount(rows, seen, minlength=len(trace)).astype(np.int64)
