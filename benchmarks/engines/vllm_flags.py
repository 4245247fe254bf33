"""vLLM's flags from `llmctl tune` against vLLM's defaults, measured beside predicted.

    python -m benchmarks.engines.vllm_flags --work DIR --vllm-python PYTHON --trace azure.csv

Takes about ten minutes with one repeat on a quiet machine. Needs an environment with vLLM 0.32 and
a trace.

It runs `llmctl profile`, `fit`, `tune` and `render`. Then, `--repeats` times, it starts vLLM's own
server under either plan, in alternating order, and replays the windows that the tuning held out
(`llmctl validate --tuning`). `--stage` runs one stage, for machines that are quiet for some minutes
only; each stage continues from the files that the stages before it left in DIR.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.common import ROOT
from benchmarks.common.command import make_parser
from benchmarks.common.results_file import put_section
from toolkit.deploy.order import ALLOW_BROKEN
from toolkit.errors import LimitsBrokenError
from toolkit.files.bench import Validation
from toolkit.files.io import read_file
from toolkit.files.plan import Plan
from toolkit.files.profile import Profile
from toolkit.files.shipped import load_recipe
from toolkit.files.tuning import Tuning

LLMCTL = (sys.executable, "-m", "toolkit")
SYSTEMS = ("defaults", "tuned")
STAGES = ("profile", "fit", "tune", "measure", "report")
SHOWN = {
    "throughput_rps": ("requests/s", ".3f"),
    "goodput_rps": ("goodput/s", ".3f"),
    "ttft_mean_s": ("TTFT mean s", ".3f"),
    "ttft_p99_s": ("TTFT p99 s", ".3f"),
    "tpot_mean_s": ("TPOT mean s", ".4f"),
    "mtpot_p99_s": ("MTPOT p99 s", ".3f"),
    "e2e_mean_s": ("E2E mean s", ".3f"),
}
ROWS = {"measured": "measured", "predicted": "predicted", "in hindsight": "predicted_in_hindsight"}
STARTED_S = time.monotonic()
HELD_TO = {"throughput_rps": 10.0, "ttft_mean_s": 15.0, "tpot_mean_s": 15.0}


def run(
    arguments: argparse.Namespace, *words: str, apart: bool = False, codes: Container[int] = (0,)
) -> None:
    """Run an llmctl command in the folder of the work; with `apart` not on the engine's CPUs, if
    there are others.

    An exit code outside `codes` is an error.
    """
    environment = os.environ | {"LLMCTL_VLLM_PYTHON": arguments.vllm_python}
    there = apart_from(arguments.recipe) if apart else []
    done = subprocess.run(
        [*there, *LLMCTL, *words], cwd=arguments.work, env=environment, check=False
    )
    if done.returncode not in codes:
        raise subprocess.CalledProcessError(done.returncode, done.args)


def apart_from(recipe: Path) -> list[str]:
    """Words before a command that keep it off the CPUs of the recipe's engine; none where it has
    them all.
    """
    engine = load_recipe(recipe).engine.threads or 0
    others = sorted(os.sched_getaffinity(0))[engine:]
    return ["taskset", "-c", ",".join(map(str, others))] if others else []


def tune(arguments: argparse.Namespace) -> None:
    """The tuning, and two plans: with vLLM's defaults and with the flags that were found.

    The comparison continues where these break the recipe's limits.
    """
    codes = (0, LimitsBrokenError.exit_code)
    recipe = str(arguments.recipe)
    trace = str(arguments.trace)
    given = ["--rate", str(arguments.rate)] if arguments.rate else []
    options = ["--fit", "fit.json", "--trace", trace, "--draws", "0", *given]
    run(arguments, "tune", recipe, *options, codes=codes)
    defaults = ["--policy", "vllm", "--out", "defaults.json"]
    run(arguments, "render", recipe, "--fit", "fit.json", *defaults)
    tuned = ["--tuning", "tuning.json", ALLOW_BROKEN, "--out", "tuned.json"]
    run(arguments, "render", recipe, "--fit", "fit.json", *tuned)


@contextmanager
def serving(arguments: argparse.Namespace, plan: str, *words: str) -> Iterator[str]:
    """A server under a plan, with more `words` of the command line; its URL."""
    environment = os.environ | {"LLMCTL_VLLM_PYTHON": arguments.vllm_python}
    command = [*LLMCTL, "serve", plan, "--port", "0", "--json"]
    command += ["--shutdown-timeout", "1", ALLOW_BROKEN, *words]
    with (arguments.work / "serve.log").open("a") as log:
        server = subprocess.Popen(
            command,
            cwd=arguments.work,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert server.stdout is not None
        try:
            yield json.loads(server.stdout.readline())["url"]
        finally:
            server.terminate()
            server.wait()


def measure(arguments: argparse.Namespace, repeat: int) -> None:
    """Both plans on the held-out windows, once; the order alternates with the repeat."""
    trace = str(arguments.trace)
    for system in SYSTEMS[:: 1 if repeat % 2 else -1]:
        out = f"{system}-{repeat}.json"
        if (arguments.work / out).exists():
            continue
        began = time.monotonic()
        if arguments.minutes is not None and began - STARTED_S > 60.0 * arguments.minutes:
            return
        with serving(arguments, f"{system}.json") as url:
            words = ["--url", url, "--trace", trace, "--tuning", "tuning.json"]
            words += ["--warmup", str(arguments.warmup)]
            run(arguments, "validate", f"{system}.json", *words, "--out", out, apart=True)
        print(f"{system} {repeat}: {time.monotonic() - began:.0f} s", file=sys.stderr)


def report(arguments: argparse.Namespace) -> str:
    """The tables as markdown."""
    folder = arguments.work
    found = {
        (system, repeat): read_file(Validation, folder / f"{system}-{repeat}.json")
        for repeat in range(1, arguments.repeats + 1)
        for system in SYSTEMS
        if (folder / f"{system}-{repeat}.json").exists()
    }
    repeats = sorted({repeat for _, repeat in found})
    lines = [
        *_about(folder, arguments.recipe),
        "",
        "| flags | repeat | |" + _titles(),
        "|" + "---|" * (len(SHOWN) + 3),
    ]
    runs = sorted(found)
    for system, repeat in runs:
        windows = found[system, repeat].windows
        for what, shown in ROWS.items():
            values = [
                np.mean([getattr(one, shown).get(name, np.nan) for one in windows])
                for name in SHOWN
            ]
            cells = " | ".join(
                format(value, spec) for value, (_, spec) in zip(values, SHOWN.values(), strict=True)
            )
            lines.append(f"| {system} | {repeat} | {what} | {cells} |")
    lines += _errors(found)
    paired = [repeat for repeat in repeats if all((system, repeat) in found for system in SYSTEMS)]
    ratios = [_goodput(found["tuned", r]) / _goodput(found["defaults", r]) for r in paired]
    shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    lines += [
        "",
        f"Goodput of the tuned flags over that of vLLM's defaults, repeat by repeat: {shown}.",
        "",
    ]
    return "\n".join(lines)


def _errors(found: Mapping[tuple[str, int], Validation]) -> list[str]:
    """The table of the prediction's errors, of each run and their medians."""
    runs = sorted(found)
    titles = " | ".join(f"{system} {repeat}" for system, repeat in runs)
    medians = " | ".join(f"{system}, median" for system in SYSTEMS)
    lines = [
        "",
        f"| prediction's error, % | {titles} | {medians} | limit |",
        "|" + "---|" * (4 + len(found)),
    ]
    for name, limit in HELD_TO.items():
        for what in ("predicted", "predicted_in_hindsight"):
            errors = {run: _error_percent(found[run], name, what) for run in runs}
            middle = [
                np.median([errors[run] for run in runs if run[0] == system]) for system in SYSTEMS
            ]
            cells = " | ".join(format(error, "+.1f") for error in [*errors.values(), *middle])
            lines.append(
                f"| {name}{' in hindsight' if what != 'predicted' else ''} | {cells} | {limit:g} |"
            )
    slow = [
        ", ".join(
            f"{one.slowdown:.2f}/{one.slowdown_meanwhile or 1.0:.2f}" for one in found[r].windows
        )
        for r in runs
    ]
    lines.append(f"| slowdown before/in each window | {' | '.join(slow)} | | | |")
    front = [", ".join(f"{1e3 * one.front_first_s:.1f}" for one in found[r].windows) for r in runs]
    lines.append(f"| front before each window, ms | {' | '.join(front)} | | | |")
    return lines


