"""Kinds of models, live: sliding windows and drafts in a real vLLM, predicted and measured.

    python -m benchmarks.engines.kinds_live --work DIR --vllm-python PYTHON [--kind windows]

Takes about 25 minutes on a quiet machine with two cores. Needs an environment with vLLM 0.32.

Two tiny models of random weights on one core; client and front have the other. `windows` is a
Gemma 3 of which three of four layers see 64 tokens, so that vLLM has several groups of caches.
`drafts` is a Llama with drafts from n-grams. Each is profiled, fitted and rendered. Then three
windows of the shipped trace are predicted and measured by `llmctl validate`, all three `--repeats`
times in turn; the table has the medians of the errors.

How many drafts are accepted depends on the texts. So other windows are served first, and the
acceptance that vLLM's metrics then show goes into the recipe, as `llmctl trace from-metrics` prints
it. It is one rate for all places of an output, while n-grams are found the more the longer a text
is. So the trace of `drafts` is a generated one with outputs of about equal length; with --chat
it is the shipped one.

Each result is a file in DIR, and the same command continues after those that are there.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.command import make_parser
from benchmarks.common.results_file import keep
from benchmarks.engines.vllm_flags import run, serving
from toolkit.endpoints.acceptance import acceptance_of
from toolkit.endpoints.prometheus import metrics_page
from toolkit.files.bench import Validation, WindowResult
from toolkit.files.io import read_file

KINDS = ("windows", "drafts")
CHAT = "chat-small"
EQUAL = "equal.jsonl"  # of the traces, outputs that are all about as long
GENERATED = "--rate 12 --duration 300 --prompt uniform:40:200 --output uniform:60:68 --longest 512"
RATES = {"windows": 6.0, "drafts": 12.0}  # requests/s
WINDOWS = 3
CALIBRATION_SEED = 1000  # its windows begin elsewhere
AIMS = {"throughput_rps": 5.0, "tpot_mean_s": 10.0, "ttft_mean_s": 15.0}  # percent
TITLES = {
    "throughput_rps": ("requests/s", 1.0, 2),
    "tpot_mean_s": ("mean TPOT, ms", 1e3, 1),
    "ttft_mean_s": ("mean TTFT, ms", 1e3, 1),
}


def recipe_of(kind: str) -> Path:
    """The recipe of a kind of models."""
    return Path(__file__).with_name(f"kinds_{kind}.yaml")


def prepare(arguments: argparse.Namespace, kind: str) -> None:
    """The profile, the fit and the plan of a kind; of drafts with the acceptance that was seen."""
    work = arguments.work
    if not (work / f"{kind}-profile.json").exists():
        run(arguments, "profile", str(recipe_of(kind)), "--out", f"{kind}-profile.json")
    if not (work / f"{kind}-fit.json").exists():
        run(arguments, "fit", f"{kind}-profile.json", "--out", f"{kind}-fit.json")
    if (work / f"{kind}.json").exists():
        return
    recipe = recipe_of(kind)
    if kind == "drafts":
        run(arguments, "trace", "generate", "--out", EQUAL, *GENERATED.split())
        recipe = with_acceptance(work, {"length": 1.5})  # of a prediction that is not read
        render(arguments, recipe, "drafts", "first.json")
        with serving(arguments, "first.json") as url:
            replay(arguments, url, kind, "first.json", "calibration.json", CALIBRATION_SEED)
            found = acceptance_of(metrics_page(url, ""))
        if found is None or found.rates is None:
            raise ValueError("vLLM's metrics have no drafts")
        given = {"rates": [round(rate, 4) for rate in found.rates], "proposed": found.proposed}
        print(f"acceptance: {given}", flush=True)
        recipe = with_acceptance(work, given)
    render(arguments, recipe, kind, f"{kind}.json")


def with_acceptance(work: Path, given: Mapping[str, object]) -> Path:
    """The recipe of drafts with so many of them accepted; its last section is `serve`."""
    path = work / "drafts.yaml"
    path.write_text(recipe_of("drafts").read_text() + f"  acceptance: {json.dumps(given)}\n")
    return path


def render(arguments: argparse.Namespace, recipe: Path, kind: str, plan: str) -> None:
    """The plan of a recipe and a kind's fit."""
    run(arguments, "render", str(recipe), "--fit", f"{kind}-fit.json", "--out", plan)


