"""Requests by a trace or by numbers, at a rate or a fixed concurrency: what commands accept."""

from dataclasses import replace

import numpy as np
import pytest
import samples
from commands import printed, refused
from sse_server import sse_server
from test_bench_client import HIDDEN, play, trace_of

from toolkit.bench.client import run
from toolkit.deploy.plan import make_plan
from toolkit.endpoints.target import find_target
from toolkit.errors import InputError
from toolkit.files.io import write_file
from toolkit.traces.generate import fixed_lengths

FIT = "--fit tiny-llama-cpu"
LENGTHS = "--prompt 100 --output 20"

CLOCK_TICK_S = 0.002  # a timer may come that much early


def test_lengths_by_numbers():
    trace = fixed_lengths(100, 20, 2000)
    assert set(trace.prompt_tokens.tolist()) == {100}
    assert set(trace.output_tokens.tolist()) == set(trace.max_tokens.tolist()) == {20}
    assert trace.arrival_s[0] == 0.0
    assert len(trace) / trace.arrival_s[-1] == pytest.approx(1.0, rel=0.1)


def test_a_spread_of_lengths_is_even_and_as_wide_as_asked_for():
    trace = fixed_lengths(100, 21, 5000, spread=0.3, seed=3)
    assert (trace.prompt_tokens.min(), trace.prompt_tokens.max()) == (70, 130)
    assert (trace.output_tokens.min(), trace.output_tokens.max()) == (14, 28)
    assert trace.prompt_tokens.mean() == pytest.approx(100, rel=0.02)
    again = fixed_lengths(100, 21, 5000, spread=0.3, seed=3)
    np.testing.assert_array_equal(trace.arrival_s, again.arrival_s)


@pytest.mark.parametrize(
    "wrong", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 1, 1.0), (1, 1, 1, -0.1)]
)
def test_lengths_that_cannot_be(wrong):
    prompt, output, requests, *spread = wrong
    with pytest.raises(InputError):
        fixed_lengths(int(prompt), int(output), int(requests), spread=sum(spread))


@pytest.mark.parametrize(
    "words",
    [
        "--rate 5 --concurrency 4",
        "--concurrency 0",
        "--concurrency 4 --ramp -1",
        "--ramp 3",
        "--prompt 100 --concurrency 4",
        "--output 20 --concurrency 4",
        LENGTHS,
        "--requests 50",
        "--length-spread 0.1",
        f"{LENGTHS} --trace chat-small --concurrency 4",
        f"{LENGTHS} --length-spread 1 --concurrency 4",
        "--prompt 500 --output 20 --concurrency 4",  # the context has 512
        "--prompt 10 --output 500 --concurrency 4",  # more than the server's limit
    ],
)
@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_options_that_contradict_each_other(command, words, capsys):
    said = refused(capsys, f"{command} {FIT} {words}")
    assert sum(line.startswith("error:") for line in said) == 1


def simulated(capsys: pytest.CaptureFixture[str], words: str) -> dict[str, float]:
    return printed(capsys, f"simulate {FIT} --policy slice {words}")


def test_a_higher_concurrency_gives_more_throughput_and_longer_latencies(capsys):
    low, high = (simulated(capsys, f"{LENGTHS} --concurrency {n}") for n in (1, 16))
    assert (low["concurrency"], high["concurrency"]) == (1, 16)
    assert (low["requests"], high["requests"]) == (300, 300)
    assert low["throughput_rps"] == pytest.approx(1 / low["e2e_mean_s"], rel=0.01), "one at a time"
    assert high["throughput_rps"] > low["throughput_rps"]
    assert high["e2e_mean_s"] > low["e2e_mean_s"]


def test_so_many_at_once_are_in_the_system_on_average(capsys):
    found = simulated(capsys, f"{LENGTHS} --concurrency 8 --requests 800")
    assert found["throughput_rps"] * found["e2e_mean_s"] == pytest.approx(8, rel=0.02)


def test_lengths_at_a_rate(capsys):
    found = simulated(capsys, f"{LENGTHS} --rate 2 --requests 500")
    assert (found["concurrency"], found["requests"]) == (0, 500)
    assert found["throughput_rps"] == pytest.approx(2, rel=0.1)


def test_compare_takes_the_same_options(capsys):
    words = f"{LENGTHS} --concurrency 8 --policies slice,sequence"
    found = printed(capsys, f"compare {FIT} {words}")
    assert found["concurrency"] == 8
    assert [run["rate_rps"] for run in found["runs"]] == [0, 0]


def test_a_trace_s_sessions_are_only_an_order(capsys):
    found = simulated(capsys, "--trace chat-small --concurrency 8")
    assert found["unfinished"] == 0


@pytest.mark.parametrize("concurrency", [1, 3, 50])
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
def test_the_first_requests_are_sent_over_the_ramp():
    with sse_server(lambda body: None) as server:
        load = replace(HIDDEN, lengths="given", timeout_s=0.2, concurrency=4, ramp_s=0.1)
        found = run(find_target(server.url), trace_of(*[(0, 5, 1)] * 4), load, lambda: None)
    for place, sample in enumerate(found.samples):
        assert sample.scheduled_s >= 0.025 * place - CLOCK_TICK_S


@pytest.mark.slow
def test_bench_predicts_for_the_same_concurrency(capsys, tmp_path):
    plan = tmp_path / "plan.json"
    write_file(make_plan(samples.recipe(), samples.fit(), None, {}), plan)
    with sse_server() as server:
        words = f"--warmup 0 --requests 40 --concurrency 5 {LENGTHS}"
        found = printed(capsys, f"bench {words} --url {server.url} --plan", plan)
    assert (found["concurrency"], found["request_rate_rps"]) == (5, None)
    assert (found["requests"], found["answered"]) == (40, 40)
    told = found["predicted"]
    assert told["throughput_rps"] * told["e2e_mean_s"] == pytest.approx(5, rel=0.1)
    assert "trace" not in found["inputs"]


@pytest.mark.parametrize(
    "words", ["--rate 5 --concurrency 4", "--concurrency 4 --loop closed", LENGTHS]
)
def test_bench_refuses_contradictions_before_it_asks_a_server(words, capsys):
    said = refused(capsys, f"bench --url http://127.0.0.1:9 {words}")
    assert "127.0.0.1" not in said[0]
