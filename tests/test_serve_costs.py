"""Scheduling costs: the worker's stopwatch, the server's counters, and the line of `bench`."""

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from said import says
from toy_server import HandWorkers, turns
from within import with_driver, with_server

from toolkit.bench.predict import COUNTED, scheduling
from toolkit.engines.protocol import SamplingParams, StepOutput
from toolkit.engines.tokenizer import ByteDetokenizer
from toolkit.estimators.laws import LinearSwap, unit_step
from toolkit.estimators.memory import ZetaMemory
from toolkit.sched.types import Batch, Job, Moves, Request, RoundResult, Worker
from toolkit.serve.driver import Driver
from toolkit.serve.live import GenerationRequest, Reply, TextOutput
from toolkit.serve.stats import Stats
from toolkit.workers.child import Stopwatch
from toolkit.workers.protocol import Times

STEP = StepOutput((0,), (65,))


def test_a_stopwatch_separates_engine_reporting_and_gap():
    at_s = iter([0.0, 1.0, 1.5, 2.0, 2.25, 4.0, 6.5, 7.0])
    watch = Stopwatch(lambda: next(at_s))
    watch.start()
    on_step = watch.reporting(lambda step: step is not STEP)
    assert on_step(StepOutput((), ()))
    assert not on_step(STEP)
    assert watch.stop() == Times(engine_s=4.0, reporting_s=0.75, gap_s=0.0)
    watch.start()
    assert watch.stop() == Times(engine_s=0.5, reporting_s=0.0, gap_s=2.5)


def submit(driver: Driver, name: str, limit: int) -> None:
    ask = GenerationRequest(name, tuple(b"hello"), limit, SamplingParams())
    driver.submit(ask, TextOutput(ByteDetokenizer(), ()), Reply(1))


@with_driver()
async def test_a_hop_counts_only_if_the_next_batch_was_ready(driver: Driver, hands: HandWorkers):
    hops = driver.stats.hop.counts
    submit(driver, "a", 20)  # slices of 8: the second follows the first
    await turns()
    hands.finish()
    await turns()
    assert sum(hops) == 0
    hands.finish()
    await turns()
    assert sum(hops) == 1
    hands.finish()
    await turns()
    assert sum(hops) == 2
    submit(driver, "b", 5)
    await turns()
    hands.finish()
    assert sum(hops) == 2


@with_driver()
async def test_a_batch_that_crashed_has_no_times(driver: Driver, hands: HandWorkers):
    submit(driver, "a", 8)
    await turns()
    hands.crash(steps=3)
    await turns()
    hands.recover()
    await turns()
    hands.finish()
    assert sum(driver.stats.hop.counts) == 0
    assert (driver.stats.engine_s, driver.stats.engine_steps) == (0.01, 5)


@with_driver()
async def test_every_call_of_the_scheduler_is_timed(driver: Driver, hands: HandWorkers):
    submit(driver, "a", 8)
    await turns()
    assert sum(driver.stats.deciding.counts) == 1
    hands.finish()
    await turns()
    assert sum(driver.stats.deciding.counts) == 3  # what has ended, and the tick after it
    assert driver.stats.deciding.total > 0


@with_server()
async def test_the_server_exposes_what_the_bench_reads(http: httpx.AsyncClient):
    families = text_string_to_metric_families((await http.get("/metrics")).text)
    assert set(COUNTED.values()) <= {
        sample.name for family in families for sample in family.samples
    }


def test_shares_are_of_the_engines_time_between_two_looks():
    before = dict.fromkeys(COUNTED.values(), 5.0)
    grown = {
        "batches": 4,
        "steps": 40,
        "engine_s": 2.0,
        "reporting_s": 0.01,
        "deciding_s": 0.02,
        "hops": 2,
        "hop_s": 0.03,
    }
    after = {series: 5.0 + grown[name] for name, series in COUNTED.items()}
    found = scheduling(before, after)
    assert found.model_dump() == pytest.approx(grown)
    assert says(found.text(), "1.00 %", "1.50 %", "0.50 %", "10.0", "50.00 ms", "5.000", "15.000")


def test_without_batches_or_counters_there_are_no_shares():
    still = dict.fromkeys(COUNTED.values(), 5.0)
    assert scheduling(still, still) is None
    assert scheduling({}, still) is None


@pytest.mark.parametrize(("overlaps", "expected_s"), [(True, 0.0), (False, 1.5)])
def test_a_rounds_prediction_includes_transfers_that_it_waits_for(overlaps, expected_s):
    link = LinearSwap(latency_s=0.5, out_tokens_per_s=16.0, in_tokens_per_s=8.0, overlaps=overlaps)
    worker = Worker(0, unit_step(), ZetaMemory(1000), swap=link, host_tokens=1000)
    left = Job(Request("a", 0.0, 16, 9), 0, 16)
    batch = Batch(
        0,
        (),
        1,
        0,
        0.0,
        keep_cache=True,
        moves=Moves(swap_out=(left,), overlap=True),
    )
    batch.started_s = 1.0
    stats = Stats()
    stats.count_round(batch, RoundResult(0, 0, 0, ()), 3.0, worker)
    assert stats.predicted_batch_s == expected_s
