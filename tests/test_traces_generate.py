"""Synthetic traces: the same seed gives the same trace, and the requested numbers come out."""

import math
import re

import numpy as np
import pytest
from commands import printed, refused
from said import says

from toolkit.errors import InputError
from toolkit.traces.generate import (
    Arrivals,
    Lengths,
    SharedContent,
    backlog,
    draw_arrivals,
    generate,
    parse_lengths,
)
from toolkit.traces.read import read_trace
from toolkit.traces.write import write_trace

SCLS_PROMPT = Lengths("lognormal", 400, 1.0, 1024)
SCLS_OUTPUT = Lengths("lognormal", 120, 0.75, 1024)


def test_the_setting_of_the_paper_has_its_rate_and_medians():
    trace = generate(Arrivals(20), 600, SCLS_PROMPT, SCLS_OUTPUT, seed=0)
    assert len(trace) == pytest.approx(12_000, rel=0.03)
    assert np.median(trace.prompt_tokens) == pytest.approx(400, rel=0.05)
    assert np.median(trace.output_tokens) == pytest.approx(120, rel=0.05)
    assert (trace.prompt_tokens.min() >= 1, trace.prompt_tokens.max()) == (True, 1024)


@pytest.mark.parametrize("cv", [0, 1e-200])
def test_gaps_that_hardly_vary_are_equal(cv):
    assert Arrivals(4, cv).times(np.random.default_rng(0), 1.0).tolist() == [0, 0.25, 0.5, 0.75]


def test_arrivals_start_at_zero_and_stay_within_the_duration():
    times = Arrivals(0.1, cv=3).times(np.random.default_rng(0), 1000)
    assert times[0] == 0
    assert times[-1] < 1000
    assert (np.diff(times) >= 0).all()


def test_drawn_arrivals_keep_the_requests():
    trace = generate(Arrivals(20), 5, SCLS_PROMPT, SCLS_OUTPUT, seed=1)
    drawn = draw_arrivals(trace, Arrivals(2), seed=3)
    assert drawn.prompt_tokens.tolist() == trace.prompt_tokens.tolist()
    assert drawn.arrival_s[0] == 0
    assert says(drawn.notes[-1], "2 requests/s", "cv 1", "seed 3")


TOKENS = ("1", "2147483647")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("lognorml:4:1", ("'lognormal'",)),
        ("lognormal", ("lognormal:MEDIAN:SIGMA",)),
        ("lognormal:4", ("lognormal:MEDIAN:SIGMA",)),
        ("lognormal:a:b", ("lognormal:MEDIAN:SIGMA",)),
        ("lognormal:nan:1", ("lognormal:MEDIAN:SIGMA", *TOKENS, "0", "10")),
        ("lognormal:4:0", ("lognormal:MEDIAN:SIGMA", *TOKENS, "0", "10")),
        ("lognormal:400:1e6", ("lognormal:MEDIAN:SIGMA", *TOKENS, "0", "10")),
        ("pareto:4:inf", ("pareto:LOW:ALPHA", *TOKENS, "0.1", "1000")),
        ("pareto:20:1e-5", ("pareto:LOW:ALPHA", *TOKENS, "0.1", "1000")),
        ("uniform:9:4", ("uniform:LOW:HIGH", *TOKENS)),
        ("uniform:1:1e30", ("uniform:LOW:HIGH", *TOKENS)),
        ("fixed:0", ("fixed:TOKENS", *TOKENS)),
        ("fixed:1e15", ("fixed:TOKENS", *TOKENS)),
        ("fixed:4:5", ("fixed:TOKENS",)),
    ],
)
def test_an_impossible_distribution_names_the_limits(text, named):
    with pytest.raises(InputError) as caught:
        parse_lengths(text)
    assert says(caught.value.hint, *named)


@pytest.mark.parametrize("duration_s", [0, -1, float("inf"), float("nan")])
def test_an_impossible_duration_is_refused(duration_s):
    with pytest.raises(InputError, match=f"{duration_s:g}"):
        generate(Arrivals(1), duration_s, SCLS_PROMPT, SCLS_OUTPUT, seed=0)


def test_a_backlog_arrives_at_once():
    trace = backlog(300, Lengths("uniform", 2048, 4096), Lengths("uniform", 32, 34), seed=0)
    assert trace.arrival_s.tolist() == [0.0] * 300
    assert set(trace.output_tokens.tolist()) == {32, 33, 34}