def _error_percent(found: Validation, name: str, what: str) -> float:
    measured = np.mean([window.measured[name] for window in found.windows])
    predicted = np.mean([getattr(window, what).get(name, np.nan) for window in found.windows])
    return float(100.0 * (predicted / measured - 1.0))


def _titles() -> str:
    return " " + " | ".join(title for title, _ in SHOWN.values()) + " |"


def _goodput(found: Validation) -> float:
    return float(np.mean([window.measured["goodput_rps"] for window in found.windows]))


def _about(folder: Path, recipe: Path) -> list[str]:
    profile = read_file(Profile, folder / "profile.json")
    tuning = read_file(Tuning, folder / "tuning.json")
    plans = {name: read_file(Plan, folder / f"{name}.json").policy.parameters for name in SYSTEMS}
    sla = ", ".join(f"{key} <= {limit:g}" for key, limit in load_recipe(recipe).sla.items())
    flags = "; ".join(
        f"{name}: {', '.join(f'{k}={v}' for k, v in given.items())}"
        for name, given in plans.items()
    )
    windows = ", ".join(f"{one.requests}" for one in tuning.held_out_windows)
    facts = profile.engine
    return [
        f"vLLM {facts.engine_version}, {profile.environment.processor}, {facts.threads}"
        f" thread, {facts.dtype};"
        f" {facts.capacity_tokens:,} tokens of KV cache; {tuning.request_rate_rps:.3g} requests/s;"
        f" windows of {windows} requests. Targets: {sla}. Predicted gain, held out:"
        f" {_gain(tuning)}. {flags}."
    ]


