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
from benchmarks.common.command import make_parser
from benchmarks.common.results_file import put_section
from toolkit.traces.read import read_trace
from toolkit.traces.types import trace_path

VOCAB = 8_000
SHORTEST = 3  # tokens 0, 1 and 2 are special
LLAMA = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
}
SHARES = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the MTPOT limit, to show how goodput depends on it
COLUMNS = {
    "seconds": ("s", ".1f"),
    "preemptions": ("preempted", ".0f"),
    "recomputed_tokens": ("tokens recomputed", ",.0f"),
    "tokens_per_s": ("tokens/s", ",.0f"),
    "goodput": ("goodput", ",.0f"),
    "attained_percent": ("within limits %", ".1f"),
    "ttft_mean_s": ("TTFT mean s", ".2f"),
    "ttft_p99_s": ("TTFT p99 s", ".2f"),
    "mtpot_mean_s": ("MTPOT mean s", ".3f"),
    "mtpot_p99_s": ("MTPOT p99 s", ".3f"),
    "rows": ("rows running", ".1f"),
    "scheduling_us": ("scheduling us/step", ",.0f"),
    "deciding_us": ("of it ours", ",.0f"),
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
        "bounds_s": [arguments.mtpot_s * share for share in SHARES],
    }


def save_model(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    spread = 0.12  # with 0.02 random weights repeat one token, and equal tokens prove little
    config = LlamaConfig(
        vocab_size=VOCAB, max_position_embeddings=1024, initializer_range=spread, **LLAMA
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def measure(python: str, folder: Path) -> dict[str, Any]:
    """The runs, as the child reports them."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [python, "-m", "benchmarks.engines.vllm_past_future_child", str(folder)]
    subprocess.run(command, check=True, env=environment)
    found: dict[str, Any] = json.loads((folder / "runs.json").read_text(encoding="utf-8"))
    return found


def report(work: dict[str, Any], found: dict[str, Any]) -> str:
    """The tables as markdown."""
    warm = work["warm"]
    outputs = work["outputs"][work["warm"] :]
    prompt = np.mean([len(tokens) for tokens in work["prompts"][warm:]])
    lines = [
        f"vLLM {found['version']}, {found['processor']}, {work['threads']} thread,"
        " float32, a Llama of"
        f" {found['parameters'] / 1e6:.0f} million random parameters; {len(outputs)}"
        f" requests of {prompt:.0f} +"
        f" {np.mean(outputs):.0f} tokens on average, limit {work['limit']}, after {warm} others; "
        f"{work['clients']} clients; {found['capacity_tokens']:,} tokens of KV cache in"
        f" blocks of {work['block_size']}."
        f" Within limits: TTFT <= {work['ttft_s']:g} s and MTPOT <= {work['mtpot_s']:g} s.",
        "",
        "| scheduler | repeat | " + " | ".join(title for title, _ in COLUMNS.values()) + " |",
        "|" + "---|" * (len(COLUMNS) + 2),
    ]
    for name in found["systems"]:
        runs = [run for run in found["runs"] if run["system"] == name]
        for number, run in enumerate(runs, start=1):
            lines.append(f"| {name} | {number} | " + _cells(run))
        middle = {key: float(np.median([run[key] for run in runs])) for key in COLUMNS}
        lines.append(f"| **{name}** | median | " + _cells(middle))
    lines += [
        "",
        "| goodput within MTPOT of | "
        + " | ".join(f"{bound:g} s" for bound in work["bounds_s"])
        + " |",
    ]
    lines.append("|" + "---|" * (len(SHARES) + 1))
    for name in found["systems"]:
        runs = [run for run in found["runs"] if run["system"] == name]
        middles = [
            np.median([run[f"goodput_{bound:g}"] for run in runs]) for bound in work["bounds_s"]
        ]
        lines.append(
            f"| {name}, median | " + " | ".join(f"{middle:,.0f}" for middle in middles) + " |"
        )
    own, ours = found["systems"][:2]
    ratios = _ratios(found["runs"], own, ours)
    lines += [
        "",
        f"`{ours}` over {own}, repeat by repeat: goodput {ratios['goodput']}, tokens/s"
        f" {ratios['tokens_per_s']}."
        f" {found['equal']} of {found['compared']} requests have the same tokens in all runs.",
        "",
    ]
    return "\n".join(lines)


def _cells(run: dict[str, float]) -> str:
    return " | ".join(format(run[key], spec) for key, (_, spec) in COLUMNS.items()) + " |"


def _ratios(runs: list[dict[str, Any]], own: str, ours: str) -> dict[str, str]:
    """The ratios of the paired repeats."""
    found = {}
    for key in ("goodput", "tokens_per_s"):
        before, after = (
            [run[key] for run in runs if run["system"] == name] for name in (own, ours)
        )
        found[key] = ", ".join(
            f"{b / a:.2f}" if a else "-" for a, b in zip(before, after, strict=True)
        )
    return found


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line, or of `words`."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--vllm-python", required=True, help="the Python of an environment that has vLLM"
    )
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
    parser.add_argument("--write", type=Path, help="replace the section of this file of results")
    return parser.parse_args(words)


def main() -> None:
    arguments = options()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work = make_work(arguments)
        (folder / "work.json").write_text(json.dumps(work), encoding="utf-8")
        save_model(folder / "model")
        text = report(work, measure(arguments.vllm_python, folder))
    print(text)
    if arguments.write:
        put_section(arguments.write, "vllm_past_future", "Past-Future inside vLLM", text)


if __name__ == "__main__":
    main()
