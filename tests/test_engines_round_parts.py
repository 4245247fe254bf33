"""Timing of the parts of a round: each part takes time, and leaves no row."""

import time

import pytest
import rounds

from toolkit.engines.protocol import EnginePass, OutOfMemory

pytestmark = pytest.mark.slow

PARTS = ["join", "leave", "grow", "swap_out", "swap_in"]


@pytest.mark.parametrize("part", PARTS)
def test_a_timed_part_takes_time_and_leaves_no_row(part):
    engine = rounds.rebatch_engine()
    assert engine.time_part(part, 2, 20, 3, time.perf_counter) > 0.0
    assert (engine.ledger.used_bytes, engine.host_ledger.used_bytes) == (0, 0)
    assert engine.run(EnginePass(0), lambda _: True).padded_tokens == 0


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_does_not_fit_leaves_no_row(part):
    engine = rounds.rebatch_engine(budget_mib=0.05)
    with pytest.raises(OutOfMemory):
        engine.time_part(part, 4, 50, 60, time.perf_counter)
    assert engine.ledger.used_bytes == 0


def test_timing_parts_changes_no_tokens():
    row = rounds.free_row(12, 6)
    texts = []
    for timed in (False, True):
        engine = rounds.rebatch_engine()
        tokens = []
        if timed:
            engine.time_part("swap_in", 2, 20, 3, time.perf_counter)
        engine.run(
            EnginePass(9, (row,), (0,)), lambda step, got=tokens: got.append(step.tokens) or True
        )
        texts.append(tokens)
    assert texts[0] == texts[1]
