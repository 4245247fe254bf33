"""The scoreboard: what a row is asked, and what is made of the answers."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.public import scoreboard
from benchmarks.public.asking import Checkpoint, Question
from benchmarks.public.scoreboard import Answer
from benchmarks.public.servers import Protocol, Row
from toolkit.catalogue.known import KNOWN
from toolkit.errors import InputError
from toolkit.estimators.elsewhere import FILE
from toolkit.estimators.gpu_operators import TABLE
from toolkit.files.io import digest
from toolkit.files.new_recipe import EXPERT_PARALLEL
from toolkit.profiling.analytic import ONE_BY_ONE

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "data" / "scoreboard.json"
EXTRACT = Path(__file__).parent / "data" / "silicon-extract.json"
SETTING = ("Qwen3-32B", "bf16", "0.12.0", 2, 1, 1, 1024, 128, 8)


def answer(name: str, gpu: str, tpot: float, ttft: float, **more: Any) -> Answer:
    return replace(Answer(name, gpu, *SETTING), tpot_percent=tpot, ttft_percent=ttft, **more)


def content() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return read


def recorded() -> list[Answer]:
    found = content()
    assert found["columns"] == list(Answer.__dataclass_fields__)
    return [Answer(*(math.nan if one is None else one for one in row)) for row in found["rows"]]


def test_the_errors_that_ship_are_those_of_the_board() -> None:
    shipped = json.loads(FILE.read_text(encoding="utf-8"))
    assert shipped == scoreboard.errors_of_servers(recorded())


def test_the_board_is_of_the_operators_that_ship() -> None:
    assert content()["operators"] == digest(TABLE).sha256


def test_a_server_that_was_measured_repeatedly_counts_once() -> None:
    rows = [
        answer("a", "h100_sxm", -10.0, 4.0),
        answer("the same again", "h100_sxm", -20.0, 8.0),
        replace(answer("another", "h100_sxm", 3.0, 1.0), concurrency=16),
        answer("refused", "h200_sxm", 0.0, 0.0, refused="why"),
    ]
    found = scoreboard.errors_of_servers(rows)
    assert found["all"]["servers"] == 2
    assert found["all"]["tokens_max"] == 1024 + 128
    [group] = found["groups"]
    assert (group["gpu"], group["experts"], group["errors"]["servers"]) == ("h100_sxm", False, 2)
    assert group["models"] == ["Qwen3-32B"]
    assert group["errors"]["tpot_percent"] == pytest.approx(9.0)  # of 15 and 3
    assert group["errors"]["ttft_percent"] == pytest.approx(3.5)
    assert group["errors"]["tpot_low_percent"] == pytest.approx(-13.2)
    assert group["errors"]["tpot_high_percent"] == pytest.approx(1.2)
    assert found["left_out"] == []  # no constants without this model


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
EXPERTS = Checkpoint(KNOWN["qwen3-30b-a3b"].config)


def test_a_row_is_put_into_the_words_of_a_recipe() -> None:
    protocol = Protocol(
        rows=64, tokens=4096, share=0.95, cache_bytes=1, whole_experts=True, ahead=True
    )
    recipe = Question(replace(ROW, model="Qwen3-30B-A3B"), EXPERTS, protocol).recipe()
    assert recipe.hardware.gpu == "h100-sxm"
    assert recipe.engine.tensor_parallel_size == 2
    assert recipe.engine.gpu_memory_utilization == 0.95
    assert (recipe.model.max_model_len, recipe.serve.max_new_tokens) == (9050, 50)
    assert recipe.policy.parameters == {"max_num_seqs": 64, "max_num_batched_tokens": 4096}
    assert recipe.tune.concurrency == 2
    assert recipe.engine.vllm is not None
    assert recipe.engine.vllm.kv_cache_dtype == "fp8"
    assert recipe.engine.vllm.args == [EXPERT_PARALLEL]
    usual = Question(replace(ROW, prompt=1000), QWEN, Protocol()).recipe()
    assert usual.engine.vllm is not None
    assert usual.engine.vllm.args == [ONE_BY_ONE]
    assert usual.model.max_model_len == 8192
    with pytest.raises(InputError):
        Question(replace(ROW, ranks=3), QWEN, Protocol()).recipe()


def test_an_engine_that_plans_ahead_has_no_host_between_passes() -> None:
    row = replace(ROW, prompt=100)
    slow = Question(row, QWEN, Protocol(requests=2)).predict({})
    fast = Question(row, QWEN, Protocol(requests=2, ahead=True)).predict({})
    assert fast.tpot_s < slow.tpot_s


def rows_of_extract() -> list[tuple[Row, Checkpoint]]:
    extract = json.loads(EXTRACT.read_text(encoding="utf-8"))
    rows = [Row(**dict(zip(extract["columns"], row, strict=True))) for row in extract["rows"]]
    known = {name: Checkpoint(**one) for name, one in extract["checkpoints"].items()}
    return [(row, known[f"{row.model} {row.precision}"]) for row in rows]


@pytest.mark.slow
def test_the_board_is_of_the_code_as_it_is() -> None:
    """Small runs of the board, asked again."""
    before = {one.name: one for one in recorded()}
    asked = rows_of_extract()
    assert len({(row.gpu, row.model) for row, _ in asked}) >= 8
    fits: dict[Any, Any] = {}
    for row, checkpoint in asked:
        known = before[row.name]
        found = Question(row, checkpoint).predict(fits)
        for name, predicted, measured in (
            ("tpot_percent", found.tpot_s, row.tpot_s),
            ("ttft_percent", found.ttft_s, row.ttft_s),
        ):
            off = 100.0 * (predicted / measured - 1.0)
            assert off == pytest.approx(getattr(known, name), abs=0.11), (row.name, name)


@pytest.mark.slow
def test_the_commands_as_typed_print_what_the_functions_return() -> None:
    question = Question(replace(ROW, prompt=1000), QWEN, Protocol(requests=2))
    assert question.type() == question.predict({})
