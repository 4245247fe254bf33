"""What analytic predictions were off beside servers that others measured."""

import json
from pathlib import Path

import pytest
from orders import changed

from toolkit.cli.basis import analytic_notes
from toolkit.estimators import elsewhere
from toolkit.estimators.elsewhere import error_words, is_of_model, measured_elsewhere
from toolkit.estimators.gpu_operators import measured_operators
from toolkit.files.fit import Fit
from toolkit.files.io import read_file, shipped_fit
from toolkit.files.profile import AnalyticError, ErrorSpread
from toolkit.files.recipe import Recipe
from toolkit.files.shipped import load_recipe, recipe_path

ROWS = Path(__file__).parents[1] / "docs" / "results" / "data" / "scoreboard.json"
NAMES = tuple(ErrorSpread.model_fields)


def spread(*values: float) -> dict[str, float]:
    return dict(zip(NAMES, values, strict=True))


DENSE = spread(20, 4.0, 11.0, 8.0, 25.0, -10.0, 3.0)
EXPERTS = spread(10, 7.0, 21.0, 10.0, 31.0, -20.0, 2.0)
DENSE_LEFT_OUT = spread(30, 6.0, 19.0, 9.0, 33.0, -20.0, 25.0)
EXPERTS_LEFT_OUT = spread(9, 8.0, 29.0, 17.0, 43.0, -28.0, 5.0)


