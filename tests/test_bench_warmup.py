"""The warm-up before a replay: which requests it takes, and what it makes of the server's own figures."""

import json

import numpy as np
import pytest
import samples
from sse_server import serve_request, sse_server

from toolkit.bench.client import Load
from toolkit.bench.predict import predict
from toolkit.bench.warmup import batch_times, others, slowdown_since, warm_up
from toolkit.cli.main import run
from toolkit.deploy.plan import make_plan
from toolkit.endpoints.target import find_target
from toolkit.errors import InputError
from toolkit.files.io import write_file
from toolkit.traces.types import Trace
from toolkit.traces.write import Line, write_lines

LOAD = Load("hidden", 128, 256)


def trace(count: int = 6) -> Trace:
    k = np.arange(count)
    return Trace(k * 1.0, 10 + k, 1 + k, np.zeros(count, dtype=np.int64))


def test_the_requests_are_those_that_come_next_and_time_goes_on_where_the_trace_starts_again():
    other = others(trace(), 3.5, 4)
    assert other.prompt_tokens.tolist() == [14, 15, 10, 11]
    assert other.arrival_s.tolist() == [0.0, 1.0, 1.0, 2.0]


def test_the_slowdown_is_of_the_batches_that_ran_meanwhile():
    def answer(body):
        server.batch_s = (server.batch_s[0] + 3.0, server.batch_s[1] + 2.0)
        return serve_request(body)

    with sse_server(answer) as server:
        server.batch_s = (100.0, 1.0)
        warm, interrupted = warm_up(find_target(server.url), others(trace(), 0.0, 2), LOAD, lambda: None)
    assert not interrupted
    assert (warm.requests, warm.batch_s, warm.predicted_batch_s, warm.slowdown) == (2, 6.0, 4.0, 1.5)


def test_without_batches_nothing_is_said():
    with sse_server() as server:
        assert warm_up(find_target(server.url), others(trace(), 0.0, 1), LOAD, lambda: None) == (None, False)


def test_prompts_are_not_those_of_the_replay():
    with sse_server() as server:
        target, short = find_target(server.url), others(trace(), 0.0, 1)
        warm_up(target, short, LOAD, lambda: None)
        warm_up(target, short, Load("hidden", 128, 256, seed=1), lambda: None)
    first, second = server.bodies
    assert first["prompt"] != second["prompt"]


def test_a_server_that_does_not_tell_is_named(monkeypatch):
    with sse_server() as server:
        monkeypatch.setattr("toolkit.bench.warmup.TOOK", "llmctl_no_such_total")
        with pytest.raises(InputError, match=r"/metrics has no llmctl_no_such_total") as error:
            warm_up(find_target(server.url), others(trace(), 0.0, 1), LOAD, lambda: None)
    assert "--warmup 0" in error.value.hint


def test_a_server_that_has_gone_after_the_replay_costs_no_report():
    with sse_server() as server:
        server.batch_s = (1.0, 1.0)
        target = find_target(server.url)
        before = batch_times(target)
        server.batch_s = (4.0, 3.0)
        assert slowdown_since(before, target) == 1.5
    assert slowdown_since(before, target) is None


def test_a_slow_machine_makes_batches_longer_and_decides_nothing_else():
    """With everything slow, the backlog of one worker takes so many times as long."""
    plan = make_plan(samples.recipe(), samples.fit(), None, {})
    backlog = Trace(np.zeros(40), np.full(40, 20), np.full(40, 9), np.zeros(40, dtype=np.int64))
    fitted, slow = (predict(plan, backlog, {}, slowdown) for slowdown in (1.0, 2.0))
    assert slow["batches"] == fitted["batches"]
    assert slow["tpot_mean_s"] == pytest.approx(2 * fitted["tpot_mean_s"])


def test_the_prediction_knows_the_output_lengths_that_the_server_has_seen():
    """Past-Future counts requests as long as they may become, until it has seen how long they are."""
    recipe = samples.recipe(policy={"name": "past-future"}, engine={"name": "fake"})
    plan = make_plan(recipe, samples.fit(capacity_tokens=1024), None, {})
    backlog = Trace(np.zeros(40), np.full(40, 20), np.full(40, 9), np.zeros(40, dtype=np.int64))
    first, later = (predict(plan, backlog, {}, finished=seen) for seen in ((), [9] * 100))
    assert later["batch_size_mean"] > first["batch_size_mean"]
    assert later["ttft_mean_s"] < first["ttft_mean_s"]


def test_the_command_warms_up_and_predicts_at_the_speed_that_it_saw(capsys, tmp_path):
    def answer(body):
        server.batch_s = (server.batch_s[0] + 1.25, server.batch_s[1] + 1.0)
        return serve_request(body)

    lines, plan = tmp_path / "trace.jsonl", tmp_path / "plan.json"
    write_lines([Line(10 * k, 20 + k, 3 + k) for k in range(5)], lines)
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
    assert report["predicted_in_hindsight"]["e2e_mean_s"] == pytest.approx(report["predicted"]["e2e_mean_s"])
    assert "had it known that speed, the prediction's errors were: throughput_rps" in err
    assert "batches take 1.25 times as long as fitted" in err
