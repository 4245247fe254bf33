"""What the SCLS paper found must come out of the simulator (ALGORITHMS section 2): orderings, shapes and gains."""

import numpy as np
import pytest

from toolkit.estimators.laws import bilinear_law
from toolkit.estimators.memory import PAPER_DEEPSPEED_RULES, RuleMemory, ZetaMemory
from toolkit.sched.policies import make_policy
from toolkit.sim.api import World, simulate
from toolkit.traces.types import Trace

HF = World(
    bilinear_law(p=(1.3e-4, 1e-3, 1e-5, 0.03), d=(3.5421e-6, 2e-4, 5e-7, 0.022956)),
    ZetaMemory(33_792),
    workers=8,
    max_new_tokens=1024,
    streams=False,
)
DEEPSPEED = World(
    bilinear_law(p=(1e-4, 5e-4, 5e-6, 0.02), d=(1e-6, 2e-4, 3e-7, 0.0165)),
    RuleMemory(PAPER_DEEPSPEED_RULES),
    workers=8,
    max_new_tokens=1024,
    streams=False,
)
PAPER = {"eager": False, "memory_reserve": 0.0}


def trace(rate_rps: float, seconds: float = 600.0, seed: int = 0) -> Trace:
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / rate_rps, int(rate_rps * seconds * 1.5)))
    arrival = arrival[arrival < seconds]

    def lengths(median: float, sigma: float) -> np.ndarray:
        drawn = rng.lognormal(np.log(median), sigma, len(arrival))
        return np.clip(np.round(drawn), 1, 1024).astype(np.int64)

    output, prompt = lengths(120, 0.75), lengths(400, 1.0)
    return Trace(arrival, prompt, output, np.zeros_like(output))


def metrics(world: World, workload: Trace, name: str, **parameters) -> dict[str, float]:
    return simulate(workload, make_policy(name, parameters), world).metrics({})


def ablation(world: World, workload: Trace, batch: int, gamma_s: float) -> dict[str, dict[str, float]]:
    fixed = PAPER | {"min_interval_s": gamma_s, "interval_factor": 0.0}
    return {
        "SLS": metrics(world, workload, "sequence", batch_size=batch),
        "SO": metrics(world, workload, "sequence", batch_size=batch, slice_tokens=128),
        "PM": metrics(world, workload, "slice", **fixed, max_min=False, max_batch_size=batch),
        "AB": metrics(world, workload, "slice", **fixed, max_min=False),
        "LB": metrics(world, workload, "slice", **fixed),
        "SCLS": metrics(world, workload, "slice", **PAPER, min_interval_s=gamma_s),
    }


def gain_percent(runs: dict[str, dict[str, float]], metric: str) -> float:
    return 100 * (runs["SCLS"][metric] / runs["SLS"][metric] - 1)


@pytest.mark.parametrize(("world", "batch", "gamma_s"), [(HF, 16, 6.0), (DEEPSPEED, 12, 3.0)], ids=["hf", "ds"])
def test_each_step_of_the_ablation_raises_throughput(world, batch, gamma_s):
    runs = ablation(world, trace(20.0), batch, gamma_s)
    throughputs = [run["throughput_rps"] for run in runs.values()]
    assert throughputs == sorted(throughputs)
    assert runs["PM"]["pad_tokens_per_request"] < runs["SO"]["pad_tokens_per_request"] / 4
    assert runs["SO"]["invalid_tokens_per_request"] < runs["SLS"]["invalid_tokens_per_request"] / 3
    assert runs["AB"]["batch_size_mean"] > runs["PM"]["batch_size_mean"] * 1.2
    assert runs["SCLS"]["completion_time_std_s"] < runs["SLS"]["completion_time_std_s"] / 5
    assert runs["SCLS"]["early_return_percent"] < 1.0


def test_the_gains_are_those_of_an_independent_simulation():
    """ALGORITHMS section 2: +285 / -84 / -81 / +173 % and, with DeepSpeed's laws, +180 / -89 / -86 / +59 %."""
    keys = ("throughput_rps", "e2e_mean_s", "e2e_p95_s", "batch_size_mean")
    hf, deepspeed = ablation(HF, trace(20.0), 16, 6.0), ablation(DEEPSPEED, trace(20.0), 12, 3.0)
    assert [gain_percent(hf, key) for key in keys] == pytest.approx([285, -84, -81, 173], abs=20)
    assert [gain_percent(deepspeed, key) for key in keys] == pytest.approx([180, -89, -86, 59], abs=20)


def test_throughput_rises_then_falls_with_the_slice_length():
    lengths = (8, 32, 128, 512, 1024)
    runs = [metrics(HF, trace(20.0), "slice", **PAPER, min_interval_s=6.0, slice_tokens=s) for s in lengths]
    throughputs = [run["throughput_rps"] for run in runs]
    peak = throughputs.index(max(throughputs))
    assert 0 < peak < len(lengths) - 1
    assert throughputs[: peak + 1] == sorted(throughputs[: peak + 1])
    assert throughputs[peak:] == sorted(throughputs[peak:], reverse=True)
    pads = [run["pad_tokens_per_request"] for run in runs]
    invalids = [run["invalid_tokens_per_request"] for run in runs]
    assert pads == sorted(pads, reverse=True)
    assert invalids == sorted(invalids)


def test_light_load_is_the_papers_exception_and_eager_mends_it():
    light = trace(2.0)
    sls = metrics(HF, light, "sequence", batch_size=16)["e2e_mean_s"]
    paper = metrics(HF, light, "slice", **PAPER, min_interval_s=6.0)["e2e_mean_s"]
    eager = metrics(HF, light, "slice", memory_reserve=0.0, min_interval_s=6.0)["e2e_mean_s"]
    assert paper > sls > eager
