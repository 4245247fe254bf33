"""Traces from metrics: lengths have the buckets' counts and sums, times the intervals' counts."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlparse

import numpy as np
import pytest
from commands import shown
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from said import says

from toolkit.cli import from_metrics
from toolkit.errors import InputError
from toolkit.traces.generate import Arrivals
from toolkit.traces.histograms import (
    ABOVE,
    OUTPUT,
    PROMPT,
    LengthHistogram,
    ScrapedTraffic,
    draw_lengths,
    draw_timed,
    draw_untimed,
)
from toolkit.traces.read import read_trace

BOUNDS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]  # of vLLM for a context of 1,999 tokens


@pytest.fixture
def out(tmp_path) -> Path:
    """The trace that the command writes."""
    return tmp_path / "out.jsonl"


@pytest.fixture
def drawn(capsys, out):
    """Runs the command; its exit code, and what it said."""

    def run(*words: object) -> tuple[int, str, str]:
        return shown(capsys, "trace from-metrics", *words, "--out", out)

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


def saved(folder: Path, name: str, *lengths: tuple[int, int], **more: object) -> Path:
    path = folder / name
    path.write_text(page(*lengths, **more), encoding="utf-8")
    return path


def test_one_page_gives_the_lengths_and_rate_the_times(drawn, out, tmp_path):
    path = saved(tmp_path, "page", *EARLY, *LATE)
    code, _, err = drawn(path, "--rate", 2)
    trace, _ = read_trace(out)
    assert code == 0
    prompts, outputs = zip(*EARLY, *LATE, strict=True)
    assert counts(trace.prompt_tokens) == counts(prompts)
    assert counts(trace.output_tokens) == counts(outputs)
    assert trace.prompt_tokens.sum() == sum(prompts)
    assert trace.output_tokens.sum() == sum(outputs)
    assert trace.prompt_tokens.max() < 2000  # vLLM's next bound
    assert says(err, "prompt", "output")


def test_two_pages_give_what_came_in_between(drawn, out, tmp_path):
    first = saved(tmp_path, "1", *EARLY)
    later = saved(tmp_path, "2", *EARLY, *LATE)
    code, said, _ = drawn(first, later, "--for", 30, "--json")
    assert code == 0
    assert json.loads(said)["requests"] == len(LATE)
    trace, _ = read_trace(out)
    assert trace.prompt_tokens.sum() == sum(prompt for prompt, _ in LATE)
    assert trace.arrival_s[-1] <= 30


def test_the_number_of_requests_can_be_chosen_and_the_mean_stays(drawn, out, tmp_path):
    path = saved(tmp_path, "page", *LATE)
    assert drawn(path, "--rate", 2, "--requests", 500)[0] == 0
    trace, _ = read_trace(out)
    assert len(trace) == 500
    assert trace.prompt_tokens.mean() == pytest.approx(np.mean([p for p, _ in LATE]), abs=0.01)


def test_the_trace_follows_from_the_seed():
    traffic = traffic_with(LATE * 10)
    one, same, other = (draw_untimed(traffic, None, Arrivals(1), s, None) for s in (1, 1, 2))
    assert one.prompt_tokens.tolist() == same.prompt_tokens.tolist()
    assert one.prompt_tokens.tolist() != other.prompt_tokens.tolist()


def histogram_with(values: list[int]) -> LengthHistogram:
    bounds = [*map(float, BOUNDS), ABOVE]
    cumulative = {bound: float(sum(value <= bound for value in values)) for bound in bounds}
    return LengthHistogram.of(cumulative, float(sum(values)))


def traffic_with(
    pairs: list[tuple[int, int]], start_s: float = 0, end_s: float = 0
) -> ScrapedTraffic:
    prompts, outputs = ([pair[k] for pair in pairs] for k in (0, 1))
    return ScrapedTraffic(histogram_with(prompts), histogram_with(outputs), start_s, end_s)


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(st.integers(1, 1999), min_size=1, max_size=60), st.integers(0, 9))
def test_drawn_lengths_have_the_counts_of_buckets_and_the_sum(values, seed):
    rng = np.random.default_rng(seed)
    drawn = draw_lengths(histogram_with(values), len(values), rng, None, "prompts")
    assert counts(drawn) == counts(values)
    assert drawn.sum() == sum(values)
    assert drawn.min() >= 1


def test_intervals_keep_their_own_counts_and_lengths():
    quiet = [(5, 1)] * 3
    busy = [(900, 90)] * 50
    intervals = [
        traffic_with(quiet, 0, 60),
        traffic_with([], 60, 120),
        traffic_with(busy, 120, 180),
    ]
    trace = draw_timed(intervals, 0, None)
    early = trace.prompt_tokens < 100
    assert int(early.sum()) == 3
    assert trace.arrival_s[early].max() < 60
    assert trace.arrival_s[~early].min() > 60
    assert trace.prompt_tokens.sum() == 3 * 5 + 50 * 900


def test_increases_that_are_not_whole_are_apportioned():
    part = LengthHistogram((10.0, ABOVE), (0.4, 0.0), 2.0)
    intervals = [ScrapedTraffic(part, part, float(k), float(k + 1)) for k in range(10)]
    trace = draw_timed(intervals, 0, None)
    assert len(trace) == 4
    assert trace.prompt_tokens.sum() == 20


def test_sums_that_buckets_do_not_allow_are_told():
    wrong = LengthHistogram((10.0, 20.0, ABOVE), (0.0, 5.0, 0.0), 500.0)
    trace = draw_untimed(ScrapedTraffic(wrong, wrong), None, Arrivals(1), 0, None)
    assert trace.prompt_tokens.tolist() == [20] * 5
    assert sum("do not allow" in note for note in trace.notes) == 2


def test_lengths_above_unknown_bounds_need_a_limit():
    other = LengthHistogram((8.0, 16.0, ABOVE), (1.0, 1.0, 1.0), 60.0)
    rng = np.random.default_rng(0)
    with pytest.raises(InputError, match=r"1 prompts.*16 tokens"):
        draw_lengths(other, 3, rng, None, "prompts")
    with pytest.raises(InputError, match="--longest 9"):
        draw_lengths(other, 3, rng, 9, "prompts")
    assert draw_lengths(other, 3, rng, 64, "prompts").sum() == 60


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], ("--rate", "--for", "--past")),
        (["--for", "5"], ("page",)),
        (["--rate", "1", "--past", "60"], ("--past", "--rate")),
        (["--rate", "1", "--every", "5"], ("--every",)),
        (["--past", "60"], ("--past", "URL")),
        (["--requests", "5"], ("--requests 5",)),
        (["--rate", "1", "--model", "other"], ("'other'",)),
        (["--rate", "0"], ("0",)),
        (["--rate", "1", "--longest", "3"], ("--longest 3",)),
    ],
)
def test_options_that_do_not_fit_the_source_are_refused(drawn, out, tmp_path, words, named):
    code, _, err = drawn(saved(tmp_path, "page", *LATE), *words)
    assert code == 2
    assert says(err, *named)
    assert not out.exists()


@pytest.mark.parametrize("text", ["", "time,prompt\n1,2\n", "vllm:num_requests_running 3\n"])
def test_a_page_without_the_histograms_is_refused(drawn, tmp_path, text):
    path = tmp_path / "page"
    path.write_text(text, encoding="utf-8")
    code, _, err = drawn(path, "--rate", 1)
    assert code == 2
    assert PROMPT in err


@pytest.mark.parametrize(("later", "named"), [(EARLY, "counters"), (LATE, "request")])
def test_two_pages_with_less_or_nothing_in_between_are_refused(drawn, tmp_path, later, named):
    """The server was started again, or had no traffic."""
    pages = saved(tmp_path, "1", *LATE), saved(tmp_path, "2", *later)
    code, _, err = drawn(*pages, "--for", 30)
    assert code == 2
    assert says(err, named)


def test_several_models_need_a_choice(drawn, out, tmp_path):
    path = tmp_path / "page"
    two = page(*LATE, model="a") + page(*EARLY, model="b")
    path.write_text(two, encoding="utf-8")
    assert drawn(path, "--rate", 1)[0] == 2
    assert drawn(path, "--rate", 1, "--model", "b")[0] == 0
    assert len(read_trace(out)[0]) == len(EARLY)


@contextmanager
def serving(answer) -> Iterator[str]:
    """A server on loopback: `answer(path)` answers each GET."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = answer(self.path).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_server_is_scraped_for_a_while(tmp_path):
    pages = iter([page(*EARLY), page(*EARLY, *LATE[:2]), page(*EARLY, *LATE)])
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    with serving(lambda path: next(pages) if path == "/metrics" else "") as url:
        args = from_metrics.FromMetricsOptions(out=tmp_path / "out", source=url, every=10.0)
        seen = from_metrics._watched(args, 20.0, lambda: now[0], sleep)
    assert [(one.start_s, one.end_s) for one in seen] == [(0, 10), (10, 20)]
    assert [one.prompt.count for one in seen] == [2, 3]
    assert [one.prompt.total for one in seen] == [2200, 270]


