"""The front's delay in a simulation: clients see tokens later, and nothing else changes."""

from dataclasses import replace

import numpy as np
import pytest
import samples

from toolkit.errors import InputError
from toolkit.sched.policies import make_policy
from toolkit.sim.api import simulate
from toolkit.sim.worker import FrontDelay, Intake
from toolkit.sim.world import world_from_fit
from toolkit.traces.types import Trace


def test_the_front_s_delay_changes_no_decision():
    k = np.arange(30)
    trace = Trace(k * 0.01, 10 + k, 1 + k, np.zeros(30, dtype=np.int64))
    world = world_from_fit(samples.fit(), workers=1, max_new_tokens=64)
    policy = make_policy("past-future", {})
    bare, behind = (
        simulate(trace, policy, replace(world, front=delay))
        for delay in (FrontDelay(), FrontDelay(0.25, 0.5))
    )
    assert behind.served.first_token_s.tolist() == (bare.served.first_token_s + 0.25).tolist()
    assert behind.served.finish_s.tolist() == (bare.served.finish_s + 0.5).tolist()
    assert behind.counters == bare.counters


def test_an_impossible_delay_is_refused():
    with pytest.raises(InputError, match=r"-0\.001.*0\.0"):
        FrontDelay(first_s=-0.001)


@pytest.mark.parametrize(
    ("start_s", "work_s", "end_s"),
    [
        (0.0, 0.5, 0.5),  # nothing arrives
        (0.0, 1.25, 1.75),  # one request arrives
        (0.0, 1.75, 2.75),  # a second one arrives in the time that the first one costs
        (1.0, 0.25, 1.25),  # an arrival at the start costs nothing
        (2.5, 1.0, 3.5),  # earlier arrivals cost nothing
    ],
)
def test_each_request_that_arrives_makes_a_batch_longer(
    start_s: float, work_s: float, end_s: float
):
    assert Intake([1.0, 2.0], 0.5).end_s(start_s, work_s) == end_s


def test_without_a_cost_arrivals_change_nothing():
    assert Intake([1.0, 2.0], 0.0).end_s(0.5, 3.0) == 3.5


def test_an_impossible_cost_is_refused():
    with pytest.raises(InputError, match=r"-0\.001"):
        Intake([], -0.001)


def crowd(count: int) -> Trace:
    """`count` requests within half a second; they take far longer to serve."""
    return Trace(
        np.linspace(0.0, 0.5, count),
        np.full(count, 20),
        np.full(count, 30),
        np.zeros(count, dtype=np.int64),
    )


def test_a_crowd_makes_slices_longer_while_it_arrives():
    """One worker, one slice after the other: the slices that run during the arrivals pay their
    cost once, later slices pay nothing.
    """
    world = world_from_fit(samples.fit(), workers=1, max_new_tokens=64)
    trace = crowd(400)
    policy = make_policy("slice", {"slice_tokens": 8})
    free, costly = (
        simulate(trace, policy, replace(world, arrival_cost_s=cost_s)).served
        for cost_s in (0.0, 0.002)
    )
    assert costly.finish_s.max() - free.finish_s.max() == pytest.approx(400 * 0.002, rel=0.25)
    assert costly.first_token_s.mean() > free.first_token_s.mean() + 0.4
    early = replace(trace, arrival_s=np.zeros(400))  # all arrive before the first slice begins
    free, costly = (
        simulate(early, policy, replace(world, arrival_cost_s=cost_s)).served
        for cost_s in (0.0, 0.002)
    )
    assert costly.first_token_s.tolist() == free.first_token_s.tolist()
    assert costly.finish_s.tolist() == free.finish_s.tolist()
