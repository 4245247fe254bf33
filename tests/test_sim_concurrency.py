"""A fixed concurrency: N requests at once, and the next of the trace starts when any one ends."""

from dataclasses import replace

import numpy as np
import paged
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_sim_contract import CASES, world
from test_sim_replicas import POLICY, same

from benchmarks.common.samples import bilinear_law
from toolkit.errors import InputError
from toolkit.estimators.memory import ZetaMemory
from toolkit.routing.routers import make_router
from toolkit.routing.simple import RoundRobinRouter
from toolkit.sched.policies import make_policy
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.api import SimResult, simulate
from toolkit.sim.paged_engine import PagedEngine
from toolkit.sim.world import World
from toolkit.traces.types import Trace

LAW = paged.LAW
ENGINE = PagedEngine(LAW, 400, 4)


def some(count: int = 80, seed: int = 0, *, limit: int = 0) -> Trace:
    """Requests of various lengths, in an order that their times do not say."""
    rng = np.random.default_rng(seed)
    output = rng.integers(1, 25, count)
    limits = output if not limit else np.full(count, limit)
    return Trace(np.sort(rng.random(count)), rng.integers(5, 60, count), output, limits)


def check(result: SimResult, concurrency: int, delay_s: float = 0.0) -> None:
    """Requests start in order, each at the time when a place became free: the first places at once,
    the others when a client saw a request end.

    The mean client sees an end `delay_s` later, and none later than twice that.
    """
    served = result.served
    assert served.ok.all()
    starts_s = served.arrival_s
    assert (np.diff(starts_s) >= 0).all()
    free_s = np.sort(np.concatenate([np.zeros(concurrency), served.finish_s]))[: len(served)]
    np.testing.assert_allclose(starts_s, free_s, atol=delay_s + 1e-9)
    # the last ends are not all followed, so that their mean may be off by a few of these
    few_s = 2 * delay_s * concurrency / len(served)
    assert starts_s.mean() == pytest.approx(free_s.mean(), abs=few_s + 1e-9)
    assert result.concurrency == concurrency


def at_once(there: World, concurrency: int) -> World:
    return replace(there, concurrency=concurrency)


@pytest.mark.parametrize("case", CASES)
def test_our_policies_keep_so_many_requests_at_once(case: str) -> None:
    name, parameters = CASES[case]
    there = at_once(world(2), 7)
    check(simulate(some(limit=30), make_policy(name, parameters), there), 7)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("concurrency", [1, 5, 30])
def test_a_paged_engine_keeps_so_many_at_once(ahead: bool, concurrency: int) -> None:
    engine = replace(ENGINE, ahead=ahead)
    check(simulate(some(), POLICY, at_once(paged.world(engine), concurrency)), concurrency)


@pytest.mark.parametrize("router", ["round-robin", "least-requests", "by-law", "llm-d"])
def test_replicas_behind_a_router_share_one_line_of_requests(router: str) -> None:
    there = replace(paged.world(ENGINE, 3), router=make_router(router, {}))
    check(simulate(some(200), POLICY, at_once(there, 11)), 11)


def test_without_a_router_engines_get_requests_in_turn() -> None:
    there = at_once(paged.world(ENGINE, 3), 11)
    in_turn = simulate(some(200), POLICY, there)
    check(in_turn, 11)
    same(in_turn, simulate(some(200), POLICY, replace(there, router=RoundRobinRouter())))


@pytest.mark.parametrize("policy", ["slice", "sequence", "fcfs", "conservative", "mlfq"])
@pytest.mark.parametrize("front_s", [0.0, 0.02])
def test_the_next_starts_when_the_client_has_seen_the_last_token(
    policy: str, front_s: float
) -> None:
    there = replace(world(2), front_s=2 * front_s)
    result = simulate(some(limit=30), make_policy(policy, {}), at_once(there, 5))
    check(result, 5, delay_s=2 * front_s)


def test_a_paged_engine_s_front_delays_the_next_too() -> None:
    engine = replace(ENGINE, front_s=0.01)
    check(simulate(some(), POLICY, at_once(paged.world(engine), 5)), 5, delay_s=0.01)
    routed = replace(paged.world(engine, 2), router=RoundRobinRouter())
    check(simulate(some(), POLICY, at_once(routed, 5)), 5, delay_s=0.01)


