"""`llmctl simulate`: several policies, routers and rates side by side, notes, and Ctrl-C."""

import json
from pathlib import Path

import numpy as np
import pytest
import samples
from commands import printed, ran, refused
from said import says

from toolkit.cli import runs
from toolkit.files.shipped import load_recipe
from toolkit.routing.routers import ROUTERS
from toolkit.sched.policies import ORACLES, POLICIES, footnote
from toolkit.sim.api import simulate
from toolkit.sim.world import make_world, policy_for
from toolkit.traces.read import read_trace
from toolkit.traces.types import Trace
from toolkit.traces.write import write_trace


@pytest.fixture
def stage(tmp_path, monkeypatch) -> str:
    """The words that name a recipe, which has a fit, and a small trace."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    lengths = [rng.integers(1, 100, 80) for _ in range(2)]
    trace = Trace(np.cumsum(rng.exponential(0.05, 80)), *lengths, np.zeros(80, np.int64))
    write_trace(trace, Path("trace.jsonl"))
    policy = {"name": "slice", "parameters": {}}
    samples.write_recipe(Path("recipe.yaml"), samples.fit(), policy=policy)
    return "recipe.yaml --trace trace.jsonl"


@pytest.mark.slow
def test_a_run_is_what_simulate_gives(stage, capsys):
    words = "--policies slice,past-future --sla ttft_p99_s=1 --set past-future.reserve=0.2"
    runs = printed(capsys, f"simulate {stage} {words}")["runs"]
    found = {run["policy"]: run for run in runs}
    assert found["past-future"]["parameters"]["reserve"] == 0.2
    fit = samples.fit()
    trace = read_trace(Path("trace.jsonl"))[0]
    for name, run in found.items():
        policy = policy_for(fit, name, {"reserve": 0.2} if name == "past-future" else {})
        result = simulate(trace, policy, make_world(fit, {}, recipe=load_recipe("recipe.yaml")))
        assert run["metrics"] == result.metrics({"ttft_p99_s": 1.0})


@pytest.mark.slow
def test_all_are_all_but_the_oracles(stage, capsys):
    runs = printed(capsys, f"simulate {stage} --policies all")["runs"]
    assert {run["policy"] for run in runs} == POLICIES.keys() - ORACLES
    assert all(run["servable"] for run in runs)


def test_the_table_fits_and_an_oracle_is_marked(stage, capsys):
    out, err = ran(capsys, f"simulate {stage} --policies fcfs,past-future-oracle")
    assert max(map(len, out.splitlines())) <= 80
    assert "past-future-oracle *" in out
    said = " ".join(out.split())
    assert says(said, "'fake'")
    assert says(err, "--sla ttft_p99_s=2")
    assert "goodput" not in out
    assert out.isascii() or "─" in out


def test_rows_are_sorted_by_rate_then_goodput(stage, capsys):
    words = "--policies sequence,past-future,slice --rate 40,10 --rate 160 --sla e2e_p99_s=1"
    runs = printed(capsys, f"simulate {stage} {words}")["runs"]
    assert [round(run["rate_rps"]) for run in runs] == [10] * 3 + [40] * 3 + [160] * 3
    keys = [
        (run["rate_rps"], -run["metrics"]["goodput_rps"], run["metrics"]["e2e_mean_s"])
        for run in runs
    ]
    assert keys == sorted(keys)


@pytest.mark.parametrize(
    ("words", "named", "remedy"),
    [
        ("--policies slic", "'slic'", "'slice'"),
        ("--set fcfs.x=1", "--set fcfs.x", "slice"),
        ("--set slice.x=1", "'x'", "slice_tokens"),
        ("--rate fast", "--rate fast", "5,10,20"),
        ("--rate -1", "-1", "5,10,20"),
        ("--policies ,", "--policies ','", ""),
        ("--rate ,", "--rate ','", ""),
        ("--routers ,", "--routers ','", ""),
        ("--routers round-robin", "--routers round-robin", "'vllm'"),
    ],
)
def test_bad_input_is_one_line_and_a_hint(words, named, remedy, stage, capsys):
    error, hint = refused(capsys, f"simulate {stage} --policies slice {words}")
    assert says(error, named)
    assert says(hint, remedy)


def test_ctrl_c_prints_what_is_done(stage, capsys, monkeypatch):
    real = runs.run_of

    def interrupted(scenario, trace, contender):
        if contender.policy.name == "fcfs":
            raise KeyboardInterrupt
        return real(scenario, trace, contender)

    monkeypatch.setattr(runs, "run_of", interrupted)
    out, err = ran(capsys, f"simulate {stage} --policies slice,fcfs --json", code=130)
    found = json.loads(out)
    assert found["interrupted"]
    assert [run["policy"] for run in found["runs"]] == ["slice"]
    assert says(err, "1 of 2")


def test_unservable_policies_are_marked_as_in_tune(stage, capsys):
    policy = {"name": "slice", "parameters": {}}
    fit = samples.fit(engine="transformers")
    samples.write_recipe(Path("recipe.yaml"), fit, policy=policy)
    out = ran(capsys, f"simulate {stage} --policies slice,past-future,baton").out
    assert "past-future *" in out
    assert "baton *" in out
    assert "slice *" not in out
    said = " ".join(out.split())
    assert footnote(["slice", "past-future", "baton"], "transformers") in said
    assert says(said, "vllm", "rebatch", "past-future")
    found = printed(capsys, f"simulate {stage} --policies slice,past-future")["runs"]
    runs = {run["policy"]: run for run in found}
    assert runs["slice"]["refusal"] is None
    assert (runs["past-future"]["servable"], runs["slice"]["servable"]) == (False, True)
    assert says(runs["past-future"]["refusal"], "'past-future'", "'transformers'")


REPLICAS = "llama-3.1-8b-h200 --trace bursty-small --workers 3"


@pytest.mark.slow
def test_routers_stand_side_by_side(capsys):
    words = f"simulate {REPLICAS} --routers round-robin,least-requests"
    runs = printed(capsys, words)["runs"]
    assert {run["router"] for run in runs} == {"round-robin", "least-requests"}
    assert {run["policy"] for run in runs} == {"vllm"}
    alone = printed(capsys, f"simulate {REPLICAS} --routers least-requests")
    [same] = [run for run in runs if run["router"] == "least-requests"]
    assert (alone["router"], alone["e2e_mean_s"]) == (
        "least-requests",
        same["metrics"]["e2e_mean_s"],
    )
    out = ran(capsys, words).out
    assert " least-requests " in out
    assert max(map(len, out.splitlines())) <= 80
    every = printed(capsys, f"simulate {REPLICAS} --routers all --policies vllm,slice")["runs"]
    assert [run["policy"] for run in every].count("slice") == 1
    assert {run["router"] for run in every if run["policy"] == "vllm"} == set(ROUTERS)


def test_an_unknown_router_is_refused(capsys):
    assert says(refused(capsys, f"simulate {REPLICAS} --routers nearest")[0], "nearest")
