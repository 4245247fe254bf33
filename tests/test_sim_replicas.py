"""Replicas behind a router on virtual time: the same times as without a router where requests are
dealt in turn, and what each router sees.
"""

from dataclasses import replace

import numpy as np
import pytest
from paged import LAW, trace_of, world

from toolkit.errors import InputError
from toolkit.estimators.pipeline import PassTimes
from toolkit.routing.admission import LatencyLimits
from toolkit.routing.balancer import Balancer
from toolkit.routing.routers import ROUTERS, Router, make_router
from toolkit.routing.types import ReplicaTraits, RoutedRequest
from toolkit.sched.policies.past_future import PastFuturePolicy
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.api import simulate
from toolkit.sim.paged_engine import PagedEngine
from toolkit.sim.replicas import Routing
from toolkit.sim.world import WorldSettings
from toolkit.traces.types import Trace

POLICY = VllmPolicy(max_num_seqs=6, max_num_batched_tokens=64)


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


@pytest.mark.slow
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
def test_without_drain_it_stops_at_the_last_admission(ahead: bool) -> None:
    there = world(PagedEngine(LAW, 30, 4, ahead), drain=False)
    trace = made_up(3)
    routed = simulate(trace, POLICY, replace(there, routing=Routing()))
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
    routed = simulate(trace, POLICY, replace(there, routing=Routing()))
    same(routed, simulate(trace, POLICY, there))
    assert routed.counters["hit_percent"] > 30


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_serves_all_and_twice_the_same(name: str) -> None:
    trace = made_up(1, gap_s=0.01)
    routing = Routing(make_router(name, {}))
    there = replace(world(PagedEngine(LAW, 60, 4), 4), routing=routing)
    one = simulate(trace, POLICY, there)
    other = simulate(trace, POLICY, there)
    same(one, other)
    assert one.served.ok.all()


def test_a_front_matches_by_larger_blocks_than_the_trace_has() -> None:
    """Of 15 tokens in blocks of 4, a front with blocks of 8 sees one: the hash of the second."""
    seen: list[tuple[int, ...]] = []

    class Spy(Router):
        def choose(self, request, view):
            seen.append(request.blocks)
            return view.routed % len(view.replicas)

    trace = trace_of([(0.0, 15, 3), (0.0, 16, 3)], ids=[[1, 2, 3, 4], [1, 2, 5, 6]])
    there = world(PagedEngine(LAW, 40, 4), 2)
    for block_tokens, blocks in ((0, (1, 2, 3)), (4, (1, 2, 3)), (8, (2,))):
        seen.clear()
        simulate(trace, POLICY, replace(there, routing=Routing(Spy(), block_tokens=block_tokens)))
        assert seen[0] == blocks
    assert seen[1] == (2, 6)


def test_a_router_by_prefix_hits_more_than_dealing_in_turn() -> None:
    trace = made_up(2, 400, groups=8, gap_s=0.02)
    there = world(PagedEngine(LAW, 40, 4), 4)
    found = {
        name: simulate(trace, POLICY, replace(there, routing=Routing(make_router(name, {}))))
        for name in ("round-robin", "dynamo", "llm-d", "by-law")
    }
    rates = {name: result.counters["hit_percent"] for name, result in found.items()}
    assert min(rates["dynamo"], rates["llm-d"], rates["by-law"]) > rates["round-robin"], rates


def test_a_router_reads_reports_that_are_as_old_as_they_are_live() -> None:
    """Two long requests on one replica each, then a third: with fresh reports the fourth goes where
    nothing waits; without reports the router takes the rows that it sent for running.
    """
    rows = [(0.0, 20, 200), (0.0, 20, 200), (0.01, 20, 200), (0.3, 20, 5)]
    policy = VllmPolicy(max_num_seqs=1, max_num_batched_tokens=64)
    homes = {}
    for report_s in (0.1, 1e9):
        routing = Routing(make_router("llm-d", {"prefix": 0.0, "kv": 0.0}), report_s=report_s)
        seen: list[list[int]] = []
        choose = type(routing.router).choose

        def spy(router, request, view, choose=choose, seen=seen):
            seen.append([r.report.waiting if r.report else -1 for r in view.replicas])
            return choose(router, request, view)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(routing.router), "choose", spy)
            there = replace(world(PagedEngine(LAW, 60, 4), 2), routing=routing)
            assert simulate(trace_of(rows), policy, there).served.ok.all()
        homes[report_s] = seen[-1]
    assert sorted(homes[0.1]) == [0, 1]
    assert homes[1e9] == [-1, -1]


def test_a_router_before_a_policy_that_routes_itself_is_refused() -> None:
    there = replace(world(PagedEngine(LAW, 40, 4)), routing=Routing())
    with pytest.raises(InputError, match="'past-future'"):
        simulate(made_up(0, 5), PastFuturePolicy(), there)


