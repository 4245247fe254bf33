"""Prompts that share blocks in the simulator's vLLM: against a plain model of the same scheduler,
block by block, against passes of vLLM's own schedulers, and by hand.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from paged import FLAT, LAW, pass_by_pass, same_times, trace_of, world
from plain_blocks import PlainScheduler

from benchmarks.engines.workloads import make_case
from toolkit.backends.vllm.conformance import modelled
from toolkit.backends.vllm.conformance.cases import Case
from toolkit.backends.vllm.conformance.modelled import passes_of_case
from toolkit.estimators.laws import unit_step
from toolkit.estimators.memory import ZetaMemory
from toolkit.sched.policies import make_policy
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.api import simulate
from toolkit.sim.kv_cache import BlockPool
from toolkit.sim.paged_engine import PagedEngine
from toolkit.sim.vllm import VllmScheduler
from toolkit.sim.world import World
from toolkit.traces.types import Trace

DATA = Path(__file__).parent / "data"


def run(trace: Trace, blocks: int = 50, policy: VllmPolicy | None = None, **more):
    engine = PagedEngine(FLAT, blocks, 4)
    return simulate(trace, policy or VllmPolicy(), world(engine, **more))


def free_blocks(pool: BlockPool) -> list[int]:
    """The registered free blocks, by their places in their requests, in the order of eviction."""
    found = []
    run = pool._queue.after
    while run is not pool._queue:
        found += range(run.stop - 1, run.first - 1, -1)
        run = run.after
    return found


@pytest.mark.slow
def test_runs_of_blocks_do_what_blocks_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass, what it finds, and the order in which free blocks will be given out."""
    step = modelled.step_of
    queues = []

    def recorded(case: Case, scheduler: VllmScheduler):
        found = step(case, scheduler)
        if case["prefix_caching"] and (found["rows"] or found["preempted"]):
            queues.append(free_blocks(scheduler.pool))
        return found

    monkeypatch.setattr(modelled, "step_of", recorded)
    preempted = hits = 0
    for seed in range(100):
        case = make_case(seed)
        plain = PlainScheduler(case)
        theirs = plain.run()
        queues.clear()
        assert passes_of_case(case) == theirs, seed
        if queues:
            size = case["block_tokens"]
            assert queues == [[len(key) // size - 1 for key in one] for one in plain.queues], seed
        preempted += sum(len(one["preempted"]) for one in theirs)
        hits += sum(one["found"][1] for one in theirs)
    assert preempted > 10
    assert hits > 1000


@pytest.mark.parametrize("number", range(6))
def test_shared_passes_are_those_of_vllm_s_schedulers(number: int) -> None:
    """As a child of `llmctl vllm-check` found them with vLLM 0.32.0: both schedulers,
    blocks of prompts, sessions in open and closed loop, preemptions.
    """
    case, theirs = json.loads((DATA / "vllm-0.32.0-shared.json").read_text())[number]
    assert passes_of_case(case) == theirs
    assert PlainScheduler(case).run() == theirs


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("closed", [False, True])
def test_leaps_change_nothing_where_prompts_are_shared(ahead: bool, closed: bool) -> None:
    seen = 0.0
    for seed in range(16):
        case = make_case(seed)
        if case["block_tokens"] != 4:
            continue
        rows = [(0.02 * k, one[1], one[2]) for k, one in enumerate(case["requests"])]
        before = case["previous"]
        trace = trace_of(
            rows, ids=case["ids"], size=case["shared_tokens"], previous=before, think_s=0.05
        )
        policy = VllmPolicy(max_num_seqs=4, max_num_batched_tokens=32)
        there = world(PagedEngine(LAW, case["blocks"], 4, ahead), closed_loop=closed)
        leaping = simulate(trace, policy, there)
        with pass_by_pass():
            stepping = simulate(trace, policy, there)
        same_times(leaping, stepping)
        for name in ("hit_tokens", "query_tokens", "evicted_percent", "rounds"):
            assert leaping.counters[name] == stepping.counters[name], seed
        seen += leaping.counters["hit_tokens"]
    assert seen > 100


def test_a_shared_prompt_is_computed_once_but_for_its_last_block() -> None:
    """16 tokens in 4 blocks: the second finds 3 of them, since its last token must be computed."""
    found = run(
        trace_of(
            [(0, 16, 2), (10, 16, 2), (20, 18, 2)],
            ids=[[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3, 4]],
        )
    )
    assert found.counters["query_tokens"] == 50
    assert found.counters["hit_tokens"] == 12 + 16
    assert found.counters["hit_percent"] == pytest.approx(56.0)
    assert found.counters["computed_prompt_tokens"] == 50 - 28
    off = run(
        trace_of([(0, 16, 2), (10, 16, 2)], ids=[[0, 1, 2, 3]] * 2),
        policy=VllmPolicy(prefix_caching=False),
    )
    assert off.counters["hit_tokens"] == 0
    assert off.counters["computed_prompt_tokens"] == 32


def test_an_evicted_block_is_not_found_again() -> None:
    """The cache holds 10 blocks. The first request leaves 5 full ones, of which the second, with
    8 blocks, evicts the last 3.
    """
    rows = [(0, 20, 2), (10, 31, 2), (20, 24, 2)]
    found = run(trace_of(rows, ids=[range(5), range(10, 18), [*range(5), 30]]), blocks=10)
    assert found.counters["hit_tokens"] == 8


def test_in_a_closed_loop_a_turn_comes_after_the_turn_before() -> None:
    """Passes take a second. The first turn leaves 16 known tokens, the second 24."""
    trace = trace_of([(0, 8, 9), (1, 20, 5), (2, 30, 2)], previous=[-1, 0, 1], think_s=2.0)
    closed = run(trace)
    assert closed.served.arrival_s.tolist() == [0.0, 11.0, 18.0]
    assert closed.served.first_token_s.tolist() == [1.0, 12.0, 19.0]
    assert closed.counters["hit_tokens"] == 16 + 24
    opened = run(trace, closed_loop=False)
    assert opened.served.arrival_s.tolist() == [0.0, 1.0, 2.0]
    assert opened.counters["hit_tokens"] == 8 + 20, "the turns before still run"


def test_a_turn_comes_when_its_client_has_seen_the_answer() -> None:
    engine = PagedEngine(FLAT, 50, 4, front_s=0.25, front_row_s=0.5)
    trace = trace_of([(0, 8, 3), (0, 12, 1)], previous=[-1, 0], think_s=1.0)
    found = simulate(trace, VllmPolicy(), world(engine)).served
    assert found.arrival_s.tolist() == [0.0, 3.0 + 0.25 + 0.5 + 1.0]


def test_a_session_goes_on_after_a_turn_that_was_refused() -> None:
    trace = trace_of([(0, 8, 3), (0, 300, 1), (0, 12, 1)], previous=[-1, 0, 1], think_s=1.0)
    found = run(trace)
    assert [one.request_id for one in found.refusals] == ["1"]
    assert found.served.ok.tolist() == [True, False, True]
    assert found.served.arrival_s.tolist() == [0.0, 4.0, 5.0]


def test_the_turns_of_a_session_go_to_one_engine() -> None:
    rows = [(0, 16, 2), (0, 16, 2), (0, 24, 2), (0, 24, 2)]
    before = [-1, -1, 0, 1]
    trace = trace_of(rows, previous=before)
    one = run(trace)
    two = run(trace, workers=2)
    assert one.counters["hit_tokens"] == two.counters["hit_tokens"] == 32
    assert run(replace(trace, sessions=None), workers=2).counters.get("hit_tokens") is None


@pytest.mark.parametrize("policy", ["conservative", "slice", "fcfs", "mlfq"])
def test_our_policies_serve_the_same_closed_loop(policy: str) -> None:
    trace = trace_of([(0, 8, 9), (1, 20, 5), (2, 30, 2)], previous=[-1, 0, 1], think_s=2.0)
    found = simulate(trace, make_policy(policy, {}), World(unit_step(), ZetaMemory(1000), 1, 100))
    served = found.served
    assert served.ok.all()
    assert served.arrival_s.tolist() == [0.0, *(served.finish_s[:2] + 2.0).tolist()]
    assert "hit_percent" not in found.counters


def test_our_policies_go_on_after_a_refused_turn() -> None:
    trace = trace_of([(0, 8, 3), (0, 3000, 1), (0, 12, 9)], previous=[-1, 0, 1], think_s=1.0)
    there = World(unit_step(), ZetaMemory(1000), 1, 100)
    found = simulate(trace, make_policy("fcfs", {}), there)
    assert found.served.ok.tolist() == [True, False, True]
    assert found.served.arrival_s[2] == found.served.finish_s[0] + 2.0
    stopped = simulate(trace, make_policy("conservative", {}), replace(there, drain=False))
    assert stopped.counters["unfinished"] == 1
