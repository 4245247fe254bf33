"""`trace convert --grow`: more requests in some hours, made of those that are there."""

import json
from pathlib import Path

import numpy as np
import pytest
from commands import printed, refused
from conversations import conversations

from toolkit.errors import InputError
from toolkit.traces.generate import Arrivals, SharedContent, generate, parse_lengths
from toolkit.traces.growth import Growth, grown
from toolkit.traces.read import read_trace
from toolkit.traces.sharing import reusable_tokens
from toolkit.traces.types import Trace
from toolkit.traces.write import write_trace

HOUR_S = 3600.0


def steady(rate: float = 0.5, seconds: float = 4 * HOUR_S, content=None) -> Trace:
    lengths = parse_lengths("lognormal:200:0.6", 4096)
    return generate(Arrivals(rate, 1.0), seconds, lengths, lengths, 0, content)


def in_hours(trace: Trace, start_h: float, end_h: float) -> np.ndarray:
    hours = trace.arrival_s / HOUR_S
    return (hours >= start_h) & (hours < end_h)


def grow(trace: Trace, *words: str, clock_s: float | None = None, seed: int = 0):
    return grown(trace, [Growth.parsed(word) for word in words], clock_s, seed)


def test_these_hours_get_the_factor_and_the_others_nothing() -> None:
    trace = steady()
    more, added = grow(trace, "1-2=1.5")
    before = in_hours(trace, 1, 2).sum()
    assert added == len(more) - len(trace) == round(0.5 * before)
    assert in_hours(more, 1, 2).sum() == before + added
    assert in_hours(more, 2, 9).sum() == in_hours(trace, 2, 9).sum()
    assert (np.diff(more.arrival_s) >= 0).all()


def test_added_requests_have_lengths_of_these_hours_at_times_of_their_own() -> None:
    trace = steady()
    more, added = grow(trace, "1-2=2")
    there = trace.take(np.flatnonzero(in_hours(trace, 1, 2)))
    then = more.take(np.flatnonzero(in_hours(more, 1, 2)))
    assert added == len(there)
    assert sorted(then.prompt_tokens) == sorted([*there.prompt_tokens, *there.prompt_tokens])
    assert len(np.unique(then.arrival_s)) == len(then)


def test_the_load_keeps_its_shape_within_the_hours() -> None:
    """Ten times as many requests come in the second half of the hour as in the first."""
    slow = np.arange(0.0, 1800.0, 20.0)
    fast = np.arange(1800.0, 3600.0, 2.0)
    arrival_s = np.concatenate([slow, fast])
    ones = np.ones(len(arrival_s), dtype=np.int64)
    more, _ = grow(Trace(arrival_s, ones, ones, 0 * ones), "0-1=2")
    early = (more.arrival_s < 1800.0).sum()
    assert early == pytest.approx(2 * len(slow), abs=0.3 * len(slow))
    gaps = np.diff(more.arrival_s[more.arrival_s > 1800.0])
    assert gaps.max() < 8.0  # no gap of the fast half grows to several requests


def test_hours_of_the_day_are_those_of_the_clock_on_each_day_and_over_midnight() -> None:
    trace = steady(rate=0.01, seconds=72 * HOUR_S)
    clock_s = 20 * HOUR_S  # the first request comes at 20:00
    more, added = grow(trace, "22-2=2", clock_s=clock_s)
    hour = (trace.arrival_s + clock_s) / HOUR_S % 24
    assert added == ((hour >= 22) | (hour < 2)).sum()
    later = (more.arrival_s + clock_s) / HOUR_S % 24
    between = (later >= 2) & (later < 22)
    assert between.sum() == ((hour >= 2) & (hour < 22)).sum()


