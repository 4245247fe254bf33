"""The sizes that `llmctl recipe new` works out against vLLM's own arithmetic.

    python -m benchmarks.engines.recipe_sizes --vllm-python PYTHON

Takes minutes. Needs an environment with vLLM 0.32; no GPU, no network and no weights.

For each model and GPU it makes a recipe from the model's config alone, or shows the refusal. Then
vLLM's classes build the same model on torch's meta device, as one GPU of the recipe's group holds
it (`recipe_sizes_child.py`), and say the bytes of its weights, the bytes of KV cache per token and
how many tokens fit into the memory that the recipe grants. A quantized checkpoint is built as it is
stored. The workspace for activations, which only a GPU shows, is left out on both sides. The exit
code is 1 where a size differs by more than --limit percent.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from benchmarks.common.command import make_parser
from toolkit.catalogue.gpus import GPUS
from toolkit.catalogue.known import KNOWN
from toolkit.errors import InputError
from toolkit.files.find_model import find_model
from toolkit.files.new_recipe import MODEL_LEN, SHARE, Wish, new_recipe
from toolkit.units import GIB

MODELS = (
    *("llama-3.1-8b", "llama-3.3-70b", "qwen3-8b", "qwen3-32b", "qwen3-30b-a3b"),
    *("mistral-small-24b", "deepseek-v3", "gpt-oss-20b"),
)
GPU_NAMES = ("a100-80gb", "h100-sxm", "h200", "l40s")
ARCHITECTURES = {  # vLLM asks for the class beside the type
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}


@dataclass(slots=True)
class Comparison:
    """A model on a GPU: what llmctl says, or `refused`, and then what vLLM says."""

    model: str
    gpu: str
    gpus: int = 0
    weight_bytes: int = 0
    kv_bytes: float = 0.0
    tokens: int = 0
    refused: str = ""
    theirs: dict[str, Any] | None = None

    def differences(self) -> list[float]:
        """Of weights, KV bytes and tokens, in percent of vLLM's."""
        theirs = self.theirs
        if theirs is None or "error" in theirs:
            return []
        pairs = (
            (self.weight_bytes, theirs["weight_bytes"]),
            (self.kv_bytes, theirs["kv_bytes_per_token"]),
            (self.tokens, theirs["tokens"]),
        )
        return [100.0 * (ours / other - 1.0) for ours, other in pairs]


def compare(model: str, gpu: str) -> Comparison:
    """What llmctl says of a model on a GPU."""
    one = Comparison(model, gpu)
    try:
        made = new_recipe(find_model(model), Wish(gpu=GPUS[gpu]))
    except InputError as error:
        one.refused = error.message
        return one
    one.gpus = made.room.gpus
    one.weight_bytes = made.room.weight_bytes
    one.kv_bytes = made.facts.cache_bytes_on(made.room.gpus)
    one.tokens = made.room.tokens
    return one


def ask_vllm(python: str, comparisons: list[Comparison], port: int) -> None:
    """Add what vLLM says to each comparison that is not refused."""
    asked = [one for one in comparisons if not one.refused]
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        for one in asked:
            place = Path(folder, one.model)
            place.mkdir(exist_ok=True)
            config = dict(KNOWN[one.model].config)
            config["architectures"] = [ARCHITECTURES[str(config["model_type"])]]
            (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
            case = {
                "folder": str(place),
                "gpus": one.gpus,
                "max_model_len": MODEL_LEN,
                "budget": int(GPUS[one.gpu].memory_gib * GIB * SHARE),
                "port": port,
            }
            cases.append(case)
        given = Path(folder, "cases.json")
        found = Path(folder, "answers.json")
        given.write_text(json.dumps(cases), encoding="utf-8")
        child = [python, "-m", "benchmarks.engines.recipe_sizes_child", str(given), str(found)]
        subprocess.run(child, check=True, cwd=ROOT)
        answers = json.loads(found.read_text(encoding="utf-8"))
    for one, answer in zip(asked, answers, strict=True):
        one.theirs = answer


def show(comparisons: list[Comparison]) -> None:
    """Print the table in Markdown."""
    print("| model | GPU | TP | GiB of weights each | KV bytes/token each | tokens of cache |")
    print("|---|---|---:|---:|---:|---:|")
    for one in comparisons:
        if one.refused:
            print(f"| {one.model} | {one.gpu} | | refused: {one.refused} | | |")
            continue
        if not one.differences():
            error = (one.theirs or {}).get("error", "")
            print(f"| {one.model} | {one.gpu} | {one.gpus} | vLLM: {error} | | |")
            continue
        weights, kv_bytes, tokens = one.differences()
        cells = [
            f"{one.weight_bytes / GIB:.2f} ({weights:+.2f} %)",
            f"{one.kv_bytes:,.0f} ({kv_bytes:+.2f} %)",
            f"{one.tokens:,} ({tokens:+.2f} %)",
        ]
        print(f"| {one.model} | {one.gpu} | {one.gpus} | {' | '.join(cells)} |")


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--vllm-python", required=True, help="Python of an environment with vLLM")
    parser.add_argument(
        "--models", nargs="+", default=list(MODELS), choices=list(KNOWN), metavar="MODEL"
    )
    parser.add_argument(
        "--gpus", nargs="+", default=list(GPU_NAMES), choices=list(GPUS), metavar="GPU"
    )
    parser.add_argument("--limit", type=float, default=1.0, help="percent; default 1")
    parser.add_argument("--port", type=int, default=29517, help="a free port of this machine")
    return parser.parse_args()


def main() -> int:
    arguments = read_arguments()
    comparisons = [compare(model, gpu) for model in arguments.models for gpu in arguments.gpus]
    ask_vllm(arguments.vllm_python, comparisons, arguments.port)
    show(comparisons)
    worst = [abs(share) for one in comparisons for share in one.differences()]
    print(f"\n{len(worst)} sizes, at most {max(worst, default=0.0):.2f} % off")
    failed = [one for one in comparisons if one.theirs and "error" in one.theirs]
    return int(bool(failed) or max(worst, default=0.0) > arguments.limit)


if __name__ == "__main__":
    sys.exit(main())
