"""`prefill_schedule_interval` in the model of vLLM's scheduler."""

from dataclasses import replace

import numpy as np
import pytest
from paged import LAW, pass_by_pass, same_times, trace_of, world

from toolkit.backends.vllm.command import flags_of
from toolkit.errors import InputError
from toolkit.sched.policies.vllm import FLAGS, VllmPolicy, refuse_later
from toolkit.sim.api import simulate
from toolkit.sim.kv_cache import PagedRow
from toolkit.sim.paged_engine import PagedEngine
from toolkit.sim.vllm import VllmScheduler


def prefills(interval: int) -> list[int]:
    """The passes with a prefill, where a row decodes and requests come at passes 5, 6 and 7."""
    flags = VllmPolicy(
        max_num_seqs=16, max_num_batched_tokens=64, prefill_schedule_interval=interval
    )
    scheduler = VllmScheduler(flags, blocks=100, block_tokens=4)
    scheduler.add(PagedRow(0, 8, 60))
    found = []
    for number in range(30):
        if number in (5, 6, 7):
            scheduler.add(PagedRow(100 + number, 8, 60))
        plan = scheduler.schedule()
        if plan.shape.prefills:
            found.append(number)
        scheduler.commit()
        scheduler.settle()
    return found


def test_prefills_come_an_interval_apart_while_rows_decode() -> None:
    assert prefills(4) == [0, 5, 9]
    assert prefills(8) == [0, 8]


def test_a_long_prompt_is_computed_an_interval_apart() -> None:
    flags = VllmPolicy(max_num_seqs=4, max_num_batched_tokens=16, prefill_schedule_interval=3)
    scheduler = VllmScheduler(flags, blocks=100, block_tokens=4)
    scheduler.add(PagedRow(0, 4, 60))
    for _ in range(3):
        scheduler.schedule()
        scheduler.commit()
        scheduler.settle()
    scheduler.add(PagedRow(1, 40, 4))
    chunks = []
    for number in range(12):
        plan = scheduler.schedule()
        chunks += [(number, part.new) for part in plan.parts if not part.row.entered]
        assert all(row[0] == 0 for row in scheduler.rows()) or plan.shape.prefills or number > 6
        scheduler.commit()
        scheduler.settle()
    assert chunks == [(0, 15), (3, 15), (6, 10)]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("interval", [2, 5])
def test_leaps_change_nothing(ahead: bool, interval: int) -> None:
    draw = np.random.default_rng(interval)
    rows = [(0.01 * k, *draw.integers(1, 40, 2).tolist(), 0) for k in range(60)]
    policy = VllmPolicy(
        max_num_seqs=6, max_num_batched_tokens=32, prefill_schedule_interval=interval
    )
    there = world(PagedEngine(LAW, 60, 4, ahead))
    leaping = simulate(trace_of(rows), policy, there)
    with pass_by_pass():
        stepping = simulate(trace_of(rows), policy, there)
    same_times(leaping, stepping)
    plain = simulate(trace_of(rows), replace(policy, prefill_schedule_interval=1), there)
    assert np.any(plain.served.finish_s != leaping.served.finish_s)


def test_the_flag_is_written_where_it_changes_something() -> None:
    assert not any("interval" in word for word in flags_of("vllm", {}))
    words = flags_of("vllm", {"prefill_schedule_interval": 4})
    assert words[words.index("--prefill-schedule-interval") + 1] == "4"


def test_a_release_without_the_flag_is_refused() -> None:
    given = {"prefill_schedule_interval": 4}
    for version in ("0.33.0", "1.0.2", ""):
        refuse_later(given, version)
    with pytest.raises(InputError, match=r"0\.32\.1"):
        refuse_later(given, "0.32.1")
    refuse_later({}, "0.28.0")
    assert not FLAGS["prefill_schedule_interval"].is_in("")
