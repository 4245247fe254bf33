"""The warm-up before a replay: its requests, and what the server's counters show."""

import json
from dataclasses import replace

import numpy as np
import pytest
import samples
from said import says
from sse_server import serve_request, sse_server

from toolkit.bench.client import LoadSpec
from toolkit.bench.predict import (
    ServerConditions,
    ServerTimes,
    arrival_cost_of,
    conditions,
    counts_or_none,
    other_requests,
    predict,
    times_between,
    warm_up,
)
from toolkit.cli.main import run
from toolkit.deploy.plan import make_plan
from toolkit.endpoints.load import Sample
from toolkit.endpoints.target import find_target
from toolkit.errors import InputError
from toolkit.estimators.pipeline import COEFFICIENTS, GraphSettings, PipelineLaw
from toolkit.files.bench import Front
from toolkit.files.io import write_file
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.serve.stats import SliceSums
from toolkit.sim.api import simulate
from toolkit.sim.paged_engine import PagedEngine
from toolkit.sim.worker import NO_DELAY, FrontDelay
from toolkit.sim.world import world_from_fit
from toolkit.traces.types import Trace
from toolkit.traces.windows import mean_rate
from toolkit.traces.write import TraceLine, write_lines

LOAD = LoadSpec("hidden", 128, 256)


def trace(count: int = 6) -> Trace:
    k = np.arange(count)
    return Trace(k * 1.0, 10 + k, 1 + k, np.zeros(count, dtype=np.int64))


def test_warm_up_requests_come_next_in_the_trace_and_wrap_around():
    other = other_requests(trace(), 3.5, 4)
    assert other.prompt_tokens.tolist() == [14, 15, 10, 11]
    assert other.arrival_s.tolist() == [0.0, 1.0, 1.0, 2.0]


def test_the_other_requests_come_at_the_rate_of_the_replay():
    """Launches and the front take as long as they do at that load."""
    own, faster = (other_requests(trace(), 0.0, 6, rate) for rate in (0.0, 10.0))
    assert mean_rate(faster) == pytest.approx(10.0)
    scale = own.arrival_s[-1] / faster.arrival_s[-1]
    assert faster.arrival_s * scale == pytest.approx(own.arrival_s)
    assert other_requests(trace(), 0.0, 1, 10.0).arrival_s.tolist() == [0.0]


@pytest.mark.slow
def test_the_slowdown_is_of_the_batches_that_ran_meanwhile():
    def answer(body):
        server.batch_s = (server.batch_s[0] + 3.0, server.batch_s[1] + 2.0)
        return serve_request(body)

    with sse_server(answer) as server:
        server.batch_s = (100.0, 1.0)
        warm = warm_up(find_target(server.url), other_requests(trace(), 0.0, 2), LOAD, lambda: None)
    assert (warm.requests, warm.batch_s, warm.predicted_batch_s, warm.slowdown) == (
        2,
        6.0,
        4.0,
        1.5,
    )


def test_the_first_requests_settle_the_server_and_are_not_timed():
    def answer(body):
        took_s = 9.0 if len(server.bodies) <= 2 else 1.5
        server.batch_s = (server.batch_s[0] + took_s, server.batch_s[1] + 1.0)
        return serve_request(body)

    with sse_server(answer) as server:
        at_once = replace(trace(), arrival_s=np.zeros(6))
        warm = warm_up(find_target(server.url), other_requests(at_once, 0.0, 8), LOAD, lambda: None)
    assert (warm.requests, warm.predicted_batch_s, warm.slowdown) == (8, 6.0, 1.5)
    assert len({str(body["prompt"]) for body in server.bodies}) == 8


def test_without_batches_the_warm_up_shows_nothing():
    with sse_server() as server:
        target = find_target(server.url)
        one = other_requests(trace(), 0.0, 1)
        assert warm_up(target, one, LOAD, lambda: None) is None


def test_prompts_are_not_those_of_the_replay():
    with sse_server() as server:
        target = find_target(server.url)
        short = other_requests(trace(), 0.0, 1)
        warm_up(target, short, LOAD, lambda: None)
        warm_up(target, short, LoadSpec("hidden", 128, 256, seed=1), lambda: None)
    first, second = server.bodies
    assert first["prompt"] != second["prompt"]


def test_a_server_without_counters_is_named(monkeypatch):
    with sse_server() as server:
        monkeypatch.setattr("toolkit.bench.predict.TOOK", "llmctl_no_such_total")
        with pytest.raises(InputError, match=r"/metrics.*llmctl_no_such_total") as error:
            warm_up(find_target(server.url), other_requests(trace(), 0.0, 1), LOAD, lambda: None)
    assert "--warmup 0" in error.value.hint


