"""Passes under way: a plain form of vLLM's loop, today's results where launches cost nothing,
leaps, reports and replicas.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import pass_by_pass, same_times, trace_of, world
from plain_passes import serve
from test_sim_paged import small
from test_sim_replicas import each_alone, made_up

from toolkit.laws.passes import GraphSettings, PassLaw
from toolkit.routing.balancer import Balancer
from toolkit.routing.routers import make_router
from toolkit.routing.simple import RoundRobinRouter
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim import replicas
from toolkit.sim.api import simulate
from toolkit.sim.flight import steps_before, stretch_s
from toolkit.sim.paged_engine import PagedEngine

# Graphs of up to 4 tokens. A graph of a row takes 3 ms to launch and 5 ms on the GPU; a prompt of
# 10 tokens takes 20 ms to launch, and as long on the GPU as its launch.
GRAPHS = GraphSettings("FULL_DECODE_ONLY", (1, 2, 4))
PLAIN = PassLaw(
    {
        "pass_read": 5e-3,
        "token_arithmetic": 1e-3,
        "graph": 3e-3,
        "piece": 2e-3,
        "eager": 20e-3,
    },
    graphs=GRAPHS,
)
LAW = PLAIN.with_terms(
    {
        "token_alone": 1.1e-4,
        "cached_alone": 2.3e-5,
        "attended": 1.7e-6,
        "cached_beside": 3.1e-5,
        "graph_row": 2.9e-4,
    }
)
FLAGS = VllmPolicy(max_num_seqs=6, max_num_batched_tokens=64)


def some(most_s: float):
    """Seconds without a simple ratio to others: no request comes just when a pass is planned."""
    return st.integers(0, 20).map(lambda k: most_s * (k / 20.0) ** 1.7)


laws = st.builds(
    PassLaw,
    st.fixed_dictionaries(
        {
            "pass_read": some(6.1e-3),
            "token_alone": some(2.03e-4),
            "cached_alone": some(3.07e-5),
            "token_arithmetic": some(5.03e-4),
            "attended": some(1.07e-6),
            "cached_beside": some(5.9e-5),
            "graph": some(7.1e-3),
            "graph_row": some(3.01e-4),
            "piece": some(5.7e-3),
            "piece_row": some(2.09e-4),
            "eager": some(2.11e-2),
            "eager_chunk": some(1.03e-3),
        }
    ).filter(lambda terms: terms["pass_read"] + terms["graph"] > 0),
    graphs=st.builds(
        GraphSettings,
        st.sampled_from(["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]),
        st.sampled_from([(), (1, 2, 4), (2, 8, 64)]),
        st.booleans(),
    ),
    spread=st.sampled_from([(), (0.6, 1.3, 1.1), (0.2, 1.8)]),
)
flags = st.builds(
    VllmPolicy,
    max_num_seqs=st.integers(1, 8),
    max_num_batched_tokens=st.integers(8, 64),
    prefix_caching=st.booleans(),
)


def spaced(rows):
    """The rows in order of arrival, no two at once, at times without a simple ratio to others."""
    ordered = sorted(rows, key=lambda row: row[0])
    return [
        (0.2 * arrival + 1.234e-4 * (k + 1) ** 0.83, prompt, output, more)
        for k, (arrival, prompt, output, more) in enumerate(ordered)
    ]


def engine_of(law, depth: int = 2, blocks: int = 30) -> PagedEngine:
    return PagedEngine(law, blocks, 4, ahead=depth > 1)


@pytest.mark.slow
@given(rows=small, policy=flags, law=laws, depth=st.sampled_from([1, 2]))
def test_every_token_comes_when_vllm_s_loop_hands_it_out(rows, policy, law, depth) -> None:
    """With queues of both depths, launches that limit and a GPU that limits, ends that are known
    and unknown, preemption, and requests that come within a launch.
    """
    rows = spaced(rows)
    times = serve(rows, policy, law, 30, 4, depth)
    result = simulate(trace_of(rows), policy, world(engine_of(law, depth)))
    served = result.served
    assert served.ok.all()
    near = {"rtol": 0, "atol": 1e-9}
    np.testing.assert_allclose(served.first_token_s, [one[0] for one in times], **near)
    np.testing.assert_allclose(served.finish_s, [one[-1] for one in times], **near)
    gaps = [[after - before for before, after in pairwise(one)] for one in times]
    np.testing.assert_allclose(served.max_gap_s, [max(one, default=0.0) for one in gaps], **near)
    every = [gap for one in gaps for gap in one]
    if every:
        assert result.counters["itl_mean_s"] == pytest.approx(np.mean(every), abs=1e-9)


@pytest.mark.slow
@given(rows=small, policy=flags, law=laws)
@settings(deadline=None)
def test_leaps_change_nothing(rows, policy, law) -> None:
    rows = spaced(rows)
    leaping = simulate(trace_of(rows), policy, world(engine_of(law)))
    with pass_by_pass():
        stepping = simulate(trace_of(rows), policy, world(engine_of(law)))
    same_times(leaping, stepping)
    # others are not the same: percentiles are of stretches of gaps, memory is a mean over a leap
    for name in ("evicted_percent", "rounds", "itl_mean_s", "utilisation_percent"):
        one = leaping.counters.get(name, 0.0)
        other = stepping.counters.get(name, 0.0)
        assert one == pytest.approx(other, rel=1e-6, abs=1e-9)


@pytest.mark.slow
@given(rows=small, policy=flags, routed=st.booleans(), apart=st.booleans())
@settings(deadline=None)
def test_where_launches_cost_nothing_a_pass_is_all_that_counts(rows, policy, routed, apart) -> None:
    """The same law in both forms, alone and behind a router that reads reports."""
    pipeline = PassLaw(
        {
            "pass_read": 2.1e-3,
            "token_alone": 2e-4,
            "cached_alone": 1e-6,
            "token_arithmetic": 3e-3,  # chunks take longer than reading does
            "attended": 1e-7,
            "cached_beside": 1e-6,
        },
        graphs=GraphSettings("FULL", (), apart),
    )
    steps = replace(pipeline, graphs=None)
    more = {"router": make_router("llm-d", {})} if routed else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "REPORT_EVERY_S", 0.01)
        one, other = (
            simulate(trace_of(spaced(rows)), policy, world(engine_of(law), 1 + routed, **more))
            for law in (pipeline, steps)
        )
    same_times(one, other, atol=1e-11)


def times_of(rows, law, depth: int = 2, **more):
    return simulate(trace_of(rows), FLAGS, world(engine_of(law, depth, blocks=90), **more)).served


def test_a_lone_request_by_hand() -> None:
    """Its prompt is launched at 0 for 20 ms, on the GPU at once. The second pass is planned at 20
    and launched at 23, when the first token may leave; then a step is the 5 ms on the GPU. When all
    rows are known to end, a plan without rows holds nothing back.
    """
    found = times_of([(0, 10, 4, 0)], PLAIN)
    assert found.first_token_s[0] == pytest.approx(23e-3)
    assert found.finish_s[0] == pytest.approx(23e-3 + 3 * 5e-3)
    assert found.max_gap_s[0] == pytest.approx(5e-3)


def test_an_arrival_within_decodes_waits_for_two_launches() -> None:
    """It comes at 40 ms. Passes of decodes end at 23, 28, 33, 38, 43; the next plan is at 43, when
    the pass that ends at 48 runs. Its launch holds back the tokens of that pass to 63; the launch
    of the pass after it, planned then, holds back its first token until 66.
    """
    found = times_of([(0, 10, 40, 0), (40e-3, 10, 4, 0)], PLAIN)
    assert found.first_token_s[1] == pytest.approx(66e-3)
    assert found.max_gap_s[0] == pytest.approx(63e-3 - 43e-3)


APART = replace(LAW, graphs=replace(GRAPHS, apart=True))
EAGER = replace(LAW, graphs=GraphSettings("NONE", ()), spread=(0.5, 1.5, 1.0))


@pytest.mark.parametrize("law", [LAW, APART, EAGER], ids=["graphs", "apart", "eager"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("shares", [False, True])
def test_in_turn_each_engine_serves_as_it_does_alone(law, depth, shares) -> None:
    """Alone an engine knows when the next request comes; behind a router its leaps are cut."""
    trace = made_up(0, gap_s=0.02)
    if not shares:
        trace = replace(trace, shared=None)
    there = world(engine_of(law, depth), 2)
    found = simulate(trace, FLAGS, there)
    assert found.counters["evicted_percent"] > 0
    for k, alone in enumerate(each_alone(trace, there, FLAGS)):
        for name in ("first_token_s", "finish_s", "max_gap_s", "ok"):
            own = getattr(found.served, name)[k::2]
            np.testing.assert_allclose(own, getattr(alone.served, name), rtol=0, atol=1e-9)


@pytest.mark.parametrize("law", [LAW, APART, EAGER], ids=["graphs", "apart", "eager"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("routed", [False, True])
def test_a_fixed_concurrency_is_kept(law, depth, routed) -> None:
    """The next request comes when a token that was held back is the last of another."""
    more = {"router": RoundRobinRouter()} if routed else {}
    there = replace(world(engine_of(law, depth, 400), 1, **more), concurrency=5)
    trace = replace(made_up(1, 60), shared=None)
    served = simulate(trace, FLAGS, there).served
    assert served.ok.all()
    free_s = np.sort(np.concatenate([np.zeros(5), served.finish_s]))[: len(served)]
    np.testing.assert_allclose(served.arrival_s, free_s, rtol=0, atol=1e-9)


@pytest.mark.parametrize("depth", [1, 2])
def test_turns_of_a_session_follow_the_tokens_that_clients_have(depth: int) -> None:
    rows = [(0.0, 12, 7), (0.0, 30, 5), (0.0, 44, 3)]
    trace = trace_of(rows, previous=[-1, 0, 1], think_s=0.05)
    there = world(engine_of(LAW, depth, 60))
    served = simulate(trace, FLAGS, there).served
    assert served.ok.all()
    np.testing.assert_allclose(served.arrival_s[1:], served.finish_s[:-1] + 0.05)


def test_reports_in_the_middle_of_a_leap_count_the_blocks_so_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A leap of 200 steps takes 50 blocks; each report has as many as a run from pass to pass."""
    rows = [(0.0, 10, 200, 0), (2.0, 4, 4, 0)]
    monkeypatch.setattr(replicas, "REPORT_EVERY_S", 0.05)
    there = world(engine_of(LAW, blocks=90), 1, router=make_router("llm-d", {}))

    def seen() -> list[float]:
        found = []
        told = Balancer.report

        def spy(balancer, index, report):
            found.append(report.kv_usage)
            told(balancer, index, report)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Balancer, "report", spy)
            simulate(trace_of(rows), FLAGS, there)
        return found

    leaping = seen()
    with pass_by_pass():
        stepping = seen()
    assert len(leaping) == len(stepping) > 10
    assert max(stepping) > 0.5
    # the share of a leap is by time, and steps become longer
    np.testing.assert_allclose(leaping, stepping, rtol=0, atol=0.07)