def replay(
    arguments: argparse.Namespace, url: str, kind: str, plan: str, out: str, seed: int
) -> None:
    """Predict and measure three windows of the kind's trace."""
    trace = EQUAL if kind == "drafts" and not arguments.chat else CHAT
    words = ["--url", url, "--trace", trace, "--rate", str(RATES[kind])]
    words += ["--windows", str(WINDOWS), "--seed", str(seed)]
    words += ["--window", str(arguments.window), "--warmup", str(arguments.warmup)]
    run(arguments, "validate", plan, *words, "--out", out, apart=True)


def measure(arguments: argparse.Namespace, kind: str) -> None:
    """The windows of a kind that have no result yet, on one server."""
    outs = [f"{kind}-{repeat}.json" for repeat in range(1, arguments.repeats + 1)]
    left = [out for out in outs if not (arguments.work / out).exists()]
    if not left:
        return
    with serving(arguments, f"{kind}.json") as url:
        for out in left:
            began_s = time.monotonic()
            replay(arguments, url, kind, f"{kind}.json", out, seed=1)
            load = " ".join(f"{one:.1f}" for one in os.getloadavg())
            print(f"{out}: {time.monotonic() - began_s:.0f} s; load {load}", flush=True)


def results_of(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Each window of each kind: medians of its runs, and of the errors of its predictions."""
    found = []
    for kind in arguments.kind:
        files = [
            arguments.work / f"{kind}-{repeat}.json" for repeat in range(1, arguments.repeats + 1)
        ]
        runs = [read_file(Validation, path) for path in files if path.exists()]
        for number in range(WINDOWS if runs else 0):
            windows = [one.windows[number] for one in runs if number < len(one.windows)]
            found.append({"kind": kind, "window": number + 1, **_middle(windows)})
    return found


def _middle(windows: Sequence[WindowResult]) -> dict[str, Any]:
    middle: dict[str, Any] = {"runs": len(windows)}
    for name in AIMS:
        measured = [one.measured[name] for one in windows]
        predicted = [one.predicted[name] for one in windows]
        pairs = zip(predicted, measured, strict=True)
        middle[name] = {
            "measured": median(measured),
            "predicted": median(predicted),
            "errors_percent": [100.0 * (ours / theirs - 1.0) for ours, theirs in pairs],
        }
    return middle


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """The windows as a Markdown table."""
    lines = ["| | window | runs | | measured | predicted | error | aim | |"]
    lines.append("|---|---:|---:|---|---:|---:|---:|---:|---|")
    for one in results:
        for name, aim in AIMS.items():
            title, factor, digits = TITLES[name]
            error = median(one[name]["errors_percent"])
            shown = [f"{factor * one[name][what]:.{digits}f}" for what in ("measured", "predicted")]
            kept = "kept" if abs(error) <= aim else "missed"
            about = f"{one['kind']} | {one['window']} | {one['runs']} | {title}"
            lines.append(f"| {about} | {' | '.join(shown)} | {error:+.1f} % | {aim:g} % | {kept} |")
    return "\n".join(lines)


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line, or of `words`."""
    parser = make_parser(__doc__)
    parser.add_argument("--work", required=True, type=Path, help="the folder for all results")
    parser.add_argument(
        "--vllm-python", required=True, help="the Python of an environment that has vLLM"
    )
    parser.add_argument("--kind", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--repeats", type=int, default=3, help="runs of the three windows")
    parser.add_argument("--window", type=float, default=20.0, help="seconds of each window")
    parser.add_argument("--warmup", type=float, default=15.0, help="seconds before each window")
    parser.add_argument(
        "--chat", action="store_true", help="the shipped trace for drafts, too; see the results"
    )
    found = parser.parse_args(words)
    found.work = found.work.absolute()
    found.work.mkdir(parents=True, exist_ok=True)
    return found


def main() -> None:
    arguments = options()
    for kind in arguments.kind:
        arguments.recipe = recipe_of(kind)  # the client stays apart from its engine
        prepare(arguments, kind)
        measure(arguments, kind)
    results = results_of(arguments)
    print(table(results))
    keep("windows", results)


if __name__ == "__main__":
    main()
