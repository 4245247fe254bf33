"""The sizes that llmctl reads from config.json files against vLLM's own classes.

    python -m benchmarks.engines.family_sizes --vllm-python PYTHON --configs FOLDER

FOLDER has files NAME_config.json, such as aiconfigurator's `model_configs`. Takes some 10 s for a
model. Needs an environment with vLLM 0.32; no GPU, no network and no weights.

vLLM's classes build each model on torch's meta device (`family_sizes_child.py`), its text part
alone, whole and as one of two GPUs holds it, and say how many parameters it has, and how many bytes
if it is quantized. The table has the differences; the exit code is 1 where one is above --limit
percent.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from benchmarks.common.command import make_parser
from toolkit.catalogue.models import facts_of
from toolkit.errors import InputError
from toolkit.units import GIB

ENDING = "_config.json"


def ask_vllm(python: str, files: list[Path]) -> dict[str, dict[str, Any]]:
    """Return what vLLM says of each file, by its name."""
    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder, "answers.json")
        child = [python, "-m", "benchmarks.engines.family_sizes_child", str(answers)]
        empty = str(Path(__file__).with_name("without_vision"))
        environment = {**os.environ, "PYTHONPATH": empty}
        subprocess.run([*child, *map(str, files)], check=True, cwd=ROOT, env=environment)
        found: dict[str, dict[str, Any]] = json.loads(answers.read_text(encoding="utf-8"))
    return found


def compare(file: Path, theirs: dict[str, Any]) -> tuple[list[str], float]:
    """Return a row of the table, and by how many percent the parameters differ."""
    name = file.name.removesuffix(ENDING).replace("--", "/")
    try:
        facts = facts_of(config_of(file))
    except InputError as error:
        return [name, "", f"refused: {error.message}", "", "", "", ""], 0.0
    ours = f"{facts.parameters / 1e9:.3f}"
    if "error" in theirs:
        return [name, ours, f"vLLM: {theirs['error']}", "", "", "", ""], 0.0
    on_two = sum(one.parameters / min(2, one.most_gpus or 2) for one in facts.modules)
    differences = [
        100.0 * (facts.parameters / theirs["parameters"] - 1.0),
        100.0 * (on_two / theirs["on_two"] - 1.0),
    ]
    stored = ["", ""]
    if "bytes" in theirs:
        differences.append(100.0 * (facts.weight_bytes / theirs["bytes"] - 1.0))
        stored = [f"{facts.weight_bytes / GIB:.2f}", f"{differences[2]:+.3f} %"]
    tower = f"{theirs['tower'] / 1e6:,.0f}" if "tower" in theirs else ""
    cells = [f"{one:+.4f} %" for one in differences[:2]]
    return [name, ours, *cells, tower, *stored], max(map(abs, differences))


def config_of(file: Path) -> dict[str, Any]:
    """Return a config with the quantization that ModelOpt writes beside it."""
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    beside = file.with_name(file.name.replace(ENDING, f"_hf_quant{ENDING}"))
    if "quantization_config" not in config and beside.is_file():
        given = json.loads(beside.read_text(encoding="utf-8"))["quantization"]
        config["quantization_config"] = {"quant_method": "modelopt", **given}
    return config


def read_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--vllm-python", required=True, help="Python of an environment with vLLM")
    parser.add_argument("--configs", required=True, type=Path, help="folder of *_config.json")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="of files; default: all")
    parser.add_argument("--limit", type=float, default=0.5, help="percent; default 0.5")
    return parser.parse_args()


def main() -> int:
    arguments = read_arguments()
    files = sorted(arguments.configs.glob(f"*{ENDING}"))
    files = [file for file in files if not file.name.endswith(f"_hf_quant{ENDING}")]
    if arguments.models:
        files = [file for file in files if file.name.removesuffix(ENDING) in arguments.models]
    answers = ask_vllm(arguments.vllm_python, files)
    print(
        "| model | 10^9 parameters | off | on one of two GPUs, off | 10^6 in its tower "
        "| GiB as stored | of GiB, off |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|")
    worst = 0.0
    for file in files:
        cells, off = compare(file, answers[file.name])
        worst = max(worst, off)
        print(f"| {' | '.join(map(str, cells))} |")
    print(f"\n{len(files)} models, at most {worst:.4f} % off")
    return int(worst > arguments.limit)


if __name__ == "__main__":
    sys.exit(main())
