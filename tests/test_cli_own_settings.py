"""`simulate` runs a recipe's own settings as `tune` judges them; options replace them."""

from pathlib import Path
from typing import Any

import pytest
import samples
from commands import printed, ran, refused
from said import says
from test_cli_stage import folder  # noqa: F401  # a fixture
from test_cli_wrong_input import MODEL

from toolkit.files.fit import Fit
from toolkit.files.io import head, read_file, write_file
from toolkit.files.shipped import load_recipe
from toolkit.sched.policies import make_any
from toolkit.sched.policies.parameters import parameters
from toolkit.traces.read import read_trace
from toolkit.traces.windows import prepare, scale_rate

ONE = "one.yaml --fit one.fit.json --trace trace.jsonl"
TARGETS = {"ttft_p99_s": 0.5, "mtpot_p99_s": 0.2}
BY_LAW = {"name": "by-law", "parameters": {"late": 7.0}}
VLLM = {"name": "vllm", "parameters": {"max_num_seqs": 32, "max_num_batched_tokens": 512}}


def write_server(at: Path, name: str, fit: Fit, **changes: Any) -> None:
    """A recipe of engine vllm, and its fit with these laws."""
    spec = {"engine": {"name": "vllm"}, "workers": 1, "policy": VLLM, "model": MODEL} | changes
    write_file(samples.recipe(name=name, **spec), at / f"{name}.yaml")  # JSON is YAML
    made = head({"recipe": at / f"{name}.yaml"})
    write_file(fit.model_copy(update={"recipe_name": name, **made}), at / f"{name}.fit.json")


@pytest.fixture
def replicas(folder) -> Path:  # noqa: F811
    """The folder of `one.yaml`: two replicas of vLLM behind a router, with targets and flags."""
    changes: dict[str, Any] = {
        "workers": 2,
        "sla": TARGETS,
        "replica_router": BY_LAW,
        "tune": {"seed": 5, "max_refused_percent": 50.0},
    }
    write_server(folder, "one", samples.paged_fit(4096), **changes)
    return folder


def judged(path: str, rate_rps: float) -> dict[str, float]:
    """What `tune` finds for the recipe's own settings on the whole trace at this rate."""
    recipe = load_recipe(Path(path))
    fit = read_file(Fit, path.replace(".yaml", ".fit.json"))
    trace = scale_rate(prepare(read_trace(Path("trace.jsonl"))[0], recipe), rate_rps)
    return samples.task(trace, given=recipe, laws=fit).simulate(0).metrics


def test_replicas_of_a_server_are_simulated_as_tune_judges_them(replicas, capsys):
    wanted = judged("one.yaml", 60.0)
    assert wanted["refused"] > 0, "their front refuses some"
    found = printed(capsys, f"simulate {ONE} --rate 60")
    assert {key: found[key] for key in wanted} == wanted
    assert (found["policy"], found["workers"], found["seed"]) == ("vllm", 2, 5)
    assert found["sla"] == TARGETS
    assert found["parameters"] == parameters(make_any("vllm", VLLM["parameters"]))


def test_workers_of_an_engine_are_simulated_as_tune_judges_them(folder, capsys):  # noqa: F811
    """Clients get the tokens in the recipe's intervals, and memory has its seed."""
    policy = {"name": "slice", "parameters": {"slice_tokens": 24}}
    changes: dict[str, Any] = {"policy": policy, "sla": TARGETS, "tune": {"seed": 9}}
    recipe = samples.recipe(engine={"name": "transformers", "flush_s": 0.3}, **changes)
    write_file(recipe, Path("own.yaml"))
    samples.write_fit(Path("own.yaml"))
    Path("fit.json").rename("own.fit.json")
    wanted = judged("own.yaml", 20.0)
    found = printed(capsys, "simulate own.yaml --fit own.fit.json --trace trace.jsonl --rate 20")
    assert {key: found[key] for key in wanted} == wanted
    assert (found["policy"], found["parameters"]["slice_tokens"], found["seed"]) == ("slice", 24, 9)


@pytest.mark.slow
def test_options_replace_each_of_the_recipe_s_settings(replicas, capsys):
    found = printed(capsys, f"simulate {ONE} --set max_num_seqs=4 --seed 0")
    assert (found["parameters"]["max_num_seqs"], found["seed"]) == (4, 0)
    assert found["parameters"]["max_num_batched_tokens"] == 512
    found = printed(capsys, f"simulate {ONE} --workers 1 --sla e2e_p99_s=3")
    assert (found["workers"], found["sla"]) == (1, {"e2e_p99_s": 3.0})

    def mean_s(words: str) -> float:
        return printed(capsys, f"simulate {ONE} --rate 50 {words}")["e2e_mean_s"]

    routers = ["by-law", "round-robin", "least-requests"]
    means = [mean_s(f"--set replica_router={name}") for name in routers]
    assert means[0] == mean_s("")
    assert len({*means}) == 3


def test_another_policy_has_its_defaults_and_the_recipe_s_targets(replicas, capsys):
    """It gives requests to workers itself, so the recipe's router is left out."""
    found = printed(capsys, f"simulate {ONE} --policies fcfs")
    assert found["parameters"] == parameters(make_any("fcfs", {}))
    assert (found["sla"], found["workers"], found["seed"]) == (TARGETS, 2, 5)
    said = refused(capsys, f"simulate {ONE} --policies fcfs --set by-law.late=1")
    assert says(said[0], "replica_router", "'by-law'")


def test_beside_others_the_recipe_s_policy_has_its_parameters(replicas, capsys):
    found = printed(capsys, f"simulate {ONE} --rate 60 --policies fcfs,vllm")
    runs = {one["policy"]: one for one in found["runs"]}
    wanted = judged("one.yaml", 60.0)
    assert {key: runs["vllm"]["metrics"][key] for key in wanted} == wanted
    assert runs["fcfs"]["parameters"] == parameters(make_any("fcfs", {}))
    assert found["sla"] == TARGETS


@pytest.mark.slow
def test_one_line_says_what_is_the_recipe_s(replicas, capsys):
    def said(words: str) -> list[str]:
        lines = ran(capsys, f"simulate {ONE} {words}").err.splitlines()
        return [line for line in lines if line.startswith("recipe one: ")]

    [line] = said("")
    for word in ("vllm.max_num_seqs 32", "router by-law", "ttft_p99_s 0.5", "seed 5"):
        assert word in line
    [line] = said("--policies fcfs --seed 1")
    assert all(word not in line for word in ("vllm", "router"))
    assert "seed 1" in line
