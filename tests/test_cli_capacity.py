"""`llmctl capacity`: how much a recipe serves within its targets, its cost, how many GPUs."""

from collections.abc import Callable

import pytest
from commands import printed, ran, refused

RECIPE = "llama-3.1-8b-h200"
OTHER = "llama-3.1-8b-a100-80gb"
# A short wait, so that the trace need not be repeated for long
TRACE = "--trace chat-small --sla ttft_p99_s=1"

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("short_chat")]


@pytest.fixture
def capacity(capsys) -> Callable[[str], list[dict]]:
    return lambda words: printed(capsys, f"capacity {TRACE} {words}")["capacities"]


def simulated(capsys: pytest.CaptureFixture[str], rate: float) -> str:
    return printed(capsys, f"simulate {RECIPE} --rate {rate:.9g} {TRACE}")["verdict"]


def test_simulate_keeps_the_targets_below_the_capacity_and_not_above(capacity, capsys):
    [found] = capacity(RECIPE)
    assert simulated(capsys, 0.98 * found["capacity_rps"]) == "kept"
    assert simulated(capsys, 1.05 * found["capacity_rps"]) != "kept"
    assert found["error_percent"] <= 1.0
    assert found["binding"] in ("ttft_p99_s", "mtpot_p99_s", "behind_percent")
    interval = found["interval"]
    assert interval["low_rps"] < found["capacity_rps"] < interval["high_rps"]
    assert interval["law"]["fast"] < 1.0 < interval["law"]["slow"]


def test_recipes_stand_side_by_side_with_what_they_cost(capacity):
    words = "--price 3.6 --price 1.8 --rate 120"
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


@pytest.mark.parametrize(
    "words",
    [
        "nothing-like-it",
        "llama-3.1-8b-h200-measured --also engine.tensor_parallel_size=2",
        f"{RECIPE} --price H200",
        f"{RECIPE} --price -1",
        f"{RECIPE} --price 3.6 --price 2",
        f"{RECIPE} --routers all",
        f"{RECIPE} --policies no-such-policy",
        f"{RECIPE} --rate 0",
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


def test_targets_that_no_rate_keeps_are_named(capsys):
    assert (
        "mtpot_p99_s"
        in ran(capsys, f"capacity {RECIPE} {TRACE} --sla mtpot_p99_s=0.000001", code=5).err
    )


def test_two_servers_or_one_on_two_gpus_is_one_command(capacity):
    one, two = capacity(
        f"{RECIPE} --workers 2 --also engine.tensor_parallel_size=2,workers=1 --price 2"
    )
    assert one["cost"]["usd_per_hour"] == two["cost"]["usd_per_hour"]
    assert [(one["workers"], one["gpus"]), (two["workers"], two["gpus"])] == [(2, 2), (1, 2)]
    assert one["capacity_rps"] != two["capacity_rps"]
    assert one["analytic"]


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
        "--also engine.vllm.drafts.method=ngram",
        "--also tune.trials=3",
    ],
)
def test_questions_without_an_answer_are_refused(capsys, words):
    assert refused(capsys, f"capacity {RECIPE} {TRACE} {words}")
