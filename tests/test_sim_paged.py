"""The model of vLLM's scheduler against a real log, and itself without leaps."""

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
from toolkit.catalogue.releases import release_of
from toolkit.errors import InputError
from toolkit.estimators.laws import unit_step
from toolkit.estimators.memory import ZetaMemory
from toolkit.files.iterations import header_of, passes_of
from toolkit.laws.passes import PassRange
from toolkit.sched.policies import make_any
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.api import simulate
from toolkit.sim.paged_engine import PagedEngine
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


def test_planning_ahead_admits_one_pass_later() -> None:
    law = FLAT.with_terms({"host": 0.5})
    rows = [(0, 8, 6, 0), (1.2, 8, 2, 0)]
    after = served(rows, PagedEngine(law, 50, 4), VllmPolicy())
    ahead = served(rows, PagedEngine(law, 50, 4, ahead=True), VllmPolicy())
    assert after.first_token_s.tolist() == [1.0, 2.5]
    assert after.finish_s[0] == 1.0 + 5 * 1.5
    assert ahead.first_token_s.tolist() == [1.0, 4.0]
    assert ahead.finish_s[0] == 6.0


def test_a_limit_that_no_client_gives_is_lowered_to_what_is_left_behind_the_prompt() -> None:
    """As vLLM does; an output that does not fit is refused as before, and no limit of a client is
    changed.
    """
    engine = PagedEngine(FLAT, 8, 4)  # 32 tokens
    roomy = world(engine)  # 100 tokens where no limit is given

    def refusals(output: int, limit: int) -> int:
        trace = replace(trace_of([(0, 24, output)]), max_tokens=np.array([limit]))
        return len(simulate(trace, VllmPolicy(), roomy).refusals)

    assert refusals(output=4, limit=0) == 0
    assert refusals(output=20, limit=0) == 1
    assert refusals(output=4, limit=100) == 1


@pytest.mark.parametrize(("version", "first_s"), [("0.30.0", 3.0), ("0.31.0", 1.0), ("", 1.0)])
def test_before_0_31_a_request_that_is_alone_is_held_to_the_threshold(version, first_s) -> None:
    engine = PagedEngine(FLAT, 50, 4, release=release_of(version))
    alone = served([(0, 24, 2, 0)], engine, VllmPolicy(long_prefill_token_threshold=8))
    assert alone.first_token_s.tolist() == [first_s]


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
    narrow = PassRange(rows_max=1, tokens_max=64, cached_max=100)
    engine = PagedEngine(replace(FLAT, valid=narrow), 90, 4)
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
