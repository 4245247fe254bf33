"""Windows do not overlap, are spread over the trace, and depend on nothing but the seed."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import InputError
from toolkit.traces.types import Trace
from toolkit.traces.windows import COVERED, cut, fit_windows, scale_rate, split_windows


def trace_of(arrivals) -> Trace:
    count = len(arrivals)
    lengths = np.arange(1, count + 1)
    return Trace(
        np.array(arrivals, dtype=float),
        lengths,
        lengths,
        np.zeros(count, dtype=np.int64),
        source="t.csv",
    )


STEADY = trace_of(np.arange(0, 100.01, 0.5))  # 100 s


def test_a_cut_is_half_open_and_counts_from_its_start():
    window = cut(STEADY, 10, 12)
    assert window.arrival_s.tolist() == [0, 0.5, 1, 1.5]
    assert window.prompt_tokens.tolist() == [21, 22, 23, 24]
    assert window.notes[-1] == "cut to 10 s .. 12 s: 4 requests"


def test_a_cut_may_go_on_to_the_end():
    assert len(cut(STEADY, 99, float("inf"))) == 3


def test_a_cut_without_requests_is_an_input_error():
    with pytest.raises(InputError, match=r"t.csv: no request arrives in 200 s .. 210 s"):
        cut(STEADY, 200, 210)


@given(
    search=st.integers(0, 6),
    held_out=st.integers(0, 6),
    seed=st.integers(0, 2**32),
    share=st.floats(0.1, 1),
)
def test_windows_are_disjoint_spread_and_as_many_as_given(search, held_out, seed, share):
    count = search + held_out
    if count == 0:
        return
    window_s = share * 100 / count
    searched, held = split_windows(STEADY, window_s, search, held_out, seed)
    assert (len(searched), len(held)) == (search, held_out)
    windows = sorted(searched + held, key=lambda window: window.start_s)
    assert all(before.end_s <= after.start_s for before, after in itertools.pairwise(windows))
    part_s = 100 / count
    assert [int((w.start_s + w.end_s) / 2 / part_s) for w in windows] == list(range(count))
    requests = [length for window in windows for length in window.trace.prompt_tokens.tolist()]
    assert len(requests) == len(set(requests))


def test_the_two_kinds_take_turns():
    searched, held = split_windows(STEADY, 10, 2, 2, seed=0)
    starts = sorted(
        [(w.start_s, "search") for w in searched] + [(w.start_s, "held out") for w in held]
    )
    kinds = [kind for _, kind in starts]
    assert kinds in (["search", "held out"] * 2, ["held out", "search"] * 2)


def test_windows_depend_on_the_seed_alone():
    first, same, other = (split_windows(STEADY, 10, 2, 2, seed)[0][0].start_s for seed in (1, 1, 2))
    assert first == same
    assert first != other


def test_a_trace_that_is_too_short_says_how_long_it_is_and_what_would_fit():
    with pytest.raises(InputError) as caught:
        split_windows(STEADY, 30, 2, 2)
    assert caught.value.message == "t.csv: lasts 100 s, too short for 2 + 2 windows of 30 s"
    assert caught.value.hint == "windows of at most 25 s, or 3 windows in all, would fit"


def test_a_window_without_requests_is_an_input_error_that_counts_them():
    with pytest.raises(InputError) as caught:
        split_windows(trace_of([0, 1, 100]), 10, 2, 2, seed=0)
    assert caught.value.message.startswith("t.csv: no request arrives in ")
    assert caught.value.message.endswith("one of 2 + 2 windows of 10 s (3 requests in 100 s)")
    assert caught.value.hint.startswith("give a longer trace, longer windows (--window)")


@pytest.mark.parametrize("wish", [None, 0.5, 10, 25, 25.1, 1e9])
def test_windows_are_as_long_as_wished_where_the_trace_allows_it(wish):
    found = fit_windows(STEADY, wish, 2, 2, seed=3)
    kept = wish is not None and wish <= 25
    assert found.seconds == (wish if kept else COVERED * 25)
    assert found.longest_s == COVERED * 25
    windows = sorted(found.search + found.held_out, key=lambda window: window.start_s)
    assert [w.end_s - w.start_s for w in windows] == pytest.approx([found.seconds] * 4)
    assert all(before.end_s <= after.start_s for before, after in itertools.pairwise(windows))
    notes = found.trace.notes
    assert notes == (
        ()
        if kept or wish is None
        else (
            f"windows of 20 s instead of {wish:,g} s: t.csv lasts 100 s at 2 requests/s, for 4 "
            f"windows",
        )
    )


def test_windows_that_would_be_empty_are_made_longer():
    sparse = trace_of(np.arange(0, 1000.1, 10))
    found = fit_windows(sparse, 2, 2, 2)
    assert found.seconds == found.longest_s == 200
    assert found.trace.notes == (
        "windows of 200 s instead of 2 s: t.csv has no request in one of these at 0.1 requests/s",
    )
    with pytest.raises(InputError, match="no request arrives in"):
        fit_windows(trace_of([0, 1, 100]), 10, 2, 2)


def test_requests_that_arrive_at_once_have_no_windows():
    with pytest.raises(InputError, match="all 3 requests arrive at once") as caught:
        fit_windows(trace_of([0, 0, 0]), 10, 2, 2)
    assert "--draw-rate" in caught.value.hint


@given(
    gaps=st.floats(2, 1e6),
    rate=st.floats(0.01, 1e4),
    search=st.integers(1, 5),
    held_out=st.integers(1, 4),
)
def test_every_wished_length_gives_windows_at_every_rate(gaps, rate, search, held_out):
    fitted, wish = scale_rate(STEADY, rate), gaps / rate
    found = fit_windows(fitted, wish, search, held_out)
    assert found.seconds <= min(wish, fitted.arrival_s[-1] / (search + held_out))
    assert (len(found.search), len(found.held_out)) == (search, held_out)


@pytest.mark.parametrize(
    ("window_s", "search", "held_out"), [(0, 1, 1), (-5, 1, 1), (float("nan"), 1, 1), (5, 0, 0)]
)
def test_impossible_windows_are_refused(window_s, search, held_out):
    with pytest.raises(InputError, match="cannot be cut"):
        split_windows(STEADY, window_s, search, held_out)
