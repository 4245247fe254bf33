"""`llmctl tune`: what it prints and writes, whatever the number of processes, and what it refuses."""

import json
from pathlib import Path

import pytest
import samples
from commands import llmctl

from toolkit.files.io import read_file
from toolkit.files.plan import Plan
from toolkit.files.tuning import Tuning
from toolkit.sched.policies import ORACLES, POLICIES
from toolkit.sched.policies.servable import footnote

RECIPE = """\
name: test
model: {source: org/model, max_model_len: 512, kv_bytes_per_token: 4096, dtype: float32}
hardware: {device: cpu, name: any}
engine: {name: transformers}
workers: 2
profile: {batch_sizes: [1], input_lengths: [8], cached_lengths: [8], memory_lengths: [8]}
sla: {ttft_p99_s: 2, e2e_p95_s: 8}
policy: {name: sequence, parameters: {batch_size: 1}}
tune: {trials: 6, window_s: 2, draws: 3, policies: [own]}
serve: {max_new_tokens: 128}
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a recipe whose policy is a poor one, and a fit of it."""
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE)
    samples.write_fit(Path("recipe.yaml"))
    Path("profile.json").unlink()  # so that the laws are scaled, not resampled
    rows = [{"timestamp": 25 * k, "input_length": 40 + 7 * k % 90, "output_length": 8 + 5 * k % 60} for k in range(900)]
    Path("trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def tune(*words: str) -> int:
    return llmctl(
        "tune", "recipe.yaml", "--trace", "trace.jsonl", *(words if "--jobs" in words else ("--jobs", "1", *words))
    )


def test_what_is_printed_fits_80_columns_and_says_what_matters(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune("--policies", "slice,past-future") == 0
    out, err = capsys.readouterr()
    assert max(map(len, out.splitlines())) <= 80
    for said in (
        "each policy's best trial",
        "goodput_rps of the trials",
        "the target that binds: ",
        "gain over the defaults, held out: +",
        "with the fit's error, in 90 % of 3 draws (no profile: laws scaled):",
        "the best beats the defaults in 100 % of the draws",
        "past-future *",
    ):
        assert said in out
    assert footnote(["past-future"], ["transformers"]) in " ".join(out.split())
    assert "wrote tuning.json" in err
    assert not Path("tuning.json.partial").exists()


def test_processes_change_no_byte_of_the_file(files: Path) -> None:
    assert tune("--out", "one.json") == tune("--jobs", "2", "--out", "two.json") == 0
    assert Path("one.json").read_bytes() == Path("two.json").read_bytes()


def test_another_policy_than_the_recipes_is_rendered(files: Path) -> None:
    assert tune("--policies", "slice", "--draws", "0") == 0
    assert read_file(Tuning, "tuning.json").best_held_out.policy == "slice"
    assert llmctl("render", "recipe.yaml", "--fit", "fit.json", "--tuning", "tuning.json") == 0
    plan = read_file(Plan, "plan.json")
    assert plan.policy.name == "slice"
    assert plan.policy.parameters == read_file(Tuning, "tuning.json").best_held_out.parameters
    assert plan.explained["slice_tokens"].source.startswith("trial ")


def test_the_best_is_one_that_the_engine_runs_and_the_best_of_all_is_named(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune("--policies", "slice,past-future", "--draws", "0") == 0
    result = read_file(Tuning, "tuning.json")
    assert result.best_held_out.policy == "slice"
    assert result.alternatives is not None
    assert result.alternatives.best_of_all == "past-future"
    said = " ".join(capsys.readouterr().out.split())
    assert "best of all policies: past-future, which needs engine vllm or rebatch; by this engine's laws it" in said
    assert llmctl("render", "recipe.yaml", "--fit", "fit.json", "--tuning", "tuning.json") == 0
    assert read_file(Plan, "plan.json").policy.name == "slice"


def test_by_default_every_policy_is_searched_and_the_price_is_said(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("recipe.yaml").write_text(RECIPE.replace("trials: 6", "trials: 10").replace(", policies: [own]", ""))
    assert tune("--draws", "0") == 0
    result = read_file(Tuning, "tuning.json")
    assert {one.policy for one in result.policies} == POLICIES.keys() - ORACLES
    assert {one.policy for one in result.policies if one.refusal is None} == {"slice", "sequence"}
    err = capsys.readouterr().err
    assert "10 trials of 10 policies, 2 of which this engine can run; about " in err
    assert tune("--draws", "0", "--policies", "own", "--trials", "2") == 0
    assert [one.policy for one in read_file(Tuning, "tuning.json").policies] == ["sequence"]
    assert "2 trials of the recipe's own policy; about " in capsys.readouterr().err


def test_nothing_within_the_limits_is_said_with_what_binds_and_a_remedy(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("recipe.yaml").write_text(RECIPE.replace("ttft_p99_s: 2", "ttft_p99_s: 0.001"))
    assert tune("--draws", "0") == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(k for k, line in enumerate(lines) if line.startswith("no trial keeps all limits; ttft_p99_s binds"))
    said = " ".join(lines[at:])
    assert "what keeps all limits at 40 requests/s, simulated:" in said
    assert "not fewer requests: the best settings break a limit even at a 64th of the rate" in said
    assert "a looser target in the recipe's sla" in said


def test_a_policy_that_was_not_searched_and_keeps_the_limits_is_named(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune("--draws", "0", "--trials", "1") == 0
    result = read_file(Tuning, "tuning.json")
    assert result.alternatives is not None
    assert not result.alternatives.feasible
    assert [one.policy for one in result.alternatives.policies] == ["slice"]
    assert result.alternatives.up_to_rps is not None
    assert result.alternatives.up_to_rps < result.request_rate_rps
    said = " ".join(capsys.readouterr().out.split())
    assert "another policy on engine 'transformers': --policies slice" in said
    assert "fewer requests: at most " in said


def test_the_fewest_workers_are_said_and_written(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune("--workers", "auto", "--policies", "slice", "--draws", "0") == 0
    result = read_file(Tuning, "tuning.json")
    assert result.sizing is not None
    out = capsys.readouterr().out
    assert f"workers needed: {result.sizing.workers}, with " in out
    assert "workers that were tried, on all windows" in out
    assert max(map(len, out.splitlines())) <= 80


def test_json_is_the_file(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune("--json", "--draws", "0") == 0
    assert json.loads(capsys.readouterr().out) == json.loads(Path("tuning.json").read_text())


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (("--policies", "slic"), "tune.policies: there is no policy 'slic'", "did you mean 'slice'?"),
        (
            ("--policies", "past-future-oracle"),
            "policy 'past-future-oracle' knows the true output lengths, so it exists in simulations only",
            "choose another policy to serve with; see docs/policies.md",
        ),
        (("--workers", "0"), "--workers 0: it is a whole number from 1, or 'auto'", ""),
        (("--workers", "many"), "--workers many: it is a whole number from 1, or 'auto'", ""),
    ],
)
def test_what_cannot_be_searched_is_refused_before_anything_runs(
    files: Path, words: tuple[str, ...], message: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(*words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"error: {message}", *([f"hint: {hint}"] if hint else [])]
    assert not Path("tuning.json.partial").exists()
