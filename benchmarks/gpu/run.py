"""The commands of llmctl on a machine with a GPU, unattended: predicted beside measured.

    python -m benchmarks.gpu.run --work DIR --vllm-python PYTHON --model FOLDER [--gpu h200]
        [--parts vllm live slices rounds] [--budget-s 540] [--out DIR]
    python -m benchmarks.gpu.run --dry-run --work DIR --vllm-python PYTHON

Takes at most --budget-s seconds. Needs a GPU with 80 GB, llmctl with its engines, and for parts
`vllm` and `live` an environment with vLLM 0.32 and a folder with the config.json and the tokenizer
of Llama-3.1-8B. Nothing is downloaded; weights are random. The second command types the same with
the tiny Llamas on this CPU; with `--parts slices rounds` it needs no vLLM.

The parts, in the order of what they are worth:

- `vllm`: profile, fit and tune vLLM in its default mode; bench its defaults at each of --rates, and
  the tuned flags at the last of them;
- `live`: try settings of that server on one start for --minutes;
- `slices`: static batches of `transformers`: SLS beside SCLS, at 1.5 times what SCLS is predicted
  to serve;
- `rounds`: `rebatch`: Past-Future beside its baselines, likewise; its profile has swaps.

A command is not typed again where its file is there, and a profile goes on from its journal: the
same command does later what is not done. With --out, gpu-results.tar.gz there has all files after
every part. Exit codes: 0, all parts are done; 1, some are not.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.command import ended, make_parser
from benchmarks.common.results_file import markdown
from benchmarks.engines.live import Work, add_work, table
from toolkit.endpoints.settings import CONTROL_KEY_VARIABLE
from toolkit.errors import LateClientError, LimitsBrokenError
from toolkit.estimators.load import laws_from_fit
from toolkit.files.bench import BenchReport
from toolkit.files.fit import Fit
from toolkit.files.io import read_file, write_file
from toolkit.files.recipe import Recipe
from toolkit.files.shipped import load_recipe, recipe_path
from toolkit.units import MIB

END_S = 15.0  # of the budget, to end a part's processes and to write the archive
LONGEST = 2048  # tokens of a request of our engines
SHARES = (128, 16, 4)  # the longest request over the lengths of the grid
CONTEXTS = 32  # longest requests that the KV cache of our engines holds: an overload fills it
SLS_ROWS = 24  # as many of the longest requests as surely fit
OVERLOAD = 1.5  # arrivals, as a multiple of the predicted throughput
TRACE = "chat-small"
CODES = (0, LimitsBrokenError.exit_code, LateClientError.exit_code)
STEPS = ((1, 512), (16, 512), (64, 512), (64, 1536))  # rows, and cached tokens of each
Settings = Mapping[str, Sequence[str]]  # parameters by policy


def typed(work: Work, *words: object, makes: str = "") -> None:
    """Show a command, run it, and show what it prints; not where the file that it makes is there.
    Raises `SystemExit` if it fails.
    """
    if makes and work.has(makes):
        return
    line = [str(word) for word in (*words, *(["--out", makes] if makes else []))]
    print(f"$ llmctl {' '.join(line)}", flush=True)
    print(work.llmctl(*line, codes=CODES), flush=True)


def measured(work: Work, name: str) -> str:
    """Profile and fit the recipe of a part. Returns the fit's file."""
    typed(work, "doctor", work.recipe, "--strict")
    typed(work, "profile", work.recipe, makes=f"{name}-profile.json")
    typed(work, "fit", f"{name}-profile.json", makes=f"{name}-fit.json")
    return f"{name}-fit.json"


def benched(
    work: Work, plan: str, rates: Sequence[float], given: argparse.Namespace, *serve: str
) -> None:
    """Bench one server of a plan at each rate."""
    left = {f"bench-{plan}-{rate:g}.json": rate for rate in rates}
    if all(map(work.has, left)):
        return
    with work.serving(f"{plan}.json", *serve) as url:
        for out, rate in left.items():
            words = ["--url", url, "--plan", f"{plan}.json", "--trace", TRACE]
            words += ["--rate", f"{rate:g}", "--duration", f"{given.seconds:g}"]
            words += ["--warmup", f"{given.seconds / 2:g}"]
            typed(work, "bench", *words, makes=out)


