"""`simulate --tuning` and `compare --tuning` simulate what `tune` recommends."""

from pathlib import Path
from typing import Any

import pytest
from commands import llmctl, printed, refused
from lean import without_capacity
from test_cli_stage import folder  # noqa: F401  # a fixture
from test_fleet_files import write_fleet, write_server
from test_tuning_kinds import FEW, SHORT, SLA, TUNE, VLLM, passes

from toolkit.files.io import head, read_file, write_file
from toolkit.files.tuning import Outcome, SizedKind, Sizing, Tuning
from toolkit.traces.generate import Arrivals, generate, parse_lengths
from toolkit.traces.write import write_trace

pytestmark = pytest.mark.slow  # each fixture is a search

TOKENS = "max_num_batched_tokens"
SERVERS = "--fleet fleet.yaml --tuning tuning.json --trace trace.jsonl"
SHOWN = ("goodput_rps", "throughput_rps", "ttft_p95_s", "mtpot_p95_s", "e2e_mean_s")


@pytest.fixture(scope="module")
def tuned_folder(tmp_path_factory) -> Path:
    """A tuned fleet of two kinds of servers, and its trace."""
    here = tmp_path_factory.mktemp("tuned")
    space = TUNE | {"request_rate_rps": 15.0, "routers": ["by-law"], "trials": 24}
    for name, times in (("few", FEW), ("short", SHORT)):
        write_server(here, name, sla=SLA, tune=space, policy=VLLM)
        made = head({"recipe": here / f"{name}.yaml"})
        facts = passes(*times).model_copy(update={"recipe_name": name, **made})
        write_file(facts, here / f"{name}.fit.json")
    write_fleet(here, ("few", 1), ("short", 2))
    lengths = parse_lengths("fixed:384"), parse_lengths("fixed:12")
    write_trace(generate(Arrivals(15.0), 30.0, *lengths, 0), here / "trace.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        tune = "tune fleet.yaml --trace trace.jsonl --jobs 1"
        assert llmctl(tune) in (0, 5)  # few trials may keep no limits
    return here


@pytest.fixture
def tuned(tuned_folder, monkeypatch) -> Tuning:
    """The tuning; its folder is the current one."""
    monkeypatch.chdir(tuned_folder)
    return read_file(Tuning, "tuning.json")


def simulated(capsys: pytest.CaptureFixture[str], words: str) -> dict[str, Any]:
    return printed(capsys, f"simulate {words}")


def test_a_fleet_is_simulated_exactly_as_it_was_tuned(tuned, capsys):
    best = tuned.recommended
    assert best.parameters[TOKENS] != best.kind_parameters["short"][TOKENS]
    found = simulated(capsys, f"{SERVERS} --rate {tuned.request_rate_rps}")
    for name in SHOWN:
        assert found[name] == best.metrics[name], name
    assert (found["policy"], found["parameters"]) == (best.policy, best.parameters)
    assert found["kind_parameters"] == best.kind_parameters
    assert (found["sla"], found["seed"], found["workers"]) == (tuned.sla, tuned.seed, 3)
    words = f"--policy vllm --trace trace.jsonl --rate {tuned.request_rate_rps}"
    plain = simulated(capsys, f"--fleet fleet.yaml {words}")
    assert plain["goodput_rps"] != found["goodput_rps"]


def test_options_replace_what_was_tuned(tuned, capsys):
    best = tuned.recommended
    short = tuned.recommended.kind_parameters["short"]
    found = simulated(capsys, f"{SERVERS} --set {TOKENS}=300 --seed 8 --sla e2e_p99_s=9")
    assert found["parameters"] == best.parameters | {TOKENS: 300}
    assert found["kind_parameters"] == {"short": short | {TOKENS: 300}}
    assert (found["seed"], found["sla"]) == (8, {"e2e_p99_s": 9.0})
    found = simulated(capsys, f"{SERVERS} --set short.{TOKENS}=80 --policy vllm")
    assert found["parameters"] == best.parameters
    assert found["kind_parameters"] == {"short": short | {TOKENS: 80}}
    other = simulated(capsys, f"{SERVERS} --set replica_router=session")
    same = simulated(capsys, f"{SERVERS} --set replica_router={best.replica_router.name}")
    assert same["e2e_mean_s"] == simulated(capsys, SERVERS)["e2e_mean_s"] != other["e2e_mean_s"]


def test_compare_shows_the_tuned_servers_at_several_rates(tuned, capsys):
    runs = printed(capsys, f"compare {SERVERS} --rate 10,25")["runs"]
    assert [run["policy"] for run in runs] == ["vllm", "vllm"]
    assert runs[0]["parameters"] == tuned.recommended.parameters
    alone = simulated(capsys, f"{SERVERS} --rate 25")
    assert runs[1]["metrics"]["e2e_mean_s"] == alone["e2e_mean_s"]


def test_counts_that_tune_found_are_simulated(tuned, tmp_path, capsys):
    def sized(few: int, short: int) -> dict[str, Any]:
        counts = {"few": few, "short": short}
        kinds = [
            SizedKind(recipe=name, workers=count, usd_per_hour=None, one_more_keeps=None)
            for name, count in counts.items()
        ]
        sizing = Sizing(
            workers=few + short, kinds=kinds, settings="recipe", one_more_keeps=None, rows=[]
        )
        write_file(tuned.model_copy(update={"sizing": sizing}), tmp_path / "sized.json")
        return simulated(capsys, f"{SERVERS} --tuning {tmp_path}/sized.json")

    assert {name: kind["workers"] for name, kind in sized(2, 3)["kinds"].items()} == {
        "few": 2,
        "short": 3,
    }
    alone = sized(2, 0)
    assert (alone["workers"], alone["kinds"]) == (2, None)
    assert alone["parameters"] == tuned.recommended.parameters


def test_an_older_tuning_leaves_further_kinds_their_recipes_flags(tuned, tmp_path, capsys):
    def without(outcome: Outcome) -> Outcome:
        return outcome.model_copy(update={"kind_parameters": {}})

    older = {name: without(getattr(tuned, name)) for name in ("best", "defaults")}
    write_file(tuned.model_copy(update=older), tmp_path / "older.json")
    found = simulated(capsys, f"{SERVERS} --tuning {tmp_path}/older.json")
    assert found["parameters"] == tuned.recommended.parameters
    assert found["kind_parameters"]["short"][TOKENS] == VLLM["parameters"][TOKENS]


@pytest.mark.parametrize("command", ["simulate", "compare"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--fit few.fit.json", "fleet.yaml"),
        ("--fit unit-step", "--tuning tuning.json"),
        ("--fleet other.yaml", "fleet other.yaml"),
        ("--fleet fleet.yaml --workers 4", "--workers"),
        ("fleet.yaml", "--fleet, --fit, "),
        ("--fleet fleet.yaml --tuning few.fit.json", "few.fit.json"),
        ("--fleet fleet.yaml --set shrt.watermark=0.1", "'shrt'"),
        ("--fleet fleet.yaml --policy slice", "policy 'vllm'"),
    ],
)
def test_a_tuning_that_does_not_belong_is_refused(tuned, command, words, said, capsys):
    text = Path("fleet.yaml").read_text()
    Path("other.yaml").write_text(text.replace("workers: 2", "workers: 3"))
    given = words.replace("--policy", "--policies") if command == "compare" else words
    line = f"{command} --tuning tuning.json --trace trace.jsonl {given}"
    assert said in "\n".join(refused(capsys, line))


@without_capacity()
def test_a_recipe_is_simulated_as_it_was_tuned(folder, capsys):  # noqa: F811
    words = "--jobs 1 --draws 0 --seed 4 --trials 9"
    assert llmctl(f"tune recipe.yaml --trace trace.jsonl {words}") in (0, 5)
    made = read_file(Tuning, "tuning.json")
    words = "--tuning tuning.json --trace trace.jsonl"
    found = simulated(capsys, words)
    best = made.recommended
    assert (found["policy"], found["parameters"]) == (best.policy, best.parameters)
    assert (found["sla"], found["seed"], found["workers"]) == (made.sla, 4, made.workers)
    again = simulated(capsys, f"{words} --rate {made.request_rate_rps}")
    for name in ("goodput_rps", "throughput_rps", "e2e_mean_s", *made.sla):
        assert again[name] == best.metrics[name], name
    assert simulated(capsys, f"{words} --workers 3")["workers"] == 3
    runs = printed(capsys, f"compare {words} --policies fcfs,{best.policy}")["runs"]
    assert {run["policy"]: run["parameters"] for run in runs}[best.policy] == best.parameters
