"""Windows do not overlap, cover the trace's loads with the busiest stretch among the search's, may
start warm, and depend on nothing but the seed.
"""

import itertools
from dataclasses import fields, replace

import numpy as np
import pytest
import samples
from hypothesis import given
from hypothesis import strategies as st
from said import says

from toolkit.errors import InputError
from toolkit.sched.policies import make_any
from toolkit.sim.api import simulate
from toolkit.sim.deployment import Deployment, Workload
from toolkit.traces.types import Trace
from toolkit.traces.windows import COVERED, TraceWindow, cut, fit_windows, scale_rate, split_windows


def trace_of(arrivals) -> Trace:
    lengths = np.arange(1, len(arrivals) + 1)
    return Trace(np.array(arrivals, dtype=float), lengths, lengths, 0 * lengths, source="t.csv")


STEADY = trace_of(np.arange(0, 100.01, 0.5))  # 100 s


def test_a_cut_is_half_open_and_counts_from_its_start():
    window = cut(STEADY, 10, 12)
    assert window.arrival_s.tolist() == [0, 0.5, 1, 1.5]
    assert window.prompt_tokens.tolist() == [21, 22, 23, 24]
    assert says(window.notes[-1], "10 s .. 12 s", "4 requests")


def in_time(*lists: list[TraceWindow]) -> list[TraceWindow]:
    return sorted(itertools.chain(*lists), key=lambda window: window.start_s)


def tokens(window: TraceWindow) -> int:
    """Of traces with equally long prompts and outputs, such as STEADY."""
    return int(window.trace.prompt_tokens[window.trace.warmup :].sum())


@given(
    search=st.integers(0, 6),
    held_out=st.integers(0, 6),
    seed=st.integers(0, 2**32),
    share=st.floats(0.1, 1),
)
def test_windows_are_disjoint_and_as_many_as_given(search, held_out, seed, share):
    count = search + held_out
    if count == 0:
        return
    window_s = share * 100 / count
    searched, held = split_windows(STEADY, window_s, search, held_out, seed)
    assert (len(searched), len(held)) == (search, held_out)
    windows = in_time(searched, held)
    pairs = itertools.pairwise(windows)
    assert all(before.end_s <= after.start_s for before, after in pairs)
    assert all(0 <= w.start_s < w.end_s <= 100 for w in windows)
    assert [w.end_s - w.start_s for w in windows] == pytest.approx([window_s] * count)
    requests = [length for window in windows for length in window.trace.prompt_tokens.tolist()]
    assert len(requests) == len(set(requests))


@pytest.mark.slow
@given(
    rates=st.lists(st.sampled_from([1.0, 3.0, 9.0, 40.0]), min_size=12, max_size=40),
    search=st.integers(1, 4),
    held_out=st.integers(0, 4),
    seed=st.integers(0, 9),
)
def test_the_busiest_stretch_is_searched(rates, search, held_out, seed):
    """The trace's rate changes every 10 s; so do the stretches, which are 10 s long."""
    gaps = np.concatenate([np.full(int(10 * rate), 1 / rate) for rate in rates])
    arrivals = np.cumsum(gaps) - gaps[0]
    ones = np.ones(len(arrivals), dtype=np.int64)
    trace = Trace(arrivals, ones, ones, 0 * ones)
    searched, held = split_windows(trace, 10.0, search, held_out, seed)
    busiest = max(len(window.trace) for window in searched)
    assert busiest >= 0.95 * 10 * max(rates)
    assert busiest >= max((len(window.trace) for window in held), default=0)


def test_windows_cover_the_quantiles_of_the_load():
    """Load rises with time: of 20 stretches the last is the busiest."""
    searched, held = split_windows(STEADY, 5, 2, 2, seed=3)
    by_load = sorted([*searched, *held], key=tokens, reverse=True)
    assert by_load == in_time(searched, held)[::-1]
    assert [window in searched for window in by_load] == [True, False, True, False]
    assert by_load[0].end_s == pytest.approx(100)
    # of the 19 others, one from each third of the distribution
    places = [round(window.start_s / 5) for window in by_load[1:]]
    thirds = [range(13, 19), range(7, 13), range(7)]
    assert all(place in third for place, third in zip(places, thirds, strict=True))