def vllm(work: Work, given: argparse.Namespace) -> None:
    """vLLM's defaults at each rate, and the tuned flags at the last."""
    fit = ["--fit", measured(work, "vllm")]
    words = ["--trace", TRACE, "--rate", given.rates[-1], "--trials", 40]
    typed(work, "tune", work.recipe, *fit, *words, makes="vllm-tuning.json")
    typed(work, "render", work.recipe, *fit, "--policy", "vllm", makes="vllm-defaults.json")
    tuned = ["--tuning", "vllm-tuning.json", "--force"]
    typed(work, "render", work.recipe, *fit, *tuned, makes="vllm-tuned.json")
    benched(work, "vllm-defaults", given.rates, given)
    benched(work, "vllm-tuned", given.rates[-1:], given)


def live(work: Work, given: argparse.Namespace) -> None:
    """Settings of a running vLLM, on one start."""
    fit = measured(work, "vllm")
    words = ["--fit", fit, "--policy", "vllm"]
    typed(work, "render", work.recipe, *words, makes="vllm-defaults.json")
    if work.has("live-tuning.json"):
        return
    os.environ.setdefault(CONTROL_KEY_VARIABLE, secrets.token_hex())
    with work.serving("vllm-defaults.json", "--live") as url:
        words = ["--live", url, "--trace", TRACE, "--rate", str(given.rates[-1])]
        words += ["--minutes", f"{given.minutes:g}"]
        typed(work, "tune", "vllm-defaults.json", *words, makes="live-tuning.json")


def overloaded(work: Work, fit: str, contenders: Settings, given: argparse.Namespace) -> None:
    """The same requests under each policy, at an overload of the first one."""
    words = [str(work.recipe), "--fit", fit, "--trace", TRACE]
    first, settings = next(iter(contenders.items()))
    words += ["--policies", first, *settings, "--rate", "1000", "--json"]
    most_rps = json.loads(work.llmctl("simulate", *words))["throughput_rps"]
    for policy, settings in contenders.items():
        words = ["--fit", fit, "--policy", policy, *settings]
        typed(work, "render", work.recipe, *words, makes=f"{policy}.json")
        benched(work, policy, [round(OVERLOAD * most_rps, 1)], given, "--allow-end-after")


def slices(work: Work, given: argparse.Namespace) -> None:
    """SCLS beside SLS."""
    scls = ["--set", "slice_tokens=64", "--set", "min_interval_s=1"]
    contenders = {"slice": scls, "sequence": ["--set", f"batch_size={SLS_ROWS}"]}
    overloaded(work, measured(work, "slices"), contenders, given)


def rounds(work: Work, given: argparse.Namespace) -> None:
    """Past-Future beside its baselines."""
    contenders: Settings = {"past-future": [], "aggressive": [], "conservative": []}
    overloaded(work, measured(work, "rounds"), contenders, given)


@dataclass(frozen=True, slots=True)
class Part:
    """One comparison.

    Attributes:
        recipe, dry_recipe: what it runs, on a GPU and with --dry-run.
        prefix: the first word of its files.
        least_s: it is not begun with less of the budget left.
    """

    run: Callable[[Work, argparse.Namespace], None]
    recipe: str
    dry_recipe: str
    prefix: str
    least_s: float


PARTS = {
    "vllm": Part(vllm, "llama-3.1-8b-h200", "tiny-llama-vllm", "vllm", 200.0),
    "live": Part(live, "llama-3.1-8b-h200", "tiny-llama-vllm", "vllm", 120.0),
    "slices": Part(slices, "llama-3.1-8b-h200-transformers", "tiny-llama-cpu", "slices", 60.0),
    "rounds": Part(rounds, "llama-3.1-8b-h200-rebatch", "tiny-llama-cpu-rebatch", "rounds", 60.0),
}


