"""The model of vLLM's scheduler against a real log, its invariants, and itself without leaps."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import FLAT, LAW, pass_by_pass, same_times, trace_of, world
from said import says

from benchmarks.engines import vllm_passes as bench
from toolkit.backends.vllm.conformance.modelled import passes_of_case
from toolkit.errors import InputError
from toolkit.estimators.laws import unit_step
from toolkit.estimators.memory import ZetaMemory
from toolkit.sched.iterations import header_of, passes_of
from toolkit.sched.policies import make_any
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.api import simulate
from toolkit.sim.blocks import PagedRequest
from toolkit.sim.paged import PagedScheduler
from toolkit.sim.paged_engine import PagedEngine, PassRange
from toolkit.sim.world import World
from toolkit.traces.types import Trace

DATA = Path(__file__).parent / "data"

small = st.lists(
    st.tuples(st.floats(0, 3), st.integers(1, 60), st.integers(1, 40), st.integers(0, 20)),
    min_size=1,
    max_size=30,
)
flags = st.builds(
    VllmPolicy,
    max_num_seqs=st.integers(1, 8),
    max_num_batched_tokens=st.integers(8, 64),
    prefix_caching=st.booleans(),
    watermark=st.sampled_from([0.0, 0.1]),
)


def served(rows, engine: PagedEngine, policy: VllmPolicy):
    return simulate(trace_of(rows), policy, world(engine)).served


def test_every_pass_of_a_real_log_is_the_same() -> None:
    """vLLM 0.32.0, 60 requests on a CPU: 343 passes, 38 of them with chunks beside decodes, and
    14 preemptions.
    """
    header, *lines = (DATA / "vllm-0.32.0-passes.jsonl").read_bytes().splitlines(keepends=True)
    requests = [
        json.loads(line) for line in (DATA / "vllm-0.32.0-requests.jsonl").read_bytes().splitlines()
    ]
    theirs = passes_of(lines)
    assert sum(len(one.preempted) for one in theirs) == 14
    ours = bench.passes_of_log(header_of(header), requests, theirs)
    assert ours == bench.logged(theirs, requests)


@pytest.mark.parametrize("number", range(6))
def test_passes_are_those_of_vllm_s_schedulers(number: int) -> None:
    """As a child of `llmctl vllm-check` found them with vLLM 0.32.0; both schedulers,
    prefix caching off and on.
    """
    case, theirs = json.loads((DATA / "vllm-0.32.0-cases.json").read_text())[number]
    assert passes_of_case(case) == theirs


@pytest.mark.slow
@given(rows=small, policy=flags, ahead=st.booleans())
@settings(deadline=None)
def test_budgets_hold_and_tokens_are_computed_once(rows, policy, ahead) -> None:
    scheduler = PagedScheduler(policy, blocks=25, block_tokens=4, ahead=ahead)
    for number, (_, prompt, output, more) in enumerate(rows):
        scheduler.add(PagedRequest(number, prompt, output, stops=more > 0))
    has = [0] * len(rows)  # tokens in the cache of each
    given_out = [0] * len(rows)
    last: list[PagedRequest] = []
    for _ in range(10_000):
        plan = scheduler.schedule()
        parts = scheduler.rows()
        for row in plan.preempted:
            has[row.number] = 0
        assert plan.shape.tokens == sum(new for *_, new in parts) <= policy.max_num_batched_tokens
        assert plan.shape.rows == len(parts) <= len(scheduler.running) <= policy.max_num_seqs
        assert 0 <= scheduler.pool.free <= 25
        for number, computed, new in parts:
            if has[number] == 0 and policy.prefix_caching:
                has[number] = computed  # what was kept of its own
            assert computed == has[number]
            has[number] += new
            prompt, output = rows[number][1:3]
            late = ahead and rows[number][3] > 0 and given_out[number] == output
            if not late and has[number] == prompt + given_out[number]:
                given_out[number] += 1
        held = sum(-(-has[row.number] // 4) for row in scheduler.running)
        assert held == 25 - scheduler.pool.free, "blocks belong to running rows only"
        if not parts and not last:
            break
        ended = scheduler.commit() if parts else []
        scheduler.settle(last if ahead else ended)
        last = ended if ahead else []
    assert given_out == [output for _, _, output, _ in rows]
    assert scheduler.pool.free == 25


@given(rows=small, policy=flags)
@settings(deadline=None)
def test_no_request_waits_that_could_be_admitted(rows, policy) -> None:
    scheduler = PagedScheduler(policy, blocks=25, block_tokens=4)
    for number, (_, prompt, output, _) in enumerate(rows):
        scheduler.add(PagedRequest(number, prompt, output))
    while scheduler.waiting or scheduler.running:
        plan = scheduler.schedule()
        assert plan.shape.rows
        if (
            scheduler.waiting
            and not plan.preempted
            and plan.shape.tokens < policy.max_num_batched_tokens
        ):
            needed = scheduler.pool.needed(scheduler.waiting[0].prompt) + int(policy.watermark * 26)
            assert len(scheduler.running) == policy.max_num_seqs or needed > scheduler.pool.free
        scheduler.settle(scheduler.commit())


@pytest.mark.slow
@given(rows=small, policy=flags, ahead=st.booleans())
@settings(deadline=None)
def test_leaps_change_nothing(rows, policy, ahead) -> None:
    engine = PagedEngine(LAW, 25, 4, ahead)
    leaping = simulate(trace_of(rows), policy, world(engine))
    with pass_by_pass():
        stepping = simulate(trace_of(rows), policy, world(engine))
    same_times(leaping, stepping)
    for name in (
        "evicted_percent",
        "rounds",
        "batch_size_mean",
        "peak_memory_percent",
        "itl_mean_s",
        "slices_per_request",
    ):
        assert leaping.counters.get(name) == pytest.approx(stepping.counters.get(name))


def test_a_prompt_takes_as_many_passes_as_its_tokens_need() -> None:
    found = served(
        [(0, 100, 3, 0)],
        PagedEngine(FLAT, 50, 16),
        VllmPolicy(max_num_batched_tokens=32, max_num_seqs=4),
    )
    assert found.first_token_s.tolist() == [4.0]
    assert found.finish_s.tolist() == [6.0]


def test_chunks_leave_room_for_decodes() -> None:
    """The first decodes while the second is prefilled in 31 + 31 + 8 tokens."""
    rows = [(0, 32, 9, 0), (1, 70, 2, 0)]
    policy = VllmPolicy(max_num_batched_tokens=32, max_num_seqs=4)
    found = served(rows, PagedEngine(FLAT, 50, 16), policy)
    assert found.first_token_s.tolist() == [1.0, 4.0]
    assert found.finish_s.tolist() == [9.0, 5.0]


def test_without_chunks_a_prompt_waits_for_a_whole_pass() -> None:
    rows = [(0, 32, 9, 0), (1, 32, 2, 0)]
    policy = VllmPolicy(max_num_batched_tokens=48, max_num_seqs=4, chunked_prefill=False)
    assert served(rows, PagedEngine(FLAT, 50, 16), policy).first_token_s.tolist() == [1.0, 2.0]
    policy = replace(policy, max_num_batched_tokens=40)  # of which the first needs one
    assert served(rows, PagedEngine(FLAT, 50, 16), policy).first_token_s.tolist() == [1.0, 2.0]
    policy = replace(policy, max_num_batched_tokens=40, max_num_seqs=1)
    assert served(rows, PagedEngine(FLAT, 50, 16), policy).first_token_s.tolist() == [1.0, 10.0]


def test_the_row_admitted_last_is_preempted_and_computed_anew() -> None:
    """Two rows of 8 tokens in 5 blocks of 4: when both need a third, one is preempted and
    waits for the end of the other.
    """
    result = simulate(
        trace_of([(0, 8, 4, 0), (0, 8, 4, 0)]),
        VllmPolicy(prefix_caching=False),
        world(PagedEngine(FLAT, 5, 4)),
    )
    assert result.counters["evicted_percent"] == 50.0
    assert result.served.finish_s.tolist() == [4.0, 7.0]
    assert result.served.max_gap_s.tolist() == [1.0, 4.0]


def test_a_preempted_request_finds_what_is_left_of_its_blocks() -> None:
    law = replace(FLAT, base_s=0.0, token_s=(1.0,))  # a token takes a second
    rows = [(0, 8, 6, 0), (0, 8, 6, 0)]
    cold = served(rows, PagedEngine(law, 5, 4), VllmPolicy(prefix_caching=False))
    warm = served(rows, PagedEngine(law, 5, 4), VllmPolicy(prefix_caching=True))
    assert (
        cold.finish_s[1] - warm.finish_s[1] == 4.0
    )  # one of two blocks; the other was given to the first


def test_planning_ahead_admits_one_pass_later() -> None:
    law = replace(FLAT, host_s=0.5)
    rows = [(0, 8, 6, 0), (1.2, 8, 2, 0)]
    after = served(rows, PagedEngine(law, 50, 4), VllmPolicy())
    ahead = served(rows, PagedEngine(law, 50, 4, ahead=True), VllmPolicy())
    assert after.first_token_s.tolist() == [1.0, 2.5]
    assert after.finish_s[0] == 1.0 + 5 * 1.5
    assert ahead.first_token_s.tolist() == [1.0, 4.0]
    assert ahead.finish_s[0] == 6.0


def test_requests_are_dealt_to_engines_in_turn() -> None:
    result = simulate(
        trace_of([(0, 8, 4, 0)] * 3), VllmPolicy(max_num_seqs=1), world(PagedEngine(FLAT, 9, 4), 2)
    )
    assert result.served.finish_s.tolist() == [4.0, 4.0, 8.0]


def test_a_request_that_can_never_be_served_is_refused() -> None:
    policy = VllmPolicy(max_num_batched_tokens=128)
    result = simulate(
        trace_of([(0, 30, 7, 0), (0, 30, 7, 4), (0, 30, 6, 0)]),
        policy,
        world(PagedEngine(FLAT, 9, 4)),
    )
    (refusal,) = result.refusals
    assert refusal.request_id == "1"
    assert says(refusal.reason, "40", "36")
    assert result.served.ok.tolist() == [True, False, True]
    policy = VllmPolicy(max_num_batched_tokens=128, chunked_prefill=False)
    result = simulate(trace_of([(0, 120, 40, 0)]), policy, world(PagedEngine(FLAT, 90, 4)))
    (refusal,) = result.refusals
    assert says(refusal.reason, "159", "128")


def test_passes_outside_the_law_s_range_are_counted() -> None:
    engine = PagedEngine(FLAT, 90, 4, valid=PassRange(rows_max=1, tokens_max=64, cached_max=100))
    rows = [(0, 30, 10, 0), (20, 80, 2, 0), (40, 10, 10, 0), (40, 10, 10, 0)]
    found = [
        simulate(trace_of(rows[k:j]), VllmPolicy(), world(engine)).counters
        for k, j in ((0, 1), (1, 2), (2, 4))
    ]
    assert [one["extrapolated_batches_percent"] for one in found] == [0.0, 50.0, 100.0]


def test_a_world_without_the_law_of_passes_says_how_to_get_it() -> None:
    bare = World(unit_step(), ZetaMemory(100), 1, 100)
    with pytest.raises(InputError, match="'vllm'"):
        simulate(trace_of([(0, 1, 1, 0)]), VllmPolicy(), bare)


def test_a_slower_machine_takes_so_many_times_as_long() -> None:
    rows = [(0.0, 20, 9, 0), (0.0, 30, 5, 0)]
    once, twice = (
        served(rows, PagedEngine(LAW, 50, 4).slowed(k), VllmPolicy()) for k in (1.0, 2.0)
    )
    np.testing.assert_allclose(2 * once.finish_s, twice.finish_s)


def test_more_sequences_than_tokens_of_a_pass_are_refused() -> None:
    with pytest.raises(InputError, match=r"max_num_batched_tokens.*64.*max_num_seqs.*100"):
        VllmPolicy(max_num_seqs=100, max_num_batched_tokens=64)


@pytest.mark.parametrize("name", ["vllm", "slice"])
def test_a_fit_without_usable_memory_is_one_clear_line(name: str) -> None:
    engine = PagedEngine(LAW, 0, 4)
    memory = ZetaMemory(1, zeta=0.1)
    there = World(unit_step(), memory, 1, 100, paged=engine)
    policy = make_any(name, {})
    with pytest.raises(InputError, match=r"0 tokens.*KV cache"):
        simulate(Trace(np.zeros(1), np.array([3]), np.array([2]), np.array([2])), policy, there)
