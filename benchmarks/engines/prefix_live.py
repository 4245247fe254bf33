"""What prompts share, live: a real vLLM on a CPU, predicted and measured, knowing and not knowing.

    python -m benchmarks.engines.prefix_live --work DIR --vllm-python PYTHON --trace TRACE

Takes about an hour and a quarter on a quiet machine. Needs an environment with vLLM 0.32 and
Mooncake's conversation_trace.jsonl.

A Llama of 1.7 million random weights with 4,096 positions, one core, three traces: Mooncake's
divided by 16 (a block of 512 tokens becomes one of 32, vLLM's here) without prompts above 3,900
tokens; generated sessions; generated prompts with a system prompt and templates. First `llmctl
profile` and `fit`. Then three windows of Mooncake's in open loop and three of the sessions in
closed loop (`llmctl validate`, which predicts each before it measures it), each `--repeats` times:
all in turn, then all again, since the machine's speed changes within minutes. The table has the
medians. A prediction knows the speed from the requests that warm up before its window. A second one
takes the geometric mean of that and of the speed after the window: that of the next warm-up. Then,
for each trace, `llmctl tune` with what the trace says of sharing and without, and a window under
both plans. Every prediction stands beside a blind one: the same simulator, fit and conditions
without a prefix cache.

Each result is a file in DIR, and the same command continues after those that are there. `--minutes`
starts no window after so long, `--stage` runs one stage, for machines that are quiet for minutes
only. `report` prints the tables; its numbers are in docs/results/data/prefix-sharing.json.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common.command import make_parser
from benchmarks.common.results_file import keep
from benchmarks.engines.vllm_flags import run, serving
from toolkit.bench.client import LengthLimits, fitted
from toolkit.bench.predict import predict
from toolkit.deploy.order import ALLOW_BROKEN
from toolkit.errors import LimitsBrokenError
from toolkit.files.bench import Validation, WindowResult
from toolkit.files.io import read_file
from toolkit.files.plan import Plan
from toolkit.files.tuning import Tuning
from toolkit.sim.conditions import ServerConditions
from toolkit.sim.worker import FrontDelay
from toolkit.traces.read import read_trace
from toolkit.traces.types import Trace, trace_path
from toolkit.traces.windows import cut, divide_lengths
from toolkit.traces.write import write_trace

STARTED_S = time.monotonic()
STAGES = ("prepare", "profile", "fit", "tune", "measure", "report")
RECIPE = Path(__file__).with_name("prefix_live.yaml")
DIVISOR = 16
LONGEST = 3_900
RATES = {"mooncake": 4.0, "sessions": 5.0, "templates": 7.0}  # requests/s
GENERATED = {
    "sessions": "--rate 1 --duration 1200 --turns uniform:2:9 --think lognormal:3:0.8"
    " --prompt lognormal:150:0.7 --output lognormal:30:0.6 --longest 512 --block-tokens 32",
    "templates": "--rate 6 --duration 1200 --system-tokens 320 --templates 24"
    " --template-tokens uniform:320:1280 --prompt lognormal:60:0.7 --output lognormal:20:0.6"
    " --longest 512 --block-tokens 32",
}
LOOPS = {"mooncake": "open", "sessions": "closed", "templates": "open"}
HELD_OUT = ("mooncake", "sessions")  # the traces of the prediction's windows
WINDOWS = 3
CLOSING = "closing.json"
CLOSING_S = 10.0  # a last window, for the speed that its warm-up shows
KNOWING = ("knowing", "blind")
AIMS = ("throughput_rps", "ttft_mean_s", "tpot_mean_s")
OF_PLANS = ("goodput_rps", "throughput_rps", "ttft_mean_s", "ttft_p99_s", "mtpot_p99_s")


@dataclass(slots=True, frozen=True)
class Window:
    """One window of a trace, replayed under a plan; its result lies in `out`."""

    plan: str
    trace: str
    seed: int
    seconds: float
    out: str


def windows_of(arguments: argparse.Namespace) -> list[Window]:
    """All windows, by plan: those of the prediction with a short one at their end, then those of
    the recommendations.
    """
    found = [
        Window("defaults", trace, seed, arguments.window, f"window-{trace}-{seed}-{repeat}.json")
        for repeat in range(1, arguments.repeats + 1)
        for trace in HELD_OUT
        for seed in range(1, WINDOWS + 1)
    ]
    found.append(Window("defaults", HELD_OUT[-1], 1, CLOSING_S, CLOSING))
    return found + [
        Window(f"{trace}-{how}", trace, 7, arguments.window, f"tuned-{trace}-{how}.json")
        for trace in RATES
        for how in KNOWING
    ]


def prepare(arguments: argparse.Namespace) -> None:
    """The three traces, and each without what its prompts share."""
    whole, _ = read_trace(Path(trace_path(arguments.trace)))
    small = divide_lengths(whole, DIVISOR)
    kept = np.flatnonzero(small.prompt_tokens <= LONGEST)
    write_trace(small.take(kept), arguments.work / "mooncake.jsonl")
    for name, options in GENERATED.items():
        run(arguments, "trace", "generate", "--out", f"{name}.jsonl", *options.split())
    for name in RATES:
        trace, _ = read_trace(arguments.work / f"{name}.jsonl")
        write_trace(
            replace(trace, shared=None, sessions=None), arguments.work / f"{name}-unshared.jsonl"
        )


def tune(arguments: argparse.Namespace) -> None:
    """A plan with vLLM's defaults, and for each trace one tuned with its sharing and one without.

    All have the same rate. Where no flags keep the recipe's limits, the nearest are taken.
    """
    work = arguments.work
    if not (work / "defaults.json").exists():
        words = ["--fit", "fit.json", "--policy", "vllm", "--out", "defaults.json"]
        run(arguments, "render", str(RECIPE), *words)
    for trace, rate in RATES.items():
        for how in KNOWING:
            name = f"{trace}-{how}"
            if (work / f"{name}.json").exists():
                continue
            read = f"{trace}.jsonl" if how == "knowing" else f"{trace}-unshared.jsonl"
            options = ["--fit", "fit.json", "--trace", read, "--rate", str(rate), "--draws", "0"]
            options += ["--out", f"tuning-{name}.json"]
            run(arguments, "tune", str(RECIPE), *options, codes=(0, LimitsBrokenError.exit_code))
            options = ["--fit", "fit.json", "--tuning", f"tuning-{name}.json", ALLOW_BROKEN]
            run(arguments, "render", str(RECIPE), *options, "--out", f"{name}.json")


def measure(arguments: argparse.Namespace) -> None:
    """Replay the windows that have no result yet, plan by plan."""
    left = unmeasured(arguments, windows_of(arguments))
    for plan in dict.fromkeys(one.plan for one in left):
        if late(arguments):
            return
        with serving(arguments, f"{plan}.json") as url:
            for window in left:
                if window.plan == plan and not late(arguments):
                    replay(arguments, url, window, RATES[window.trace])


def unmeasured(arguments: argparse.Namespace, windows: Sequence[Window]) -> list[Window]:
    """The windows that were asked for and have no result yet."""
    only = tuple(arguments.only or [""])
    chosen = [one for one in windows if one.out.startswith(only)]
    return [one for one in chosen if not (arguments.work / one.out).exists()]


def replay(
    arguments: argparse.Namespace, url: str, window: Window, rate: float, *, apart: bool = True
) -> None:
    """Predict and replay a window on the server at `url`; with `apart` not on the engine's CPUs."""
    words = ["--url", url, "--trace", f"{window.trace}.jsonl", "--rate", str(rate)]
    words += ["--loop", LOOPS[window.trace], "--windows", "1", "--window", str(window.seconds)]
    words += ["--seed", str(window.seed), "--warmup", str(arguments.warmup)]
    words += ["--out", window.out, "--save-requests", f"{window.out}l"]
    run(arguments, "validate", f"{window.plan}.json", *words, apart=apart)


