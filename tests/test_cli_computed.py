"""Laws that are computed for a command, where a recipe has no fit."""

from html import unescape
from pathlib import Path
from typing import Any

import pytest
from commands import llmctl, ran

from toolkit.catalogue.gpus import GPUS
from toolkit.files.find_model import find_model
from toolkit.files.io import read_file
from toolkit.files.new_recipe import Wish, new_recipe
from toolkit.files.plan import Plan
from toolkit.files.tuning import Tuning

TRACE = ["--trace", "chat-small"]
ONE_TRIAL = ["--trials", "1", "--policies", "own", "--routers", "own"]
QUICK = [*TRACE, "--rate", "40", "--jobs", "1", *ONE_TRIAL]


def write(model: str, gpu: str, **wish: Any) -> None:
    """recipe.yaml of this folder, as `llmctl recipe new` prints it."""
    text = new_recipe(find_model(model), Wish(GPUS[gpu], **wish)).text
    Path("recipe.yaml").write_text(text, encoding="utf-8")


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_chat: None) -> None:
    """recipe.yaml, and a trace of 600 requests."""
    monkeypatch.chdir(tmp_path)
    write("llama-3.1-8b", "h100-sxm")


def tuned() -> Tuning:
    return read_file(Tuning, "tuning.json")


@pytest.mark.slow
def test_a_recipe_without_a_fit_is_tuned_rendered_and_reported(
    recipe: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        llmctl(
            "tune",
            "recipe.yaml",
            *QUICK,
        )
        == 0
    )
    shown = capsys.readouterr()
    assert "analytic" in shown.err
    assert "analytic" in shown.out
    assert sorted(path.name for path in Path().iterdir()) == ["recipe.yaml", "tuning.json"]
    assert "fit" not in tuned().inputs
    assert tuned().analytic
    assert llmctl("render", "recipe.yaml", "--tuning", "tuning.json") == 0
    assert "analytic" in capsys.readouterr().err
    plan = read_file(Plan, "plan.json")
    assert plan.fit.engine.analytic == tuned().analytic
    assert "fit" not in plan.inputs
    for source in ("recipe.yaml", "plan.json"):
        assert llmctl("report", source, "--out", "report.html") == 0
        page = Path("report.html").read_text(encoding="utf-8")
        assert plan.fit.engine.analytic in unescape(page)
    Path("plan.json").unlink()
    assert llmctl("report", "recipe.yaml", "--out", "report.html") == 0
    assert plan.fit.engine.analytic in unescape(Path("report.html").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_every_command_warns_where_no_server_like_the_recipe_s_was_compared(
    recipe: None, capsys: pytest.CaptureFixture[str]
) -> None:
    write("llama-3.1-8b", "a100-80gb")
    for words in (
        "profile recipe.yaml --analytic",
        "fit profile.json",
        "simulate recipe.yaml --fit fit.json --trace chat-small",
        "capacity recipe.yaml --trace chat-small --fit fit.json --sla ttft_p99_s=1",
        "render recipe.yaml --fit fit.json",
        "report recipe.yaml",
    ):
        said = ran(capsys, words).err.splitlines()
        assert any(line.startswith("warning: ") and "a100_sxm" in line for line in said), words
    Path("fit.json").unlink()
    assert llmctl("tune", "recipe.yaml", *QUICK) in (0, 5)
    Path("profile.json").unlink()
    Path("plan.json").unlink()
    said = ran(capsys, "report recipe.yaml").err.splitlines()
    assert any(line.startswith("warning: ") and "a100_sxm" in line for line in said)


@pytest.mark.slow
def test_a_measured_fit_of_this_folder_comes_first_and_one_of_another_recipe_does_not(
    recipe: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert llmctl("profile", "recipe.yaml", "--analytic") == 0
    assert llmctl("fit", "profile.json") == 0
    assert llmctl("tune", "recipe.yaml", *QUICK) == 0
    assert "fit" in tuned().inputs
    before = Path("fit.json").read_bytes()
    write("qwen3-8b", "h100-sxm")
    capsys.readouterr()
    assert llmctl("tune", "recipe.yaml", *QUICK) == 0
    assert "not used" in capsys.readouterr().err
    assert "fit" not in tuned().inputs
    assert Path("fit.json").read_bytes() == before
