"""Scaling and windows keep what prompts share."""

from dataclasses import replace

import numpy as np
import pytest
from divided import divide_lengths
from hypothesis import given
from hypothesis import strategies as st
from said import says
from test_traces_shared import blocks_of

from toolkit.traces.sharing import reusable_tokens
from toolkit.traces.types import Sessions, Trace
from toolkit.traces.windows import cut, scale_lengths


@st.composite
def prompts_of_blocks(draw, most=12):
    """Prompts as paths in a tree of blocks, with the tokens of a block and of each prompt."""
    block = draw(st.sampled_from([1, 4, 16, 512]))
    tree: dict[tuple[int, ...], int] = {}
    lengths = []
    ids = []
    for _ in range(draw(st.integers(1, most))):
        path = tuple(draw(st.lists(st.integers(0, 1), min_size=1, max_size=9)))
        tokens = draw(st.integers((len(path) - 1) * block + 1, len(path) * block))
        nodes = [path[: k + 1] for k in range(len(path))]
        if tokens % block:  # a part of a block is not the whole block
            nodes[-1] = (*nodes[-1], tokens + 10)
        lengths.append(tokens)
        ids.append([tree.setdefault(node, len(tree)) for node in nodes])
    return block, lengths, ids


def trace_of(block, lengths, ids, sessions=None, outputs=None) -> Trace:
    count = len(lengths)
    return Trace(
        np.arange(count) * 1.0,
        np.array(lengths),
        np.ones(count, np.int64) if outputs is None else np.array(outputs),
        np.zeros(count, np.int64),
        "made",
        shared=blocks_of(*ids, size=block),
        sessions=sessions,
    )


def common(trace, one, other) -> int:
    """The tokens that two prompts share."""
    run = 0
    for a, b in zip(trace.shared.of(one), trace.shared.of(other), strict=False):
        if a != b:
            break
        run += 1
    lengths = trace.prompt_tokens[[one, other]].tolist()
    return min(run * trace.shared.block_tokens, *lengths)


def test_prompts_that_were_scaled_share_nothing():
    trace = trace_of(4, [40, 40, 3], [list(range(10)), list(range(10)), [77]])
    assert scale_lengths(trace, 11, 1).shared is None
    assert scale_lengths(trace, 64, 8).shared is not None  # all of them fit


# Rows 0, 2 and 3 are one session, rows 1 and 4 another.
TURNS = Sessions(np.array([-1, -1, 0, 2, 1]), np.array([0.0, 0.0, 1.0, 1.0, 1.0]))


@given(
    news=st.lists(st.integers(0, 40), min_size=5, max_size=5),
    outputs=st.lists(st.integers(1, 60), min_size=5, max_size=5),
    divisor=st.sampled_from([1.0, 2.0, 3.3, 16.0]),
)
def test_scaled_turns_hold_the_turn_before_and_its_answer(news, outputs, divisor):
    lengths = [100, 200, 0, 0, 0]
    for row in (2, 3, 4):
        before = TURNS.previous[row]
        lengths[row] = lengths[before] + outputs[before] + news[row]
    trace = replace(
        trace_of(4, lengths, [[]] * 5, TURNS, outputs), shared=None, arrival_s=np.arange(5.0)
    )
    scaled = divide_lengths(trace, divisor)
    later = np.flatnonzero(scaled.sessions.previous >= 0)
    before = scaled.sessions.previous[later]
    whole = (scaled.prompt_tokens + scaled.output_tokens)[before]
    assert (scaled.prompt_tokens[later] >= whole).all()
    assert scaled.output_tokens.min() >= 1
    assert (np.abs(scaled.output_tokens - np.ceil(trace.output_tokens / divisor)) <= 1).all()
    if divisor == 1.0:
        assert scaled.sessions.previous.tolist() == TURNS.previous.tolist()
    cut_links = 3 - len(later)
    assert any(f"{cut_links} of 3 later turns start a session" in one for one in scaled.notes) == (
        cut_links > 0
    )


def test_a_window_cuts_sessions():
    trace = trace_of(4, [8, 4, 12, 16, 8], [[1, 2], [3], [1, 2, 4], [1, 2, 4, 5], [3, 6]], TURNS)
    window = cut(trace, 2.0, 9.0)
    assert window.sessions.previous.tolist() == [-1, 0, -1]
    assert says(window.notes[-1], "2 of 3")
    assert len(cut(trace, 0.0, 9.0).notes) == 1


def reused(trace: Trace) -> int:
    """The tokens that hit in a cache without limit, by replaying it."""
    held: set[int] = set()
    tokens = 0
    for row in range(len(trace)):
        ids = trace.shared.of(row).tolist()
        left = int(trace.prompt_tokens[row])
        for one in ids:
            if one not in held:
                break
            tokens += min(left, trace.shared.block_tokens)
            left -= trace.shared.block_tokens
        held.update(ids)
    return tokens


@pytest.mark.slow
@given(made=prompts_of_blocks(most=20))
def test_a_cache_without_limit_reuses_what_an_earlier_prompt_begins_with(made):
    trace = trace_of(*made)
    assert reusable_tokens(trace).sum() == reused(trace)
