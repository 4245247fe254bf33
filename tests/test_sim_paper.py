"""The simulator reproduces the findings of the SCLS paper: orderings, shapes and gains.

The setting is that of `benchmarks/papers/scls_figures.py`, on one trace instead of the mean of
several.
"""

from itertools import pairwise

import pytest

from benchmarks.papers import scls_figures as bench
from benchmarks.papers.scls_figures import DS, HF, Case, gain_percent, run

STEPS = ("SLS", "SO", "PM", "AB", "LB", "SCLS")


@pytest.fixture(scope="module", params=[HF.name, DS.name])
def ablation(request):
    return request.param, {name: run(Case(request.param, name)) for name in STEPS}


@pytest.mark.slow
def test_each_step_of_the_ablation_raises_throughput(ablation):
    """LB against AB is within the noise of one trace on DeepSpeed's laws: 0.1 % to either side."""
    _, runs = ablation
    throughputs = [run["throughput_rps"] for run in runs.values()]
    assert all(after > 0.995 * before for before, after in pairwise(throughputs))
    for before, after in (("SLS", "SO"), ("SO", "PM"), ("PM", "AB"), ("LB", "SCLS")):
        assert runs[after]["throughput_rps"] > 1.05 * runs[before]["throughput_rps"]
    assert runs["PM"]["pad_tokens_per_request"] < runs["SO"]["pad_tokens_per_request"] / 4
    assert runs["SO"]["invalid_tokens_per_request"] < runs["SLS"]["invalid_tokens_per_request"] / 3
    assert runs["AB"]["batch_size_mean"] > runs["PM"]["batch_size_mean"] * 1.2
    assert runs["SCLS"]["completion_time_std_s"] < runs["SLS"]["completion_time_std_s"] / 5
    assert runs["SCLS"]["early_return_percent"] < 1.0


@pytest.mark.slow
def test_the_gains_are_those_of_an_independent_simulation(ablation):
    engine, runs = ablation
    gains = [gain_percent(runs["SCLS"], runs["SLS"], metric) for metric in bench.GAINS]
    independent = [float(figure) for figure in bench.INDEPENDENT_GAINS[engine, "SLS"]]
    assert gains == pytest.approx(independent, abs=20)


def test_figure_11_comes_out_of_the_laws():
    assert bench.figure_11() == pytest.approx((13.5, 7.6), abs=0.1)


@pytest.mark.slow
def test_throughput_rises_then_falls_with_the_slice_length():
    runs = [run(Case(HF.name, "SCLS", slice_tokens=tokens)) for tokens in (8, 128, 1024)]
    throughputs = [run["throughput_rps"] for run in runs]
    peak = throughputs.index(max(throughputs))
    assert 0 < peak < len(runs) - 1
    assert throughputs[: peak + 1] == sorted(throughputs[: peak + 1])
    assert throughputs[peak:] == sorted(throughputs[peak:], reverse=True)
    pads = [run["pad_tokens_per_request"] for run in runs]
    invalids = [run["invalid_tokens_per_request"] for run in runs]
    assert pads == sorted(pads, reverse=True)
    assert invalids == sorted(invalids)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [HF.name, DS.name])
def test_light_load_is_the_papers_exception_and_eager_mends_it(engine):
    sls, paper, eager = (
        run(Case(engine, name, rate_rps=2.0))["e2e_mean_s"]
        for name in ("SLS", "SCLS", "SCLS, eager")
    )
    assert paper > sls > eager
