"""The compiled arithmetic against its definition in plain Python."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.sched.kernels import admit_past_future, peak_to_come
from toolkit.sched.view import LengthHistory

jobs = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 30)), min_size=1, max_size=12)


def peak_by_running(rows: list[tuple[int, int]]) -> int:
    """Every step until the last has ended; a request counts in the step in which it ends."""
    steps = range(max(remaining for _, remaining in rows) + 1)
    return max(sum(used + step for used, remaining in rows if remaining >= step) for step in steps)


def columns(rows: list[tuple[int, ...]], width: int) -> np.ndarray:
    return np.array(rows, dtype=np.int64).reshape(-1, width).T


def admitted_of(
    table: np.ndarray, new: np.ndarray, past: np.ndarray, limit: float, samples: int, seed: int
) -> int:
    """`admit_past_future` of running requests and newcomers [3, n]."""
    rows = np.ascontiguousarray(table.T)
    waiting = np.ascontiguousarray(new.T)
    return admit_past_future(rows, waiting, past, limit, samples, seed)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)  # the first call compiles
@given(rows=jobs)
def test_the_future_peak_is_the_peak_of_running_them(rows):
    used, remaining = columns(rows, 2)
    assert peak_to_come(used, remaining, False) == peak_by_running(rows)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)  # the first call compiles
@given(rows=jobs, waiting=jobs, limit=st.integers(1, 400), seed=st.integers(0, 2**63 - 1))
def test_with_a_history_of_one_length_sampling_is_deterministic(rows, waiting, limit, seed):
    """All are expected to end at 30: they are admitted while the peak stays below the limit."""
    table = columns([(used, 30 - left, 30) for used, left in rows], 3)
    new = columns([(used, 0, 30) for used, _ in waiting], 3)
    admitted = admitted_of(table, new, np.empty(0, dtype=np.int64), float(limit), 2, seed)
    expected = 0
    while expected < len(waiting):
        rows = [*rows, (waiting[expected][0], 30)]
        if peak_by_running(rows) >= limit:
            break
        expected += 1
    assert admitted == expected


@pytest.mark.slow
@settings(max_examples=50, deadline=None)  # the first call compiles
@given(
    history=st.lists(st.integers(1, 60), min_size=1, max_size=30),
    generated=st.integers(0, 59),
    seed=st.integers(0, 2**63 - 1),
)
def test_a_resident_is_expected_to_end_within_the_longer_half_of_history(history, generated, seed):
    """The sampled end of the only resident, in [generated, 60], decides about the newcomer."""
    table = columns([(100, generated, 60)], 3)
    past = np.sort(np.array(history, dtype=np.int64))
    new = columns([(1, 0, 60)], 3)
    assert admitted_of(table, new, past, 100.0 + 1, 1, seed) == 0  # they hold 101 now
    assert admitted_of(table, new, past, 100 + 60 - generated + 61.0 + 60, 1, seed) == 1


@pytest.mark.slow
def test_sampled_lengths_follow_the_points():
    """Points 10, 20, 40, 60 after 10 generated tokens: uniform over the three stretches between."""
    table = columns([(0, 10, 60)], 3)
    past = np.array([5, 20, 40], dtype=np.int64)
    # The newcomer ends after one step: the peak is the resident's end, or both after a step.
    new = columns([(1, 59, 60)], 3)
    below = [
        np.mean([admitted_of(table, new, past, float(end), 1, seed) for seed in range(2000)])
        for end in (10, 30, 50)
    ]
    # The resident's remaining tokens are below `end` with these probabilities; rounding moves each
    # by half a token.
    assert np.allclose(below, [1 / 3, 2 / 3, 1.0], atol=0.04)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)  # the first call compiles
@given(
    lengths=st.lists(st.integers(1, 20), max_size=40),
    window=st.integers(1, 10),
    asked=st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_the_sorted_history_equals_sorting_the_recent_one(lengths, window, asked):
    history = LengthHistory(window, [7, 3])
    for length, ask in zip(lengths, asked, strict=False):
        history.add(length)
        if ask:
            assert history.ascending().tolist() == sorted(history.recent)
    assert history.ascending().tolist() == sorted([7, 3, *lengths][-window:])
