"""`llmctl capacity`: how much a recipe serves within its targets, its cost, how many GPUs."""

import json
from collections.abc import Callable

import pytest
from commands import llmctl

from toolkit.files.shipped import recipe_path

RECIPE = "llama-3.1-8b-h200"
OTHER = "llama-3.1-8b-a100-80gb"
TRACE = ["--trace", "chat-small"]

pytestmark = pytest.mark.slow


@pytest.fixture
def capacity(capsys) -> Callable[..., dict]:
    def run(*words: str) -> dict:
        assert llmctl("capacity", *words, *TRACE, "--json") == 0
        return json.loads(capsys.readouterr().out)

    return run


def simulated(capsys: pytest.CaptureFixture[str], rate: float) -> str:
    words = ["--fit", RECIPE, *TRACE, "--rate", f"{rate:.9g}", "--json"]
    assert llmctl("simulate", *words) == 0
    return json.loads(capsys.readouterr().out)["verdict"]


def test_simulate_keeps_the_targets_below_the_capacity_and_not_above(capacity, capsys):
    [found] = capacity(RECIPE)["capacities"]
    assert simulated(capsys, 0.98 * found["capacity_rps"]) == "kept"
    assert simulated(capsys, 1.05 * found["capacity_rps"]) != "kept"
    assert found["error_percent"] <= 1.0
    assert found["binding"] in ("ttft_p99_s", "mtpot_p99_s", "behind_percent")


def test_recipes_stand_side_by_side_with_what_they_cost(capacity):
    words = ["--price", "H200=3.6", "--price", "A100=1.8", "--rate", "120", "--no-at-once"]
    one, other = capacity(RECIPE, OTHER, *words)["capacities"]
    assert (one["recipe"], other["recipe"]) == (RECIPE, OTHER)
    assert one["capacity_rps"] > other["capacity_rps"]
    for found, price in ((one, 3.6), (other, 1.8)):
        usd = 1e6 * price / 3600 / found["capacity_rps"]
        assert found["cost"]["usd_per_million_requests"] == pytest.approx(usd)
        needed = found["needed"]
        assert needed["gpus"] == needed["workers"]
        assert needed["usd_per_hour"] == pytest.approx(price * needed["workers"])
    assert one["needed"]["gpus"] < other["needed"]["gpus"]


def test_the_most_requests_at_once_keep_the_targets_and_one_more_does_not(capacity):
    [found] = capacity(RECIPE, "--sla", "mtpot_p99_s=0.1")["capacities"]
    curve = {point["load"]: point["kept"] for point in found["concurrency_curve"]}
    assert curve[found["concurrency"]]
    assert all(kept for load, kept in curve.items() if load < found["concurrency"])
    assert not curve[min(load for load in curve if load > found["concurrency"])]


def test_policies_and_routers_are_rows_of_their_own(capacity):
    words = ["--workers", "2", "--routers", "least-requests", "--no-at-once"]
    settings = [one["settings"] for one in capacity(RECIPE, *words)["capacities"]]
    assert settings == ["defaults", "router least-requests"]
    words = ["--policies", "past-future-sla", "--no-at-once"]
    one, other = capacity(RECIPE, *words)["capacities"]
    assert (one["policy"], other["policy"]) == ("vllm", "past-future-sla")


def test_a_page_and_a_terminal_of_80_columns_show_it(capsys, tmp_path):
    page = tmp_path / "capacity.html"
    assert llmctl("capacity", RECIPE, *TRACE, "--html", str(page)) == 0
    shown = capsys.readouterr()
    assert all(len(line) <= 80 for line in shown.out.splitlines())
    assert RECIPE in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "words",
    [
        ["nothing-like-it"],
        ["llama-3.1-8b-h200-measured", "--tp", "2"],
        [RECIPE, "--price", "H200"],
        [RECIPE, "--price", "H200=-1"],
        [RECIPE, "--routers", "all"],
        [RECIPE, "--policies", "no-such-policy"],
        [RECIPE, "--rate", "0"],
        [RECIPE, "--rate", "1e9"],
        [RECIPE, "--sla", "ttft=1"],
    ],
)
def test_wrong_words_are_one_line_and_a_hint(capsys, words):
    assert llmctl("capacity", *words, *TRACE) == 2
    shown = capsys.readouterr().err.splitlines()
    assert sum(line.startswith("error: ") for line in shown) == 1
    assert any(line.startswith("hint: ") for line in shown)


def test_where_the_trace_is_too_short_for_more_the_capacity_is_at_least(capsys):
    words = ["capacity", RECIPE, "--trace", "bursty-small", "--no-at-once", "--json"]
    assert llmctl(*words) == 0
    [found] = json.loads(capsys.readouterr().out)["capacities"]
    assert found["at_least"]


def test_targets_that_no_rate_keeps_are_named(capsys):
    assert llmctl("capacity", RECIPE, *TRACE, "--sla", "mtpot_p99_s=0.000001") == 5
    assert "mtpot_p99_s" in capsys.readouterr().err


def test_two_servers_or_one_on_two_gpus_is_one_command(capsys):
    words = ["capacity", "llama-3.1-8b-h200", "--tp", "1,2", "--no-at-once", "--json"]
    assert llmctl(*words, *TRACE) == 0
    one, two = json.loads(capsys.readouterr().out)["capacities"]
    assert [(one["workers"], one["gpus"]), (two["workers"], two["gpus"])] == [(2, 2), (1, 2)]
    assert one["capacity_rps"] != two["capacity_rps"]
    assert one["analytic"]


@pytest.mark.parametrize("words", [["--tp", "3"], ["--tp", "x"], ["--tp", "2", "--workers", "3"]])
def test_a_tensor_parallelism_that_cannot_be_is_refused(capsys, words):
    assert llmctl("capacity", "llama-3.1-8b-h200", *words, *TRACE) == 2
    assert "error: --tp" in capsys.readouterr().err


def test_a_recipe_of_vllm_without_a_fit_gets_an_analytic_one(capsys, tmp_path):
    shipped = recipe_path("llama-3.1-8b-h200").read_text(encoding="utf-8")
    mine = tmp_path / "mine.yaml"
    mine.write_text(shipped.replace("name: llama-3.1-8b-h200", "name: mine"), encoding="utf-8")
    assert llmctl("capacity", str(mine), *TRACE, "--no-at-once") == 0
    assert "analytic" in capsys.readouterr().err