@given(
    first_s=st.floats(0, 1e-2),
    growth_s=st.floats(0, 1e-3),
    steps=st.integers(1, 200),
)
def test_a_stretch_is_the_sum_of_its_passes(first_s, growth_s, steps) -> None:
    each = [first_s + growth_s * k for k in range(steps)]
    assert stretch_s(first_s, growth_s, steps) == pytest.approx(sum(each), rel=1e-9)


@given(
    first_s=st.floats(0, 1e-1),
    growth_s=st.floats(0, 1e-3),
    seconds=st.floats(-1, 1e4) | st.just(float("inf")),
    limit=st.integers(0, 10_000),
)
def test_steps_before_is_the_least_count_in_a_time(first_s, growth_s, seconds, limit) -> None:
    k = steps_before(first_s, growth_s, seconds, limit)
    assert 0 <= k <= limit
    assert k == limit or stretch_s(first_s, growth_s, k) >= seconds
    assert k == 0 or stretch_s(first_s, growth_s, k - 1) < seconds


@pytest.mark.parametrize("seconds", [3.7e-40, 1e-323])
def test_steps_before_a_tiny_time_of_free_passes(seconds: float) -> None:
    """With empty caches only the second pass reads any: the quadratic's slope is not above 0."""
    assert steps_before(0.0, 2.0**-7, seconds, 50) == 2
