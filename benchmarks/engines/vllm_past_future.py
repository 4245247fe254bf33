"""Past-Future inside vLLM against vLLM's own scheduler: preemptions, goodput and throughput.

    python -m benchmarks.engines.vllm_past_future --vllm-python VENV/bin/python [--trace azure.csv]

Takes --repeats runs of each scheduler, minutes in all. Needs an environment with vLLM (tried: 0.32
on a CPU).

One process of VLLM-PYTHON loads one model with random weights, and one KV cache that is too small
for the requests that want to run. On it the two schedulers serve the same requests `--repeats`
times each, in alternating order and each time from its first state. The first `--warm` requests are
not counted; Past-Future learns the lengths from them. Each of `--clients` clients sends its next
request when the last one's answer has ended. Prompts have the trace's inputs // 16 within 4..128
tokens, outputs the trace's within 8..384 tokens, so decoding dominates. All requests allow 512
tokens, greedy, and no scheduler knows when a request ends. The cost of deciding is shown, too.

Goodput is the output tokens per second of requests within the limits of TTFT and MTPOT, the largest
gap between two tokens of a request.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import ROOT
from benchmarks.common.command import add_vllm, make_parser
from benchmarks.common.results_file import markdown
from benchmarks.engines.random_llama import save_llama
from toolkit.traces.read import read_trace
from toolkit.traces.types import trace_path

VOCAB = 8_000
SHORTEST = 3  # tokens 0, 1 and 2 are special
LLAMA = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
}
COLUMNS = {
    "preemptions": ("preempted", ".0f"),
    "recomputed_tokens": ("tokens recomputed", ",.0f"),
    "tokens_per_s": ("tokens/s", ",.0f"),
    "goodput": ("goodput", ",.0f"),
    "attained_percent": ("within limits %", ".1f"),
    "ttft_mean_s": ("TTFT mean s", ".2f"),
    "mtpot_mean_s": ("MTPOT mean s", ".3f"),
    "deciding_us": ("our decisions us/step", ",.0f"),
    "step_ms": ("step ms", ".2f"),
}


def make_work(arguments: argparse.Namespace) -> dict[str, Any]:
    """Prompts as tokens, the true output lengths, and the settings."""
    lengths, _ = read_trace(trace_path(arguments.trace))
    count = arguments.warm + arguments.requests
    prompt = np.clip(lengths.prompt_tokens[:count] // 16, 4, 128)
    output = np.clip(lengths.output_tokens[:count], 8, 384)
    rng = np.random.default_rng(0)
    keys = (
        *("policy", "warm", "repeats", "clients", "kv_tokens", "block_size"),
        *("ttft_s", "mtpot_s", "threads"),
    )
    return {key: getattr(arguments, key) for key in keys} | {
        "prompts": [rng.integers(SHORTEST, VOCAB, size).tolist() for size in prompt],
        "outputs": output.tolist(),
        "limit": 512,
    }


def measure(python: str, folder: Path) -> dict[str, Any]:
    """The runs, as the child reports them."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [python, "-m", "benchmarks.engines.vllm_past_future_child", str(folder)]
    subprocess.run(command, check=True, env=environment)
    found: dict[str, Any] = json.loads((folder / "runs.json").read_text(encoding="utf-8"))
    return found


def report(work: dict[str, Any], found: dict[str, Any]) -> str:
    """The table of all runs, and the ratios of the paired repeats."""
    by_system = {
        name: [run for run in found["runs"] if run["system"] == name] for name in found["systems"]
    }
    rows = []
    for name, runs in by_system.items():
        middle = {key: float(np.median([run[key] for run in runs])) for key in COLUMNS}
        for number, run in (*enumerate(runs, start=1), ("median", middle)):
            figures = [format(run[key], form) for key, (_, form) in COLUMNS.items()]
            rows.append([name, number, *figures])
    own, ours = by_system.values()
    ratios = {
        key: ", ".join(
            f"{b[key] / a[key]:.2f}" if a[key] else "-" for a, b in zip(own, ours, strict=True)
        )
        for key in ("goodput", "tokens_per_s")
    }
    titles = [title for title, _ in COLUMNS.values()]
    return (
        f"vLLM {found['version']}, {found['parameters'] / 1e6:.0f} million parameters, "
        f"{found['capacity_tokens']:,} tokens of KV cache; within limits: TTFT <= "
        f"{work['ttft_s']:g} s and MTPOT <= {work['mtpot_s']:g} s.\n\n"
        f"{markdown(['scheduler', 'repeat', *titles], rows)}\n"
        f"{work['policy']} over vLLM's own, repeat by repeat: goodput {ratios['goodput']}, "
        f"tokens/s {ratios['tokens_per_s']}. {found['equal']} of {found['compared']} requests have "
        "the same tokens in all runs."
    )


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line, or of `words`."""
    parser = make_parser(__doc__)
    add_vllm(parser)
    parser.add_argument(
        "--trace", default="chat-small", help="lengths: a trace's file, or a shipped trace's name"
    )
    parser.add_argument(
        "--policy", default="past-future", help="the policy inside vLLM, as in LLMCTL_VLLM_POLICY"
    )
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--warm", type=int, default=60)
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kv-tokens", type=int, default=3072)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--ttft-s", type=float, default=10.0, help="the paper's for 7B")
    parser.add_argument(
        "--mtpot-s", type=float, default=0.25, help="the paper's 1.5 s for 7B, about 30 steps"
    )
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args(words)


def main() -> None:
    arguments = options()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work = make_work(arguments)
        (folder / "work.json").write_text(json.dumps(work), encoding="utf-8")
        save_llama(folder / "model", LLAMA)
        print(report(work, measure(arguments.vllm_python, folder)))


if __name__ == "__main__":
    main()
