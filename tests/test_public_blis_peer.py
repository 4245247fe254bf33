"""BLIS as a peer: what it is asked, and how its answers and refusals are read."""

import json
import stat
from pathlib import Path

import pytest

from benchmarks.public import blis_peer
from benchmarks.public.operators import CORE
from benchmarks.public.silicon import Row, protocol_of

ROW = Row(
    name="x",
    source="InferenceX",
    model="gpt-oss-120b",
    gpu="h100_sxm",
    version="0.18.0",
    precision="fp4",
    ranks=2,
    expert_ranks=1,
    data_ranks=1,
    prompt=1024,
    output=256,
    concurrency=8,
    day="2026-03-27",
    ttft_s=0.1,
    tpot_s=0.01,
)
ANSWER = """echo '{"itl_mean_ms": 12.5,' '"ttft_mean_ms": 80.25}'"""
REFUSAL = """echo 'time="now" level=fatal msg="no such GPU"' >&2; exit 1"""
ECHO = """echo "level=fatal msg=\\"$*\\"" >&2; exit 1"""


def program(folder: Path, body: str) -> tuple[Path, Path]:
    """A checkout of aiconfigurator with the model's configuration, and one of BLIS."""
    configs = folder / CORE / "model_configs"
    configs.mkdir(parents=True)
    (configs / "openai--gpt-oss-120b_config.json").write_text("{}")
    path = folder / "blis"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return folder, folder


def test_lengths_are_even_and_the_requests_those_of_the_protocol() -> None:
    found = blis_peer.workload_of(ROW, protocol_of(ROW))
    assert found["num_requests"] == 80
    (client,) = found["clients"]
    assert client["concurrency"] == 8
    lengths = client["input_distribution"]["params"]
    assert sum(lengths.values()) == pytest.approx(1.0)
    assert (min(map(int, lengths)), max(map(int, lengths))) == (819, 1024)
    json.dumps(found)


@pytest.mark.slow
def test_an_answer_is_read_in_milliseconds(tmp_path: Path) -> None:
    assert blis_peer.ask(*program(tmp_path, ANSWER), ROW) == (80.25, 12.5)


@pytest.mark.slow
def test_a_refusal_has_its_own_words(tmp_path: Path) -> None:
    assert blis_peer.ask(*program(tmp_path, REFUSAL), ROW) == "no such GPU"


@pytest.mark.slow
def test_flags_are_those_of_the_protocol(tmp_path: Path) -> None:
    words = blis_peer.ask(*program(tmp_path, ECHO), ROW)
    assert isinstance(words, str)
    for flag in ("--hardware=H100", "--tp=2", "--max-num-seqs=8", "--max-num-batched-tokens=8192"):
        assert flag in words
