"""`simulate` scales lengths as `tune` does, by the recipe of the fit."""

import json
from pathlib import Path

import pytest
import samples
from commands import llmctl, printed, ran, refused
from lean import without_capacity
from said import says
from test_cli_tune import RECIPE

from toolkit.files.io import fit_path, read_file
from toolkit.files.shipped import recipe_path
from toolkit.files.tuning import Tuning

SIMULATE = "simulate recipe.yaml --policies slice --trace trace.jsonl"
SEVERAL = "simulate recipe.yaml --policies slice,sequence --trace trace.jsonl"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The working directory, with a recipe, its fit, and a trace with outputs that are too long for
    it.
    """
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE)
    samples.write_fit(Path("recipe.yaml"))
    rows = [
        {"timestamp": 25 * k, "input_length": 40 + k % 90, "output_length": 8 + k % 400}
        for k in range(900)
    ]
    Path("trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def scaling(capsys: pytest.CaptureFixture[str], line: str, *words: str) -> dict[str, object]:
    return printed(capsys, line, *words)["trace"]["scaling"]


@pytest.mark.slow
@without_capacity()
def test_all_commands_scale_alike(folder, capsys):
    assert llmctl("tune recipe.yaml --trace trace.jsonl --jobs 1") == 0
    tuned = read_file(Tuning, "tuning.json").scaling
    assert tuned.max_new_tokens == 128
    assert scaling(capsys, SIMULATE) == scaling(capsys, SEVERAL) == tuned.model_dump(mode="json")


@pytest.mark.parametrize("command", [SIMULATE, SEVERAL])
def test_the_first_line_says_how_lengths_were_scaled(folder, command, capsys):
    lines = ran(capsys, command).err.splitlines()
    assert "divided by 3.1" in lines[0]
    assert sum("divided" in line for line in lines) == 1


def test_the_recipe_counts_as_it_is_now_as_in_tune(folder, capsys):
    text = Path("recipe.yaml").read_text()
    Path("recipe.yaml").write_text(text.replace("max_new_tokens: 128", "max_new_tokens: 100"))
    assert scaling(capsys, SIMULATE)["max_new_tokens"] == 100
    assert scaling(capsys, SIMULATE, "--max-new-tokens", "90")["max_new_tokens"] == 90


def test_a_recipe_with_a_changed_measured_part_is_not_the_fit_s(folder, capsys):
    Path("recipe.yaml").write_text(RECIPE.replace("max_model_len: 512", "max_model_len: 256"))
    assert says(refused(capsys, SIMULATE)[0], "fit.json", "'model'", "recipe.yaml")


NO_FIT = "llama-3.1-8b-l40s"  # a shipped recipe of vLLM


@pytest.mark.slow
@pytest.mark.parametrize("words", [NO_FIT, "ours.yaml"])
def test_laws_are_computed_where_a_recipe_has_no_fit(words, tmp_path, monkeypatch, capsys):
    """As in `tune` and `capacity`; also beside a fit of another recipe."""
    monkeypatch.chdir(tmp_path)
    text = recipe_path(NO_FIT).read_text()
    Path("ours.yaml").write_text(text.replace(f"name: {NO_FIT}", "name: mine"))
    Path("fit.json").write_bytes(fit_path("tiny-llama-cpu").read_bytes())
    assert llmctl(f"simulate {words} --trace chat-small --json") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["policy"] == "vllm"
    assert found["ttft_p99_s"] > 0
    assert says(err, "analytic, nothing was measured")