def test_sessions_are_added_whole() -> None:
    trace = conversations(steady(0.05).arrival_s.tolist(), turns=3, think_s=0.009)
    more, added = grow(trace, "1-2=2")
    assert trace.sessions is not None
    assert more.sessions is not None
    begins = trace.sessions.previous < 0
    assert added == 3 * (begins & in_hours(trace, 1, 2)).sum()
    later = np.flatnonzero(more.sessions.previous >= 0)
    assert len(later) == (trace.sessions.previous >= 0).sum() + added * 2 // 3
    before = more.sessions.previous[later]
    assert (more.arrival_s[later] > more.arrival_s[before]).all()
    assert (more.prompt_tokens[later] > more.prompt_tokens[before]).all()


def test_copies_share_what_sessions_share_and_nothing_of_their_own(tmp_path: Path) -> None:
    """All prompts begin with the same 64 tokens. A copy must not find more in a cache than that."""
    trace = steady(0.1, content=SharedContent(system_tokens=64))
    more, added = grow(trace, "0-4=2")
    assert added == len(trace)
    assert set(reusable_tokens(more)[1:].tolist()) == {64}
    write_trace(more, tmp_path / "more.jsonl")
    again, report = read_trace(tmp_path / "more.jsonl")
    assert not report.unshared.counts
    assert set(reusable_tokens(again)[1:].tolist()) == {64}


@pytest.mark.parametrize(
    "words",
    ["9-17", "9-17=x", "x-9=2", "9-9=2", "0-1=1", "0-1=0.5", "0-1=101", "1-2=-2", "0-1=nan"],
)
def test_words_that_are_no_growth_are_refused(words: str) -> None:
    with pytest.raises(InputError):
        Growth.parsed(words)


@pytest.mark.parametrize(
    ("words", "clock_s"),
    [
        (["9-17=2"], None),  # there are four hours
        (["3-1=2"], None),
        (["9-25=2"], 0.0),
        (["9-17=2"], 0.0),
        (["0-2=2", "1-3=2"], None),
        (["0-1=1.00001"], None),
    ],
)
def test_hours_that_the_trace_does_not_have_are_refused(words: list[str], clock_s) -> None:
    with pytest.raises(InputError) as error:
        grow(steady(), *words, clock_s=clock_s)
    assert words[-1] in error.value.message


def test_requests_at_once_have_no_hours() -> None:
    ones = np.ones(3, dtype=np.int64)
    with pytest.raises(InputError):
        grow(Trace(np.zeros(3), ones, ones, ones), "0-1=2")


@pytest.mark.parametrize(
    ("stamp", "hour"),
    [
        ("2026-01-05T09:30:{:02}+05:00", 9),  # the file's own clock, not UTC
        ("2026-01-05 09:30:{:02}", 9),
        ("05/Jan/2026:09:30:{:02} -0800", 9),
    ],
)
def test_dates_count_by_the_clock_of_the_file(tmp_path: Path, capsys, stamp: str, hour: int):
    rows = [
        {"time": stamp.format(second), "prompt_tokens": 5, "completion_tokens": 4}
        for second in range(20)
    ]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    out = tmp_path / "out.jsonl"
    words = f"trace convert {log} {out} --columns time=time:iso --grow"
    said = printed(capsys, words, f"{hour}-{hour + 1}=1.5")
    assert (said["added"], said["requests"]) == (10, 30)
    assert refused(capsys, words, f"{hour + 1}-{hour + 2}=1.5")


def test_the_command_says_how_many_and_a_seed_needs_something_to_draw(tmp_path, capsys) -> None:
    out = tmp_path / "out.jsonl"
    said = printed(capsys, f"trace convert chat-small {out} --grow 0-0.02=1.5 --seed 3")
    assert said["requests"] == 3040 + said["added"]
    assert len(read_trace(out)[0]) == said["requests"]
    (error, _) = refused(capsys, f"trace convert chat-small {out} --rate 3 --seed 0")
    assert "--seed 0" in error
    for words in ("--repeat 2", "--draw-rate 5"):
        assert printed(capsys, f"trace convert chat-small {out} {words} --seed 3")["requests"]
    assert "added" not in printed(capsys, f"trace convert chat-small {out}")