@pytest.mark.parametrize("words", ["--rate 20", "--duration 600", "--cv 0"])
def test_a_backlog_has_no_arrivals_to_set(words: str, tmp_path, capsys):
    out = tmp_path / "made.jsonl"
    (error, _) = refused(capsys, f"trace generate --backlog 7 {words} --out", out)
    assert says(error, words, "--backlog")
    assert not out.exists()


def test_the_defaults_of_generated_arrivals_hold_only_without_a_value(tmp_path, capsys):
    out = tmp_path / "made.jsonl"
    assert printed(capsys, f"trace generate --backlog 7 --out {out}")["requests"] == 7
    made = printed(capsys, f"trace generate --cv 0 --duration 2 --out {out}")
    assert made["requests"] == 40
    assert set(np.diff(read_trace(out)[0].arrival_s).round(6)) == {0.05}
    assert refused(capsys, f"trace generate --rate 0 --out {out}")


def test_clipped_lengths_are_counted_and_others_stay():
    free = generate(Arrivals(20), 60, Lengths("lognormal", 400, 1.0), SCLS_OUTPUT, seed=0)
    bound = generate(Arrivals(20), 60, SCLS_PROMPT, SCLS_OUTPUT, seed=0)
    longer = free.prompt_tokens > 1024
    assert longer.any()
    assert bound.prompt_tokens[longer].tolist() == [1024] * int(longer.sum())
    assert bound.prompt_tokens[~longer].tolist() == free.prompt_tokens[~longer].tolist()
    [said] = [note for note in bound.notes if note.startswith("prompts clipped")]
    assert f"{int(longer.sum()):,} of {len(bound):,}" in said
    assert not any(note.startswith("prompts clipped") for note in free.notes)


@pytest.mark.parametrize("cv", [-1.0, 1e9, 1e200, math.nan])
def test_an_impossible_variation_of_gaps_is_refused(cv):
    with pytest.raises(InputError, match=re.escape(f"{cv:g}")):
        Arrivals(1.0, cv)


def test_a_trace_that_would_not_fit_into_memory_is_refused():
    for rate, duration in ((1e12, 600.0), (1e6, 1e9), (1e-3, 1e300)):
        with pytest.raises(InputError, match="too many"):
            Arrivals(rate).times(np.random.default_rng(0), duration)
    with pytest.raises(InputError, match="too many"):
        backlog(99_999_999_999, SCLS_PROMPT, SCLS_OUTPUT, 0)


def content_trace(seed=0, rate=3.0, **content):
    made = SharedContent(**content)
    prompt = Lengths("uniform", 5, 40)
    output = Lengths("uniform", 2, 30)
    return generate(Arrivals(rate), 40, prompt, output, seed, made)


def shared_tokens(trace, one, other) -> int:
    """The whole blocks that two prompts begin with alike, in tokens."""
    pairs = zip(trace.shared.of(one).tolist(), trace.shared.of(other).tolist(), strict=False)
    same = [a == b for a, b in pairs]
    return [*same, False].index(False) * trace.shared.block_tokens


def test_prompts_begin_with_system_prompt_and_template():
    template = Lengths("fixed", 50)
    trace = content_trace(system_tokens=100, templates=4, template=template)
    assert trace.prompt_tokens.min() >= 155
    assert trace.shared.counts.tolist() == [-(-n // 16) for n in trace.prompt_tokens.tolist()]
    shared = [shared_tokens(trace, 0, row) for row in range(1, len(trace))]
    # All share the whole blocks of the system prompt (96), some of the template, too (144).
    assert set(shared) == {96, 144}
    groups = sorted(
        sum(shared_tokens(trace, one, other) >= 144 for other in range(len(trace)))
        for one in range(len(trace))
    )
    assert groups[-1] > 0.3 * len(trace)  # the first template's weight is 0.48
    assert trace.sessions is None


def test_a_generated_trace_is_read_again_as_it_was(tmp_path):
    trace = content_trace(system_tokens=20, templates=2)
    write_trace(trace, tmp_path / "made.jsonl")
    again, report = read_trace(tmp_path / "made.jsonl")
    assert again.shared.ids.tolist() == trace.shared.ids.tolist()
    assert report.unshared.counts == {}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"templates": -2}, "-2 templates"),
        ({"system_tokens": -1}, "system prompt.*-1 tokens"),
        ({"system_tokens": 2**31 - 1}, "2,147,4"),
        ({"system_tokens": 100_000_000}, "[0-9]{3} blocks"),
    ],
)
def test_impossible_shared_content_is_an_error(content, said):
    with pytest.raises(InputError, match=said):
        content_trace(**content)
