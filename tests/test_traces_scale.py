"""Scaling a trace keeps its order and shape, and leaves a note."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from said import says

from toolkit.errors import InputError
from toolkit.traces.types import Trace
from toolkit.traces.windows import (
    fit_lengths,
    leave_out_longer,
    mean_rate,
    scale_lengths,
    scale_rate,
)

LENGTHS = st.lists(
    st.tuples(st.integers(1, 200_000), st.integers(1, 200_000)), min_size=1, max_size=60
)


def trace_of(prompts, outputs, arrivals=None, max_tokens=None) -> Trace:
    count = len(prompts)
    times = np.array(range(count) if arrivals is None else arrivals, dtype=float)
    limits = np.zeros(count, dtype=np.int64) if max_tokens is None else np.array(max_tokens)
    return Trace(times, np.array(prompts), np.array(outputs), limits, source="t.csv")


def test_the_rate_is_scaled_by_stretching_time():
    scaled = scale_rate(trace_of([1, 2, 3], [1, 2, 3], arrivals=[0, 1, 4]), 2.0)
    assert scaled.arrival_s.tolist() == [0, 0.25, 1]
    assert mean_rate(scaled) == 2.0
    assert scaled.notes == ("arrival times scaled by 0.25: 0.5 -> 2 requests/s",)


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf"), 1e-300, 1e12])
def test_an_impossible_rate_is_refused(rate):
    with pytest.raises(InputError) as caught:
        scale_rate(trace_of([1, 2], [1, 2]), rate)
    assert says(caught.value.message, f"{rate:g} requests/s")
    assert says(caught.value.hint, "1e-06", "1,000,000")


def test_a_trace_without_times_has_no_rate_to_scale():
    with pytest.raises(InputError, match="2 requests") as caught:
        scale_rate(trace_of([1, 2], [1, 2], arrivals=[0, 0]), 2.0)
    assert "--draw-rate" in caught.value.hint


@given(lengths=LENGTHS, room=st.integers(1, 5000), max_new_tokens=st.integers(1, 5000))
def test_scaled_lengths_fit_and_keep_their_order(lengths, room, max_new_tokens):
    prompts, outputs = (np.array(column) for column in zip(*lengths, strict=True))
    scaled = scale_lengths(trace_of(prompts, outputs), room + max_new_tokens, max_new_tokens)
    for before, after, limit in (
        (prompts, scaled.prompt_tokens, room),
        (outputs, scaled.output_tokens, max_new_tokens),
    ):
        assert after.min() >= 1
        assert after.max() <= limit
        assert (np.diff(after[np.argsort(before, kind="stable")]) >= 0).all()
    assert scaled.notes == (scaled.scaling.summary(),)


def test_lengths_are_divided_to_fit_the_99th_percentile():
    lengths = [*range(10, 1000, 10), 5000]  # the 99th percentile is 1030.1
    scaled = scale_lengths(trace_of(lengths, lengths), 200, 100)
    assert scaled.prompt_tokens[:3].tolist() == [1, 2, 3]
    assert scaled.prompt_tokens[-2:].tolist() == [97, 100]
    assert says(scaled.notes[0], "prompts divided by 10.3", "1 prompts cut to 100 tokens")


@pytest.mark.parametrize(("max_model_len", "max_new_tokens"), [(100, 100), (100, 0), (0, 50)])
def test_a_context_without_room_for_prompts_is_refused(max_model_len, max_new_tokens):
    with pytest.raises(InputError, match=f"max_new_tokens {max_new_tokens} .*{max_model_len}"):
        scale_lengths(trace_of([1], [1]), max_model_len, max_new_tokens)


@given(lengths=LENGTHS, context=st.integers(2, 300_000), limit=st.integers(1, 5000))
def test_a_server_s_requests_keep_their_lengths_or_are_left_out(lengths, context, limit):
    prompts, outputs = (np.array(column) for column in zip(*lengths, strict=True))
    fits = prompts + outputs <= context
    trace = trace_of(prompts, outputs)
    if not fits.any():
        with pytest.raises(InputError) as caught:
            leave_out_longer(trace, context, limit)
        assert "max_model_len" in caught.value.hint
        return
    kept = leave_out_longer(trace, context, limit)
    assert kept.prompt_tokens.tolist() == prompts[fits].tolist()
    assert kept.output_tokens.tolist() == outputs[fits].tolist()
    assert kept.scaling.left_out == (~fits).sum()
    assert bool(kept.changes) == (not fits.all())
    assert kept.arrival_s[0] == 0.0
    cut = np.where(kept.max_tokens == 0, limit, kept.max_tokens) < kept.output_tokens
    assert not cut.any(), "no limit cuts an output"
    assert (kept.prompt_tokens + kept.max_tokens <= context).all()


def test_only_our_own_engines_get_other_lengths():
    trace = trace_of([100] * 50, [3000] * 50)
    assert fit_lengths(trace, "vllm", 8192, 1024).output_tokens.tolist() == [3000] * 50
    scaled = fit_lengths(trace, "rebatch", 8192, 1024)
    assert scaled.output_tokens.max() == 1024
    assert scaled.changes
