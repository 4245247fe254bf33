"""What benchmarks of live servers share: a folder of work, and replays predicted and measured.

Each result is a file in the folder, and the same command continues after those that are there.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.command import llmctl
from benchmarks.common.results_file import markdown
from benchmarks.common.serving import Server
from toolkit.backends.vllm.setup import PYTHON_VARIABLE
from toolkit.deploy.order import ALLOW_BROKEN
from toolkit.endpoints.target import look
from toolkit.files.bench import BenchReport
from toolkit.files.io import read_file
from toolkit.files.shipped import load_recipe

METRICS = {  # title, factor, digits, and the aim: percent, or points of hits
    "hit_percent": ("hits, %", 1.0, 1, 1.0),
    "throughput_rps": ("requests/s", 1.0, 2, 5.0),
    "tpot_mean_s": ("mean TPOT, ms", 1e3, 1, 10.0),
    "ttft_mean_s": ("mean TTFT, ms", 1e3, 1, 15.0),
}
COLUMNS = ("window", "", "runs", "measured", "predicted", "error", "aim", "")


def add_work(parser: argparse.ArgumentParser) -> None:
    """Add `--work DIR` and `--vllm-python PYTHON`; without the latter it is the variable's."""
    parser.add_argument("--work", type=Path, required=True, help="a folder for all files")
    parser.add_argument(
        "--vllm-python",
        default=os.environ.get(PYTHON_VARIABLE, ""),
        help=f"the Python of an environment that has vLLM; default: {PYTHON_VARIABLE}",
    )


class Work:
    """The folder of a benchmark, and its recipe, which says what CPUs the engine has."""

    def __init__(self, given: argparse.Namespace, recipe: Path) -> None:
        self.folder: Path = given.work.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.recipe = recipe
        if given.vllm_python:
            os.environ[PYTHON_VARIABLE] = given.vllm_python  # of all commands

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def llmctl(self, *words: str, apart: bool = False, codes: Container[int] = (0,)) -> str:
        """Run a command of llmctl in the folder; what it printed. With `apart` it keeps off the
        engine's CPUs, if there are others.
        """
        before = self._apart() if apart else []
        return llmctl(*words, before=before, codes=codes, cwd=self.folder).stdout

    def _apart(self) -> list[str]:
        engine = load_recipe(self.recipe).engine.threads or 0
        others = sorted(os.sched_getaffinity(0))[engine:]
        return ["taskset", "-c", ",".join(map(str, others))] if others else []

    def fit(self, name: str = "") -> str:
        """Profile and fit the recipe, unless that was done before; the fit's file."""
        profile = f"{name}profile.json"
        fit = f"{name}fit.json"
        if not self.has(profile):
            self.llmctl("profile", str(self.recipe), "--out", profile)
        if not self.has(fit):
            self.llmctl("fit", profile, "--out", fit)
        return fit

    @contextmanager
    def serving(self, plan: str, *words: str) -> Iterator[str]:
        """A server under a plan, with more `words` of the command line; its URL."""
        options = ["--port", "0", "--shutdown-timeout", "1", ALLOW_BROKEN, *words]
        log = self.folder / "serve.log"
        with Server(self.folder / plan, *options, log=log) as server:
            while look(server.url).state != "ready":
                if server.process.poll() is not None:
                    raise SystemExit(f"the server ended: see {log}")
                time.sleep(0.2)
            try:
                yield server.url
            finally:
                server.end()


@dataclass(frozen=True)
class Replay:
    """A part of a trace that is predicted under a plan and then measured; the report lies in `out`.
    `words`: of `llmctl bench`, which part of which trace, and what warms up before it.
    """

    plan: str
    out: str
    words: Sequence[str]


def replay(work: Work, replays: Sequence[Replay]) -> None:
    """Those that have no result yet, on one server of their plan, not on the engine's CPUs."""
    left = [one for one in replays if not work.has(one.out)]
    if not left:
        return
    with work.serving(left[0].plan) as url:
        for one in left:
            began_s = time.monotonic()
            words = ["--url", url, "--plan", one.plan, *one.words, "--out", one.out]
            work.llmctl("bench", *words, apart=True)
            load = " ".join(f"{mean:.1f}" for mean in os.getloadavg())
            print(f"{one.out}: {time.monotonic() - began_s:.0f} s; load {load}", flush=True)


def report_of(work: Work, one: Replay) -> BenchReport:
    """Return the report of a replay."""
    return read_file(BenchReport, work.folder / one.out)


def middle(runs: Sequence[BenchReport]) -> dict[str, Any]:
    """Of the runs of one part: medians of what was measured and predicted, and the errors."""
    found: dict[str, Any] = {"runs": len(runs)}
    for name in METRICS:
        pairs = [pair for run in runs if (pair := _predicted_measured(run, name)) is not None]
        if pairs:
            found[name] = {
                "predicted": median(predicted for predicted, _ in pairs),
                "measured": median(measured for _, measured in pairs),
                "errors": [error(name, *pair) for pair in pairs],
            }
    return found


def _predicted_measured(run: BenchReport, name: str) -> tuple[float, float] | None:
    """A metric as predicted and as measured; None: hits in a cache that were not counted."""
    if name != "hit_percent":
        return run.predicted[name], run.measured[name]
    cache = run.cache
    if cache is None or cache.predicted_percent is None or cache.hit_percent is None:
        return None
    return cache.predicted_percent, cache.hit_percent


def error(name: str, predicted: float, measured: float) -> float:
    """Percent, or points of hits."""
    if name == "hit_percent":
        return predicted - measured
    return 100.0 * (predicted / measured - 1.0)


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """The windows, each with its `name` and what `middle` found, as a Markdown table."""
    rows = []
    for one in results:
        for name, (title, factor, digits, aim) in METRICS.items():
            if name in one:
                off = median(one[name]["errors"])
                measured = f"{factor * one[name]['measured']:.{digits}f}"
                predicted = f"{factor * one[name]['predicted']:.{digits}f}"
                kept = "kept" if abs(off) <= aim else "missed"
                cells = [one["name"], title, one["runs"], measured, predicted]
                rows.append([*cells, f"{off:+.1f}", f"{aim:g}", kept])
    return markdown(COLUMNS, rows, words=2)
