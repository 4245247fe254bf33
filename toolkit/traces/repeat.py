"""A short trace repeated end to end, so that it lasts as long as a verdict needs.

What each repeat keeps and what is drawn anew:

- **Arrivals.** Each repeat has the trace's own arrival times, so bursts, lulls and every longer
  rise and fall of the load stay. Which request comes at which of these times is drawn anew, within
  each of `STRETCHES` equal stretches of the trace: a burst meets other lengths than before, and
  long prompts stay in the part of the trace where they were. A gap of the mean length joins two
  repeats, so the mean rate is the trace's.
- **Sessions.** Whole sessions are repeated as new sessions. Their starts change places as requests
  do; their turns, and the times to think, stay as they are. A session that is not over when its
  repeat ends goes on beside the next repeat's.
- **Requests that share blocks without sessions** keep their order, since a later one may be the
  next turn of an earlier one.
- **Shared blocks.** A repeat must not find in vLLM's prefix cache what an earlier repeat of the
  same conversation left there: real conversations do not come again. So each repeat's blocks have
  new ids. Only what many use throughout the trace stays the same: a block of `COMMON_USERS`
  conversations or more, the first and the last of which begin half of the trace apart. This is the
  system prompt, or a template in steady use. A template that was used once or twice counts as new,
  which makes the answer rather too low than too high.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import InputError
from toolkit.traces.types import Sessions, SharedBlocks, Trace

STRETCHES = 32  # of the trace, within which requests change places
COMMON_USERS = 3  # conversations with the same block
COMMON_SPAN = 0.5  # of the trace: how far apart the first and the last of them begin
MOST_BLOCKS = 50_000_000  # of all prompts of a repeated trace: some 2 GB while it is made

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def repeated(trace: Trace, times: int, seed: int = 0) -> Trace:
    """Return the trace `times` times, end to end; the first time as it is. The module says what
    each repeat draws anew. The first repeats of a longer result are the same.

    Raises `InputError` if `times` is below 1, the trace has no times, or its prompts have too many
    blocks.
    """
    if times < 1:
        raise InputError(f"a trace cannot be repeated {times} times", "give 1 or more")
    if times == 1:
        return trace
    count = len(trace)
    span_s = float(trace.arrival_s[-1] - trace.arrival_s[0])
    if span_s <= 0.0:
        raise InputError(
            f"{trace.source}: its requests arrive at once, so it has no length to repeat",
            "draw arrival times first: llmctl trace convert IN OUT --draw-rate REQUESTS_PER_S",
        )
    if times > most_repeats(trace):
        raise InputError(
            f"{trace.source}: {times:,} times its prompts have more than {MOST_BLOCKS:,} blocks",
            f"repeat it at most {most_repeats(trace):,} times",
        )
    period_s = span_s * count / (count - 1)
    arrivals = [trace.arrival_s]
    for number in range(1, times):
        rng = np.random.default_rng([seed, number])
        arrivals.append(_redrawn(trace, rng) + number * period_s)
    rows = np.tile(np.arange(count), times)
    sessions = None
    if trace.sessions is not None:
        previous = trace.sessions.previous
        shifted = [np.where(previous < 0, -1, previous + n * count) for n in range(times)]
        sessions = Sessions(np.concatenate(shifted), np.tile(trace.sessions.think_s, times))
    whole = replace(
        trace,
        arrival_s=np.concatenate(arrivals),
        prompt_tokens=trace.prompt_tokens[rows],
        output_tokens=trace.output_tokens[rows],
        max_tokens=trace.max_tokens[rows],
        priority=None if trace.priority is None else trace.priority[rows],
        shared=None if trace.shared is None else _blocks(trace, times),
        sessions=sessions,
        notes=(*trace.notes, _note(trace, times)),
        repeats=trace.repeats * times,
    )
    order = np.argsort(whole.arrival_s, kind="stable")
    return whole if (np.diff(order) == 1).all() else whole.take(order)


def most_repeats(trace: Trace) -> int:
    """How many times a trace may be repeated, by the blocks of its prompts."""
    blocks = 0 if trace.shared is None else len(trace.shared.ids)
    return max(MOST_BLOCKS // blocks, 1) if blocks else MOST_BLOCKS


def _note(trace: Trace, times: int) -> str:
    how = f"repeated {times} times, end to end, each time at the trace's own times"
    if trace.sessions is None and trace.shared is not None:
        return how
    what = "requests" if trace.sessions is None else "sessions"
    return f"{how}, with the {what} of each {STRETCHES}nd of it in another order"


def _redrawn(trace: Trace, rng: np.random.Generator) -> Floats:
    """The arrival times of one repeat: sessions, or requests, take each other's places."""
    arrival_s = trace.arrival_s
    if trace.sessions is None and trace.shared is not None:
        return arrival_s
    first = np.arange(len(trace)) if trace.sessions is None else trace.sessions.first
    heads = np.flatnonzero(first == np.arange(len(trace)))  # first turns, by arrival
    places_s = arrival_s[heads]
    since_s = places_s - arrival_s[0]
    stretch = np.floor(since_s * (STRETCHES / float(arrival_s[-1] - arrival_s[0])))
    taken = np.lexsort((rng.random(len(heads)), stretch))  # the head that takes each place
    start_s = np.zeros(len(trace))
    start_s[heads[taken]] = places_s
    redrawn: Floats = start_s[first] + (arrival_s - arrival_s[first])
    return redrawn


