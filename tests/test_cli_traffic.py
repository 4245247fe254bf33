"""Requests of a trace, at a rate or a fixed concurrency: what commands accept."""

from dataclasses import replace
from pathlib import Path

import pytest
import samples
from commands import printed, refused
from sse_server import sse_server
from test_bench_client import HIDDEN, play, trace_of

from toolkit.bench.client import run
from toolkit.deploy.plan import make_plan
from toolkit.endpoints.target import find_target
from toolkit.files.io import write_file
from toolkit.traces.generate import Arrivals, Lengths, generate
from toolkit.traces.write import write_trace

FIT = "tiny-llama-cpu"
CLOCK_TICK_S = 0.002  # a timer may come that much early


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    """The option for a trace of 300 requests of the same lengths, one a second."""
    made = generate(Arrivals(1.0), 400.0, Lengths("fixed", 100), Lengths("fixed", 20), 0)
    write_trace(made.take(slice(0, 300)), tmp_path / "lengths.jsonl")
    return f"--trace {tmp_path / 'lengths.jsonl'}"


@pytest.mark.parametrize(
    "words",
    [
        "--rate 5 --concurrency 4",
        "--concurrency 0",
    ],
)
def test_options_that_contradict_each_other(words, capsys):
    said = refused(capsys, f"simulate {FIT} {words}")
    assert sum(line.startswith("error:") for line in said) == 1


def simulated(capsys: pytest.CaptureFixture[str], words: str) -> dict[str, float]:
    return printed(capsys, f"simulate {FIT} --policies slice {words}")


def test_a_higher_concurrency_gives_more_throughput_and_longer_latencies(capsys, lengths):
    low, high = (simulated(capsys, f"{lengths} --concurrency {n}") for n in (1, 16))
    assert (low["concurrency"], high["concurrency"]) == (1, 16)
    assert (low["requests"], high["requests"]) == (300, 300)
    assert low["throughput_rps"] == pytest.approx(1 / low["e2e_mean_s"], rel=0.01), "one at a time"
    assert high["throughput_rps"] > low["throughput_rps"]
    assert high["e2e_mean_s"] > low["e2e_mean_s"]


def test_so_many_at_once_are_in_the_system_on_average(capsys, lengths):
    found = simulated(capsys, f"{lengths} --concurrency 8")
    assert found["throughput_rps"] * found["e2e_mean_s"] == pytest.approx(8, rel=0.05)


@pytest.mark.parametrize("concurrency", [3, 50])
def test_the_client_sends_the_next_when_one_has_ended(concurrency):
    trace = trace_of(*((9 * k, 5, 1) for k in range(12)))  # at its times it would take 100 s
    with sse_server() as server:
        result = play(server, trace, replace(HIDDEN, concurrency=concurrency))
    found = result.samples
    assert [sample.failure for sample in found] == [""] * 12
    sent = [sample.scheduled_s for sample in found]
    assert sent == sorted(sent), "in the trace's order"
    ends = sorted(sample.last_token_s for sample in found)
    assert all(one >= end for one, end in zip(sent[concurrency:], ends, strict=False))


def test_a_request_that_fails_frees_its_place_too():
    trace = trace_of(*[(0, 5, 1)] * 4)
    with sse_server(lambda body: None) as server:
        load = replace(HIDDEN, lengths="given", timeout_s=0.1, concurrency=2)
        found = run(find_target(server.url), trace, load, lambda: None).samples
    assert all(sample.failure for sample in found)
    sent = [sample.scheduled_s for sample in found]
    assert max(sent[:2]) < 0.1 - CLOCK_TICK_S <= min(sent[2:])


@pytest.mark.slow
def test_bench_predicts_for_the_same_concurrency(capsys, tmp_path, lengths):
    plan = tmp_path / "plan.json"
    write_file(make_plan(samples.recipe(), samples.fit(), None, {}), plan)
    with sse_server() as server:
        words = f"--warmup 0 --duration 40 --concurrency 5 {lengths}"
        found = printed(capsys, f"bench {words} --url {server.url} --plan", plan)
    assert (found["concurrency"], found["request_rate_rps"]) == (5, None)
    assert found["requests"] == found["answered"] > 20
    told = found["predicted"]["metrics"]
    assert told["throughput_rps"] * told["e2e_mean_s"] == pytest.approx(5, rel=0.1)


@pytest.mark.parametrize("words", ["--rate 5 --concurrency 4", "--concurrency 4 --loop closed"])
def test_bench_refuses_contradictions_before_it_asks_a_server(words, capsys):
    said = refused(capsys, f"bench --url http://127.0.0.1:9 {words}")
    assert "127.0.0.1" not in said[0]
