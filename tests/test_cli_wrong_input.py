"""Wrong input to commands: one clear line with the value, the limit and the remedy."""

from pathlib import Path

import pytest
import samples
from commands import refused
from orders import changed
from said import says

from toolkit.files.io import head, shipped_fits, write_file

LIMIT = "256"
MODEL = {
    "source": "random",
    "config": {"model_type": "fake"},
    "dtype": "float32",
    "max_model_len": 512,
    "tokenizer": "bytes",
}


def write_recipe(folder: Path, name: str, max_model_len: int = 512) -> None:
    """A recipe and its fit."""
    recipe = samples.recipe(name=name, model=MODEL | {"max_model_len": max_model_len})
    write_file(recipe, folder / f"{name}.yaml")  # JSON is YAML
    made = head({"recipe": folder / f"{name}.yaml"})
    write_file(changed(samples.fit(), recipe_name=name, **made), folder / f"{name}.fit.json")


@pytest.fixture
def stage(tmp_path, monkeypatch) -> Path:
    """A folder with recipe.yaml and its fit.json."""
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path, "recipe")
    (tmp_path / "recipe.fit.json").rename(tmp_path / "fit.json")
    return tmp_path


@pytest.mark.parametrize(
    "line",
    [
        "simulate unit-step",
        "tune recipe.yaml",
        "serve plan.json",
    ],
)
def test_the_number_of_workers_has_a_limit(line, stage, capsys):
    error, hint = refused(capsys, line, "--workers", 1_000_000)
    assert says(error, "--workers 1000000", LIMIT)
    assert hint.startswith("hint: ")


RATES = ("1e-06", "1,000,000")


@pytest.mark.parametrize(
    ("words", "named", "limits"),
    [
        (f"--trials {10**9}", ("--trials", "100000"), ()),
        ("--jobs 1000000", ("--jobs", "1024"), ()),
        ("--rate 1e-300", ("1e-300",), RATES),
        ("--rate 1e12", ("1e+12",), RATES),
        ("--rate nan", ("nan",), RATES),
    ],
)
def test_a_search_has_bounds(words, named, limits, stage, capsys):
    error, hint = refused(capsys, f"tune recipe.yaml {words}")
    assert says(error, *named)
    assert says(hint, *limits)


@pytest.mark.slow
@pytest.mark.parametrize("count", ["-1", "9" * 5000])
def test_a_count_of_workers_is_a_whole_number(count, stage, capsys):
    assert says(refused(capsys, "tune recipe.yaml --workers", count)[0], "--workers")


def test_a_fit_of_another_recipe_is_named_as_such(tmp_path, capsys):
    write_recipe(tmp_path, "large")
    write_recipe(tmp_path, "small", 1024)
    error, hint = refused(
        capsys, "tune", tmp_path / "large.yaml", "--fit", tmp_path / "small.fit.json"
    )
    assert says(error, "small.fit.json", "'small'", "'large'")
    assert says(hint, "'large'", "llmctl profile RECIPE", "llmctl fit PROFILE")


def test_the_shipped_fit_is_offered_instead_of_another_recipes(capsys):
    one = shipped_fits()[0]
    other = shipped_fits()[-1]
    error, hint = refused(capsys, "tune", one, "--fit", other)
    assert says(error, "fit.json", f"'{other}'", f"'{one}'")
    assert hint.endswith(f"--fit {one}")


@pytest.mark.parametrize(
    ("policy", "setting"),
    [("sequence", "batch_size"), ("slice", "slice_tokens"), ("fcfs", "capacity_tokens")],
)
def test_an_enormous_whole_number_is_refused(policy, setting, capsys):
    line = f"simulate unit-step --trace bursty-small --policies {policy}"
    said = refused(capsys, line, "--set", f"{setting}={10**21}")
    assert says(said[0], setting, str(10**21), "9.0072e+15")