def test_a_server_can_be_scraped_once(drawn, out):
    with serving(lambda path: page(*LATE)) as url:
        assert drawn(f"{url}/metrics", "--rate", 1)[0] == 0
    assert len(read_trace(out)[0]) == len(LATE)


class Prometheus:
    """Answers range queries about the increases of two intervals of every query's times."""

    def __init__(self, models: tuple[str, ...] = ("tiny",)) -> None:
        self.models = models
        self.queries: list[str] = []

    def __call__(self, path: str) -> str:
        parsed = urlparse(path)
        assert parsed.path == "/api/v1/query_range"
        asked = {name: values[0] for name, values in parse_qs(parsed.query).items()}
        query = asked["query"]
        start = float(asked["start"])
        step = float(asked["step"])
        self.queries.append(query)
        series: list[tuple[dict[str, str], list[float]]] = []
        histograms = [traffic_with(EARLY), traffic_with(LATE)]
        wanted = [one.prompt if PROMPT in query else one.output for one in histograms]
        if "_count" in query:
            series = [({"model_name": name}, [2, 7]) for name in self.models]
        elif "_sum" in query:
            series = [({}, [one.total for one in wanted])]
        else:
            for place, bound in enumerate([*map(str, BOUNDS), "+Inf"]):
                values = [sum(one.counts[: place + 1]) for one in wanted]
                series.append(({"le": bound}, values))
        result = [
            {"metric": labels, "values": [[start + k * step, str(v)] for k, v in enumerate(values)]}
            for labels, values in series
        ]
        return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}})


def test_prometheus_tells_the_rate_and_the_lengths_over_time(drawn, out):
    asked = Prometheus()
    with serving(asked) as url:
        code, _, err = drawn(url, "--past", 120, "--every", 60)
    assert code == 0, err
    trace, _ = read_trace(out)
    assert len(trace) == len(EARLY) + len(LATE)
    short = trace.prompt_tokens < 50
    assert trace.prompt_tokens[short].sum() == 23
    assert trace.arrival_s[short].max() <= trace.arrival_s[~short].min()
    assert any('increase(vllm:request_prompt_tokens_bucket{model_name="tiny"}[60000ms])' in one
               for one in asked.queries)  # fmt: skip


def test_prometheus_without_data_of_one_model_is_an_error(drawn):
    for models, named in (((), (PROMPT,)), (("a", "b"), ("'a'", "'b'", "--model"))):
        with serving(Prometheus(models)) as url:
            code, _, err = drawn(url, "--past", 120, "--every", 60)
        assert code == 2
        assert says(err, *named)
    with serving(lambda path: "hello") as url:
        assert drawn(url, "--past", 120)[0] == 2
    assert drawn("http://127.0.0.1:9", "--past", 1e7, "--every", 1)[0] == 2
