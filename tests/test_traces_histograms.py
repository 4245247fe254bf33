"""Lengths from a page of metrics have the buckets' counts and sums."""

from pathlib import Path

import numpy as np
import pytest
from commands import shown
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from said import says

from toolkit.errors import InputError
from toolkit.traces.histograms import ABOVE, OUTPUT, PROMPT, LengthHistogram
from toolkit.traces.read import read_trace

BOUNDS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]  # of vLLM for a context of 1,999 tokens


@pytest.fixture
def out(tmp_path) -> Path:
    """The trace that the command writes."""
    return tmp_path / "out.jsonl"


@pytest.fixture
def drawn(capsys, out):
    """Runs the command; its exit code, and what it said."""

    def run(page: object, *words: object) -> tuple[int, str, str]:
        return shown(capsys, "trace generate --metrics", page, *words, "--out", out)

    return run


def page(*lengths: tuple[int, int], engines: int = 2, model: str = "tiny") -> str:
    """A page as vLLM's, of requests with these prompts and outputs."""
    registry = CollectorRegistry()
    labels = ["model_name", "engine"]
    both = [Histogram(name, "x", labels, buckets=BOUNDS, registry=registry)
            for name in (PROMPT, OUTPUT)]  # fmt: skip
    for k in range(engines):
        for histogram in both:
            histogram.labels(model, str(k))
    for place, pair in enumerate(lengths):
        for histogram, value in zip(both, pair, strict=True):
            histogram.labels(model, str(place % engines)).observe(value)
    return generate_latest(registry).decode()


EARLY = [(5, 1), (18, 7)]
LATE = [(700, 30), (1500, 90), (60, 2), (60, 3), (150, 4)]


def counts(values: object) -> list[int]:
    edges = [0.5, *(bound + 0.5 for bound in BOUNDS), 1e9]
    return np.histogram(np.asarray(values), edges)[0].tolist()


def saved(folder: Path, *lengths: tuple[int, int], **more: object) -> Path:
    path = folder / "page"
    path.write_text(page(*lengths, **more), encoding="utf-8")
    return path


def test_a_page_gives_the_lengths(drawn, out, tmp_path):
    every = [*EARLY, *LATE]
    code, _, err = drawn(saved(tmp_path, *every), "--backlog", len(every))
    trace, _ = read_trace(out)
    assert code == 0
    prompts, outputs = zip(*every, strict=True)
    assert counts(trace.prompt_tokens) == counts(prompts)
    assert counts(trace.output_tokens) == counts(outputs)
    assert trace.prompt_tokens.max() < 2000  # vLLM's next bound
    assert says(err, "prompt", "output", PROMPT)


def histogram_with(values: list[int]) -> LengthHistogram:
    bounds = (*map(float, BOUNDS), ABOVE)
    return LengthHistogram(bounds, tuple(map(float, counts(values))), float(sum(values)))


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(st.integers(1, 1999), min_size=1, max_size=60), st.integers(0, 9))
def test_drawn_lengths_have_the_shares_of_buckets_and_the_mean(values, seed):
    rng = np.random.default_rng(seed)
    drawn = histogram_with(values).draw_unclipped(rng, 100 * len(values))
    assert counts(drawn) == [100 * count for count in counts(values)]
    assert drawn.mean() == pytest.approx(np.mean(values), rel=0.1, abs=1.0)
    assert drawn.min() >= 1


@pytest.mark.parametrize(
    ("longest", "named"), [(2**31 - 1, r"1 lengths.*16 tokens"), (9, "--longest 9")]
)
def test_lengths_above_unknown_bounds_need_a_limit(longest, named):
    bounds = (8.0, 16.0, ABOVE)
    rng = np.random.default_rng(0)
    with pytest.raises(InputError, match=named):
        LengthHistogram(bounds, (1.0, 1.0, 1.0), 60.0, "x", longest).draw_unclipped(rng, 3)
    known = LengthHistogram(bounds, (1.0, 1.0, 1.0), 60.0, "x", 64)
    found = np.sort(known.draw_unclipped(rng, 3))
    assert (found[0] <= 8, 8 < found[1] <= 16, 16 < found[2] <= 64) == (True, True, True)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--prompt", "fixed:5"], ("--prompt",)),
        (["--output", "fixed:5"], ("--output",)),
        (["--rate", "0"], ("0",)),
        (["--longest", "3"], ("--longest 3",)),
    ],
)
def test_options_that_do_not_fit_the_page_are_refused(drawn, out, tmp_path, words, named):
    code, _, err = drawn(saved(tmp_path, *LATE), *words)
    assert code == 2
    assert says(err, *named)
    assert not out.exists()


@pytest.mark.parametrize(
    "text", ["", "time,prompt\n1,2\n", "vllm:num_requests_running 3\n", page()]
)
def test_a_page_without_lengths_is_refused(drawn, tmp_path, text):
    path = tmp_path / "page"
    path.write_text(text, encoding="utf-8")
    code, _, err = drawn(path)
    assert code == 2
    assert PROMPT in err


def test_a_page_of_several_models_is_refused(drawn, tmp_path):
    path = tmp_path / "page"
    path.write_text(page(*LATE, model="a") + page(*EARLY, model="b"), encoding="utf-8")
    code, _, err = drawn(path)
    assert code == 2
    assert says(err, "'a'", "'b'")
