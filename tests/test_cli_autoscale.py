"""`llmctl autoscale`: rules beside each other on a trace, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from commands import llmctl

from toolkit.files.io import read_file
from toolkit.files.scaling import ScalingResult
from toolkit.files.shipped import recipe_path

RECIPE = "qwen3-8b-h100-sxm"
TARGETS = ("--sla", "ttft_p99_s=2", "--sla", "tpot_mean_s=0.05")


def trace_file(folder: Path, *, hours: float = 1.0, low: float = 2.0, high: float = 30.0) -> Path:
    """A low rate, a high one in the middle third, and the low one again."""
    rng = np.random.default_rng(0)
    third_s = hours * 1200.0
    times: list[float] = []
    for part, rate in enumerate((low, high, low)):
        count = rng.poisson(rate * third_s)
        times += sorted(part * third_s + third_s * rng.random(count))
    rows = [
        {"timestamp": round(1000 * at), "input_length": 3000, "output_length": 60} for at in times
    ]
    file = folder / "day.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def autoscale(*words: object) -> int:
    return llmctl("autoscale", *map(str, words))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_rules_stand_beside_the_static_fleet(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = trace_file(here, hours=0.25)
    code = autoscale(
        RECIPE, "--trace", trace, "--start-s", "20,30", "--rules", "by-law,keda", "--trials", 2,
        "--most", 6, "--jobs", 1, *TARGETS, "--html", "page.html", "--json",
    )  # fmt: skip
    assert code == 0
    printed = json.loads(capsys.readouterr().out)
    result = read_file(ScalingResult, Path("scaling.json"))
    assert printed["recipe_name"] == result.recipe_name == RECIPE
    assert {one.rule for one in result.rules} == {"by-law", "keda"}
    assert result.static is not None
    assert result.static.kept
    assert result.static.replicas_max > 1
    assert result.clairvoyant is not None
    assert result.clairvoyant.gpu_hours_per_day < result.static.gpu_hours_per_day
    assert result.best is not None
    assert result.best.kept
    assert result.best.gpu_hours_per_day <= result.static.gpu_hours_per_day
    best = [one for one in result.rules if one.kept]
    assert result.rules[: len(best)] == best
    # the mean of a curve is the mean of the run, but for the drain after the last arrival
    assert np.mean(result.static.curve.ready) == pytest.approx(result.static.replicas_mean)
    assert sum(result.demand_rps) * result.step_s == pytest.approx(
        len(trace.read_text().split("\n")) - 1
    )
    assert Path("page.html").read_text().count("<svg") == 3


@pytest.mark.slow
def test_nothing_keeps_the_targets(here: Path) -> None:
    trace = trace_file(here, hours=0.1, high=60.0)
    code = autoscale(
        RECIPE, "--trace", trace, "--start-s", 20, "--rules", "keda", "--trials", 1,
        "--most", 1, "--jobs", 1, *TARGETS,
    )  # fmt: skip
    assert code == 5
    result = read_file(ScalingResult, Path("scaling.json"))
    assert result.best is None
    assert result.static is None
    assert not result.rules[0].kept


def changed(here: Path, name: str, **scale: Any) -> Path:
    """The recipe with a fleet, in a file of this name."""
    content = yaml.safe_load(recipe_path(Path(RECIPE)).read_text())
    content["scale"] = scale
    file = here / f"{name}.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.mark.slow
def test_wrong_input_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = trace_file(here, hours=0.05)
    known = ("--trace", trace, "--start-s", 20)
    for words in (
        (RECIPE, "--trace", trace),  # no start is known
        (RECIPE, "--trace", trace, "--start-s", "soon"),
        (RECIPE, "--trace", trace, "--start-s", 5000),  # it is over before
        (RECIPE, *known, "--rules", "kedar"),
        (RECIPE, *known, "--rules", "static"),
        (RECIPE, *known, "--least", 4, "--most", 3),
        ("tiny-llama-cpu", *known),  # its workers have one scheduler
        (changed(here, "bounds", min=3, max=2), *known),
        (changed(here, "rule", start_s=[20], scaling={"rule": "by-laws"}), *known),
    ):
        assert autoscale(*words) == 2, words
        err = capsys.readouterr().err
        assert "Traceback" not in err
    assert not Path("scaling.json").exists()
