"""What a warm-up shows of a running server, applied to the world that a fit describes."""

import pytest
import samples

from toolkit.sim.conditions import AS_FITTED, ServerConditions, in_conditions, mean_conditions
from toolkit.sim.worker import FrontDelay
from toolkit.sim.world import world_from_fit


def world(engine: str = "transformers"):
    return world_from_fit(samples.fit(engine=engine), workers=2, max_new_tokens=64)


def test_as_fitted_nothing_changes():
    usual = world()
    assert in_conditions(usual, AS_FITTED) is usual


def test_batches_take_longer_than_the_scheduler_believes():
    usual = world()
    slow = in_conditions(usual, ServerConditions(slowdown=2.0, arrival_cost_s=0.01))
    assert slow.latency.decode_s(4, 100, 8) == pytest.approx(
        2.0 * usual.latency.decode_s(4, 100, 8)
    )
    assert slow.believed == usual.latency
    assert slow.arrival_cost_s == 0.01


def test_a_front_that_was_seen_takes_the_place_of_the_fitted_one():
    seen = FrontDelay(0.02, 0.01)
    assert in_conditions(world(), ServerConditions(front=seen)).front == seen


def test_the_mean_of_several_is_geometric_in_speed():
    both = [
        ServerConditions(0.5, FrontDelay(0.01, 0.02), (1,), 0.0, 2.0),
        ServerConditions(2.0, FrontDelay(0.03, 0.02), (2,), 0.02, 8.0),
    ]
    mean = mean_conditions(both)
    assert mean.slowdown == pytest.approx(1.0)
    assert mean.launch_slowdown == pytest.approx(4.0)
    assert mean.front == FrontDelay(0.02, 0.02)
    assert mean.arrival_cost_s == pytest.approx(0.01)
    assert mean.finished == (2,)
    alone = [ServerConditions(1.5)]
    assert mean_conditions(alone).launch_slowdown is None
    assert mean_conditions(alone).front is None