def _blocks(trace: Trace, times: int) -> SharedBlocks:
    """The blocks of all repeats: new ids in each, but for those in steady use."""
    shared = trace.shared
    assert shared is not None
    known, places = np.unique(shared.ids, return_inverse=True)
    common = _common(trace, places.reshape(-1), len(known))
    new = np.cumsum(~common) - 1  # a number for each id that is not shared by repeats
    count = int((~common).sum())
    highest = int(known[-1]) + 1
    ids = [shared.ids]
    for number in range(1, times):
        fresh = np.where(common, known, highest + (number - 1) * count + new)
        ids.append(fresh[places.reshape(-1)])
    counts = np.tile(shared.counts, times)
    return SharedBlocks(
        shared.block_tokens, np.concatenate(ids), np.concatenate([[0], np.cumsum(counts)])
    )


def _common(trace: Trace, places: Ints, count: int) -> NDArray[np.bool_]:
    """Which of `count` ids are in steady use. `places`: the number of each block's id.

    Each conversation counts once: a session, or, where the trace names none, its longest prompt.
    A block before a common one is common, since a prompt with the later block has the earlier too.
    """
    shared = trace.shared
    assert shared is not None
    rows = np.repeat(np.arange(len(trace)), shared.counts)
    if trace.sessions is None:
        user = rows
        counted = ~_continued(trace, places, count)[rows]
    else:
        user = trace.sessions.first[rows]
        counted = np.ones(len(rows), dtype=np.bool_)
    pairs = np.unique(places[counted] * len(trace) + user[counted])
    block, conversation = pairs // len(trace), pairs % len(trace)
    users = np.bincount(block, minlength=count)
    first_s = np.full(count, np.inf)
    last_s = np.full(count, -np.inf)
    np.minimum.at(first_s, block, trace.arrival_s[conversation])
    np.maximum.at(last_s, block, trace.arrival_s[conversation])
    far = last_s - first_s >= COMMON_SPAN * float(trace.arrival_s[-1] - trace.arrival_s[0])
    common: NDArray[np.bool_] = (users >= COMMON_USERS) & far
    return common


def _continued(trace: Trace, places: Ints, count: int) -> NDArray[np.bool_]:
    """The rows with a last whole block that stands in a longer prompt too: another turn follows."""
    shared = trace.shared
    assert shared is not None
    longest = np.zeros(count, dtype=np.int64)  # the most blocks of a prompt with this id
    np.maximum.at(longest, places, np.repeat(shared.counts, shared.counts))
    whole = np.minimum(trace.prompt_tokens // shared.block_tokens, shared.counts)
    found = np.zeros(len(trace), dtype=np.bool_)
    has = np.flatnonzero(whole > 0)
    last = places[shared.offsets[:-1][has] + whole[has] - 1]
    found[has] = longest[last] > shared.counts[has]
    return found
