"""What prompts share, and sessions, stay right when requests are chosen and repeated."""

import numpy as np
import pytest

from toolkit.traces.types import Sessions, SharedBlocks, Trace


def blocks_of(*prompts: list[int], size: int = 4) -> SharedBlocks:
    offsets = np.cumsum([0, *map(len, prompts)])
    return SharedBlocks(size, np.array([one for ids in prompts for one in ids], np.int64), offsets)


def trace_of(**columns) -> Trace:
    rows = np.arange(4)
    return Trace(rows * 1.0, rows + 5, rows + 1, 0 * rows, **columns)


def lists(shared: SharedBlocks) -> list[list[int]]:
    return [shared.of(row).tolist() for row in range(len(shared))]


SHARED = blocks_of([1, 2], [1, 3], [], [1, 2, 4])


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (slice(1, 3), [[1, 3], []]),
        (slice(2, 2), []),
        (np.array([3, 0, 3]), [[1, 2, 4], [1, 2], [1, 2, 4]]),
        (np.array([2]), [[]]),
    ],
)
def test_chosen_prompts_keep_their_blocks(rows, expected):
    taken = SHARED.take(rows)
    assert lists(taken) == expected
    assert taken.counts.tolist() == [len(ids) for ids in expected]
    assert taken.block_tokens == 4


# Session A: rows 0, 2, 3. Session B: rows 1, 4.
TURNS = Sessions(np.array([-1, -1, 0, 2, 1]), np.array([0.0, 0.0, 5.0, 6.0, 7.0]))


@pytest.mark.parametrize(
    ("rows", "previous", "think_s"),
    [
        (slice(0, 5), [-1, -1, 0, 2, 1], [0, 0, 5, 6, 7]),
        # A and B begin before the part: their turns in it become first turns.
        (slice(2, 5), [-1, 0, -1], [0, 6, 0]),
        (np.array([0, 3]), [-1, -1], [0, 0]),  # a turn between is missing
        (np.array([1, 4, 1, 4]), [-1, 0, -1, 2], [0, 7, 0, 7]),  # repeated: two sessions
        (np.array([3, 4, 0, 1, 2]), [-1, -1, -1, -1, 2], [0, 0, 0, 0, 5]),  # starts again
    ],
)
def test_chosen_turns_continue_the_turn_before_where_it_is_there(rows, previous, think_s):
    taken = TURNS.take(rows)
    assert taken.previous.tolist() == previous
    assert taken.think_s.tolist() == think_s


def test_every_turn_knows_the_first_of_its_session():
    assert TURNS.first.tolist() == [0, 1, 0, 0, 1]


def test_a_part_of_a_trace_carries_every_column():
    sessions = Sessions(np.array([-1, 0, -1, 1]), np.array([0.0, 2.0, 0.0, 3.0]))
    whole = trace_of(shared=SHARED, sessions=sessions, priority=np.array([4, 3, 2, 1]))
    part = whole.take(slice(1, 4))
    assert part.arrival_s.tolist() == [1, 2, 3]
    assert part.prompt_tokens.tolist() == [6, 7, 8]
    assert part.priority.tolist() == [3, 2, 1]
    assert lists(part.shared) == [[1, 3], [], [1, 2, 4]]
    assert part.sessions.previous.tolist() == [-1, -1, 0]
    bare = trace_of().take(np.array([0, 0]))
    assert bare.shared is None
    assert bare.sessions is None
