"""`simulate --tuning` and `compare --tuning` simulate what `tune` recommends."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import llmctl
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
SERVERS = ("--fleet", "fleet.yaml", "--tuning", "tuning.json", "--trace", "trace.jsonl")
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
    fleet = write_fleet(here, ("few", 1), ("short", 2))
    lengths = parse_lengths("fixed:400"), parse_lengths("fixed:12")
    write_trace(generate(Arrivals(15.0), 30.0, *lengths, 0), here / "trace.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        tune = ("tune", fleet, "--trace", "trace.jsonl", "--jobs", "1")
        assert llmctl(*tune) in (0, 5)  # few trials may keep no limits
    return here


@pytest.fixture
def tuned(tuned_folder, monkeypatch) -> Tuning:
    """The tuning; its folder is the current one."""
    monkeypatch.chdir(tuned_folder)
    return read_file(Tuning, "tuning.json")


def simulated(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    capsys.readouterr()
    assert llmctl("simulate", *words, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_fleet_is_simulated_exactly_as_it_was_tuned(tuned, capsys):
    best = tuned.recommended
    assert best.parameters[TOKENS] != best.kind_parameters["short"][TOKENS]
    found = simulated(capsys, *SERVERS, "--rate", tuned.request_rate_rps)
    for name in SHOWN:
        assert found[name] == best.metrics[name], name
    assert (found["policy"], found["parameters"]) == (best.policy, best.parameters)
    assert found["kind_parameters"] == best.kind_parameters
    assert (found["sla"], found["seed"], found["workers"]) == (tuned.sla, tuned.seed, 3)
    rate = ("--rate", tuned.request_rate_rps)
    plain = simulated(capsys, "--fleet", "fleet.yaml", "--policy", "vllm", *SERVERS[-2:], *rate)
    assert plain["goodput_rps"] != found["goodput_rps"]


def test_options_replace_what_was_tuned(tuned, capsys):
    best = tuned.recommended
    short = tuned.recommended.kind_parameters["short"]
    found = simulated(
        capsys, *SERVERS, "--set", f"{TOKENS}=300", "--seed", "8", "--sla", "e2e_p99_s=9"
    )
    assert found["parameters"] == best.parameters | {TOKENS: 300}
    assert found["kind_parameters"] == {"short": short | {TOKENS: 300}}
    assert (found["seed"], found["sla"]) == (8, {"e2e_p99_s": 9.0})
    found = simulated(capsys, *SERVERS, "--set", f"short.{TOKENS}=80", "--policy", "vllm")
    assert found["parameters"] == best.parameters
    assert found["kind_parameters"] == {"short": short | {TOKENS: 80}}
    assert best.replica_router is not None
    router = "session-hash"
    other = simulated(capsys, *SERVERS, "--set", f"replica_router={router}")
    same = simulated(capsys, *SERVERS, "--set", f"replica_router={best.replica_router.name}")
    assert same["e2e_mean_s"] == simulated(capsys, *SERVERS)["e2e_mean_s"] != other["e2e_mean_s"]


def test_compare_shows_the_tuned_servers_at_several_rates(tuned, capsys):
    assert llmctl("compare", *SERVERS, "--rate", "10,25", "--json") == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["policy"] for run in runs] == ["vllm", "vllm"]
    assert runs[0]["parameters"] == tuned.recommended.parameters
    words = (*SERVERS, "--rate", "25")
    assert runs[1]["metrics"]["e2e_mean_s"] == simulated(capsys, *words)["e2e_mean_s"]


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
        return simulated(capsys, *SERVERS, "--tuning", tmp_path / "sized.json")

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
    found = simulated(capsys, *SERVERS, "--tuning", tmp_path / "older.json")
    assert found["parameters"] == tuned.recommended.parameters
    assert found["kind_parameters"]["short"][TOKENS] == VLLM["parameters"][TOKENS]


@pytest.mark.parametrize("command", ["simulate", "compare"])
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--fit", "few.fit.json"), 2, "it is of the fleet fleet.yaml"),
        (("--fit", "unit-step"), 2, "--tuning tuning.json changes nothing"),
        (("--fleet", "other.yaml"), 2, "tuning.json is stale: its fleet other.yaml"),
        (("--fleet", "fleet.yaml", "--workers", "4"), 2, "--workers"),
        (("fleet.yaml",), 2, "hint: write its option before it: --fleet, --fit, "),
        (("--fleet", "fleet.yaml", "--tuning", "few.fit.json"), 2, "few.fit.json"),
        (("--fleet", "fleet.yaml", "--set", "shrt.watermark=0.1"), 2, "'shrt' is neither"),
        (("--fleet", "fleet.yaml", "--policy", "slice"), 2, "recommends policy 'vllm'"),
    ],
)
def test_a_tuning_that_does_not_belong_is_refused(tuned, command, words, code, said, capsys):
    text = Path("fleet.yaml").read_text()
    Path("other.yaml").write_text(text.replace("workers: 2", "workers: 3"))
    given = [
        "--policies" if word == "--policy" and command == "compare" else word for word in words
    ]
    assert llmctl(command, *SERVERS[2:], *given) == code
    assert said in capsys.readouterr().err


@without_capacity()
def test_a_recipe_is_simulated_as_it_was_tuned(folder, capsys):  # noqa: F811
    trace = ("--trace", "trace.jsonl")
    words = ("--jobs", "1", "--draws", "0", "--seed", "4", "--trials", "9")
    assert llmctl("tune", "recipe.yaml", *trace, *words) in (0, 5)
    made = read_file(Tuning, "tuning.json")
    words = ("--tuning", "tuning.json", *trace)
    found = simulated(capsys, *words)
    best = made.recommended
    assert (found["policy"], found["parameters"]) == (best.policy, best.parameters)
    assert (found["sla"], found["seed"], found["workers"]) == (made.sla, 4, made.workers)
    again = simulated(capsys, *words, "--rate", made.request_rate_rps)
    for name in ("goodput_rps", "throughput_rps", "e2e_mean_s", *made.sla):
        assert again[name] == best.metrics[name], name
    assert simulated(capsys, *words, "--workers", "3")["workers"] == 3
    assert llmctl("compare", *words, "--policies", f"fcfs,{best.policy}", "--json") == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert {run["policy"]: run["parameters"] for run in runs}[best.policy] == best.parameters
