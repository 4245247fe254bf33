"""Policy `vllm` in the commands simulate, tune and render, and where it is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import samples
from commands import llmctl
from lean import without_capacity
from said import says
from test_cli_wrong_input import MODEL

from toolkit.errors import InputError
from toolkit.sched.policies import make_any, make_policy, refuse_unservable
from toolkit.sched.policies.parameters import declared
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.api import simulate
from toolkit.sim.world import make_world
from toolkit.traces.types import Trace
from toolkit.tuning.executor import InProcessRunner
from toolkit.tuning.spaces import search_space
from toolkit.tuning.tune import tune
from toolkit.tuning.workload import TuneInputs, cut_trace


def trace(n: int = 2000) -> Trace:
    rng = np.random.default_rng(0)
    prompts, outputs = (
        np.clip(rng.lognormal(m, 0.8, n), 1, 250).astype(np.int64) for m in (4.5, 3.5)
    )
    return Trace(
        np.cumsum(rng.exponential(0.02, n)), prompts, outputs, np.zeros(n, np.int64), source="test"
    )


@pytest.fixture
def paged(tmp_path: Path, short_chat: None) -> Path:
    policy = {"name": "vllm", "parameters": {}}
    engine = {"name": "vllm"}
    at = tmp_path / "paged.yaml"
    samples.write_recipe(at, samples.paged_fit(), engine=engine, policy=policy, model=MODEL)
    return at


@pytest.mark.slow
def test_simulate_has_its_flags_as_parameters(
    paged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        f"simulate {paged} --fit {paged.parent}/fit.json --trace chat-small --policies vllm "
        "--rate 40"
    )
    assert llmctl(*words.split(), "--set", "max_num_seqs=4", "--json") == 0
    few = json.loads(capsys.readouterr().out)
    assert llmctl(*words.split(), "--json") == 0
    many = json.loads(capsys.readouterr().out)
    assert few["batch_size_mean"] <= 4 < many["batch_size_mean"]
    assert few["ttft_mean_s"] > many["ttft_mean_s"]


@pytest.mark.slow
def test_all_policies_have_it_on_its_own_engine_s_fit_only(
    paged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other" / "other.yaml"
    samples.write_recipe(other, samples.fit())
    found = []
    for at, names in ((paged, "vllm,fcfs"), (other, "all")):
        words = f"--trace chat-small --fit {at.parent}/fit.json --policies {names} --json"
        assert llmctl(f"simulate {at} {words}") == 0
        found.append({run["policy"] for run in json.loads(capsys.readouterr().out)["runs"]})
    assert found[0] == {"vllm", "fcfs"}
    assert "vllm" not in found[1]


def test_a_fit_of_another_engine_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples.write_recipe(tmp_path / "recipe.yaml", samples.fit())
    words = f"simulate {tmp_path}/recipe.yaml --fit {tmp_path}/fit.json --policies vllm"
    assert llmctl(*words.split()) == 2
    assert says(capsys.readouterr().err, "'vllm'")


def test_clients_wait_for_the_front_too() -> None:
    fit = samples.paged_fit()
    assert fit.steps is not None
    steps = fit.steps.model_copy(update={"front_s": 0.0, "front_row_s": 0.0})
    without = fit.model_copy(update={"steps": steps})
    found = [simulate(trace(50), VllmPolicy(), make_world(one, {})) for one in (fit, without)]
    delay_s = found[0].metrics({})["ttft_mean_s"] - found[1].metrics({})["ttft_mean_s"]
    assert delay_s == pytest.approx(4e-3 + 1e-5 * found[0].counters["batch_size_mean"])
    assert found[0].metrics({})["front_mean_s"] == pytest.approx(delay_s)
    assert "front_mean_s" not in found[1].metrics({})


@pytest.mark.slow
@without_capacity()
def test_tune_searches_its_flags() -> None:
    assert search_space("vllm", {}, {}).keys() == {
        "max_num_seqs",
        "max_num_batched_tokens",
        "watermark",
    }
    recipe = samples.recipe(
        engine={"name": "vllm"},
        workers=1,
        policy={"name": "vllm"},
        tune={"trials": 4, "window_s": 2, "request_rate_rps": 30.0, "policies": ["own"]},
    )
    fit = samples.paged_fit()
    found = tune(
        TuneInputs(recipe, fit, cut_trace(recipe, fit, trace(300))),
        InProcessRunner(),
        samples.HEAD,
        lambda best: None,
    )
    assert found.best.settings.policy == "vllm"
    assert found.best.settings.parameters.keys() == declared(VllmPolicy).keys()
    assert len({trial.settings.parameters["max_num_seqs"] for trial in found.trials}) > 1


def test_no_pair_of_searched_flags_is_one_that_vllm_refuses() -> None:
    space = search_space("vllm", {}, {})
    assert space["max_num_seqs"].high <= space["max_num_batched_tokens"].low  # type: ignore[union-attr]


def test_our_scheduler_cannot_run_it() -> None:
    with pytest.raises(InputError, match="'vllm'"):
        make_policy("vllm", {})
    refuse_unservable(make_any("vllm", {}), "vllm")
    with pytest.raises(InputError, match=r"'vllm'.*'rebatch'"):
        refuse_unservable(make_any("vllm", {}), "rebatch")


@pytest.mark.parametrize(
    "given", [{"max_num_seq": 4}, {"max_num_seqs": 0}, {"max_num_seqs": 2.5}, {"watermark": 1.0}]
)
def test_wrong_flags_are_refused_by_name(given: dict[str, float]) -> None:
    with pytest.raises(InputError, match="policy 'vllm'"):
        make_any("vllm", given)
