"""A short trace repeated: its rate and its requests stay, and nothing private is found again."""

import numpy as np
import pytest
from conversations import conversations

from toolkit.errors import InputError
from toolkit.traces.generate import Arrivals
from toolkit.traces.repeat import repeated
from toolkit.traces.sharing import reusable_tokens
from toolkit.traces.types import Trace
from toolkit.traces.windows import mean_rate


def plain(count: int = 200) -> Trace:
    rng = np.random.default_rng(1)
    gaps_s = rng.gamma(0.25, 4.0, count)  # bursty
    lengths = rng.integers(1, 1000, (2, count))
    limits = np.zeros(count, dtype=np.int64)
    return Trace(np.cumsum(gaps_s) - gaps_s[0], *lengths, limits, "t.csv")


def sessions() -> Trace:
    starts_s = Arrivals(1.0).times(np.random.default_rng(3), 60.0)
    return conversations(starts_s, turns=4, think_s=0.5, system_tokens=64)


@pytest.mark.parametrize("trace", [plain(), sessions()], ids=["plain", "sessions"])
def test_every_repeat_has_the_trace_s_requests_at_its_rate(trace):
    whole = repeated(trace, 5)
    assert len(whole) == 5 * len(trace)
    assert whole.repeats == 5
    assert "repeated 5 times" in whole.changes
    assert mean_rate(whole) == pytest.approx(mean_rate(trace), rel=0.02)
    assert (np.diff(whole.arrival_s) >= 0.0).all()
    pairs = np.stack([whole.prompt_tokens, whole.output_tokens])
    own = np.stack([trace.prompt_tokens, trace.output_tokens])
    assert np.sort(pairs[0]).tolist() == np.sort(np.tile(own[0], 5)).tolist()
    assert np.sort(pairs[1]).tolist() == np.sort(np.tile(own[1], 5)).tolist()


def test_each_repeat_keeps_the_arrival_times_and_redraws_the_requests_nearby():
    trace = plain()
    whole = repeated(trace, 3)
    count = len(trace)
    period_s = trace.arrival_s[-1] * count / (count - 1)
    assert whole.arrival_s[:count].tolist() == trace.arrival_s.tolist()
    assert whole.prompt_tokens[:count].tolist() == trace.prompt_tokens.tolist()
    for number in (1, 2):
        part = slice(number * count, (number + 1) * count)
        assert whole.arrival_s[part] == pytest.approx(trace.arrival_s + number * period_s)
        assert whole.prompt_tokens[part].tolist() != trace.prompt_tokens.tolist()
        quarter = np.flatnonzero(trace.arrival_s < trace.arrival_s[-1] / 4)
        own = trace.prompt_tokens[quarter]
        drawn = whole.prompt_tokens[part][quarter]
        assert sorted(drawn.tolist()) == sorted(own.tolist()), "a part of the day stays a part"


def test_sessions_are_repeated_whole_as_new_ones():
    trace = sessions()
    whole = repeated(trace, 4)
    assert trace.sessions
    assert whole.sessions
    heads = (whole.sessions.previous < 0).sum()
    assert heads == 4 * (trace.sessions.previous < 0).sum()
    assert whole.sessions.think_s.sum() == pytest.approx(4 * trace.sessions.think_s.sum())
    later = np.flatnonzero(whole.sessions.previous >= 0)
    before = whole.sessions.previous[later]
    held = whole.prompt_tokens[before] + whole.output_tokens[before]
    assert (whole.prompt_tokens[later] >= held).all(), "a turn holds its own session's turn before"


def test_repeats_share_the_system_prompt_and_no_conversation():
    trace = sessions()
    whole = repeated(trace, 4)
    assert trace.shared
    assert whole.shared
    system = set(trace.shared.ids[trace.shared.offsets[:-1][:, None] + np.arange(4)].flat)
    assert len(system) == 4
    private = set(trace.shared.ids.tolist()) - system
    assert len(set(whole.shared.ids.tolist())) == 4 + 4 * len(private)
    once = reusable_tokens(trace).sum()
    again = reusable_tokens(whole).sum()
    assert again == 4 * once + 3 * 64, "a repeat's first request finds the system prompt, no more"


@pytest.mark.parametrize("times", [0, -1])
def test_an_impossible_number_is_refused(times):
    with pytest.raises(InputError, match=str(times)):
        repeated(plain(), times)


def test_requests_that_arrive_at_once_have_no_length_to_repeat():
    ones = np.ones(3, dtype=np.int64)
    with pytest.raises(InputError):
        repeated(Trace(np.zeros(3), ones, ones, ones), 2)