def test_a_warm_up_is_what_comes_before_a_window():
    for wish in (4, 25):
        cold = fit_windows(STEADY, wish, 2, 2, seed=1)
        warm = fit_windows(STEADY, wish, 2, 2, seed=1, warm=True)
        plain = in_time(cold.search, cold.held_out)
        warmed = in_time(warm.search, warm.held_out)
        for one, other in zip(plain, warmed, strict=True):
            assert (one.start_s, one.end_s) == (other.start_s, other.end_s)
            assert one.trace.warmup == 0
            counted = other.trace.prompt_tokens[other.trace.warmup :]
            assert counted.tolist() == one.trace.prompt_tokens.tolist()
            assert other.trace.counted == len(one.trace)
            # as long as the window, or from the trace's beginning
            begin_s = max(other.start_s - wish, 0.0)
            before = (STEADY.arrival_s >= begin_s) & (STEADY.arrival_s < other.start_s)
            assert other.trace.warmup == before.sum()
            first = STEADY.prompt_tokens[before]
            assert other.trace.prompt_tokens[: other.trace.warmup].tolist() == first.tolist()
        assert any(window.trace.warmup for window in warmed)


def test_a_short_trace_says_what_would_fit():
    with pytest.raises(InputError) as caught:
        split_windows(STEADY, 30, 2, 2)
    assert says(caught.value.message, "t.csv", "100 s", "2 + 2", "30 s")
    assert says(caught.value.hint, "25 s", "3 windows")


@pytest.mark.parametrize("wish", [None, 0.5, 10, 25, 25.1, 1e9])
def test_windows_are_as_long_as_wished_where_the_trace_allows_it(wish):
    found = fit_windows(STEADY, wish, 2, 2, seed=3)
    kept = wish is not None and wish <= 25
    assert found.seconds == (wish if kept else COVERED * 25)
    assert found.longest_s == COVERED * 25
    windows = in_time(found.search, found.held_out)
    assert [w.end_s - w.start_s for w in windows] == pytest.approx([found.seconds] * 4)
    assert all(before.end_s <= after.start_s for before, after in itertools.pairwise(windows))
    notes = ()
    if wish is not None and not kept:
        why = "t.csv lasts 100 s at 2 requests/s, for 4 windows"
        notes = (f"windows of 20 s instead of {wish:,g} s: {why}",)
    assert found.trace.notes == notes


def test_windows_that_would_be_empty_are_made_longer():
    sparse = trace_of(np.arange(0, 1000.1, 10))
    found = fit_windows(sparse, 2, 2, 2)
    assert found.seconds == found.longest_s == 200
    assert found.trace.notes == (
        "windows of 200 s instead of 2 s: t.csv has no request in most of these at 0.1 requests/s",
    )
    with pytest.raises(InputError, match=r"t\.csv.*4.*5 stretches.*3 requests"):
        fit_windows(trace_of([0, 1, 100]), 10, 2, 2)


def test_requests_that_arrive_at_once_have_no_windows():
    with pytest.raises(InputError, match="3 requests") as caught:
        fit_windows(trace_of([0, 0, 0]), 10, 2, 2)
    assert "--draw-rate" in caught.value.hint


@pytest.mark.slow
@given(
    gaps=st.floats(2, 1e6),
    rate=st.floats(0.01, 1e4),
    search=st.integers(1, 5),
    held_out=st.integers(1, 4),
)
def test_every_wished_length_gives_windows_at_every_rate(gaps, rate, search, held_out):
    fitted = scale_rate(STEADY, rate)
    wish = gaps / rate
    found = fit_windows(fitted, wish, search, held_out)
    assert found.seconds <= min(wish, fitted.arrival_s[-1] / (search + held_out))
    assert (len(found.search), len(found.held_out)) == (search, held_out)


@pytest.mark.parametrize(
    ("window_s", "search", "held_out"), [(0, 1, 1), (-5, 1, 1), (float("nan"), 1, 1), (5, 0, 0)]
)
def test_impossible_windows_are_refused(window_s, search, held_out):
    with pytest.raises(InputError, match=rf"{search} \+ {held_out} windows.*{window_s:g} s"):
        split_windows(STEADY, window_s, search, held_out)


def test_simulate_counts_only_the_requests_after_the_warm_up():
    policy = make_any("slice", {})
    world = Deployment.of(samples.recipe(), samples.fit()).world(Workload(STEADY))
    whole = simulate(STEADY, policy, world)
    warm = simulate(replace(STEADY, warmup=120), make_any("slice", {}), world)
    assert warm.metrics({})["requests"] == STEADY.counted - 120 == 81
    for column in fields(whole.served):
        every = getattr(whole.served, column.name)
        counted = getattr(warm.served, column.name)
        assert counted.tolist() == every[120:].tolist()
