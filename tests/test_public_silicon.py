"""Measured servers: how rows are read, what their protocols are, and how they are predicted."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.public import servers, silicon
from benchmarks.public.operators import CORE
from benchmarks.public.servers import Row
from toolkit.estimators.gpu_operators import ModelShapes

GIVEN = {
    "id": "one",
    "silicon_data_source": "db-dump; silicon_concurrency=8; measured=2026-04-22T00:00:00.000Z",
    "backend": "vllm",
    "backend_version": "0.19.0",
    "mode": "agg",
    "model_path": "MiniMaxAI/MiniMax-M2.5",
    "system": "b200_sxm",
    "precision": "fp8",
    "isl": "1024",
    "osl": "512",
    "batch_size": "8",
    "tp_size": "4",
    "moe_tp_size": "4",
    "moe_ep_size": "1",
    "attention_dp_size": "1",
    "silicon_ttft_ms": "200",
    "silicon_tpot_ms": "12.5",
}
LLAMA = ModelShapes(32, 4096, 14336, 32, 8, 128, 128256)
ROW = Row(
    name="x",
    source="InferenceX",
    model="Llama-3.1-8B",
    gpu="h200_sxm",
    version="0.19.0",
    precision="bf16",
    ranks=1,
    expert_ranks=1,
    data_ranks=1,
    prompt=1024,
    output=256,
    concurrency=8,
    day="2026-04-22",
    ttft_s=0.1,
    tpot_s=0.01,
)


def checkout(folder: Path, rows: list[dict[str, str]]) -> Path:
    """A folder with these rows, as aiconfigurator has them."""
    path = folder / CORE / "systems" / "silicon_sample.csv"
    path.parent.mkdir(parents=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(GIVEN))
        writer.writeheader()
        writer.writerows(rows)
    return folder


def test_a_row_is_read_once_and_other_engines_are_left_out(tmp_path: Path) -> None:
    rows = [
        GIVEN,
        GIVEN | {"id": "the same again"},
        GIVEN | {"id": "a repeat", "silicon_tpot_ms": "12.6"},
        GIVEN | {"id": "another engine", "backend": "sglang"},
        GIVEN | {"id": "disaggregated", "mode": "disagg"},
    ]
    found = servers.read_rows(checkout(tmp_path, rows))
    assert [row.name for row in found] == ["one", "a repeat"]
    assert found[0].setting == found[1].setting
    assert found[0].day == "2026-04-22"
    assert (found[0].ttft_s, found[0].tpot_s) == (0.2, 0.0125)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"model_path": "moonshotai/Kimi-K2.5"}, "latent"),
        ({"attention_dp_size": "4", "moe_ep_size": "16"}, ""),
        ({"attention_dp_size": "4", "moe_ep_size": "16", "id": "one_cfg707"}, "wait"),
        ({"model_path": "openai/gpt-oss-120b", "precision": "fp4"}, ""),
        (
            {
                "model_path": "openai/gpt-oss-120b",
                "system": "h100_sxm",
                "silicon_data_source": "silicon_concurrency=512; measured=2025-12-08",
            },
            "512",
        ),
        ({"attention_dp_size": "4"}, "wait"),
        ({"model_path": "Qwen/Qwen3-235B-A22B-FP8", "tp_size": "2"}, "wait"),
        ({"system": "b60"}, "b60"),
        ({"model_path": "some/Other"}, "Other"),
        ({"silicon_data_source": "measured=2026-01-23"}, "concurrency"),
    ],
)
def test_what_is_not_modelled_has_a_reason(change: dict[str, str], reason: str) -> None:
    found = servers.not_modelled(servers.read_row(GIVEN | change))
    assert reason in found
    assert bool(found) == bool(reason)


def test_expert_parallelism_that_was_read_as_copies_of_attention_is_the_same_setting() -> None:
    said = servers.read_row(GIVEN | {"moe_tp_size": "1", "moe_ep_size": "4"})
    read = servers.read_row(
        GIVEN | {"moe_tp_size": "1", "moe_ep_size": "16", "attention_dp_size": "4"}
    )
    assert read.misread
    assert not said.misread
    assert read.setting == said.setting
    assert servers.protocol_of(read) == servers.protocol_of(said)


def test_repeats_of_a_setting_are_of_the_tenth_together_and_each_line_has_some() -> None:
    rows = [
        replace(ROW, ranks=ranks, concurrency=k // 2 + 1, tpot_s=0.01 + k)
        for ranks, count in ((1, 200), (2, 8))
        for k in range(count)
    ]
    drawn = servers.tenth_of(rows)
    assert [
        sum(row.ranks == ranks and row.setting in drawn for row in rows) for ranks in (1, 2)
    ] == [
        20,
        2,
    ]
    assert servers.tenth_of(rows[::-1]) == drawn


def test_lengths_are_those_that_the_source_draws() -> None:
    protocol = servers.protocol_of(ROW)
    trace = servers.trace_of(ROW, protocol)
    assert len(trace) == 80
    drawn = np.random.RandomState(0)
    assert trace.prompt_tokens.tolist() == drawn.randint(819, 1025, 80).tolist()
    assert trace.output_tokens.tolist() == drawn.randint(204, 257, 80).tolist()
    alike = servers.trace_of(ROW, replace(protocol, ratio=1.0))
    assert set(alike.prompt_tokens.tolist()) == {1024}


def test_a_server_is_predicted_and_a_full_cache_makes_requests_wait() -> None:
    constants = replace(silicon.shipped_constants()["h200"], front_s=0.0, front_row_s=0.0)
    row = replace(ROW, concurrency=32)
    roomy = silicon.Server(row, servers.protocol_of(row), LLAMA)
    found = silicon.predict(roomy, constants)
    assert not found.full
    assert 0.02 < found.ttft_s < 0.3
    assert 0.004 < found.tpot_s < 0.02
    scarce = replace(roomy.protocol, share=0.12 + roomy.protocol.taken)
    waiting = silicon.predict(replace(roomy, protocol=scarce), constants)
    assert waiting.full
    assert waiting.ttft_s > 2 * found.ttft_s


WINDOWED = ModelShapes(
    layers=36,
    hidden=2880,
    intermediate=0,
    heads=64,
    kv_heads=8,
    head_dim=64,
    vocab=201088,
    experts=128,
    experts_per_token=4,
    expert_intermediate=2880,
    expert_weights="mxfp4",
    window=128,
    window_layers=18,
)


def test_layers_with_windows_save_time_and_memory() -> None:
    row = replace(ROW, model="gpt-oss-120b", precision="fp4", prompt=8192, concurrency=4)
    constants = silicon.shipped_constants()["h200"]
    protocol = servers.protocol_of(row)
    assert (protocol.rows, protocol.longest) == (4, 8192 + 256 + 200)
    server = silicon.server_of(WINDOWED, row, protocol)
    without = silicon.server_of(replace(WINDOWED, window=0, window_layers=0), row, protocol)
    assert server.caches is not None
    assert without.caches is None
    assert server.blocks == pytest.approx(2 * without.blocks, abs=1)
    found = silicon.predict(server, constants)
    full = silicon.predict(without, constants)
    assert 0.5 * full.tpot_s < found.tpot_s < 0.97 * full.tpot_s
    assert found.ttft_s < full.ttft_s
    uneven = silicon.server_of(replace(WINDOWED, window_layers=30), row, protocol)
    with pytest.raises(silicon.InputError, match=r"gpt-oss-120b: 30 layers.*6"):
        silicon.predict(uneven, constants)


def test_weights_that_leave_no_cache_are_refused() -> None:
    constants = silicon.shipped_constants()["h200"]
    small = replace(servers.protocol_of(ROW), share=0.1)
    with pytest.raises(silicon.InputError, match=r"x: .*KV cache"):
        silicon.predict(silicon.Server(ROW, small, LLAMA), constants)


EXTRACT = Path(__file__).parent / "data" / "silicon-extract.json"


@pytest.mark.slow
def test_errors_do_not_get_worse_unseen() -> None:
    """80 measured servers; docs/results/scoreboard.md has all."""
    extract = json.loads(EXTRACT.read_text(encoding="utf-8"))
    constants = silicon.shipped_constants()
    shapes = {name: ModelShapes(**sizes) for name, sizes in extract["shapes"].items()}
    found = []
    for values in extract["rows"]:
        row = Row(**dict(zip(extract["columns"], values, strict=True)))
        protocol = servers.protocol_of(row)
        server = silicon.server_of(shapes[f"{row.model} {row.precision}"], row, protocol)
        ours = silicon.predict(server, constants[silicon.family_of(row.gpu)])
        found.append(silicon.Compared(row, ours, ""))
    assert len(found) == 80
    assert silicon.median_error(found, 0) <= extract["tpot_percent"] + 0.2
    assert silicon.median_error(found, 1) <= extract["ttft_percent"] + 0.5