def late(arguments: argparse.Namespace) -> bool:
    return arguments.minutes is not None and (
        time.monotonic() - STARTED_S > 60.0 * arguments.minutes
    )


def predicted(
    work: Path, window: Window, found: WindowResult, slowdown: float, *, shares: bool
) -> Mapping[str, float]:
    """The prediction of a window at another speed, or without a prefix cache."""
    plan = read_file(Plan, work / f"{window.plan}.json")
    trace, _ = read_trace(work / f"{window.trace}.jsonl")
    recipe = plan.recipe
    limits = LengthLimits(
        recipe.model.max_model_len, recipe.serve.max_new_tokens, plan.fit.engine.vocab_size
    )
    trace = fitted(trace, limits, RATES[window.trace])
    part = cut(_given(trace, LOOPS[window.trace]), found.start_s, found.end_s)
    flags = {**plan.policy.parameters, "prefix_caching": shares}
    policy = plan.policy.model_copy(update={"parameters": flags})
    conditions = ServerConditions(slowdown, FrontDelay(found.front_first_s, found.front_last_s))
    return predict(plan.model_copy(update={"policy": policy}), part, recipe.sla, conditions)


def _given(trace: Trace, loop: str) -> Trace:
    """`trace` as `validate` sends it: each limit is the output, turns follow answers or not."""
    sessions = trace.sessions if loop == "closed" else None
    return replace(trace, max_tokens=trace.output_tokens, sessions=sessions)


