"""Replicas that come and go on virtual time."""

import math
from dataclasses import replace

import numpy as np
import pytest
from paged import LAW, trace_of, world

from toolkit.errors import InputError
from toolkit.files.recipe import ScaleSpec
from toolkit.routing.routers import make_router
from toolkit.scaling.autoscaler import Autoscaler, ScalingRule
from toolkit.scaling.behaviour import Behaviour
from toolkit.scaling.hpa import HpaRule
from toolkit.scaling.rules import SETTLED
from toolkit.scaling.static import StaticRule
from toolkit.scaling.types import FleetView
from toolkit.sched.policies.past_future import PastFuturePolicy
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.api import SimResult, simulate
from toolkit.sim.fleet import Fleet
from toolkit.sim.paged_engine import PagedEngine
from toolkit.traces.types import Trace

POLICY = VllmPolicy(max_num_seqs=6, max_num_batched_tokens=64)
AT_ONCE = Behaviour(**SETTLED)  # type: ignore[arg-type]


class PlannedRule(StaticRule):
    """Wants a number from a time on."""

    steps = ((0.0, 1),)

    def decide(self, view: FleetView) -> int:
        return [number for at_s, number in self.steps if at_s <= view.now_s][-1]


def planned(*steps: tuple[float, int]) -> StaticRule:
    made = type("Planned", (PlannedRule,), {"steps": steps})
    return made()


def fleet(rule: StaticRule | HpaRule, free: float = math.inf, **changed: object) -> Fleet:
    scaling = ScalingRule(rule, AT_ONCE, 0, 9, scrape_s=0.5, poll_s=0.5)
    return Fleet(scaling, ScaleSpec(**{"start_s": [3.0], **changed}), free)


def even(requests: int, gap_s: float, output: int = 12) -> Trace:
    return trace_of([(gap_s * k, 20, output) for k in range(requests)])


def served(trace: Trace, under: Fleet, begin: int = 1, router: str = "least-requests") -> SimResult:
    engine = PagedEngine(LAW, 60, 4, False)
    there = world(engine, begin)
    return simulate(trace, POLICY, replace(there, router=make_router(router, {}), fleet=under))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("router", ["round-robin", "least-requests", "llm-d"])
def test_a_static_fleet_is_as_many_replicas(ahead: bool, workers: int, router: str) -> None:
    rng = np.random.default_rng(workers)
    arrival = np.cumsum(rng.exponential(0.05 / workers, 150))
    rows = zip(arrival, rng.integers(5, 60, 150), rng.integers(1, 25, 150), strict=True)
    trace = trace_of(list(rows))
    engine = PagedEngine(LAW, 30, 4, ahead)
    there = replace(world(engine, workers), router=make_router(router, {}))
    fixed = simulate(trace, POLICY, there)
    scaled = simulate(trace, POLICY, replace(there, fleet=fleet(StaticRule(workers))))
    for name in ("arrival_s", "first_token_s", "finish_s", "max_gap_s", "ok"):
        np.testing.assert_array_equal(getattr(fixed.served, name), getattr(scaled.served, name))
    assert scaled.fleet is not None
    assert scaled.fleet.mean(("ready",)) == pytest.approx(workers)
    assert scaled.fleet.replica_s() == pytest.approx(
        workers * (scaled.fleet.end_s - scaled.fleet.begin_s)
    )


def test_a_replica_starts_serves_drains_and_is_gone() -> None:
    result = served(even(200, 0.1), fleet(planned((0, 1), (4, 2), (12, 1))))
    log = result.fleet
    assert log is not None
    states = [(change.state, change.place) for change in log.changes]
    assert states[:4] == [("ready", 0), ("starting", 1), ("ready", 1), ("draining", 1)]
    assert states[4] == ("gone", 1)
    starting, ready, draining, gone = (change.at_s for change in log.changes[1:5])
    assert starting == pytest.approx(4.0)
    assert ready == pytest.approx(7.0)
    assert draining == pytest.approx(12.0)
    assert draining < gone < 13.0
    assert result.served.ok.all()
    # paid from its start to its end
    own_s = gone - starting
    assert log.replica_s() == pytest.approx(own_s + log.end_s - log.begin_s)
    assert result.metrics({})["replica_starts"] == 1.0


def test_a_new_replica_has_an_empty_cache() -> None:
    ids = [[1, 2, 3, 4, 5]] * 60
    trace = trace_of([(0.2 * k, 20, 6) for k in range(60)], ids=ids)
    policy = replace(POLICY, prefix_caching=True)
    there = world(PagedEngine(LAW, 60, 4, False), 1)
    hits = []
    for rule in (planned((0, 1)), planned((0, 1), (2, 2), (6, 1), (7, 2))):
        result = simulate(trace, policy, replace(there, fleet=fleet(rule)))
        hits.append(result.counters["hit_tokens"])
    assert hits[1] < hits[0]


