"""`simulate --tuning` simulates what `tune` recommends."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import samples
from commands import llmctl, printed, refused
from lean import without_capacity
from orders import changed
from test_cli_own_settings import write_server
from test_cli_stage import folder  # noqa: F401  # a fixture

from toolkit.files.io import read_file
from toolkit.files.tuning import Tuning
from toolkit.traces.generate import Arrivals, generate, parse_lengths
from toolkit.traces.write import write_trace

pytestmark = pytest.mark.slow  # each fixture is a search

TOKENS = "max_num_batched_tokens"
SERVERS = "few.yaml --fit few.fit.json --tuning tuning.json --trace trace.jsonl"
SHOWN = ("goodput_rps", "throughput_rps", "ttft_p95_s", "mtpot_p95_s", "e2e_mean_s")
TUNE = {
    "trials": 12,
    "windows": 1,
    "held_out_windows": 1,
    "request_rate_rps": 15.0,
    "routers": ["by-law"],
}


@pytest.fixture(scope="module")
def tuned_folder(tmp_path_factory) -> Path:
    """Two tuned replicas of a server with passes that are long at any size, and their trace."""
    here = tmp_path_factory.mktemp("tuned")
    own = samples.paged_fit(65536)
    law = replace(own.steps.law.with_terms({"pass": 0.06}), token_s=(1e-5, 1e-5))
    fit = changed(own, steps__law=law)
    sla = {"ttft_p95_s": 2.0, "mtpot_p95_s": 0.08}
    write_server(here, "few", fit, sla=sla, tune=TUNE, workers=2)
    lengths = parse_lengths("fixed:384"), parse_lengths("fixed:12")
    write_trace(generate(Arrivals(15.0), 30.0, *lengths, 0), here / "trace.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        tune = "tune few.yaml --fit few.fit.json --trace trace.jsonl --jobs 1"
        assert llmctl(tune) in (0, 5)  # few trials may keep no limits
    return here


@pytest.fixture
def tuned(tuned_folder, monkeypatch) -> Tuning:
    """The tuning; its folder is the current one."""
    monkeypatch.chdir(tuned_folder)
    return read_file(Tuning, "tuning.json")


def simulated(capsys: pytest.CaptureFixture[str], words: str) -> dict[str, Any]:
    return printed(capsys, f"simulate {words}")


def test_replicas_are_simulated_exactly_as_they_were_tuned(tuned, capsys):
    best = tuned.recommended.settings
    found = simulated(capsys, f"{SERVERS} --rate {tuned.request_rate_rps}")
    for name in SHOWN:
        assert found[name] == tuned.recommended.metrics[name], name
    assert (found["policy"], found["parameters"]) == (best.policy, best.parameters)
    assert (found["sla"], found["seed"], found["workers"]) == (tuned.sla, tuned.seed, 2)


def test_options_replace_what_was_tuned(tuned, capsys):
    best = tuned.recommended.settings
    found = simulated(capsys, f"{SERVERS} --set {TOKENS}=300 --seed 8 --sla e2e_p99_s=9")
    assert found["parameters"] == best.parameters | {TOKENS: 300}
    assert (found["seed"], found["sla"]) == (8, {"e2e_p99_s": 9.0})
    other = simulated(capsys, f"{SERVERS} --set replica_router=session")
    same = simulated(capsys, f"{SERVERS} --set replica_router={best.replica_router.name}")
    assert same["e2e_mean_s"] == simulated(capsys, SERVERS)["e2e_mean_s"] != other["e2e_mean_s"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("unit-step", "--tuning tuning.json"),
        ("few.yaml --fit few.fit.json --tuning few.fit.json", "few.fit.json"),
        ("few.yaml --fit few.fit.json --policies slice", "policy 'vllm'"),
    ],
)
def test_a_tuning_that_does_not_belong_is_refused(tuned, words, said, capsys):
    line = f"simulate --tuning tuning.json --trace trace.jsonl {words}"
    assert said in "\n".join(refused(capsys, line))


@without_capacity()
def test_a_recipe_is_simulated_as_it_was_tuned(folder, capsys):  # noqa: F811
    words = "--jobs 1 --seed 4 --trials 9"
    assert llmctl(f"tune recipe.yaml --trace trace.jsonl {words}") in (0, 5)
    made = read_file(Tuning, "tuning.json")
    words = "recipe.yaml --tuning tuning.json --trace trace.jsonl"
    found = simulated(capsys, words)
    best = made.recommended.settings
    assert (found["policy"], found["parameters"]) == (best.policy, best.parameters)
    assert (found["sla"], found["seed"], found["workers"]) == (made.sla, 4, made.workers)
    again = simulated(capsys, f"{words} --rate {made.request_rate_rps}")
    for name in ("goodput_rps", "throughput_rps", "e2e_mean_s", *made.sla):
        assert again[name] == made.recommended.metrics[name], name
    assert simulated(capsys, f"{words} --workers 3")["workers"] == 3
    runs = printed(capsys, f"simulate {words} --policies fcfs,{best.policy}")["runs"]
    assert {run["policy"]: run["parameters"] for run in runs}[best.policy] == best.parameters
