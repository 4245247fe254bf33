"""The front's delay in a simulation: clients see tokens later, and nothing else changes."""

from dataclasses import replace

import numpy as np
import pytest
import samples

from toolkit.errors import InputError
from toolkit.sched.policies import make_policy
from toolkit.sim.api import simulate
from toolkit.sim.front import FrontDelay
from toolkit.sim.world import world_from_fit
from toolkit.traces.types import Trace


def test_clients_see_tokens_later_and_the_scheduler_decides_the_same():
    k = np.arange(30)
    trace = Trace(k * 0.01, 10 + k, 1 + k, np.zeros(30, dtype=np.int64))
    world = world_from_fit(samples.fit(), workers=1, max_new_tokens=64)
    policy = make_policy("past-future", {})
    bare, behind = (
        simulate(trace, policy, replace(world, front=delay)) for delay in (FrontDelay(), FrontDelay(0.25, 0.5))
    )
    assert behind.served.first_token_s.tolist() == (bare.served.first_token_s + 0.25).tolist()
    assert behind.served.finish_s.tolist() == (bare.served.finish_s + 0.5).tolist()
    assert behind.counters == bare.counters


def test_a_delay_that_cannot_be_is_refused():
    with pytest.raises(InputError, match=r"delays of -0.001 and 0.0 s are not possible"):
        FrontDelay(first_s=-0.001)
