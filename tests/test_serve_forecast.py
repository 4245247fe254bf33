"""What a newcomer is told he would wait, and who is refused by it."""

import asyncio
import math

import pytest
from serving import LAW, HandWorkers, client, turns

from toolkit.engines.tokenizer import ByteTokenizer
from toolkit.estimators.memory import ZetaMemory
from toolkit.sched.policies import make_policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Request, Worker
from toolkit.serve.forecast import Delay, Forecast, LatencyLimits, PredictedLatency

POLICIES = {"slice": {"slice_tokens": 16}, "conservative": {}}


def scheduler(policy: str, workers: int = 1, capacity: int = 4096) -> Scheduler:
    memory = ZetaMemory(capacity)
    return Scheduler(
        make_policy(policy, POLICIES[policy]),
        [Worker(index, LAW, memory) for index in range(workers)],
    )


def load(jobs: int, policy: str, workers: int = 1) -> PredictedLatency:
    """What one is told who comes behind so many."""
    loaded = scheduler(policy, workers)
    forecast = Forecast(loaded, typical_tokens=64)
    for index in range(jobs):
        loaded.submit(Request(str(index), 0.0, 64, 64), 0.0)
    for batch in loaded.tick(0.0):
        forecast.started(batch)
    return forecast.raw(0.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_on_an_idle_server_nobody_is_in_the_way(policy: str):
    told = load(0, policy)
    assert told.ttft_s == pytest.approx(LAW.prefill_s(1, 96 if policy == "slice" else 64))
    assert told.others_s == pytest.approx(0.0, abs=0.05)
    assert LatencyLimits(0.0, 0.0).excess_s(told) == pytest.approx(0.0, abs=0.05)


@pytest.mark.parametrize("policy", POLICIES)
def test_whoever_comes_behind_more_waits_longer_and_less_where_more_work(policy: str):
    waits_s = [load(jobs, policy).ttft_s for jobs in (0, 100, 200, 400)]
    assert waits_s == sorted(waits_s)
    assert waits_s[-1] > 2 * waits_s[1]
    assert load(400, policy, workers=4).ttft_s < waits_s[-1] / 2


def test_who_finds_a_free_place_in_a_running_batch_waits_for_no_other():
    assert load(8, "conservative").ttft_s < 0.1
    assert load(100, "conservative").ttft_s > 1.0


def test_what_the_laws_do_not_know_is_learnt():
    delay = Delay(8.0)
    for _ in range(64):
        delay.add(1.0, 1.5)
    assert delay.value_s == pytest.approx(0.5)
    for _ in range(300):
        delay.add(0.5, 3600.0)  # told too little to count
    assert delay.value_s == pytest.approx(0.5)
    for _ in range(300):
        delay.add(1.0, 3600.0)
    assert delay.value_s == 4.0


def test_a_machine_that_is_slower_than_its_laws_is_noticed_by_its_batches():
    forecast = Forecast(scheduler("conservative"), typical_tokens=64)
    lawful = forecast.raw(0.0)
    forecast.pace.ran(0.0, 0.0)
    assert forecast.raw(0.0) == lawful
    for batches in range(1, 201):
        forecast.pace.ran(2.0 * 0.1 * batches, 0.1 * batches)
    assert forecast.raw(0.0) == pytest.approx([2.0 * seconds for seconds in lawful], rel=0.01)
    for batches in range(1, 201):
        forecast.pace.ran(40.0 + 0.1 * batches, 20.0 + 0.1 * batches)
    assert forecast.raw(0.0) == pytest.approx(list(lawful), rel=0.01)


def test_the_strictest_targets_count():
    limits = LatencyLimits.of(
        {"ttft_p99_s": 2.0, "ttft_mean_s": 1.0, "e2e_p95_s": 8.0, "tpot_mean_s": 0.1}
    )
    assert limits == LatencyLimits(1.0, 8.0)
    assert LatencyLimits.of({}) == LatencyLimits(math.inf, math.inf)
    assert limits.excess_s(PredictedLatency(0.8, 7.0, 5.0)) == 0.0
    assert limits.excess_s(PredictedLatency(2.9, 7.0, 5.0)) == pytest.approx(2.0)
    assert limits.excess_s(PredictedLatency(0.1, 9.2, 5.0)) == pytest.approx(2.0)


def test_a_refusal_comes_before_any_tokenizing_and_says_when_to_come_again(
    monkeypatch: pytest.MonkeyPatch,
):
    async def run() -> None:
        async with client(HandWorkers(1), limits=LatencyLimits(ttft_s=0.05)) as http:
            body = {"prompt": ["hello"] * 16, "max_tokens": 100, "n": 2}
            asking = asyncio.create_task(http.post("/v1/completions", json=body))
            await turns(60)
            assert http.driver.running
            monkeypatch.setattr(ByteTokenizer, "encode", None)
            refused = await http.post("/v1/completions", json={"prompt": "hello"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
            assert refused.json()["error"]["message"].startswith(
                "too many wait: the first token would come in"
            )
            assert int(refused.headers["retry-after"]) >= 1
            assert 'llmctl_refused_total{model_name="toy"} 1.0' in (await http.get("/metrics")).text
            asking.cancel()

    asyncio.run(run())
