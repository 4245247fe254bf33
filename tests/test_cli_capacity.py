"""`llmctl capacity`: how much a recipe serves within its targets, its cost, how many GPUs."""

import json
from collections.abc import Callable

import pytest
from commands import printed, ran, refused

from toolkit.files.shipped import recipe_path

RECIPE = "llama-3.1-8b-h200"
OTHER = "llama-3.1-8b-a100-80gb"
# A short wait, so that the trace need not be repeated for long
TRACE = "--trace chat-small --sla ttft_p99_s=1"

pytestmark = pytest.mark.slow


@pytest.fixture
def capacity(capsys) -> Callable[[str], list[dict]]:
    return lambda words: printed(capsys, f"capacity {TRACE} {words}")["capacities"]


def simulated(capsys: pytest.CaptureFixture[str], rate: float) -> str:
    return printed(capsys, f"simulate --fit {RECIPE} --rate {rate:.9g} {TRACE}")["verdict"]


def test_simulate_keeps_the_targets_below_the_capacity_and_not_above(capacity, capsys):
    [found] = capacity(RECIPE)
    assert simulated(capsys, 0.98 * found["capacity_rps"]) == "kept"
    assert simulated(capsys, 1.05 * found["capacity_rps"]) != "kept"
    assert found["error_percent"] <= 1.0
    assert found["binding"] in ("ttft_p99_s", "mtpot_p99_s", "behind_percent")


def test_recipes_stand_side_by_side_with_what_they_cost(capacity):
    words = "--price H200=3.6 --price A100=1.8 --rate 120"
    one, other = capacity(f"{RECIPE} {OTHER} {words}")
    assert (one["recipe"], other["recipe"]) == (RECIPE, OTHER)
    assert one["capacity_rps"] > other["capacity_rps"]
    for found, price in ((one, 3.6), (other, 1.8)):
        usd = 1e6 * price / 3600 / found["capacity_rps"]
        cost = found["cost"]
        assert cost["usd_per_million_requests"] == pytest.approx(usd)
        assert 0.0 < cost["usd_per_million_in"] < cost["usd_per_million_out"]
        needed = found["needed"]
        assert needed["gpus"] == needed["workers"]
        assert needed["usd_per_hour"] == pytest.approx(price * needed["workers"])
    assert one["needed"]["gpus"] < other["needed"]["gpus"]


def test_the_most_requests_at_once_keep_the_targets_and_one_more_does_not(capacity):
    [found] = capacity(f"{RECIPE} --sla mtpot_p99_s=0.1 --at-once")
    curve = {point["load"]: point["kept"] for point in found["concurrency_curve"]}
    assert curve[found["concurrency"]]
    assert all(kept for load, kept in curve.items() if load < found["concurrency"])
    assert not curve[min(load for load in curve if load > found["concurrency"])]


def test_policies_and_routers_are_rows_of_their_own(capacity):
    routed = capacity(f"{RECIPE} --workers 2 --routers least-requests")
    settings = [one["settings"] for one in routed]
    assert settings == ["defaults", "router least-requests"]
    one, other = capacity(f"{RECIPE} --policies past-future-sla")
    assert (one["policy"], other["policy"]) == ("vllm", "past-future-sla")


def test_a_page_and_a_terminal_of_80_columns_show_it(capsys, tmp_path):
    page = tmp_path / "capacity.html"
    out = ran(capsys, f"capacity {RECIPE} {TRACE} --html", page).out
    assert all(len(line) <= 80 for line in out.splitlines())
    assert RECIPE in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "words",
    [
        "nothing-like-it",
        "llama-3.1-8b-h200-measured --tp 2",
        f"{RECIPE} --price H200",
        f"{RECIPE} --price H200=-1",
        f"{RECIPE} --price H2OO=3",
        f"{RECIPE} --price H20=3",
        f"{RECIPE} --price H200=3.6 --price A100=2",
        f"{RECIPE} --price =3",
        f"{RECIPE} --routers all",
        f"{RECIPE} --policies no-such-policy",
        f"{RECIPE} --rate 0",
        f"{RECIPE} --rate 1e9",
        f"{RECIPE} --sla ttft=1",
    ],
)
def test_wrong_words_are_one_line_and_a_hint(capsys, words):
    said = refused(capsys, f"capacity {words} {TRACE}")
    assert [line.split(":")[0] for line in said] == ["error", "hint"]


@pytest.mark.whole_traces
def test_a_trace_that_is_over_too_soon_is_repeated(capacity):
    [found] = capacity(f"{RECIPE} --trace bursty-small")
    assert not found["at_least"]
    assert found["repeats"] > 1
    assert str(found["repeats"]) in found["changes"]


