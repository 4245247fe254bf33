"""BLIS's predictions of the servers of the scoreboard.

    python -m benchmarks.public.blis_peer --data AICONFIGURATOR --blis FOLDER --out FILE

Takes some minutes. FOLDER is a checkout of inference-sim/inference-sim (Apache-2.0), built there
with `go build -o blis main.go`. Each row is simulated with BLIS's defaults (its `trained-physics`),
the config.json of the row's model, and the requests at once, lengths, flags and parallelism of the
row's protocol (`benchmarks.public.silicon`). Only models with a config.json in their precision are
asked about (`CONFIGS`). Lengths are drawn from 16 values, evenly from the
least to the largest. A row that it refuses has its words instead of times.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.command import make_parser
from benchmarks.public.operators import CORE
from benchmarks.public.silicon import Protocol, Row, not_modelled, protocol_of, read_rows

LENGTHS = 16
CARDS = {
    "h100_sxm": "H100",
    "h200_sxm": "H200",
    "b200_sxm": "B200",
    "b300_sxm": "B300",
}
CONFIGS = {
    ("Qwen3-32B", "bf16"): "Qwen--Qwen3-32B",
    ("Llama-3.1-70B", "fp8"): "nvidia--Llama-3.1-70B-Instruct-FP8",
    ("MiniMax-M2.5", "fp8"): "MiniMaxAI--MiniMax-M2.5",
    ("gpt-oss-120b", "fp4"): "openai--gpt-oss-120b",
}
TIMEOUT_S = 120


def lengths_of(most: int, ratio: float) -> dict[str, Any]:
    """The distribution of lengths, for BLIS."""
    values = np.linspace(max(int(most * ratio), 1), most, LENGTHS).round().astype(int)
    counts = {str(value): float((values == value).sum()) / LENGTHS for value in values}
    return {"type": "empirical", "params": counts}


def workload_of(row: Row, protocol: Protocol) -> dict[str, Any]:
    """The workload of a row; JSON, which is YAML too."""
    return {
        "version": "2",
        "seed": 0,
        "category": "language",
        "num_requests": protocol.requests * row.concurrency,
        "clients": [
            {
                "id": "one",
                "concurrency": row.concurrency,
                "input_distribution": lengths_of(row.prompt, protocol.ratio),
                "output_distribution": lengths_of(row.output, protocol.ratio),
                "streaming": True,
                "timeout": 0,
            }
        ],
    }


def ask(data: Path, blis: Path, row: Row) -> tuple[float, float] | str:
    """TTFT and TPOT in milliseconds, or BLIS's words."""
    protocol = protocol_of(row)
    name = CONFIGS.get((row.model, row.precision))
    if name is None:
        return "not asked"
    with tempfile.TemporaryDirectory() as folder:
        path = data / CORE / "model_configs" / f"{name}_config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config.setdefault("torch_dtype", "bfloat16")  # as the models' own files have it
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        workload = Path(folder, "workload.yaml")
        workload.write_text(json.dumps(workload_of(row, protocol)), encoding="utf-8")
        flags = {
            "model": f"other/{row.model.lower()}",
            "model-config-folder": folder,
            "hardware": CARDS.get(row.gpu, row.gpu),
            "tp": row.ranks,
            "workload-spec": workload,
            "max-num-seqs": protocol.rows,
            "max-num-batched-tokens": protocol.tokens,
            "gpu-memory-utilization": protocol.share,
            "max-model-len": row.prompt + row.output + 200,
        }
        command = [str(blis / "blis"), "run", *(f"--{key}={value}" for key, value in flags.items())]
        if protocol.whole_experts:
            command.append("--enable-expert-parallel")
        try:
            ran = subprocess.run(
                command, cwd=blis, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"no answer in {TIMEOUT_S} s"
    found = {key: float(value) for key, value in MEANS.findall(ran.stdout)}
    if ran.returncode or "ttft_mean_ms" not in found:
        words = re.findall(r'level=(?:fatal|error) msg="(.*?)"\n', ran.stderr + "\n")
        return words[-1] if words else f"exit code {ran.returncode}"
    return found["ttft_mean_ms"], found["itl_mean_ms"]


MEANS = re.compile(r'"((?:ttft|itl)_mean_ms)": ([\d.]+)')


def version_of(blis: Path) -> str:
    """The commit of the checkout; "": not known."""
    ran = subprocess.run(
        ["git", "-C", str(blis), "describe", "--tags", "--always"],
        capture_output=True,
        text=True,
        check=False,
    )
    return ran.stdout.strip()


def main() -> None:
    parser: argparse.ArgumentParser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="aiconfigurator")
    parser.add_argument("--blis", type=Path, required=True, metavar="FOLDER", help="built there")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    found = {}
    for row in read_rows(options.data):
        if not not_modelled(row):
            found[row.name] = ask(options.data, options.blis, row)
            content = {"name": "BLIS", "version": version_of(options.blis), "rows": found}
            options.out.write_text(json.dumps(content, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