def test_a_server_that_has_gone_after_the_replay_costs_no_report():
    with sse_server() as server:
        server.batch_s = (1.0, 1.0)
        target = find_target(server.url)
        before = counts_or_none(target)
        server.batch_s = (4.0, 3.0)
        assert times_between(before, counts_or_none(target), []).slowdown == 1.5
    assert times_between(before, counts_or_none(target), []) is None


def counters(requests: int, ttft_s: float, e2e_s: float) -> dict[str, float]:
    """What a server tells after so many requests, all with the same latencies."""
    found = {
        "llmctl_batch_seconds_total": 2.0 * requests,
        "llmctl_predicted_batch_seconds_total": 1.0 * requests,
    }
    for name, each_s in (("ttft", ttft_s), ("e2e", e2e_s)):
        found |= {
            f"llmctl_{name}_seconds_count": requests,
            f"llmctl_{name}_seconds_sum": requests * each_s,
        }
    return found


def seen_by_clients(count: int, ttft_s: float, e2e_s: float) -> list[Sample]:
    return [
        Sample(k, 5, 9, sent_s=k, first_token_s=k + ttft_s, last_token_s=k + e2e_s, failure="")
        for k in range(count)
    ]


def test_the_clients_extra_latency_is_the_fronts_delay():
    samples_ = seen_by_clients(4, ttft_s=0.5, e2e_s=2.0)
    times = times_between(counters(0, 0.0, 0.0), counters(4, ttft_s=0.375, e2e_s=1.75), samples_)
    assert times.front == Front(first_s=0.125, last_s=0.25)
    assert times.slowdown == 2.0


def test_clocks_that_disagree_make_no_token_early():
    times = times_between(
        counters(0, 0.0, 0.0), counters(2, 0.5, 2.0), seen_by_clients(2, 0.375, 2.5)
    )
    assert times.front == Front(first_s=0.0, last_s=0.5)


@pytest.mark.parametrize("served", [3, 5])
def test_other_requests_hide_the_fronts_delay(served):
    times = times_between(
        counters(0, 0.0, 0.0), counters(served, 0.375, 1.75), seen_by_clients(4, 0.5, 2.0)
    )
    assert times.front is None
    assert conditions(times.slowdown, times.front, [7]) == ServerConditions(2.0, None, (7,))


def test_the_fronts_delay_is_unknown_where_a_request_failed():
    failed = seen_by_clients(4, 0.5, 2.0)
    failed[2].failure = "the connection was lost"
    assert times_between(counters(0, 0.0, 0.0), counters(4, 0.375, 1.75), failed).front is None


def test_refused_requests_do_not_count_for_the_fronts_delay():
    refused = seen_by_clients(5, 0.5, 2.0)
    refused[2].failure = "HTTP 503: too many requests wait"
    refused[2].refused = True
    times = times_between(counters(0, 0.0, 0.0), counters(4, 0.375, 1.75), refused)
    assert times.front == Front(first_s=0.125, last_s=0.25)


def slices(times_s: list[tuple[float, float, int]]) -> dict[str, float]:
    """What a server has counted after slices that took, should have taken, and met so many
    arrivals.
    """
    sums = SliceSums()
    for took_s, expected_s, arrived in times_s:
        sums.add(took_s, expected_s, arrived)
    return sums


def crowded(
    slowdown: float, cost_s: float, count: int = 60, noise_s: float = 0.0
) -> dict[str, float]:
    """Requests arrive during the first half of the slices alone."""
    found = []
    for k in range(count):
        expected_s = 0.5 + 0.01 * (k % 7)
        arrived = 300 + 10 * (k % 5) if 2 * k < count else 0
        wrong_s = noise_s if k % 2 else -noise_s
        found.append((slowdown * expected_s + cost_s * arrived + wrong_s, expected_s, arrived))
    return slices(found)


@pytest.mark.parametrize(("slowdown", "cost_s"), [(1.0, 0.0007), (1.2, 0.0005), (0.9, 0.002)])
def test_the_cost_of_arrivals_is_separated_from_a_slow_machine(slowdown: float, cost_s: float):
    found = arrival_cost_of(crowded(slowdown, cost_s))
    assert found.cost_s == pytest.approx(cost_s, rel=0.02)
    sums = crowded(slowdown, cost_s)
    times = ServerTimes(sums["took"], sums["expected"], None, found)
    assert times.slowdown == pytest.approx(slowdown, rel=0.01)


