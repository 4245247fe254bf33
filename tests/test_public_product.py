"""Measured servers, predicted by the commands: what is asked, and what is made of the answers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.public import product
from benchmarks.public.product import Answer, Checkpoint
from benchmarks.public.servers import Protocol, Row
from toolkit.catalogue.known import KNOWN
from toolkit.errors import InputError
from toolkit.estimators.elsewhere import FILE
from toolkit.files.shipped import load_recipe

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "data" / "product.json"
EXTRACT = Path(__file__).parent / "data" / "silicon-extract.json"
SETTING = ("Qwen3-32B", "bf16", "0.12.0", 2, 1, 1, 1024, 128, 8)


def answer(name: str, gpu: str, tpot: float, ttft: float, **more: Any) -> Answer:
    return replace(Answer(name, gpu, *SETTING), tpot_percent=tpot, ttft_percent=ttft, **more)


def recorded() -> list[Answer]:
    content = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert content["columns"] == list(Answer.__dataclass_fields__)
    return [Answer(*row) for row in content["rows"]]


def test_the_errors_that_ship_are_those_of_the_results() -> None:
    ships = json.loads(FILE.read_text(encoding="utf-8"))
    found = product.errors_of(recorded())
    pairs = zip([ships["all"], *ships["groups"]], [found["all"], *found["groups"]], strict=True)
    for kept, asked in pairs:
        assert kept == kept | asked


def test_every_judged_row_is_answered_or_refused_once() -> None:
    rows = recorded()
    board = json.loads((RESULTS.parent / "scoreboard.json").read_text(encoding="utf-8"))
    assert [one.name for one in rows] == [row[0] for row in board["rows"]]
    assert len({one.name for one in rows}) == len(rows)
    refused = [one for one in rows if one.refused]
    assert all((one.tpot_percent, one.ttft_percent) == (0.0, 0.0) for one in refused)
    assert len(product.servers_of(rows)) <= len(rows) - len(refused)


def test_a_server_that_was_measured_repeatedly_counts_once() -> None:
    rows = [
        answer("a", "h100_sxm", -10.0, 4.0),
        answer("the same again", "h100_sxm", -20.0, 8.0),
        replace(answer("another", "h100_sxm", 3.0, 1.0), concurrency=16),
        answer("refused", "h200_sxm", 0.0, 0.0, refused="why"),
    ]
    content = product.errors_of(rows)
    assert content["all"]["servers"] == 2
    [group] = content["groups"]
    assert (group["gpu"], group["experts"], group["servers"]) == ("h100_sxm", False, 2)
    assert group["tpot_percent"] == pytest.approx(9.0)  # of 15 and 3
    assert group["ttft_percent"] == pytest.approx(3.5)


ROW = Row(
    name="x",
    source="NVIDIA",
    model="Qwen3-32B",
    gpu="h100_sxm",
    version="0.12.0",
    precision="bf16",
    ranks=2,
    expert_ranks=1,
    data_ranks=1,
    prompt=9000,
    output=50,
    concurrency=2,
    day="",
    ttft_s=0.5,
    tpot_s=0.02,
)
QWEN = Checkpoint(KNOWN["qwen3-32b"].config)


def test_a_row_is_put_into_the_words_of_a_recipe(tmp_path: Path) -> None:
    protocol = Protocol(rows=64, tokens=4096, share=0.95, cache_bytes=1)
    row = replace(ROW, expert_ranks=2)
    flags = product.flags_of(row, protocol)
    recipe = load_recipe(product.write_recipe(row, protocol, QWEN, tmp_path, flags))
    assert recipe.hardware.gpu == "h100-sxm"
    assert recipe.engine.tensor_parallel_size == 2
    assert recipe.engine.gpu_memory_utilization == 0.95
    assert (recipe.model.max_model_len, recipe.serve.max_new_tokens) == (9050, 50)
    assert recipe.policy.parameters == {"max_num_seqs": 64, "max_num_batched_tokens": 4096}
    assert recipe.engine.vllm is not None
    assert recipe.engine.vllm.kv_cache_dtype == "fp8"
    assert recipe.engine.vllm.args == [product.EXPERT_PARALLEL]
    assert product.flags_of(ROW, Protocol()) == {}
    usual = replace(ROW, prompt=1000)
    path = product.write_recipe(usual, protocol, QWEN, tmp_path, {})
    assert load_recipe(path).model.max_model_len == product.USUAL_LENGTH
    with pytest.raises(InputError):
        product.write_recipe(replace(ROW, ranks=3), protocol, QWEN, tmp_path, {})


@pytest.mark.slow
def test_a_flag_that_is_refused_is_left_out_and_named() -> None:
    asked = product.ask(ROW, QWEN, Protocol(requests=2, whole_experts=True))
    assert (asked.refused, asked.experts) == ("", False)
    assert asked.without == product.EXPERT_PARALLEL
    plain = product.ask(ROW, QWEN, Protocol(requests=2))
    assert replace(asked, without="") == plain
    narrow = product.ask(ROW, QWEN, Protocol(requests=2, cache_bytes=1))
    assert (narrow.refused, narrow.without) == ("", "")
    assert product.ask(replace(ROW, ranks=3), QWEN, Protocol()).refused


CHECKPOINTS = {
    ("Qwen3-32B", "bf16"): QWEN,
    ("Llama-3.1-70B", "fp8"): Checkpoint(KNOWN["llama-3.3-70b"].config, "fp8"),
}


@pytest.mark.slow
def test_the_results_are_of_the_code_as_it_is() -> None:
    """A few small servers of the file, asked again."""
    before = {one.name: one for one in recorded()}
    extract = json.loads(EXTRACT.read_text(encoding="utf-8"))
    rows = [Row(**dict(zip(extract["columns"], row, strict=True))) for row in extract["rows"]]
    known_models = [row for row in rows if (row.model, row.precision) in CHECKPOINTS]
    small = sorted(known_models, key=lambda row: row.concurrency * row.output)[:3]
    assert len(small) == 3
    for row in small:
        checkpoint = CHECKPOINTS[row.model, row.precision]
        found = product.ask(row, checkpoint, product.protocol_of(row))
        known = before[row.name]
        assert found.tpot_percent == pytest.approx(known.tpot_percent, abs=0.2)
        assert found.ttft_percent == pytest.approx(known.ttft_percent, abs=0.5)
        assert replace(found, tpot_percent=known.tpot_percent, ttft_percent=0.0) == replace(
            known, ttft_percent=0.0
        )
