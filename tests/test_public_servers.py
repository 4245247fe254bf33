"""Measured servers: how rows are read, and what their protocols are."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.public import servers
from benchmarks.public.operators import CORE
from benchmarks.public.servers import Row

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
        ({"model_path": "moonshotai/Kimi-K2.5", "precision": "int4"}, ""),
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
