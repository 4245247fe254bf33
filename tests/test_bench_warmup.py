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
    counts_or_none,
    other_requests,
    predicted,
    slowdown_between,
    warm_up,
)
from toolkit.cli.main import run
from toolkit.deploy.plan import make_plan
from toolkit.endpoints.target import find_target
from toolkit.errors import InputError
from toolkit.files.io import write_file
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.api import simulate
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
    """A busy server takes longer."""
    own, faster = (other_requests(trace(), 0.0, 6, rate) for rate in (0.0, 10.0))
    assert mean_rate(faster) == pytest.approx(10.0)
    scale = own.arrival_s[-1] / faster.arrival_s[-1]
    assert faster.arrival_s * scale == pytest.approx(own.arrival_s)
    assert other_requests(trace(), 0.0, 1, 10.0).arrival_s.tolist() == [0.0]


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
        assert slowdown_between(before, counts_or_none(target)) == 1.5
    assert slowdown_between(before, counts_or_none(target)) is None


@pytest.mark.slow
def test_a_slow_machine_only_makes_batches_longer():
    """With everything slow, the backlog of one worker takes so many times as long."""
    plan = make_plan(samples.recipe(), samples.fit(), None, {})
    backlog = Trace(np.zeros(40), np.full(40, 20), np.full(40, 9), np.zeros(40, dtype=np.int64))
    fitted, slow = (predicted(plan, backlog, slowdown).metrics({}) for slowdown in (1.0, 2.0))
    assert slow["batches"] == fitted["batches"]
    assert slow["tpot_mean_s"] == pytest.approx(2 * fitted["tpot_mean_s"])


def test_without_a_warm_up_bench_predicts_as_simulate_does():
    """The front is the fitted one, not what clients of any server wait besides its laws."""
    recipe = samples.recipe(engine={"name": "vllm"}, workers=1, policy={"name": "vllm"})
    fit = samples.paged_fit()
    slow = fit.prefill.law.with_terms({"pass": 0.5})
    fit = fit.model_copy(update={"prefill": fit.prefill.model_copy(update={"law": slow})})
    few = Trace(np.arange(4.0), np.full(4, 20), np.full(4, 9), np.zeros(4, dtype=np.int64))
    plan = make_plan(recipe, fit, None, {})
    world = world_from_fit(fit, workers=1, max_new_tokens=128)
    simulated = simulate(few, VllmPolicy(), world).metrics({})
    assert predicted(plan, few).metrics({})["ttft_mean_s"] == simulated["ttft_mean_s"]


@pytest.mark.slow
def test_the_prediction_knows_the_outputs_seen_before():
    """Past-Future counts requests as long as they may become, until it has seen how long they
    are.
    """
    recipe = samples.recipe(policy={"name": "past-future"}, engine={"name": "fake"})
    plan = make_plan(recipe, samples.fit(capacity_tokens=1024), None, {})
    backlog = Trace(np.zeros(40), np.full(40, 20), np.full(40, 9), np.zeros(40, dtype=np.int64))
    first, later = (
        predicted(plan, backlog, finished=seen).metrics({}) for seen in ((), (9,) * 100)
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
    assert (
        report["predicted"]["metrics"]["e2e_mean_s"]
        > report["predicted_as_fitted"]["metrics"]["e2e_mean_s"]
    )
    assert says(err, "1.25")