def _gain(tuning: Tuning) -> str:
    return "-" if tuning.gain_percent is None else f"{tuning.gain_percent:+.1f} % goodput"


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line, or of `words`."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--work",
        type=Path,
        required=True,
        help="a folder for profile, fit, tuning, plans and results",
    )
    parser.add_argument(
        "--vllm-python", required=True, help="the Python of an environment that has vLLM"
    )
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "tiny-llama-vllm.yaml")
    parser.add_argument(
        "--trace", default="chat-small", help="a trace's file, or a shipped trace's name"
    )
    parser.add_argument(
        "--rate", type=float, help="requests per second; default: the recipe's load"
    )
    parser.add_argument(
        "--warmup", type=float, default=2.0, help="seconds of other requests before each window"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--repeat", type=int, help="with --stage measure: only this repeat")
    parser.add_argument(
        "--minutes",
        type=float,
        help="start no run after this; the same command continues with the next",
    )
    parser.add_argument("--stage", choices=STAGES, help="run only this stage; default: all")
    parser.add_argument("--write", type=Path, help="replace the section of this file of results")
    parser.add_argument("--section", default="vllm_flags", help="that section's name")
    found = parser.parse_args(words)
    found.work = found.work.absolute()
    found.recipe = found.recipe.absolute()
    found.work.mkdir(parents=True, exist_ok=True)
    return found


def main() -> None:
    arguments = options()
    stages = [arguments.stage] if arguments.stage else STAGES
    if "profile" in stages:
        run(arguments, "profile", str(arguments.recipe), "--out", "profile.json")
    if "fit" in stages:
        run(arguments, "fit", "profile.json", "--out", "fit.json")
    if "tune" in stages:
        tune(arguments)
    if "measure" in stages:
        for repeat in [arguments.repeat] if arguments.repeat else range(1, arguments.repeats + 1):
            measure(arguments, repeat)
    if "report" in stages:
        text = report(arguments)
        print(text)
        if arguments.write:
            put_section(
                arguments.write, arguments.section, "vLLM's flags, predicted and measured", text
            )


if __name__ == "__main__":
    main()