@pytest.mark.parametrize(
    "sums",
    [
        crowded(1.2, 0.0),  # arrivals cost nothing
        crowded(1.2, 0.0007, count=30),  # too few slices
        crowded(1.2, 0.00001, noise_s=0.2),  # lost in the noise
        slices([(0.6, 0.5, 100)] * 60),  # all alike: nothing tells the two apart
        slices([(0.6, 0.5, 0)] * 60),
        # late slices meet more of a steady stream: it does not make them late
        slices([(took_s, 0.5, round(50 * took_s)) for took_s in (0.5, 0.9, 0.6, 0.8, 0.7) * 12]),
        slices([]),
    ],
)
def test_an_uncertain_cost_is_part_of_the_slowdown(sums: dict[str, float]):
    assert arrival_cost_of(sums) == (0.0, 0.0)


def test_the_total_time_of_the_slices_is_kept():
    sums = crowded(1.1, 0.0006, noise_s=0.01)
    found = arrival_cost_of(sums)
    slowdown = ServerTimes(sums["took"], sums["expected"], None, found).slowdown
    assert slowdown is not None
    assert slowdown * sums["expected"] + found.cost_s * sums["arrived"] == pytest.approx(
        sums["took"]
    )


@pytest.mark.slow
def test_the_command_prints_and_predicts_the_cost_of_arrivals(capsys, tmp_path):
    def answer(body):
        ran.append(body)
        at = len(ran)
        times_s.append((0.06 if at % 2 else 0.05, 0.05, 5 if at % 2 else 0))
        sums = slices(times_s)
        server.metrics = "".join(
            f'llmctl_slice_sums_total{{of="{of}"}} {value}\n' for of, value in sums.items()
        )
        server.batch_s = (sums["took"], sums["expected"])
        return serve_request(body)

    ran: list[dict] = []
    times_s: list[tuple[float, float, int]] = []
    lines = tmp_path / "trace.jsonl"
    plan = tmp_path / "plan.json"
    write_lines([TraceLine(2 * k, 20 + k, 3 + k % 9) for k in range(80)], lines)
    write_file(make_plan(samples.recipe(), samples.fit(), None, {}), plan)
    options = ["--trace", lines, "--plan", plan, "--warmup", 0.5, "--json"]
    with sse_server(answer) as server, pytest.raises(SystemExit) as ended:
        run(["bench", "--url", server.url, *map(str, options)])
    printed, err = capsys.readouterr()
    assert ended.value.code == 0
    report = json.loads(printed)
    assert report["warmup"]["arrival_cost_s"] == pytest.approx(0.002, rel=0.02)
    assert report["warmup"]["slowdown"] == pytest.approx(1.0, rel=0.02)
    assert says(err, "2 ms")
    assert report["predicted"]["ttft_mean_s"] > report["predicted_as_fitted"]["ttft_mean_s"]


@pytest.mark.slow
def test_a_slow_machine_only_makes_batches_longer():
    """With everything slow, the backlog of one worker takes so many times as long."""
    plan = make_plan(samples.recipe(), samples.fit(), None, {})
    backlog = Trace(np.zeros(40), np.full(40, 20), np.full(40, 9), np.zeros(40, dtype=np.int64))
    fitted, slow = (
        predict(plan, backlog, {}, ServerConditions(slowdown)) for slowdown in (1.0, 2.0)
    )
    assert slow["batches"] == fitted["batches"]
    assert slow["tpot_mean_s"] == pytest.approx(2 * fitted["tpot_mean_s"])


def overlapping_counts(launches: float, gpu: float) -> dict[str, float]:
    return {
        "llmctl_batch_seconds_total": 5.0,
        "llmctl_predicted_batch_seconds_total": 4.0,
        "llmctl_launch_seconds_total": launches,
        "llmctl_predicted_launch_seconds_total": 2.0 * bool(launches),
        "llmctl_gpu_seconds_total": gpu,
        "llmctl_predicted_gpu_seconds_total": 3.0 * bool(gpu),
    }


def test_launches_and_the_gpu_have_a_slowdown_each():
    zero = dict.fromkeys(overlapping_counts(1.0, 1.0), 0.0)
    both = times_between(zero, overlapping_counts(2.5, 3.3), [])
    assert both is not None
    assert both.launch_slowdown == pytest.approx(1.25)
    assert both.slowdown == pytest.approx(1.1)
    hidden = times_between(zero, overlapping_counts(2.5, 0.0), [])
    assert hidden is not None
    assert hidden.launch_slowdown == pytest.approx(1.25)
    assert hidden.slowdown == 1.0, "no pass waited for the GPU"
    whole = times_between(zero, overlapping_counts(0.0, 0.0), [])
    assert whole is not None
    assert whole.launch_slowdown is None
    assert whole.slowdown == pytest.approx(1.25)


