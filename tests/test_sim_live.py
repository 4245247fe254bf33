"""New settings between two passes of the simulated vLLM, and thresholds for long prefills."""

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
from paged import FLAT, trace_of, world

from toolkit.backends.vllm.conformance.modelled import passes_of_case
from toolkit.errors import InputError
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.api import simulate
from toolkit.sim.kv_cache import PagedRow
from toolkit.sim.paged_engine import PagedEngine
from toolkit.sim.vllm import VllmScheduler

DATA = Path(__file__).parent / "data" / "vllm-0.32.0-live.json"


@pytest.mark.parametrize("number", range(8))
def test_passes_are_those_of_vllm_s_schedulers_under_the_same_changes(number: int) -> None:
    """As a child of `llmctl vllm-check` found them with vLLM 0.32.0."""
    case, theirs = json.loads(DATA.read_text())[number]
    assert any(case["changes"].values())
    assert passes_of_case(case) == theirs


def test_fewer_rows_let_those_that_run_end_and_admit_no_other():
    scheduler = VllmScheduler(VllmPolicy(max_num_seqs=4, max_num_batched_tokens=64), 100, 4)
    for number in range(6):
        scheduler.add(PagedRow(number, 4, 3))
    assert scheduler.schedule().rows == 4
    scheduler.commit()
    scheduler.settle()
    scheduler.change({"max_num_seqs": 2})
    assert scheduler.schedule().preempted == []
    rows = []
    for _ in range(8):
        scheduler.commit()
        scheduler.settle()
        rows.append(scheduler.schedule().rows)
        if not rows[-1]:
            break
    assert rows == [4, 2, 2, 2, 0]


def test_no_other_setting_changes():
    scheduler = VllmScheduler(VllmPolicy(), 100, 4)
    with pytest.raises(ValueError, match="prefix_caching"):
        scheduler.change({"prefix_caching": False})


def test_a_threshold_needs_chunked_prefill():
    with pytest.raises(InputError):
        VllmPolicy(
            long_prefill_token_threshold=8, chunked_prefill=False, max_num_batched_tokens=512
        )


def token_times(flags: VllmPolicy, rows, blocks: int) -> list[list[int]]:
    """When each request gets its tokens, if a pass takes a second and all are there at first."""
    scheduler = VllmScheduler(flags, blocks, 4)
    for number, (prompt, output) in enumerate(rows):
        scheduler.add(PagedRow(number, prompt, output))
    times: list[list[int]] = [[] for _ in rows]
    has = [0] * len(rows)
    for second in range(1, 10_000):
        scheduler.schedule()
        parts = scheduler.rows()
        if not parts:
            return times
        for number, computed, new in parts:
            has[number] = computed + new
            if has[number] == rows[number][0] + len(times[number]):
                times[number].append(second)
        scheduler.commit()
        scheduler.settle()
    raise AssertionError("it does not end")


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_miss_a_pass_get_their_tokens_later_and_their_gaps_are_longer(seed: int):
    draw = random.Random(seed)
    rows = [(draw.randint(1, 60), draw.randint(1, 30)) for _ in range(20)]
    flags = VllmPolicy(
        max_num_seqs=8,
        max_num_batched_tokens=draw.choice([8, 12, 24]),
        long_prefill_token_threshold=draw.choice([3, 5, 9]),
    )
    blocks = draw.choice([40, 200])
    expected = token_times(flags, rows, blocks)
    assert [len(times) for times in expected] == [output for _, output in rows]
    trace = trace_of([(0.0, prompt, output) for prompt, output in rows])
    served = simulate(trace, flags, world(PagedEngine(FLAT, blocks, 4))).served
    times = (served.first_token_s, served.finish_s, served.max_gap_s)
    found = list(zip(*(column.tolist() for column in times), strict=True))
    gaps = [max((b - a for a, b in pairwise(times)), default=0) for times in expected]
    assert found == [(times[0], times[-1], gap) for times, gap in zip(expected, gaps, strict=True)]