def test_the_world_s_setting_names_a_router() -> None:
    assert WorldSettings().routing({}) is None
    routing = WorldSettings(replica_router="llm-d").routing({"queue": 3.0})
    assert routing is not None
    assert routing.router.name == "llm-d"
    with pytest.raises(InputError, match=r"replica_router.*'llmd'"):
        WorldSettings(replica_router="llmd")


def test_reports_come_as_late_as_they_are_live() -> None:
    trace = made_up(3, gap_s=0.01)
    found = []
    for age_s in (0.0, 5.0):
        routing = Routing(make_router("llm-d", {}), report_age_s=age_s)
        there = replace(world(PagedEngine(LAW, 60, 4), 4), routing=routing)
        found.append(simulate(trace, POLICY, there))
    assert not np.array_equal(found[0].served.finish_s, found[1].served.finish_s)


def test_the_law_s_router_makes_few_requests_late() -> None:
    """Two replicas decode; on one of them the rows are late anyway. A prompt that would stall the
    rows goes there; without targets it goes where fewer rows lose time.
    """
    law = PassTimes(LAW)
    traits = ReplicaTraits(10_000, 2048, 64, law)
    long = law.pass_s(4, 80, 1, 1_500, 1e6)
    homes = {}
    for gap_s in (0.0, 0.9 * long):
        balancer = Balancer(make_router("by-law", {"gap_s": gap_s, "work": 0.0}), [traits] * 2)
        for k in range(8):  # 2 to replica 0, 6 to replica 1
            where = (1,) if k < 2 else (0,)
            balancer.route(RoutedRequest(str(k), 20, 50), 0.0, where)
            balancer.first_token(str(k))
        balancer.replicas[1].in_time = 0
        homes[gap_s] = balancer.route(RoutedRequest("long", 1_500, 50), 0.1)
    assert list(homes.values()) == [0, 1]


@pytest.mark.parametrize("target", ["", "gap_s"])
def test_the_law_s_router_prices_the_cache_before_a_chunk(target: str) -> None:
    """One replica has the prompt but its end, and rows that decode; another has to compute it all.
    Where reading a cached token costs more than computing one, or makes the gap too long, the
    request goes to the other.
    """
    homes = {}
    for behind_s in (0.0, 1e-4 if target else 0.01):
        law = PassTimes(replace(LAW, behind_s=behind_s))
        given = {"gap_s": law.pass_s(2, 2_000, 1, 4, 4_000) * 1.5} if target else {}
        traits = ReplicaTraits(10_000, 2048, 64, law)
        front = Balancer(make_router("by-law", given), [traits] * 2, block_tokens=4)
        front.route(RoutedRequest("first", 800, 50, tuple(range(200))), 0.0, (1,))
        front.first_token("first")
        homes[behind_s] = front.route(RoutedRequest("next", 804, 50, tuple(range(201))), 0.1)
    assert list(homes.values()) == [0, 1]


class Counted(PassTimes):
    """A law that knows whether it was asked."""

    asked = False

    def pass_s(self, decodes, decode_cached, chunks, new_tokens, attended):
        self.asked = True
        return super().pass_s(decodes, decode_cached, chunks, new_tokens, attended)


def test_the_law_finds_the_replica_with_the_prompt() -> None:
    laws = [Counted(LAW) for _ in range(64)]
    traits = [ReplicaTraits(10_000, 2048, 64, law) for law in laws]
    balancer = Balancer(make_router("by-law", {}), traits, block_tokens=4)
    blocks = tuple(range(20))
    balancer.route(RoutedRequest("first", 80, 5, blocks), 0.0, [k for k in range(64) if k != 41])
    balancer.first_token("first")
    for law in laws:
        law.asked = False
    assert balancer.route(RoutedRequest("again", 80, 5, blocks), 1.0) == 41
    assert 4 <= sum(law.asked for law in laws) <= 14


@pytest.mark.slow
@pytest.mark.parametrize("name", ["round-robin", "by-law"])
def test_refusing_by_forecast_raises_goodput_in_an_overload(name: str) -> None:
    sla = {"ttft_p99_s": 0.4}
    there = world(PagedEngine(LAW, 60, 4), 3)
    found = {}
    for gap_s in (0.05, 0.001):
        for limits in (LatencyLimits(), LatencyLimits.of(sla)):
            routing = Routing(make_router(name, {}), limits=limits)
            result = simulate(made_up(4, 600, gap_s=gap_s), POLICY, replace(there, routing=routing))
            found[gap_s, limits.ttft_s] = result.metrics(sla)
    assert found[0.05, 0.4]["goodput_rps"] == found[0.05, np.inf]["goodput_rps"]
    assert found[0.05, 0.4]["refused"] == 0
    without = found[0.001, np.inf]
    refusing = found[0.001, 0.4]
    assert refusing["refused"] > 50
    assert refusing["goodput_rps"] > 1.25 * without["goodput_rps"]
    assert refusing["ttft_p99_s"] < without["ttft_p99_s"]
