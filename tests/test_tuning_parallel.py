"""Tensor parallelism beside replicas on the same GPUs, and laws that are computed for a command."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import llmctl

from toolkit.catalogue.gpus import GPUS
from toolkit.errors import InputError
from toolkit.files.find_model import find_model
from toolkit.files.io import read_file
from toolkit.files.new_recipe import Wish, new_recipe
from toolkit.files.plan import Plan
from toolkit.files.shipped import load_recipe
from toolkit.files.tuning import Tuning
from toolkit.tuning.parallel import on_gpus

TRACE = ["--trace", "chat-small"]
ONE_TRIAL = ["--trials", "1", "--draws", "0", "--policies", "own", "--routers", "own"]
QUICK = [*TRACE, "--rate", "40", "--jobs", "1", *ONE_TRIAL]


def write(model: str, gpu: str, **wish: Any) -> None:
    """recipe.yaml of this folder, as `llmctl recipe new` prints it."""
    text = new_recipe(find_model(model), Wish(GPUS[gpu], **wish)).text
    Path("recipe.yaml").write_text(text, encoding="utf-8")


@pytest.fixture
def with_whole_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write("llama-3.1-8b", "h100-sxm")


@pytest.fixture
def recipe(with_whole_trace: None, short_chat: None) -> None:
    """recipe.yaml, for tests in which a trace of 600 requests suffices."""


def tuned() -> Tuning:
    return read_file(Tuning, "tuning.json")


def test_the_same_gpus_are_few_large_workers_or_many_small_ones(recipe: None) -> None:
    one = load_recipe("recipe.yaml")
    four = on_gpus(one, 4, 8)
    assert (four.engine.tensor_parallel_size, four.workers) == (4, 2)
    assert one.hardware.usd_per_hour is not None
    assert four.hardware.usd_per_hour == pytest.approx(4 * one.hardware.usd_per_hour)
    back = on_gpus(four, 1, 8)
    assert back.hardware.usd_per_hour == pytest.approx(one.hardware.usd_per_hour)
    assert back.model_copy(update={"workers": 1}).measured == one.measured


@pytest.mark.parametrize(("size", "gpus"), [(2, 3), (3, 3), (16, 16)])
def test_a_size_that_divides_neither_gpus_nor_heads_is_refused(
    recipe: None, size: int, gpus: int
) -> None:
    with pytest.raises(InputError):
        on_gpus(load_recipe("recipe.yaml"), size, gpus)


@pytest.mark.slow
def test_a_recipe_without_a_fit_is_tuned_rendered_and_reported(
    recipe: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert llmctl("tune", "recipe.yaml", *QUICK, "--draws", "2") == 0
    shown = capsys.readouterr()
    assert "analytic, nothing was measured" in shown.err
    assert "analytic" in shown.out
    assert sorted(path.name for path in Path().iterdir()) == ["recipe.yaml", "tuning.json"]
    assert "fit" not in tuned().inputs
    assert tuned().analytic
    drawn = tuned().uncertainty
    assert drawn
    assert drawn.method == "measured servers"
    assert llmctl("render", "recipe.yaml", "--tuning", "tuning.json") == 0
    assert "analytic, nothing was measured" in capsys.readouterr().err
    plan = read_file(Plan, "plan.json")
    assert plan.fit.engine.analytic == tuned().analytic
    assert "fit" not in plan.inputs
    again = ["render", "recipe.yaml", "--tuning", "tuning.json", "--check"]
    assert llmctl(*again) == 0
    for source in ("recipe.yaml", "plan.json"):
        assert llmctl("report", source, "--out", "report.html") == 0
        page = Path("report.html").read_text(encoding="utf-8")
        assert "Nothing here was measured" in page
        assert "Tuned for" in page
    Path("plan.json").unlink()
    assert llmctl("report", "recipe.yaml", "--out", "report.html") == 0
    assert "Nothing here was measured" in Path("report.html").read_text(encoding="utf-8")


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


@pytest.mark.slow
def test_sizes_have_the_capacities_that_capacity_finds(
    with_whole_trace: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert llmctl("tune", "recipe.yaml", "--gpus", "2", *QUICK) == 0
    assert all(len(line) <= 80 for line in capsys.readouterr().out.splitlines())
    rows = tuned().parallel
    assert [(row.tensor_parallel_size, row.workers) for row in rows] == [(1, 2), (2, 1)]
    assert llmctl("capacity", "recipe.yaml", "--tp", "1,2", *TRACE, "--no-at-once", "--json") == 0
    found = json.loads(capsys.readouterr().out)["capacities"]
    capacities = [one["capacity_rps"] for one in found]
    assert [row.capacity_rps for row in rows] == pytest.approx(capacities)
    best = max(rows, key=lambda row: row.capacity_rps or 0.0)
    assert tuned().tensor_parallel_size == best.tensor_parallel_size
    assert tuned().workers == best.workers


@pytest.mark.slow
def test_the_plan_has_the_size_that_was_chosen(recipe: None) -> None:
    text = Path("recipe.yaml").read_text(encoding="utf-8")
    tight = text.replace("  mtpot_p99_s: 1.5", "  tpot_mean_s: 0.006")
    Path("recipe.yaml").write_text(tight, encoding="utf-8")
    assert llmctl("tune", "recipe.yaml", "--gpus", "2", *QUICK[:2], "--rate", "4", *ONE_TRIAL) == 0
    kept = {row.tensor_parallel_size: row.keeps_limits for row in tuned().parallel}
    assert kept == {1: False, 2: True}
    assert llmctl("render", "recipe.yaml", "--tuning", "tuning.json") == 0
    plan = read_file(Plan, "plan.json")
    own = load_recipe("recipe.yaml").hardware.usd_per_hour
    assert own is not None
    assert plan.recipe.engine.tensor_parallel_size == 2
    assert plan.fit.engine.tensor_parallel_size == 2
    assert plan.workers == 1
    assert plan.recipe.hardware.usd_per_hour == pytest.approx(2 * own)
    assert plan.explained["tensor_parallel_size"].value == "2"
    assert llmctl("render", "plan.json", "--target", "vllm", "--out", "deploy") == 0
    texts = [path.read_text(encoding="utf-8") for path in Path("deploy").iterdir()]
    assert any("--tensor-parallel-size" in text for text in texts)


@pytest.mark.slow
def test_the_recipe_can_name_the_sizes(recipe: None) -> None:
    with Path("recipe.yaml").open("a", encoding="utf-8") as file:
        file.write("tune: {tensor_parallel_sizes: [2, 1]}\n")
    assert llmctl("tune", "recipe.yaml", *QUICK) == 0
    assert [row.tensor_parallel_size for row in tuned().parallel] == [1, 2]


@pytest.mark.slow
def test_sizes_that_do_not_hold_the_model_are_left_out_by_name(
    recipe: None, capsys: pytest.CaptureFixture[str]
) -> None:
    write("llama-3.3-70b", "h100-sxm", gpus=4)
    assert llmctl("tune", "recipe.yaml", "--gpus", "4", *QUICK[:2], "--rate", "2", *ONE_TRIAL) == 0
    assert capsys.readouterr().err.count("leave no KV cache") == 1
    refused = {row.tensor_parallel_size: bool(row.refused) for row in tuned().parallel}
    assert refused[1]
    assert not refused[4]


@pytest.mark.slow
def test_the_fewest_gpus_of_any_size(with_whole_trace: None) -> None:
    words = [*TRACE, "--rate", "150", "--workers", "auto", "--tp", "1,2", *ONE_TRIAL]
    assert llmctl("tune", "recipe.yaml", *words) == 0
    gpus = {row.tensor_parallel_size: row.workers for row in tuned().parallel}
    assert tuned().workers * (tuned().tensor_parallel_size or 0) == min(
        size * (workers or 0) for size, workers in gpus.items()
    )


@pytest.mark.slow
def test_of_measured_laws_only_their_own_size_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    measured = "llama-3.1-8b-h200-measured"
    words = [*QUICK[:2], "--rate", "4", *ONE_TRIAL]
    assert llmctl("tune", measured, "--gpus", "2", *words) == 0
    rows = tuned().parallel
    assert [(row.tensor_parallel_size, row.workers) for row in rows] == [(1, 2), (2, None)]
    assert rows[1].refused
    assert tuned().analytic is None
    assert "tensor parallelism 2 is not searched" in capsys.readouterr().err
    assert llmctl("tune", measured, "--tp", "2", *words) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["--tp", "x"],
        ["--tp", ""],
        ["--tp", "0"],
        ["--tp", "3"],
        ["--tp", "2", "--gpus", "3"],
        ["--gpus", "2", "--workers", "2"],
        ["--gpus", "2", "--workers", "auto"],
    ],
)
def test_words_that_cannot_be_are_one_line_and_a_hint(
    recipe: None, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert llmctl("tune", "recipe.yaml", *QUICK, *words) == 2
    shown = capsys.readouterr().err.splitlines()
    assert sum(line.startswith("error: ") for line in shown) == 1
    assert any(line.startswith("hint: ") for line in shown)
    assert not Path("tuning.json").exists()
