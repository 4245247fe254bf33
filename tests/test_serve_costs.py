"""Scheduling costs: what the server counts of them."""

import pytest

from toolkit.estimators.laws import LinearSwap, unit_step
from toolkit.estimators.memory import ZetaMemory
from toolkit.sched.types import Job, Moves, Pass, PassResult, Request, Worker
from toolkit.server.stats import Stats


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
