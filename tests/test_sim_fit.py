"""A fitted world serves every policy: the memory edge of static batches is not held against rounds."""

import numpy as np
import pytest
import samples

from toolkit.sched.policies import POLICIES, make_policy
from toolkit.sim.api import simulate, world_from_fit
from toolkit.traces.types import Trace


@pytest.mark.parametrize("policy", POLICIES)
def test_no_request_is_given_up_in_a_fitted_world(policy: str) -> None:
    rng = np.random.default_rng(0)
    prompts, outputs = rng.integers(1, 300, 200), rng.integers(1, 128, 200)
    burst = Trace(np.zeros(200), prompts, outputs, np.zeros(200, np.int64))
    world = world_from_fit(samples.fit(zeta_std=0.05), workers=2, max_new_tokens=128)
    result = simulate(burst, make_policy(policy, {}), world)
    assert result.counters["refused"] == 0
    assert result.served.ok.all()