def results_of(arguments: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """All windows that have a result, as numbers: those of the prediction, and those of tuned
    plans.
    """
    results = [
        (window, read_file(Validation, arguments.work / window.out).windows[0])
        for window in windows_of(arguments)
        if (arguments.work / window.out).exists()
    ]
    of_defaults = [one for one in results if one[0].plan == "defaults"]
    return {
        "predictions": [
            _prediction(arguments.work, window, result, after)
            for (window, result), (_, after) in pairwise(of_defaults)
        ],
        "recommendations": [
            _recommendation(arguments.work, window, result)
            for window, result in results
            if window.plan != "defaults"
        ],
    }


def _prediction(
    work: Path, window: Window, found: WindowResult, after: WindowResult
) -> dict[str, Any]:
    cache = found.cache
    assert cache is not None
    slowdown = math.sqrt(found.slowdown * after.slowdown)
    both = predicted(work, window, found, slowdown, shares=True)
    return {
        "window": f"{window.trace} {window.seed}",
        "start_s": _round(found.start_s),
        "requests": found.requests,
        "prompt_tokens": cache.prompt_tokens,
        "hit_tokens": cache.hit_tokens,
        "counter_hits": cache.counter_hits,
        "slowdown": _round(found.slowdown),
        "slowdown_after": _round(after.slowdown),
        "slowdown_meanwhile": _round(found.slowdown_meanwhile),
        "front_first_s": _round(found.front_first_s),
        "measured": _kept(found.measured, cache.hit_percent),
        "predicted": _kept(found.predicted, cache.predicted_percent),
        "both": _kept(both, both.get("hit_percent")),
        "in hindsight": _kept(
            found.predicted_in_hindsight, found.predicted_in_hindsight.get("hit_percent")
        ),
        "blind": _kept(predicted(work, window, found, found.slowdown, shares=False), 0.0),
    }


def _kept(metrics: Mapping[str, float], hit_percent: float | None) -> dict[str, float | None]:
    return {"hit_percent": _round(hit_percent)} | {name: _round(metrics[name]) for name in AIMS}


def _recommendation(work: Path, window: Window, found: WindowResult) -> dict[str, Any]:
    tuning = read_file(Tuning, work / f"tuning-{window.plan}.json")
    cache = found.cache
    trace, _, how = window.plan.rpartition("-")
    return {
        "trace": trace,
        "tuned": how,
        "flags": {k: _round(v) for k, v in tuning.recommended.parameters.items()},
        "tune_predicts_rps": _round(tuning.recommended.metrics["goodput_rps"]),
        "tune_predicts_defaults_rps": _round(tuning.defaults.metrics["goodput_rps"]),
        "requests": found.requests,
        "predicted": {name: _round(found.predicted.get(name)) for name in OF_PLANS},
        "measured": {name: _round(found.measured.get(name)) for name in OF_PLANS},
        "hit_percent": _round(cache.hit_percent) if cache else None,
    }


def _round(value: Any) -> Any:
    """A number with four digits; anything else as it is."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def tables(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Both tables as markdown."""
    lines = ["| window | | hits %, points | requests/s | TTFT mean s | TPOT mean s |"]
    lines.append("|---|---|---:|---:|---:|---:|")
    by_window: dict[str, list[Mapping[str, Any]]] = {}
    for one in found["predictions"]:
        by_window.setdefault(one["window"], []).append(one)
    for name, repeats in by_window.items():
        lines += _rows(name, repeats)
    lines += [
        "",
        "| trace | tuned | tokens a pass, rows, watermark | `tune` predicts, goodput/s"
        " | of vLLM's defaults | in this window | measured | MTPOT p99 s |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for one in found["recommendations"]:
        flags = one["flags"]
        measured = one["measured"]
        shown = f"{flags['max_num_batched_tokens']:,}, {flags['max_num_seqs']}"
        shown += f", {flags.get('watermark', 0.0):.2f}"
        cells = [one["tune_predicts_rps"], one["tune_predicts_defaults_rps"]]
        cells += [one["predicted"]["goodput_rps"], measured["goodput_rps"]]
        cells.append(measured["mtpot_p99_s"])
        numbers = " | ".join("-" if cell is None else f"{cell:.3g}" for cell in cells)
        lines.append(f"| {one['trace']} | {one['tuned']} | {shown} | {numbers} |")
    return "\n".join([*lines, ""])


def _rows(window: str, repeats: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Of a window: the medians of what was measured, and of the errors of its predictions."""
    hits = median(one["measured"]["hit_percent"] for one in repeats)
    medians = (median(one["measured"][name] for one in repeats) for name in AIMS)
    values = " | ".join(f"{value:.3g}" for value in medians)
    yield f"| {window} | measured | {hits:.1f} | {values} |"
    for what in ("predicted", "both", "blind"):
        errors = " | ".join(
            f"{median(_error_percent(one, what, name) for one in repeats):+.1f} %" for name in AIMS
        )
        points = median(
            one[what]["hit_percent"] - one["measured"]["hit_percent"] for one in repeats
        )
        yield f"| | {what} | {points:+.1f} | {errors} |"


def _error_percent(one: Mapping[str, Any], what: str, name: str) -> float:
    predicted = float(one[what][name])
    measured = float(one["measured"][name])
    return 100.0 * (predicted / measured - 1.0)


def add_live_options(
    parser: argparse.ArgumentParser, stages: Sequence[str], warmup_s: float
) -> None:
    """The options of a benchmark that replays windows against vLLM's own server, in stages."""
    parser.add_argument("--work", type=Path, required=True, help="a folder for all files")
    parser.add_argument(
        "--vllm-python", required=True, help="the Python of an environment that has vLLM"
    )
    parser.add_argument("--window", type=float, default=60.0, help="seconds of each window")
    parser.add_argument(
        "--warmup",
        type=float,
        default=warmup_s,
        help="seconds of other requests before each window",
    )
    parser.add_argument("--minutes", type=float, help="start no window after so long")
    parser.add_argument("--only", nargs="+", help="beginnings of result files, such as window-1")
    only = f"run only this stage, of {', '.join(stages)}; default: all"
    parser.add_argument("--stage", choices=stages, metavar="STAGE", help=only)


def in_folder(found: argparse.Namespace) -> argparse.Namespace:
    """The options with this benchmark's recipe and an absolute folder, which is made."""
    found.work = found.work.absolute()
    found.recipe = RECIPE
    found.work.mkdir(parents=True, exist_ok=True)
    return found


def profile_and_fit(arguments: argparse.Namespace, stages: Sequence[str]) -> None:
    """The stages `profile` and `fit`, of one vLLM server."""
    if "profile" in stages:
        run(arguments, "profile", str(RECIPE), "--out", "profile.json")
    if "fit" in stages:
        run(arguments, "fit", "profile.json", "--out", "fit.json")


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line, or of `words`."""
    parser = make_parser(__doc__)
    add_live_options(parser, STAGES, warmup_s=20.0)
    parser.add_argument("--trace", required=True, help="Mooncake's conversation_trace.jsonl")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each held-out window")
    found = in_folder(parser.parse_args(words))
    found.trace = str(Path(found.trace).absolute())
    return found


def main() -> None:
    arguments = options()
    stages = [arguments.stage] if arguments.stage else STAGES
    if "prepare" in stages and not (arguments.work / "templates-unshared.jsonl").exists():
        prepare(arguments)
    profile_and_fit(arguments, stages)
    if "tune" in stages:
        tune(arguments)
    if "measure" in stages:
        measure(arguments)
    if "report" in stages:
        found = results_of(arguments)
        print(tables(found))
        for name, numbers in found.items():
            keep(name, numbers)


if __name__ == "__main__":
    main()