def test_a_prediction_slows_launches_and_the_gpu_apart():
    names = [name for name in COEFFICIENTS if name not in ("graph_s", "decode_s")]
    graphs = GraphSettings("FULL", (1, 8))
    law = PipelineLaw(graphs, graph_s=2.0, decode_s=3.0, **dict.fromkeys(names, 0.0))
    engine = PagedEngine(law, 100, 16)
    apart = engine.slowed(1.5, 1.25).steps
    assert (apart.graph_s, apart.decode_s) == (2.5, 4.5)
    together = engine.slowed(1.5).steps
    assert (together.graph_s, together.decode_s) == (3.0, 4.5)


def test_the_fronts_delay_is_in_every_predicted_latency():
    plan = make_plan(samples.recipe(), samples.fit(), None, {})
    few = Trace(np.arange(4.0), np.full(4, 20), np.full(4, 9), np.zeros(4, dtype=np.int64))
    bare, behind = (
        predict(plan, few, {}, ServerConditions(front=delay))
        for delay in (NO_DELAY, FrontDelay(0.25, 0.5))
    )
    assert behind["ttft_mean_s"] == pytest.approx(bare["ttft_mean_s"] + 0.25)
    assert behind["e2e_p99_s"] == pytest.approx(bare["e2e_p99_s"] + 0.5)


def test_without_a_warm_up_bench_predicts_as_simulate_does():
    """The front is the fitted one, not what clients of any server wait besides its laws."""
    recipe = samples.recipe(engine={"name": "vllm"}, workers=1, policy={"name": "vllm"})
    fit = samples.paged_fit()
    slow = [each.model_copy(update={"const": 0.5}) for each in fit.prefill.segments]
    fit = fit.model_copy(update={"prefill": fit.prefill.model_copy(update={"segments": slow})})
    few = Trace(np.arange(4.0), np.full(4, 20), np.full(4, 9), np.zeros(4, dtype=np.int64))
    plan = make_plan(recipe, fit, None, {})
    world = world_from_fit(fit, workers=1, max_new_tokens=128)
    simulated = simulate(few, VllmPolicy(), world).metrics({})
    assert predict(plan, few, {})["ttft_mean_s"] == simulated["ttft_mean_s"]


@pytest.mark.slow
def test_the_prediction_knows_the_outputs_seen_before():
    """Past-Future counts requests as long as they may become, until it has seen how long they
    are.
    """
    recipe = samples.recipe(policy={"name": "past-future"}, engine={"name": "fake"})
    plan = make_plan(recipe, samples.fit(capacity_tokens=1024), None, {})
    backlog = Trace(np.zeros(40), np.full(40, 20), np.full(40, 9), np.zeros(40, dtype=np.int64))
    first, later = (
        predict(plan, backlog, {}, ServerConditions(finished=seen)) for seen in ((), (9,) * 100)
    )
    assert later["batch_size_mean"] > first["batch_size_mean"]
    assert later["ttft_mean_s"] < first["ttft_mean_s"]


def test_the_command_predicts_at_the_speed_of_its_warm_up(capsys, tmp_path):
    def answer(body):
        server.batch_s = (server.batch_s[0] + 1.25, server.batch_s[1] + 1.0)
        return serve_request(body)

    lines = tmp_path / "trace.jsonl"
    plan = tmp_path / "plan.json"
    write_lines([TraceLine(10 * k, 20 + k, 3 + k) for k in range(5)], lines)
    write_file(make_plan(samples.recipe(), samples.fit(), None, {}), plan)
    options = ["--trace", lines, "--plan", plan, "--duration", 0.025, "--warmup", 0.2, "--json"]
    with sse_server(answer) as server, pytest.raises(SystemExit) as ended:
        run(["bench", "--url", server.url, *map(str, options)])
    printed, err = capsys.readouterr()
    assert ended.value.code == 0
    report = json.loads(printed)
    assert report["requests"] == 3
    assert report["warmup"]["slowdown"] == pytest.approx(1.25)
    assert len(server.bodies) == 1 + report["warmup"]["requests"] + 3
    assert report["replay_slowdown"] == pytest.approx(1.25)
    assert report["predicted"]["e2e_mean_s"] > report["predicted_as_fitted"]["e2e_mean_s"]
    assert report["predicted_in_hindsight"]["e2e_mean_s"] == pytest.approx(
        report["predicted"]["e2e_mean_s"]
    )
    assert says(err, "throughput_rps")
    assert says(err, "1.25")
