"""The front's delay in a simulation: clients see tokens later, and nothing else changes."""

from dataclasses import replace

import numpy as np
import samples

from toolkit.sched.policies import make_policy
from toolkit.sim.api import simulate
from toolkit.sim.world import world_from_fit
from toolkit.traces.types import Trace


def test_the_front_s_delay_changes_no_decision():
    k = np.arange(30)
    trace = Trace(k * 0.01, 10 + k, 1 + k, np.zeros(30, dtype=np.int64))
    world = world_from_fit(samples.fit(), workers=1, max_new_tokens=64)
    policy = make_policy("past-future", {})
    bare, behind = (
        simulate(trace, policy, replace(world, front_s=delay_s)) for delay_s in (0.0, 0.25)
    )
    assert behind.served.first_token_s.tolist() == (bare.served.first_token_s + 0.25).tolist()
    assert behind.served.finish_s.tolist() == (bare.served.finish_s + 0.25).tolist()
    assert behind.counters == bare.counters
