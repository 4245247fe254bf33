"""Timing of the parts of a round: each part takes time, and leaves no row."""

import time

import pytest
import rounds

from toolkit.engines.protocol import OutOfMemory, Round
from toolkit.estimators.part_fits import fit_swap
from toolkit.files.profile import PartPoint, RoundsProfile

PARTS = ["join", "leave", "grow", "swap_out", "swap_in"]


@pytest.mark.parametrize("part", PARTS)
def test_a_timed_part_takes_time_and_leaves_no_row(part):
    engine = rounds.rebatch_engine()
    assert engine.time_part(part, 2, 20, 3, time.perf_counter) > 0.0
    assert (engine.ledger.used_bytes, engine.host_ledger.used_bytes) == (0, 0)
    assert engine.run_round(Round(0), lambda _: True).padded_tokens == 0


@pytest.mark.parametrize("measure", ["time_prefill", "time_decode"])
def test_prefills_and_steps_are_timed_as_in_rounds(measure, monkeypatch):
    engine = rounds.rebatch_engine()
    monkeypatch.delattr("toolkit.engines.slab.SlabCache.fill")  # what the static engine uses
    assert getattr(engine, measure)(3, 20, time.perf_counter) > 0.0
    assert engine.ledger.used_bytes == 0


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
        engine.run_round(
            Round(9, (row,), (0,)), lambda step, got=tokens: got.append(step.tokens) or True
        )
        texts.append(tokens)
    assert texts[0] == texts[1]


def test_swap_timings_give_a_link_to_host_memory():
    engine = rounds.rebatch_engine()
    points = [
        PartPoint(
            part=part,
            rows=1,
            length=length,
            others=1,
            seconds=[engine.time_part(part, 1, length, 1, time.perf_counter) for _ in range(3)],
        )
        for part in ("swap_out", "swap_in")
        for length in (4, 16, 48)
    ]
    found = fit_swap(
        RoundsProfile(parts=points, sequences=[], memory=[], host_bytes=1 << 20), 512, 0
    )
    assert found is not None
    assert found.error.points == 6
    assert found.out_bytes_per_s > 1e5
    assert found.host_bytes == 1 << 20
