"""ITL: every gap between tokens is counted once, and the percentiles equal those of a list of all
gaps.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sim_contract import CAPACITY, CASES, LAW, cases, requests, trace_of

from toolkit.estimators.memory import ZetaMemory
from toolkit.sched.policies import make_policy
from toolkit.sim.api import simulate
from toolkit.sim.ledger import TokenGaps
from toolkit.sim.world import World


@settings(max_examples=40, deadline=None)
@given(
    stretches=st.lists(
        st.tuples(st.integers(2, 60), st.floats(1e-3, 10.0), st.sampled_from([1.0, 1.3, 2.0])),
        min_size=1,
        max_size=30,
    )
)
def test_percentiles_are_those_of_the_gaps_one_by_one(stretches):
    kept = TokenGaps()
    singly = []
    for count, first_s, factor in stretches:
        kept.add(count, first_s, first_s * factor)
        singly += np.linspace(first_s, first_s * factor, count).tolist()
    found = kept.summary()
    gaps = np.sort(singly)
    assert found["itl_mean_s"] == pytest.approx(gaps.mean())
    for q in (50, 95, 99):
        near = np.searchsorted(
            gaps, found[f"itl_p{q}_s"] * np.array([1 - 1e-9, 1 + 1e-9]), side="left"
        )
        slack = len(stretches) + 1  # a stretch is read as a line, not as its steps
        assert near[0] - slack <= q / 100 * len(gaps) <= near[1] + slack


@given(rows=requests, case=cases, workers=st.integers(1, 2))
def test_every_gap_is_counted_once(rows, case, workers):
    name, parameters = CASES[case]
    world = World(LAW, ZetaMemory(CAPACITY), workers, 80, token_gaps=True)
    result = simulate(trace_of(rows), make_policy(name, parameters), world)
    served = result.served
    gaps = int((served.output_tokens - 1).sum())
    if not gaps:
        assert "itl_mean_s" not in result.counters
        return
    waited_s = float((served.finish_s - served.first_token_s).sum())
    assert result.counters["itl_mean_s"] == pytest.approx(waited_s / gaps, rel=1e-6)
    assert (
        result.counters["itl_p50_s"] <= result.counters["itl_p95_s"] <= result.counters["itl_p99_s"]
    )
    assert result.counters["itl_p99_s"] <= served.max_gap_s.max() * (1 + 1e-9)


def test_without_gaps_there_are_no_figures():
    assert TokenGaps().summary() == {}
