"""Replicas behind a router on virtual time: the same times as of each alone, where requests are
dealt in turn, and what each router sees.
"""

from dataclasses import replace

import numpy as np
import pytest
from paged import LAW, trace_of, world

from toolkit.errors import InputError
from toolkit.routing.admission import LatencyLimits
from toolkit.routing.base import Router
from toolkit.routing.routers import ROUTERS, make_router
from toolkit.routing.simple import RoundRobinRouter
from toolkit.sched.policies.past_future import PastFuturePolicy
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim import replicas
from toolkit.sim.api import SimResult, simulate
from toolkit.sim.paged_engine import PagedEngine
from toolkit.sim.world import World, WorldSettings
from toolkit.traces.types import Trace

POLICY = VllmPolicy(max_num_seqs=6, max_num_batched_tokens=64)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A front for short prompts, and for passes of a few milliseconds."""
    monkeypatch.setattr(replicas, "BLOCK_TOKENS", 4)
    monkeypatch.setattr(replicas, "REPORT_EVERY_S", 0.1)


def made_up(seed: int, requests: int = 120, *, groups: int = 5, gap_s: float = 0.03) -> Trace:
    """Prompts of a few groups that share beginnings of several lengths."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(gap_s, requests))
    prompt = rng.integers(5, 60, requests)
    output = rng.integers(1, 25, requests)
    ids = []
    fresh = 1_000
    for length in prompt.tolist():
        count = -(-length // 4)
        common = int(rng.integers(0, 12))
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


def each_alone(trace: Trace, there: World, policy: VllmPolicy = POLICY) -> list[SimResult]:
    """Each engine with every so many-th request, in a world of its own."""
    alone = replace(there, workers=1)
    numbers = np.arange(len(trace))
    return [
        simulate(trace.take(numbers[k :: there.workers]), policy, alone)
        for k in range(there.workers)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("shares", [False, True])
def test_in_turn_each_engine_serves_as_it_does_alone(ahead: bool, shares: bool) -> None:
    for seed in range(2):
        trace = made_up(seed, gap_s=0.01)
        if not shares:
            trace = replace(trace, shared=None)
        there = world(PagedEngine(LAW, 30, 4, ahead), 3)
        found = simulate(trace, POLICY, there)
        assert found.counters["evicted_percent"] > 0
        for k, alone in enumerate(each_alone(trace, there)):
            for name in ("first_token_s", "finish_s", "max_gap_s", "ok"):
                own = getattr(found.served, name)[k::3]
                np.testing.assert_array_equal(own, getattr(alone.served, name))
        same(found, simulate(trace, POLICY, replace(there, router=RoundRobinRouter())))


@pytest.mark.parametrize("ahead", [False, True])
def test_without_drain_it_stops_at_the_last_admission(ahead: bool) -> None:
    there = world(PagedEngine(LAW, 30, 4, ahead), drain=False)
    trace = made_up(3)
    routed = simulate(trace, POLICY, replace(there, router=RoundRobinRouter()))
    same(routed, simulate(trace, POLICY, there))
    assert 0 < routed.counters["unfinished"] < len(trace)


@pytest.mark.parametrize("ahead", [False, True])
def test_sessions_in_a_closed_loop_too(ahead: bool) -> None:
    rows = []
    previous = []
    prompt = 0
    for k in range(40):
        prompt = 12 if k % 4 == 0 else prompt + 15
        rows.append((0.1 * (k - k % 4), prompt, 7))
        previous.append(-1 if k % 4 == 0 else k - 1)
    trace = trace_of(rows, previous=previous, think_s=0.05)
    engine = PagedEngine(LAW, 60, 4, ahead, front_s=0.01, front_row_s=0.001)
    there = world(engine)
    routed = simulate(trace, POLICY, replace(there, router=RoundRobinRouter()))
    same(routed, simulate(trace, POLICY, there))
    assert routed.counters["hit_percent"] > 30


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_serves_all_and_twice_the_same(name: str) -> None:
    trace = made_up(1, gap_s=0.01)
    there = replace(world(PagedEngine(LAW, 60, 4), 4), router=make_router(name, {}))
    one = simulate(trace, POLICY, there)
    other = simulate(trace, POLICY, there)
    same(one, other)
    assert one.served.ok.all()


def test_a_front_matches_by_larger_blocks_than_the_trace_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 15 tokens in blocks of 4, a front with blocks of 8 sees one: the hash of the second."""
    seen: list[tuple[int, ...]] = []

    class Spy(Router):
        def choose(self, request, view):
            seen.append(request.blocks)
            return view.routed % len(view.replicas)

    trace = trace_of([(0.0, 15, 3), (0.0, 16, 3)], ids=[[1, 2, 3, 4], [1, 2, 5, 6]])
    there = world(PagedEngine(LAW, 40, 4), 2)
    for block_tokens, blocks in ((2, (1, 2, 3)), (4, (1, 2, 3)), (8, (2,))):
        seen.clear()
        monkeypatch.setattr(replicas, "BLOCK_TOKENS", block_tokens)
        simulate(trace, POLICY, replace(there, router=Spy()))
        assert seen[0] == blocks
    assert seen[1] == (2, 6)


def test_a_router_by_prefix_hits_more_than_dealing_in_turn() -> None:
    trace = made_up(2, 400, groups=8, gap_s=0.02)
    there = world(PagedEngine(LAW, 40, 4), 4)
    found = {
        name: simulate(trace, POLICY, replace(there, router=make_router(name, {})))
        for name in ("round-robin", "dynamo", "llm-d", "by-law")
    }
    rates = {name: result.counters["hit_percent"] for name, result in found.items()}
    assert min(rates["dynamo"], rates["llm-d"], rates["by-law"]) > rates["round-robin"], rates


def test_a_router_before_a_policy_that_routes_itself_is_refused() -> None:
    there = replace(world(PagedEngine(LAW, 40, 4)), router=RoundRobinRouter())
    with pytest.raises(InputError, match="'past-future'"):
        simulate(made_up(0, 5), PastFuturePolicy(), there)


def test_the_world_s_setting_names_a_router() -> None:
    assert WorldSettings().front({}, {}) == (None, LatencyLimits())
    router, limits = WorldSettings(replica_router="llm-d").front({"queue": 3.0}, {})
    assert router == make_router("llm-d", {"queue": 3.0})
    assert limits == LatencyLimits()
    with pytest.raises(InputError, match=r"replica_router.*'llmd'"):
        WorldSettings(replica_router="llmd")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["round-robin", "by-law"])
def test_refusing_by_forecast_raises_goodput_in_an_overload(name: str) -> None:
    sla = {"ttft_p99_s": 0.4}
    there = world(PagedEngine(LAW, 60, 4), 3)
    found = {}
    for gap_s in (0.05, 0.001):
        for limits in (LatencyLimits(), LatencyLimits.of(sla)):
            front = replace(there, router=make_router(name, {}), limits=limits)
            result = simulate(made_up(4, 600, gap_s=gap_s), POLICY, front)
            found[gap_s, limits.ttft_s] = result.metrics(sla)
    assert found[0.05, 0.4]["goodput_rps"] == found[0.05, np.inf]["goodput_rps"]
    assert found[0.05, 0.4]["refused"] == 0
    without = found[0.001, np.inf]
    refusing = found[0.001, 0.4]
    assert refusing["refused"] > 50
    assert refusing["goodput_rps"] > 1.25 * without["goodput_rps"]
    assert refusing["ttft_p99_s"] < without["ttft_p99_s"]