def test_without_a_replica_requests_wait_before_the_router() -> None:
    result = served(even(20, 0.1), fleet(planned((0, 0), (1, 1))), 0)
    assert result.served.ok.all()
    assert result.served.first_token_s.min() > 4.0  # decided at 1 s, ready 3 s later


def test_no_replica_ever_leaves_the_requests_unserved() -> None:
    result = served(even(5, 0.1), fleet(planned((0, 0))), 0)
    assert not result.served.ok.any()
    assert result.metrics({})["failed"] == 5.0


def test_what_waits_before_the_router_goes_to_a_new_replica() -> None:
    burst = trace_of([(0.0, 20, 60)] * 240)
    rule = planned((0, 1), (1, 4))
    bound = served(burst, fleet(rule))
    held = served(burst, fleet(rule, replica_requests=6))
    assert held.served.ok.all()
    assert bound.served.ok.all()
    # bound to the first replica, no later one gets any
    assert held.served.finish_s.max() < 0.6 * bound.served.finish_s.max()


def test_a_drain_that_lasts_too_long_loses_its_requests() -> None:
    burst = trace_of([(0.0, 20, 60)] * 160 + [(20.0, 20, 5)])
    result = served(burst, fleet(planned((0, 2), (0.5, 1)), drain_s=1.0), 2)
    assert result.fleet is not None
    assert 0 < result.fleet.lost < 160
    assert int((~result.served.ok).sum()) == result.fleet.lost
    patient = served(burst, fleet(planned((0, 2), (0.5, 1))), 2)
    assert patient.served.ok.all()


def test_scarce_gpus_hold_replicas_back() -> None:
    result = served(even(200, 0.1), fleet(planned((0, 1), (2, 5), (10, 1), (11, 4)), free=3))
    assert result.fleet is not None
    assert result.fleet.most(("starting", "ready", "draining")) == 3
    assert max(point.wanted for point in result.fleet.points) == 5


def test_a_place_that_ran_before_starts_warm() -> None:
    rule = planned((0, 1), (2, 2), (8, 1), (10, 2))
    result = served(even(200, 0.1), fleet(rule, warm_start_s=[1.0]))
    assert result.fleet is not None
    at = [change.at_s for change in result.fleet.changes if change.place == 1]
    states = [change.state for change in result.fleet.changes if change.place == 1]
    begun = [k for k, state in enumerate(states) if state == "starting"]
    assert [at[k + 1] - at[k] for k in begun] == pytest.approx([3.0, 1.0])


def test_a_closed_loop_follows_lost_and_served_requests() -> None:
    there = replace(world(PagedEngine(LAW, 60, 4, False), 2), concurrency=8)
    under = fleet(planned((0, 2), (1, 1), (4, 3)), drain_s=0.2)
    result = simulate(even(120, 0.0), POLICY, replace(there, fleet=under))
    assert result.fleet is not None
    assert int(result.served.ok.sum()) == 120 - result.fleet.lost


def test_a_rule_that_swings_is_named_with_its_period() -> None:
    steps = [(10.0 * k, 1 + k % 2) for k in range(40)]
    swings = served(even(4000, 0.1), fleet(planned(*steps))).fleet
    settles = served(even(4000, 0.1), fleet(planned((0, 1), (50, 2), (300, 1)))).fleet
    assert swings is not None
    assert settles is not None
    assert swings.period_s() == pytest.approx(20.0, rel=0.1)
    assert settles.period_s() is None


def test_its_log_of_samples_replays() -> None:
    rule = HpaRule(metric="requests", target=6.0)
    burst = trace_of([(0.0, 20, 60)] * 40 + [(6.0 + 0.1 * k, 20, 12) for k in range(100)])
    under = fleet(rule)
    taken = []

    class Recording(Autoscaler):
        def step(self, now_s, ready, sample):  # type: ignore[no-untyped-def]
            decided = super().step(now_s, ready, sample)
            latest = self.history.latest
            taken.append((now_s, ready, latest, self.wanted))
            return decided

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("toolkit.sim.fleet.Autoscaler", Recording)
        result = served(burst, under)
    assert result.fleet is not None
    assert len({wanted for *_, wanted in taken}) > 2
    again = Autoscaler(under.scaling, 1, result.fleet.begin_s)
    for now_s, ready, latest, wanted in taken:
        again.step(now_s, ready, lambda latest=latest: latest)
        assert again.wanted == wanted


def test_only_servers_of_their_own_have_replicas_that_come_and_go() -> None:
    there = replace(world(PagedEngine(LAW, 60, 4, False), 1), fleet=fleet(StaticRule()))
    with pytest.raises(InputError):
        simulate(even(5, 0.1), PastFuturePolicy(), there)