def test_clients_see_the_ends_of_one_pass_one_after_the_other() -> None:
    """Passes of a second; three rows end with the second, and are seen 0.6 s later on average."""
    engine = PagedEngine(paged.FLAT, 50, 4, front_s=0.6)
    rows = [(0, 4, 2)] * 6
    found = simulate(paged.trace_of(rows), VllmPolicy(), at_once(paged.world(engine), 3)).served
    assert found.arrival_s[3:].tolist() == pytest.approx([2.2, 2.6, 3.0])


def test_an_early_row_of_a_batch_frees_its_place_at_once() -> None:
    """Two workers: one runs a batch of a short and a long row, and the other gets the next."""
    output = np.array([9, 2, 3, 3])
    trace = Trace(np.zeros(4), np.ones(4, dtype=int), output, output)
    law = bilinear_law((0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 1.0))
    there = World(law, ZetaMemory(1000), 1, 10, concurrency=2)
    served = simulate(trace, make_policy("sequence", {"batch_size": 2}), there).served
    short = served.finish_s[1]
    assert short < served.finish_s[0]
    assert served.arrival_s[2] == short, "its client sees the end, and sends the next"
    assert served.first_token_s[2] > served.finish_s[0], "which waits for the batch"


@pytest.mark.parametrize("policy", ["slice", "fcfs"])
def test_a_refused_request_frees_its_place(policy: str) -> None:
    trace = some(20, limit=30)
    trace.prompt_tokens[[0, 3, 19]] = 10**6
    found = simulate(trace, make_policy(policy, {}), at_once(world(1), 2))
    assert [one.request_id for one in found.refusals] == ["0", "3", "19"]
    assert int(found.served.ok.sum()) == 17


@pytest.mark.parametrize("workers", [1, 2])
def test_and_on_paged_engines_after_its_delay(workers: int) -> None:
    trace = some(20)
    trace.prompt_tokens[[0, 3, 19]] = 10**6
    engine = replace(ENGINE, front_s=0.5)
    found = simulate(trace, POLICY, at_once(paged.world(engine, workers), 2))
    assert {one.request_id for one in found.refusals} == {"0", "3", "19"}
    assert int(found.served.ok.sum()) == 17
    assert found.served.arrival_s[2] == 0.5


def test_a_request_that_is_given_up_frees_its_place() -> None:
    """Every batch runs out of memory: all requests are given up, none waits for ever."""
    there = replace(world(1), runs_out=lambda *_: True, concurrency=2)
    found = simulate(some(6, limit=30), make_policy("sequence", {}), there)
    assert len(found.refusals) == 6


@settings(max_examples=25, deadline=None)
@example(seed=0, concurrency=19, workers=1, case="mlfq, in chunks")
@example(seed=181, concurrency=17, workers=2, case="mlfq")  # an end while a cache is swapped
@given(
    seed=st.integers(0, 1000),
    concurrency=st.integers(1, 40),
    workers=st.integers(1, 3),
    case=st.sampled_from(sorted(CASES)),
)
def test_any_world(seed: int, concurrency: int, workers: int, case: str) -> None:
    name, parameters = CASES[case]
    there = at_once(world(workers), concurrency)
    result = simulate(some(40, seed, limit=30), make_policy(name, parameters), there)
    check(result, concurrency)


def test_the_trace_gives_only_the_order() -> None:
    trace = paged.trace_of([(0, 8, 9), (1, 20, 5), (2, 30, 2)], previous=[-1, 0, 1], think_s=2.0)
    engine = PagedEngine(paged.FLAT, 50, 4)
    there = at_once(paged.world(engine), 3)
    assert simulate(trace, VllmPolicy(), there).served.arrival_s.tolist() == [0.0, 0.0, 0.0]


def test_a_load_that_is_not_possible_is_refused() -> None:
    with pytest.raises(InputError):
        simulate(some(5, limit=30), make_policy("fcfs", {}), replace(world(1), concurrency=-1))
