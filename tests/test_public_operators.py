"""The benchmark of operators: its reading of measured servers, and the constants of an engine."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.public.operators import (
    CORE,
    LLAMA_8B,
    Measured,
    as_json,
    compare,
    constants_of,
    prompt_passes,
    read_own,
    read_servers,
    solve,
)
from toolkit.estimators.gpu_operators import AllReduce, measured_operators, rest_kernels
from toolkit.estimators.steps import StepShape

GPUS = {"h200_sxm": measured_operators("h200_sxm")}
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
ROW = {
    "backend": "vllm",
    "backend_version": "0.19.0",
    "mode": "agg",
    "model_path": "meta-llama/Llama-3.1-70B",
    "system": "h200_sxm",
    "precision": "fp8",
    "gemm_quant_mode": "fp8",
    "isl": "1024",
    "osl": "1024",
    "batch_size": "4",
    "tp_size": "1",
    "moe_ep_size": "1",
    "attention_dp_size": "1",
    "silicon_ttft_ms": "200",
    "silicon_tpot_ms": "21.5",
}


def checkout(folder: Path, rows: list[dict[str, str]]) -> Path:
    """A folder with these rows, as aiconfigurator has them."""
    systems = folder / CORE / "systems"
    configs = folder / CORE / "model_configs"
    systems.mkdir(parents=True)
    configs.mkdir()
    with (systems / "silicon_sample.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(ROW))
        writer.writeheader()
        writer.writerows(rows)
    name = "meta-llama--Meta-Llama-3.1-70B_config.json"
    (configs / name).write_text(json.dumps(CONFIG), encoding="utf-8")
    return folder


def test_what_is_read_of_measured_servers(tmp_path: Path) -> None:
    long = ROW | {"isl": "8192", "silicon_ttft_ms": "1300", "silicon_tpot_ms": "26"}
    others = [
        ROW,  # the file has some rows twice
        ROW | {"backend": "sglang"},
        ROW | {"batch_size": "64", "silicon_tpot_ms": "40"},
        ROW | {"model_path": "openai/gpt-oss-120b"},
        ROW | {"moe_ep_size": "4"},
    ]
    found = list(read_servers(checkout(tmp_path, [long, ROW, *others]), GPUS))
    assert [one.what.split()[0] for one in found] == ["decode", "decode", "prompt"]
    short, _, difference = found
    assert short.seconds == pytest.approx(21.5e-3)
    # an answer of 1,024 tokens sees the prompts of three others
    assert short.weights == pytest.approx((1 - 3 / 1024, 3 / 1024))
    assert short.shapes_of_model.weights == "fp8"
    assert difference.seconds == pytest.approx(1.1)
    passes = difference.operators_s(GPUS)
    assert 0.7 < passes / difference.seconds < 1.3


def test_a_prompt_beside_decodes_is_cut_into_passes() -> None:
    first, last = prompt_passes(8192, 3, 1000)
    assert (first.tokens, first.decode_cached) == (8192, 3000)
    assert (last.prefill_tokens, last.prefill_cached) == (3, 8189)
    assert first.prefill_attended + last.prefill_attended == 8192 * 8192 / 2


def row(model: str, seconds: float, layers: int = 32, ranks: int = 1) -> Measured:
    shapes = LLAMA_8B.__class__(layers, 4096, 14336, 32, 8, 128, 128256)
    passes = (StepShape(1, 1024),)
    return Measured(model, "h200_sxm", "decode", shapes, ranks, passes, (1.0,), seconds)


def test_the_constants_are_found_and_a_model_is_left_out() -> None:
    kernels = rest_kernels(LLAMA_8B)
    rows = []
    for model, layers, ranks in (("a", 32, 1), ("a", 32, 2), ("b", 64, 1), ("b", 64, 2)):
        bare = row(model, 1.0, layers, ranks)
        seconds = bare.operators_s(GPUS) + layers * (kernels * 2e-6 + (ranks - 1) * 2 * 7e-6)
        rows.append(row(model, seconds, layers, ranks))
    operators = np.array([one.operators_s(GPUS) for one in rows])
    assert constants_of(rows, operators) == pytest.approx([2e-6, 0.0, 7e-6], abs=1e-9)
    constants, predicted = compare(rows, GPUS)
    assert constants == pytest.approx([2e-6, 0.0, 7e-6], abs=1e-9)
    assert predicted == pytest.approx([one.seconds for one in rows])
    wrong = [*rows[:2], *(row("b", 2 * one.seconds, 64, one.ranks) for one in rows[2:])]
    _, predicted = compare(wrong, GPUS)
    assert predicted[2:] == pytest.approx([one.seconds for one in rows[2:]])  # b is not seen


def test_our_own_run_is_read_from_the_shipped_profile() -> None:
    found = {one.what: one.seconds for one in read_own()}
    assert found["decode bf16 TP1 1 x 1024"] == pytest.approx(5.07e-3, rel=0.01)
    assert found["prompt bf16 TP1 2048"] == pytest.approx(48e-3, rel=0.03)


def test_coefficients_are_found_again_and_written() -> None:
    sizes = np.array([1e3, 1e5, 1e7, 1e8])
    law = AllReduce(5e-6, 2e11)
    fitted = solve("x", AllReduce, lambda one: one.seconds(sizes), law.seconds(sizes), [1e-6, 1e11])
    assert (fitted.value.start_s, fitted.value.bytes_per_s) == pytest.approx((5e-6, 2e11))
    assert fitted.median < 0.1
    kept = {"engine": {"constants": {"kernel_s": 1e-6}}, "errors": {}}
    written = json.loads(as_json(GPUS, kept))
    assert written["gpus"]["h200_sxm"]["all_reduce"]["2"]["bytes_per_s"] > 1e11
    assert written["engine"] == kept["engine"]