@pytest.fixture
def sessions(tmp_path) -> str:
    """200 sessions of three turns, 30 s apart: over in no time where their starts are pushed
    together, while few of them are served per second.
    """
    rows = [
        {
            "timestamp": 10_000 * session + 30_000 * turn,
            "session": session,
            "input_length": (300, 1100, 2200)[turn],
            "output_length": 200,
            "think_ms": 30_000 * (turn > 0),
        }
        for session in range(200)
        for turn in range(3)
    ]
    file = tmp_path / "sessions.jsonl"
    rows.sort(key=lambda row: row["timestamp"])
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_the_rate_of_sessions_is_the_one_that_is_served(capacity, capsys, sessions, tmp_path):
    [found] = capacity(f"{RECIPE} --trace {sessions}")
    rate = found["capacity_rps"]
    assert found["metrics"]["served_rps"] == rate
    nearest = min(found["curve"], key=lambda point: abs(point["load"] / rate - 1.0))
    assert nearest["load"] == pytest.approx(rate, rel=0.05), "what starts is what is served"
    long = tmp_path / "long.jsonl"
    ran(capsys, f"trace convert {sessions} {long} --repeat {found['repeats']}")
    words = f"simulate --fit {RECIPE} --trace {long} --sla ttft_p99_s=1 --rate"
    assert printed(capsys, f"{words} {0.95 * rate:.9g}")["verdict"] == "kept"
    assert printed(capsys, f"{words} {1.1 * rate:.9g}")["verdict"] != "kept"


def test_long_outputs_stay_long_and_what_does_not_fit_is_counted(capacity, capsys, tmp_path):
    rows = [
        {"timestamp": 200 * k, "input_length": 400, "output_length": 2000 + 10 * k}
        for k in range(600)
    ]
    file = tmp_path / "long.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    too_long = sum(row["output_length"] + 400 > 7500 for row in rows)
    recipe = tmp_path / f"{RECIPE}.yaml"
    text = recipe_path(RECIPE).read_text(encoding="utf-8")
    recipe.write_text(text.replace("max_model_len: 8192", "max_model_len: 7500"))
    result = printed(capsys, f"capacity {recipe} --force --trace", file)
    [found] = result["capacities"]
    assert too_long > 0
    assert found["scaling"]["left_out"] == too_long
    assert found["scaling"]["outputs"]["divisor"] == 1.0
    assert str(too_long) in found["changes"]
    assert result["trace"]["requests"] == 600 - too_long


def test_targets_that_no_rate_keeps_are_named(capsys):
    assert (
        "mtpot_p99_s"
        in ran(capsys, f"capacity {RECIPE} {TRACE} --sla mtpot_p99_s=0.000001", code=5).err
    )


def test_two_servers_or_one_on_two_gpus_is_one_command(capacity):
    one, two = capacity(f"{RECIPE} --tp 1,2")
    assert [(one["workers"], one["gpus"]), (two["workers"], two["gpus"])] == [(2, 2), (1, 2)]
    assert one["capacity_rps"] != two["capacity_rps"]
    assert one["analytic"]


@pytest.mark.parametrize("words", ["--tp 3", "--tp x", "--tp 2 --workers 3"])
def test_a_tensor_parallelism_that_cannot_be_is_refused(capsys, words):
    assert refused(capsys, f"capacity {RECIPE} {TRACE} {words}")[0].startswith("error: --tp")


def test_a_recipe_of_vllm_without_a_fit_gets_an_analytic_one(capsys, tmp_path):
    shipped = recipe_path(RECIPE).read_text(encoding="utf-8")
    mine = tmp_path / "mine.yaml"
    mine.write_text(shipped.replace(f"name: {RECIPE}", "name: mine"), encoding="utf-8")
    assert "analytic" in ran(capsys, f"capacity {TRACE}", mine).err


def test_with_a_worker_lost_the_others_serve_and_sizing_counts_it(capacity):
    whole, lost = capacity(f"{RECIPE} --workers 3 --lost 1 --rate 150")
    assert (whole["lost"], lost["lost"]) == (0, 1)
    assert (whole["gpus"], lost["gpus"]) == (3, 3)
    [two] = capacity(f"{RECIPE} --workers 2")
    assert lost["capacity_rps"] == two["capacity_rps"] < whole["capacity_rps"]
    assert lost["needed"]["workers"] == whole["needed"]["workers"] + 1


def test_fp8_stands_beside_16_bits(capacity):
    words = "--also model.quantization=fp8 --also engine.vllm.kv_cache_dtype=fp8"
    own, weights, cache = capacity(f"{RECIPE} {words}")
    assert weights["changed"] == {"model.quantization": "fp8"}
    assert cache["changed"] == {"engine.vllm.kv_cache_dtype": "fp8"}
    assert own["changed"] == {}
    assert weights["capacity_rps"] > own["capacity_rps"]
    assert cache["capacity_rps"] > own["capacity_rps"]


def test_the_prefix_cache_is_judged_by_what_prompts_share(capsys, tmp_path):
    shared = tmp_path / "shared.jsonl"
    ran(capsys, f"trace generate --rate 10 --duration 30 --system-tokens 2000 --out {shared}")
    words = f"capacity {RECIPE} --also prefix_caching=false --trace"
    own, without = printed(capsys, words, shared)["capacities"]
    assert own["metrics"]["hit_percent"] > 50.0
    assert without["metrics"]["hit_percent"] == 0.0
    assert without["capacity_rps"] < own["capacity_rps"]
    [error, _] = refused(capsys, words, "chat-small")
    assert "chat-small" in error


@pytest.mark.parametrize(
    "words",
    [
        "--lost 1",  # of one
        "--workers 2 --lost 2 --rate 50",
        "--lost 0",
        "--also max_num_seq=3",
        "--also engine.vllm.drafts.method=ngram",
        "--also tune.trials=3",
    ],
)
def test_questions_without_an_answer_are_refused(capsys, words):
    assert refused(capsys, f"capacity {RECIPE} {TRACE} {words}")
