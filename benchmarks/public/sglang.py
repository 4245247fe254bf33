"""Servers of SGLang beside predictions for vLLM, of models of which no server of vLLM was measured.

    python -m benchmarks.public.sglang --aiconfigurator AIC --page docs/results/scoreboard.md \\
        --json docs/results/data/sglang.json

Takes ten minutes on two shared cores. AIC is a checkout of ai-dynamo/aiconfigurator (Apache-2.0,
NVIDIA), with rows of InferenceX (SemiAnalysisAI/InferenceX, Apache-2.0).

Both engines compute linear and sparse attention by much the same kernels, and differ in the rest.
So these errors say whether a law is of the right size, and no more; nothing was set by them, and
commands quote none. Each row is a question to the product, as in `benchmarks.public.scoreboard`.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.command import make_parser
from benchmarks.common.results_file import keep, markdown
from benchmarks.engines.family_sizes import config_of
from benchmarks.public.asking import Checkpoint, Fits, Question
from benchmarks.public.operators import CORE, GPUS
from benchmarks.public.scoreboard import Answer, line_of, percent, put_section, servers_of
from benchmarks.public.servers import Protocol, Row, read_rows
from toolkit.errors import InputError

# The config of each model by its precision.
CONFIGS = {
    ("Qwen3.5-397B-A17B", "bf16"): "Qwen--Qwen3.5-397B-A17B",
    ("Qwen3.5-397B-A17B", "fp8"): "Qwen--Qwen3.5-397B-A17B",
    ("Qwen3.5-397B-A17B", "fp4"): "nvidia--Qwen3.5-397B-A17B-NVFP4",
    ("GLM-5", "fp8"): "zai-org--GLM-5-FP8",
    ("GLM-5", "fp4"): "nvidia--GLM-5-NVFP4",
}
# What Qwen's own checkpoint in fp8 keeps in 16 bits.
FP8 = {
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "*in_proj_a", "*in_proj_b", "*shared_expert_gate*"],
}
MOST_GPUS = 8  # of one machine
SHOWN = ("name", "tpot_percent", "ttft_percent", "refused")
OFF = ("median, %", "p90, %", "bias, %")
HEAD = ("SGLang", "servers", *(f"{what}: {one}" for what in ("TPOT", "TTFT") for one in OFF))


def checkpoint_of(data: Path, row: Row) -> Checkpoint:
    """Return the checkpoint of a row's model in its precision."""
    path = data / CORE / "model_configs" / f"{CONFIGS[row.model, row.precision]}_config.json"
    config = config_of(path)
    if row.precision == "fp8" and "quantization_config" not in config:
        config["quantization_config"] = FP8
    return Checkpoint(config)


def answer(data: Path, rows: list[Row]) -> list[Answer]:
    """Return what the product says of rows of one engine, which share its laws."""
    fits: Fits = {}
    found = []
    for row in rows:
        protocol = Protocol(ratio=0.8, ahead=True, whole_experts=row.expert_ranks > 1)
        one = Answer(row.name, *row.setting)
        try:
            times = Question(row, checkpoint_of(data, row), protocol).predict(fits)
        except InputError as error:
            found.append(replace(one, refused=error.message))
            continue
        tpot = percent(times.tpot_s, row.tpot_s)
        ttft = percent(times.ttft_s, row.ttft_s)
        found.append(replace(one, full=times.full, tpot_percent=tpot, ttft_percent=ttft))
    return found


def lines_of(servers: list[Answer]) -> Mapping[str, list[Answer]]:
    """Return the servers of each line of the table."""
    lines: dict[str, list[Answer]] = {}
    for one in servers:
        apart = f", EP {one.expert_ranks}" if one.expert_ranks > 1 else ""
        gpu = one.gpu.partition("_")[0].upper()
        name = f"{one.model} {one.precision}, {gpu}, TP {one.ranks}{apart}"
        lines.setdefault(f"**{one.model}**", []).append(one)
        lines.setdefault(name, []).append(one)
    return dict(sorted(lines.items(), key=lambda line: (line[0].strip("*"), line[0])))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--aiconfigurator", type=Path, required=True, metavar="DIR")
    parser.add_argument("--page", type=Path, help="its section is written")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    data = options.aiconfigurator
    engines: dict[Any, list[Row]] = {}
    for row in read_rows(data, "sglang"):
        known = (row.model, row.precision) in CONFIGS and row.gpu in GPUS and row.concurrency
        if known and row.data_ranks == 1 and row.ranks <= MOST_GPUS:
            engines.setdefault((*row.group, row.expert_ranks), []).append(row)
    with ProcessPoolExecutor(options.processes) as pool:
        asked = [pool.submit(answer, data, rows) for rows in engines.values()]
        answers = [one for each in asked for one in each.result()]
    refused = [one.refused for one in answers if one.refused]
    servers = servers_of(answers)
    rows = [line_of(name, group) for name, group in lines_of(servers).items()]
    table = markdown(HEAD, rows)
    print(table, *sorted(set(refused)), sep="\n")
    if options.page:
        put_section(options.page, "sglang", f"{table}\n")
    keep("columns", SHOWN)
    keep("rows", [[getattr(one, key) for key in SHOWN] for one in answers])


if __name__ == "__main__":
    main()
