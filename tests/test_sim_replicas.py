"""Replicas behind a router on virtual time: the same times as without a router where requests are
dealt in turn, and what each router sees.
"""

from dataclasses import replace

import numpy as np
import pytest
from test_sim_prefix import LAW, trace_of, world

from toolkit.errors import InputError
from toolkit.routing.routers import ROUTERS, make_router
from toolkit.sched.policies.past_future import PastFuturePolicy
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.api import simulate
from toolkit.sim.paged_engine import PagedEngine
from toolkit.sim.replicas import Routing
from toolkit.sim.world import WorldSettings
from toolkit.traces.types import SharedBlocks, Trace

POLICY = VllmPolicy(max_num_seqs=6, max_num_batched_tokens=64)


def made_up(seed: int, requests: int = 120, *, groups: int = 5, gap_s: float = 0.03) -> Trace:
    """Prompts of a few groups that share beginnings of several lengths."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(gap_s, requests))
    prompt = rng.integers(5, 60, requests)
    output = rng.integers(1, 25, requests)
    ids, fresh = [], 1_000
    for length in prompt.tolist():
        count, common = -(-length // 4), int(rng.integers(0, 12))
        group = int(rng.integers(groups))
        own = [group * 100 + k for k in range(min(common, length // 4))]
        while len(own) < count:
            own.append(fresh)
            fresh += 1
        ids.append(own)
    return trace_of(list(zip(arrival, prompt, output, strict=True)), ids=ids)


def same(one, other) -> None:
    for name in ("arrival_s", "first_token_s", "finish_s", "max_gap_s", "ok"):
        np.testing.assert_array_equal(getattr(one.served, name), getattr(other.served, name))
    assert one.counters == pytest.approx(other.counters, rel=1e-12)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
def test_round_robin_is_what_dealing_in_turn_is(ahead: bool, shares: bool, workers: int) -> None:
    for seed in range(6):
        trace = made_up(seed, gap_s=0.03 / workers)
        if not shares:
            trace = replace(trace, shared=None)
        there = world(PagedEngine(LAW, 30, 4, ahead), workers)
        routed = simulate(trace, POLICY, replace(there, routing=Routing()))
        same(routed, simulate(trace, POLICY, there))
        assert routed.counters["evicted_percent"] > 0


@pytest.mark.parametrize("ahead", [False, True])
def test_sessions_in_a_closed_loop_too(ahead: bool) -> None:
    rows, previous, prompt = [], [], 0
    for k in range(40):
        prompt = 12 if k % 4 == 0 else prompt + 15
        rows.append((0.1 * (k - k % 4), prompt, 7))
        previous.append(-1 if k % 4 == 0 else k - 1)
    trace = trace_of(rows, previous=previous, think_s=0.05)
    engine = PagedEngine(LAW, 60, 4, ahead, front_s=0.01, front_row_s=0.001)
    there = world(engine)
    routed = simulate(trace, POLICY, replace(there, routing=Routing()))
    same(routed, simulate(trace, POLICY, there))
    assert routed.counters["hit_percent"] > 30


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_serves_all_and_twice_the_same(name: str) -> None:
    trace = made_up(1, gap_s=0.01)
    routing = Routing(make_router(name, {}))
    there = replace(world(PagedEngine(LAW, 60, 4), 4), routing=routing)
    one, other = simulate(trace, POLICY, there), simulate(trace, POLICY, there)
    same(one, other)
    assert one.served.ok.all()


def test_a_router_by_prefix_hits_more_than_dealing_in_turn() -> None:
    trace = made_up(2, 400, groups=8, gap_s=0.02)
    there = world(PagedEngine(LAW, 40, 4), 4)
    found = {
        name: simulate(trace, POLICY, replace(there, routing=Routing(make_router(name, {}))))
        for name in ("round-robin", "prefix", "llm-d", "by-law")
    }
    rates = {name: result.counters["hit_percent"] for name, result in found.items()}
    assert min(rates["prefix"], rates["llm-d"], rates["by-law"]) > rates["round-robin"], rates


def test_reports_show_the_queue_and_the_cache() -> None:
    """A replica that is told to run nothing has a queue, which its reports show to the router."""
    trace = Trace(
        np.array([0.0, 0.0, 0.0, 0.5]),
        np.array([20, 20, 20, 20]),
        np.array([40, 40, 40, 5]),
        np.array([40, 40, 40, 5]),
        shared=SharedBlocks(4, np.tile(np.arange(5), 4), np.arange(0, 21, 5)),
    )
    policy = VllmPolicy(max_num_seqs=1, max_num_batched_tokens=64)
    routing = Routing(make_router("llm-d", {"prefix": 0.0, "kv": 0.0}), report_s=0.1)
    there = replace(world(PagedEngine(LAW, 60, 4), 2), routing=routing)
    result = simulate(trace, policy, there)
    waits = result.served.first_token_s - result.served.arrival_s
    assert result.served.ok.all()
    assert waits[3] < 0.5


def test_a_router_before_a_policy_that_routes_itself_is_refused() -> None:
    there = replace(world(PagedEngine(LAW, 40, 4)), routing=Routing())
    with pytest.raises(InputError, match="policy 'past-future' gives requests to workers itself"):
        simulate(made_up(0, 5), PastFuturePolicy(), there)


def test_the_world_s_setting_names_a_router() -> None:
    assert WorldSettings().routing is None
    routing = WorldSettings(replica_router="llm-d").routing
    assert routing is not None
    assert routing.router.name == "llm-d"
    with pytest.raises(InputError, match="replica_router is 'llmd'; it is one of in-turn, round"):
        WorldSettings(replica_router="llmd")