@pytest.fixture(autouse=True)
def shipped(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "ships" in request.node.name:
        return
    groups = [
        {"gpu": "h100_sxm", "experts": False, "models": ["Llama-3.1-8B-FP8"], "errors": DENSE},
        {"gpu": "h200_sxm", "experts": True, "models": ["Qwen3-235B-A22B"], "errors": EXPERTS},
    ]
    left_out = [
        {"experts": False, "errors": DENSE_LEFT_OUT},
        {"experts": True, "errors": EXPERTS_LEFT_OUT},
    ]
    reach = {"tokens_max": 9216, "ranks_max": 8}
    content = {"all": reach, "groups": groups, "left_out": left_out}
    monkeypatch.setattr(elsewhere, "read_json", lambda path: content)


def recipe(source: str = "meta-llama/Llama-3.1-8B", tokens: int = 8192, ranks: int = 1) -> Recipe:
    own = load_recipe(recipe_path("llama-3.1-8b-h100-sxm"))
    return changed(
        own,
        model__source=source,
        model__max_model_len=tokens,
        engine__tensor_parallel_size=ranks,
    )


@pytest.mark.parametrize(
    ("gpu", "experts", "here", "left_out"),
    [
        ("h100_sxm", False, DENSE, DENSE_LEFT_OUT),
        ("h200_sxm", True, EXPERTS, EXPERTS_LEFT_OUT),
        ("h100_sxm", True, None, EXPERTS_LEFT_OUT),
        ("h200_sxm", False, None, DENSE_LEFT_OUT),
        ("a100_sxm", False, None, DENSE_LEFT_OUT),
    ],
)
def test_three_figures_are_said_or_that_none_was_compared(
    gpu: str, experts: bool, here: dict[str, float] | None, left_out: dict[str, float]
) -> None:
    error = measured_elsewhere(gpu, recipe(), experts=experts)
    assert error.here == (here and ErrorSpread(**here))
    assert error.left_out == ErrorSpread(**left_out)
    said = error_words(error)
    for figures in filter(None, (here, left_out)):
        assert all(f"{figures[name]:g}" in said for name in NAMES[:5])
    assert all(model in said for model in error.models)
    assert gpu in said


@pytest.mark.parametrize(
    ("source", "listed"),
    [
        ("meta-llama/Llama-3.1-8B", True),
        ("models/llama-3.1-8b-instruct", True),
        ("Llama-3.1-80B", False),
        ("Llama-3.1-8Bx", False),
        ("meta-llama/Llama-3.3-70B-Instruct", False),
        ("random", False),
    ],
)
def test_a_model_that_was_not_compared_has_the_errors_of_left_out_ones(
    source: str, listed: bool
) -> None:
    error = measured_elsewhere("h100_sxm", recipe(source), experts=False)
    assert error.listed == listed
    assert error.own == ErrorSpread(**(DENSE if listed else DENSE_LEFT_OUT))


def test_a_name_goes_on_with_another_word() -> None:
    assert is_of_model("Qwen/Qwen2-7B-Chat", "Qwen2-7B-Instruct-FP8")
    assert not is_of_model("Qwen/Qwen2.5-7B", "Qwen2")


@pytest.mark.parametrize(
    ("tokens", "ranks", "named"),
    [(9216, 8, []), (9217, 8, ["9,217"]), (9216, 16, ["16"]), (131072, 16, ["131,072", "16"])],
)
def test_what_is_beyond_the_compared_servers_is_named(
    tokens: int, ranks: int, named: list[str]
) -> None:
    error = measured_elsewhere("h100_sxm", recipe(tokens=tokens, ranks=ranks), experts=False)
    assert len(error.beyond) == len(named)
    assert all(word in text for word, text in zip(named, error.beyond, strict=True))
    assert all(text in error_words(error) for text in error.beyond)


def computed(error: AnalyticError) -> Fit:
    file = shipped_fit("llama-3.1-8b-h200")
    assert file
    fit = read_file(Fit, file)
    engine = fit.engine.model_copy(update={"analytic_error": error})
    return fit.model_copy(update={"engine": engine})


@pytest.mark.parametrize(
    ("gpu", "tokens", "warns"),
    [("h100_sxm", 8192, False), ("a100_sxm", 8192, True), ("h100_sxm", 99999, True)],
)
def test_laws_without_a_compared_server_are_a_warning(gpu: str, tokens: int, warns: bool) -> None:
    fit = computed(measured_elsewhere(gpu, recipe(tokens=tokens), experts=False))
    [line] = analytic_notes(fit.engine)
    assert line.startswith("warning: ") == warns


@pytest.mark.parametrize(("source", "own"), [("Llama-3.1-8B", DENSE), ("other", DENSE_LEFT_OUT)])
def test_the_range_of_a_computed_law_holds_80_percent_of_servers(
    source: str, own: dict[str, float]
) -> None:
    fit = computed(measured_elsewhere("h100_sxm", recipe(source), experts=False))
    law = fit.law_range()
    low, high = own["tpot_low_percent"], own["tpot_high_percent"]
    assert law.slow == pytest.approx(1 / (1 + low / 100))
    assert law.fast == pytest.approx(1 / (1 + high / 100))
    assert str(own["servers"]) in law.basis


@pytest.mark.parametrize("name", ["tiny-llama-cpu", "llama-3.1-8b-h200-measured"])
def test_the_range_of_a_measured_law_is_of_its_held_out_batches(name: str) -> None:
    file = shipped_fit(name)
    assert file
    fit = read_file(Fit, file)
    law = fit.law_range()
    assert law.slow == pytest.approx(1 + fit.overhead.error.p95_percent / 100)
    assert law.slow * law.fast == pytest.approx(1.0)


def test_what_ships_is_of_known_gpus_and_of_the_recorded_rows() -> None:
    content = elsewhere.read_json(elsewhere.FILE)
    groups = content["groups"]
    assert {one["gpu"] for one in groups} <= set(measured_operators())
    assert len({(one["gpu"], one["experts"]) for one in groups}) == len(groups)
    assert sum(one["errors"]["servers"] for one in groups) == content["all"]["servers"]
    assert {one["experts"] for one in content["left_out"]} == {False, True}
    board = json.loads(ROWS.read_text(encoding="utf-8"))
    rows = [dict(zip(board["columns"], row, strict=True)) for row in board["rows"]]
    answered = [row for row in rows if not row["refused"]]
    assert content["all"]["ranks_max"] == max(row["ranks"] for row in answered)
    assert content["all"]["tokens_max"] == max(row["prompt"] + row["output"] for row in answered)
    for group in groups:
        own = (group["gpu"], group["experts"])
        models = {row["model"] for row in answered if (row["gpu"], row["experts"]) == own}
        assert set(group["models"]) == models
    for gpu in ("a100_sxm", "l40s"):
        assert measured_elsewhere(gpu, recipe(), experts=False).here is None
