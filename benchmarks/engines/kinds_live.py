"""Kinds of models, live: sliding windows and drafts in a real vLLM, predicted and measured.

    python -m benchmarks.engines.kinds_live --work DIR --vllm-python PYTHON [--kind windows]

Takes about 25 minutes on a quiet machine with two cores. Needs an environment with vLLM 0.32.

Two tiny models of random weights on one core; client and front have the other. `windows` is a
Gemma 3 of which three of four layers see 64 tokens, so that vLLM has several groups of caches.
`drafts` is a Llama with drafts from n-grams. Each is profiled, fitted and rendered. Then three
parts of the shipped trace are predicted and measured by `llmctl bench`, all three `--repeats`
times in turn; the table has the medians of the errors, in percent.

How many drafts are accepted depends on the texts. So other windows are served first, and the
acceptance that vLLM's metrics then show goes into the recipe, as `llmctl trace generate --metrics`
prints it. It is one rate for all places of an output, while n-grams are found the more the longer a
text is. So the trace of `drafts` is a generated one with outputs of about equal length; with --chat
it is the shipped one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common.command import make_parser
from benchmarks.common.results_file import keep
from benchmarks.engines.live import Replay, Work, add_work, middle, replay, report_of, table
from toolkit.endpoints.acceptance import acceptance_of
from toolkit.endpoints.target import Target, scrape

KINDS = ("windows", "drafts")
CHAT = "chat-small"
EQUAL = "equal.jsonl"  # of the traces, outputs that are all about as long
GENERATED = "--rate 12 --duration 300 --prompt uniform:40:200 --output uniform:60:68 --longest 512"
RATES = {"windows": 6.0, "drafts": 12.0}  # requests/s
STARTS_S = {CHAT: (10.0, 40.0, 70.0), EQUAL: (60.0, 140.0, 220.0)}  # of the three parts
CALIBRATION_S = 100.0  # where another part begins


def measure(given: argparse.Namespace, kind: str) -> list[dict[str, Any]]:
    """Three windows of a kind of models: medians of its runs, and the errors."""
    work = Work(given, Path(__file__).with_name(f"kinds_{kind}.yaml"))
    fit = work.fit(f"{kind}-")
    plan = f"{kind}.json"
    trace = CHAT if kind == "windows" or given.chat else EQUAL
    if not work.has(plan):
        recipe = work.recipe if kind == "windows" else accepting(given, work, fit, trace)
        work.llmctl("render", str(recipe), "--fit", fit, "--out", plan)
    turns = [
        [
            Replay(plan, f"{kind}-{part}-{repeat}.json", words_of(given, kind, trace, start_s))
            for part, start_s in enumerate(STARTS_S[trace], start=1)
        ]
        for repeat in range(1, given.repeats + 1)
    ]
    replay(work, [one for turn in turns for one in turn])
    return [
        {"name": f"{kind} {part}", **middle([report_of(work, one) for one in runs])}
        for part, runs in enumerate(zip(*turns, strict=True), start=1)
    ]


def words_of(given: argparse.Namespace, kind: str, trace: str, start_s: float) -> list[str]:
    """Return the words that name a part of a trace."""
    words = ["--trace", trace, "--rate", str(RATES[kind]), "--start", str(start_s)]
    return [*words, "--duration", str(given.window), "--warmup", str(given.warmup)]


def accepting(given: argparse.Namespace, work: Work, fit: str, trace: str) -> Path:
    """The recipe of drafts with as many of them accepted as vLLM's metrics show."""
    work.llmctl("trace", "generate", "--out", EQUAL, *GENERATED.split())
    first = with_acceptance(work, {"length": 1.5})  # of a prediction that is not read
    work.llmctl("render", str(first), "--fit", fit, "--out", "first.json")
    words = words_of(given, "drafts", trace, CALIBRATION_S)
    with work.serving("first.json") as url:
        words = ["--url", url, "--plan", "first.json", *words, "--out", "calibration.json"]
        work.llmctl("bench", *words, apart=True)
        found = acceptance_of(scrape(Target(url, "", "", None, own=False)))
    if found is None or found.rates is None:
        raise ValueError("vLLM's metrics have no drafts")
    seen = {"rates": [round(rate, 4) for rate in found.rates], "proposed": found.proposed}
    print(f"acceptance: {seen}", flush=True)
    return with_acceptance(work, seen)


def with_acceptance(work: Work, acceptance: Mapping[str, object]) -> Path:
    """The recipe of drafts with so many of them accepted; its last section is `serve`."""
    path = work.folder / "drafts.yaml"
    path.write_text(f"{work.recipe.read_text()}  acceptance: {json.dumps(acceptance)}\n")
    return path


def main() -> None:
    parser = make_parser(__doc__)
    add_work(parser)
    parser.add_argument("--kind", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--repeats", type=int, default=3, help="runs of the three windows")
    parser.add_argument("--window", type=float, default=20.0, help="seconds of each window")
    parser.add_argument("--warmup", type=float, default=15.0, help="seconds before each window")
    parser.add_argument(
        "--chat", action="store_true", help="the shipped trace for drafts, too; see the results"
    )
    given = parser.parse_args()
    results = [one for kind in given.kind for one in measure(given, kind)]
    print(table(results))
    keep("windows", results)


if __name__ == "__main__":
    main()
