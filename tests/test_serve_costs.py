"""Scheduling costs: what the server counts of them."""

import pytest
from toy_server import HandWorkers, turns
from within import with_driver

from toolkit.engines.protocol import SamplingParams
from toolkit.engines.tokenizer import ByteDetokenizer
from toolkit.estimators.laws import LinearSwap, unit_step
from toolkit.estimators.memory import ZetaMemory
from toolkit.openai.answers import AnswerWriter
from toolkit.sched.types import Job, Moves, Pass, PassResult, Request, Worker
from toolkit.server.driver import Driver
from toolkit.server.live import LiveRequest, Reply, TextOutput
from toolkit.server.stats import Stats


def submit(driver: Driver, name: str, limit: int) -> None:
    output = TextOutput(ByteDetokenizer(), ())
    reply = Reply(AnswerWriter({}, chat=False), 5, streams=True, keepalive_s=10.0)
    driver.submit(LiveRequest(name, tuple(b"hello"), limit, SamplingParams(), output, reply))


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


@pytest.mark.parametrize(("overlaps", "expected_s"), [(True, 0.0), (False, 1.5)])
def test_a_rounds_prediction_includes_transfers_that_it_waits_for(overlaps, expected_s):
    link = LinearSwap(latency_s=0.5, out_tokens_per_s=16.0, in_tokens_per_s=8.0, overlaps=overlaps)
    worker = Worker(0, unit_step(), ZetaMemory(1000), swap=link, host_tokens=1000)
    left = Job(Request("a", 0.0, 16, 9), 0, 16)
    batch = Pass(
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
    counted = stats.count_pass(batch, PassResult(0, 0, 0, ()), 3.0, worker)
    assert counted == ((2.0, expected_s) if expected_s else (0.0, 0.0))
    assert stats.predicted_batch_s[0] == expected_s
