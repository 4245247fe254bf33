"""The forecast of latency, and admission by it."""

import asyncio
import math

import pytest
from toy_server import LAW, HandWorkers, client, turns
from within import in_a_loop

from toolkit.engines.tokenizer import ByteTokenizer
from toolkit.estimators.memory import ZetaMemory
from toolkit.routing.admission import Delay, LatencyLimits, PredictedLatency
from toolkit.sched.policies import make_policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Request, Worker
from toolkit.server.forecast import Forecast

POLICIES = {"slice": {"slice_tokens": 16}, "conservative": {}}


def scheduler(policy: str, workers: int = 1, capacity: int = 4096) -> Scheduler:
    memory = ZetaMemory(capacity)
    return Scheduler(
        make_policy(policy, POLICIES[policy]),
        [Worker(index, LAW, memory) for index in range(workers)],
    )


def predict(jobs: int, policy: str, workers: int = 1) -> PredictedLatency:
    """The prediction for a request behind a backlog of `jobs`."""
    loaded = scheduler(policy, workers)
    forecast = Forecast(loaded, typical_tokens=64)
    for index in range(jobs):
        loaded.submit(Request(str(index), 0.0, 64, 64), 0.0)
    for batch in loaded.tick(0.0):
        forecast.started(batch)
    return forecast.predict_by_laws(0.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_on_an_idle_server_there_is_no_contention(policy: str):
    predicted = predict(0, policy)
    assert predicted.ttft_s == pytest.approx(LAW.prefill_s(1, 96 if policy == "slice" else 64))
    assert predicted.contention_s == pytest.approx(0.0, abs=0.05)
    assert LatencyLimits(0.0, 0.0).excess_s(predicted) == pytest.approx(0.0, abs=0.05)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_predicted_ttft_grows_with_the_backlog_and_falls_with_workers(policy: str):
    waits_s = [predict(jobs, policy).ttft_s for jobs in (0, 100, 200, 400)]
    assert waits_s == sorted(waits_s)
    assert waits_s[-1] > 2 * waits_s[1]
    assert predict(400, policy, workers=4).ttft_s < waits_s[-1] / 2


def test_a_request_with_a_free_place_in_a_running_batch_does_not_wait():
    assert predict(8, "conservative").ttft_s < 0.1
    assert predict(100, "conservative").ttft_s > 1.0


def test_delays_outside_the_laws_are_learnt():
    delay = Delay(8.0)
    for _ in range(64):
        delay.add(1.0, 1.5)
    assert delay.value_s == pytest.approx(0.5)
    for _ in range(300):
        delay.add(0.5, 3600.0)  # too short a prediction to count
    assert delay.value_s == pytest.approx(0.5)
    for _ in range(300):
        delay.add(1.0, 3600.0)
    assert delay.value_s == 4.0


def test_recent_batches_reveal_a_slow_machine():
    forecast = Forecast(scheduler("conservative"), typical_tokens=64)
    lawful = forecast.predict_by_laws(0.0)
    forecast.ran(0.0, 0.0)
    assert forecast.predict_by_laws(0.0) == lawful
    for _ in range(200):
        forecast.ran(0.2, 0.1)
    assert forecast.predict_by_laws(0.0) == pytest.approx(
        [2.0 * seconds for seconds in lawful], rel=0.01
    )
    for _ in range(200):
        forecast.ran(0.1, 0.1)
    assert forecast.predict_by_laws(0.0) == pytest.approx(list(lawful), rel=0.01)


def test_the_strictest_targets_count():
    limits = LatencyLimits.of(
        {"ttft_p99_s": 2.0, "ttft_mean_s": 1.0, "e2e_p95_s": 8.0, "tpot_mean_s": 0.1}
    )
    assert limits == LatencyLimits(1.0, 8.0)
    assert LatencyLimits.of({}) == LatencyLimits(math.inf, math.inf)
    assert limits.excess_s(PredictedLatency(0.8, 7.0, 5.0)) == 0.0
    assert limits.excess_s(PredictedLatency(2.9, 7.0, 5.0)) == pytest.approx(2.0)
    assert limits.excess_s(PredictedLatency(0.1, 9.2, 5.0)) == pytest.approx(2.0)


@in_a_loop
async def test_an_overloaded_server_refuses_before_tokenizing_with_retry_after(
    monkeypatch: pytest.MonkeyPatch,
):
    async with client(HandWorkers(1), limits=LatencyLimits(ttft_s=0.05)) as http:
        body = {"prompt": ["hello"] * 16, "max_tokens": 100, "n": 2}
        asking = asyncio.create_task(http.post("/v1/completions", json=body))
        await turns(60)
        assert http.driver.running
        monkeypatch.setattr(ByteTokenizer, "encode", None)
        refused = await http.post("/v1/completions", json={"prompt": "hello"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert "too many requests wait" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        assert 'llmctl_refused_total{model_name="toy"} 1.0' in (await http.get("/metrics")).text
        asking.cancel()