def make_recipe(part: Part, given: argparse.Namespace) -> Path:
    """Write the recipe of a part: a grid of minutes and random weights; for our engines also
    shorter requests, and a cache that an overload fills. Returns its path.
    """
    path: Path = given.work.absolute() / f"{part.prefix}-recipe.json"
    if path.exists():
        return path
    recipe = load_recipe(recipe_path(part.dry_recipe if given.dry_run else part.recipe))
    data = recipe.model_dump(mode="json", exclude_none=True)
    longest = min(recipe.model.max_model_len, LONGEST)
    lengths = [longest // share for share in SHARES]
    data["profile"] |= {"batch_sizes": [1, 4, 16, 64], "repeats": 1, "warmups": 1}
    data["profile"] |= {"input_lengths": lengths, "cached_lengths": lengths}
    data["profile"] |= {"memory_lengths": lengths[1:2], "slice_tokens": [longest // 128]}
    data["profile"] |= {"slices": 8, "sequences": 5}
    if recipe.engine.name != "vllm":
        cache_bytes = CONTEXTS * longest * (recipe.model.kv_bytes_per_token or 0)
        data["model"] |= {"max_model_len": longest, "tokenizer": "bytes"}
        data["engine"] |= {"kv_cache_memory_mib": cache_bytes / MIB}
        data["serve"] |= {"max_new_tokens": longest // 8}
    elif not given.dry_run:
        data["model"] |= {"source": str(given.model.absolute())}
        data["model"].pop("revision", None)
    if not given.dry_run:
        data["model"] |= {"load_format": "dummy"}
        data["hardware"] = given.gpu
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(Recipe.model_validate_json(json.dumps(data)), path)
    return path


def step_times(work: Path) -> str:
    """Milliseconds of a decode step by each fit, beside what it takes to read the weights and the
    rows' caches once at the data sheet's bandwidth.
    """
    names = [part.prefix for part in PARTS.values() if (work / f"{part.prefix}-fit.json").exists()]
    laws = {name: laws_from_fit(read_file(Fit, work / f"{name}-fit.json")) for name in names}
    if not laws:
        return ""
    recipe = load_recipe(work / f"{next(iter(laws))}-recipe.json")
    read_bytes_per_s = 1e9 * (recipe.hardware.bandwidth_gb_s or float("inf"))
    cells = []
    for rows, cached in STEPS:
        cache_bytes = rows * cached * (recipe.model.kv_bytes_per_token or 0)
        floor_s = ((recipe.model.weight_bytes or 0) + cache_bytes) / read_bytes_per_s
        steps_s = [floor_s, *(each.rounds.decode_s(rows, cached, 1) for each in laws.values())]
        cells.append([f"{rows} x {cached}", *(f"{1e3 * one:.2f}" for one in steps_s)])
    return markdown(["rows x cached tokens", "floor, ms", *(f"{name}, ms" for name in laws)], cells)


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TimeoutError within the block after so many seconds, whatever it waits for."""

    def is_over(*_: object) -> None:
        raise TimeoutError(f"not done within {seconds:.0f} s; the same command goes on")

    before = signal.signal(signal.SIGALRM, is_over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_work(parser)
    parser.add_argument("--dry-run", action="store_true", help="the tiny Llamas on this CPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--gpu", default="h200", help="a GPU of `llmctl recipe gpus`")
    parser.add_argument("--model", type=Path, help="a folder with config.json and tokenizer")
    parser.add_argument("--rates", type=float, nargs="+", help="requests/s; default: 10 18")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each bench")
    parser.add_argument("--minutes", type=float, default=2.5, help="of part live")
    parser.add_argument("--budget-s", type=float, default=540.0)
    parser.add_argument("--out", type=Path, help="a folder for the archive")
    given = parser.parse_args(words)
    if {"vllm", "live"} & {*given.parts} and not (given.dry_run or given.model):
        parser.error("parts vllm and live need --model FOLDER")
    given.rates = given.rates or ([5.0, 10.0] if given.dry_run else [10.0, 18.0])
    return given


def run(given: argparse.Namespace) -> None:
    """Run the parts, and print what they measured. `SystemExit` if one is not done."""
    end_s = time.monotonic() + given.budget_s - END_S
    undone = []
    for name in given.parts:
        part = PARTS[name]
        left_s = end_s - time.monotonic()
        print(f"\n== {name}: {max(left_s, 0.0):.0f} s are left", flush=True)
        try:
            if left_s < part.least_s:
                raise TimeoutError(f"not begun: it takes at least {part.least_s:.0f} s")
            with at_most(left_s):
                part.run(Work(given, make_recipe(part, given)), given)
        except (RuntimeError, SystemExit, TimeoutError) as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            undone.append(name)
        if given.out:
            shutil.make_archive(str(given.out / "gpu-results"), "gztar", given.work)
    work = given.work.absolute()
    reports = {
        path.stem.removeprefix("bench-"): read_file(BenchReport, path)
        for path in sorted(work.glob("bench-*.json"))
    }
    print(f"\n{table(reports)}\n{step_times(work)}")
    if undone:
        raise SystemExit(f"not done: {', '.join(undone)}")


def main() -> int:
    given = options()
    return ended(lambda: run(given))


if __name__ == "__main__":
    sys.exit(main())
