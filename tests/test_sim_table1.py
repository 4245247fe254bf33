"""One row of each kind of Past-Future's Table 1, with fewer requests than the benchmark."""

import pytest

from benchmarks.papers import past_future_table1 as bench
from toolkit.sim.api import simulate
from toolkit.sim.world import make_world, policy_for
from toolkit.traces.generate import Lengths, backlog


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "method"),
    [
        ("D3", "theoretical optimum"),
        ("D3", "Past-Future, reserved 10 %"),
        ("D2", "aggressive, watermark 95 %"),
        ("D1", "conservative"),
        ("D3", "conservative, overcommit 150 %"),
    ],
)
def test_a_row_is_the_papers(data, method):
    requests = 800
    (paper,) = [figures for d, m, figures in bench.cells() if (d, m) == (data, method)]
    ours = bench.simulated(data, method, seed=1, requests=requests)
    assert ours["decoding_steps"] == pytest.approx(
        paper["decoding_steps"] * requests / bench.REQUESTS, rel=0.07
    )
    assert ours["consumed_memory_percent"] == pytest.approx(paper["consumed_memory_percent"], abs=2)
    assert ours["future_required_memory_percent"] == pytest.approx(
        paper["future_required_memory_percent"], abs=2
    )
    if "overcommit" not in method:  # its evictions are one run's noise
        assert ours["evicted_percent"] == pytest.approx(paper["evicted_percent"], abs=6)


def test_without_overfilling_memory_is_never_passed():
    trace = backlog(100, Lengths("fixed", 3000), Lengths("fixed", 3000), seed=0)
    policy = policy_for(None, "aggressive", {"watermark": 0.99, "overfill": False})
    counters = simulate(trace, policy, make_world(None, {"drain": True})).counters
    assert counters["evicted_percent"] > 0
    assert 95 < counters["peak_memory_percent"] <= 100
