"""`llmctl` without a command: what to do next, by what lies in the folder."""

from pathlib import Path

import pytest
import samples
from commands import ran
from said import says
from test_cli_render import RECIPE, tuning

from toolkit.cli.arguments import ScenarioOptions
from toolkit.cli.scenario import Scenario
from toolkit.files.io import write_file


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    out = ran(capsys, "").out
    assert max(map(len, out.splitlines())) <= 80
    assert len(out.splitlines()) <= 24
    return out


def test_an_empty_folder_shows_how_to_begin(folder, capsys):
    Path("other.yaml").write_text("a: 1\n")
    Path("plan.json").write_text("{}")
    assert says(shown(capsys), "llmctl recipes", "llmctl recipe new", "llmctl --help")


@pytest.mark.slow
def test_each_file_of_the_workflow_leads_to_the_next(folder, capsys):
    recipe = Path("mine.yaml")
    recipe.write_text(RECIPE)
    assert says(shown(capsys), "llmctl profile mine.yaml")
    samples.write_fit(recipe)
    assert says(shown(capsys), "fit.json", "llmctl tune mine.yaml")
    write_file(tuning({"recipe": recipe, "fit": Path("fit.json")}), Path("tuning.json"))
    assert says(shown(capsys), "llmctl render mine.yaml --tuning tuning.json")
    plan = Scenario.open(ScenarioOptions(recipe=recipe)).make_plan()
    write_file(plan, Path("plan.json"))
    assert says(shown(capsys), "llmctl serve plan.json")


def test_a_file_about_another_recipe_is_not_used(folder, capsys):
    Path("mine.yaml").write_text(RECIPE)
    samples.write_fit(Path("mine.yaml"))
    Path("mine.yaml").write_text(RECIPE.replace("batch_sizes: [1]", "batch_sizes: [1, 2]"))
    out = shown(capsys)
    assert says(out, "not used", "mine.yaml")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "follows"),
    [
        ("recipe new llama-3.1-8b --gpu H200", "llmctl tune recipe.yaml"),
        (
            "simulate mine.yaml --trace chat-small",
            "llmctl tune mine.yaml --trace chat-small",
        ),
        ("render mine.yaml --tuning tuning.json", "llmctl serve plan.json"),
        ("report plan.json", "llmctl serve plan.json"),
    ],
)
def test_a_command_ends_with_the_next_one(line, follows, folder, capsys):
    Path("mine.yaml").write_text(RECIPE)
    samples.write_fit(Path("mine.yaml"))
    write_file(tuning({"recipe": Path("mine.yaml"), "fit": Path("fit.json")}), Path("tuning.json"))
    write_file(
        Scenario.open(ScenarioOptions(recipe=Path("mine.yaml"))).make_plan(), Path("plan.json")
    )
    said = ran(capsys, line).err.splitlines()
    [last] = [one for one in said if one.startswith("next")]
    assert last.endswith(follows)
