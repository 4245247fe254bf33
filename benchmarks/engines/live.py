"""What benchmarks of live servers share: a folder of work, and replays predicted and measured.

Each result is a file in the folder, and the same command continues after those that are there.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.common.command import llmctl
from benchmarks.common.results_file import markdown
from benchmarks.common.serving import Server
from toolkit.backends.vllm.setup import PYTHON_VARIABLE
from toolkit.files.bench import BenchReport
from toolkit.files.io import read_file
from toolkit.files.shipped import load_recipe

GOODPUT = "goodput_rps"
SHOWN = {
    "throughput_rps": ("requests/s", ".3f"),
    "ttft_mean_s": ("TTFT mean s", ".3f"),
    "tpot_mean_s": ("TPOT mean s", ".4f"),
    "mtpot_p99_s": ("MTPOT p99 s", ".3f"),
}


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
        options = ["--port", "0", "--shutdown-timeout", "1", *words]
        log = self.folder / "serve.log"
        with Server(self.folder / plan, *options, log=log) as server:
            try:
                yield server.url
            finally:
                server.end()

    def bench(
        self,
        url: str,
        plan: str,
        out: str,
        *words: str,
        apart: bool = False,
        codes: Container[int] = (0,),
    ) -> BenchReport:
        """Replay a trace against a server of the plan; the report."""
        words = ("--url", url, "--plan", plan, *words, "--out", out)
        self.llmctl("bench", *words, apart=apart, codes=codes)
        return read_file(BenchReport, self.folder / out)


def table(reports: Mapping[str, BenchReport]) -> str:
    """A row for each report: what was measured, each with the prediction's error in percent at the
    warm-up's speed, and as fitted in parentheses.
    """
    rows = []
    for name, report in reports.items():
        cells = [name, f"{report.measured.metrics.get(GOODPUT, math.nan):.3f}"]
        for metric, (_, form) in SHOWN.items():
            measured = report.measured.metrics.get(metric, math.nan)
            predictions = (report.predicted.metrics, report.predicted_as_fitted.metrics)
            both = [said.get(metric, math.nan) for said in predictions]
            errors = [100.0 * (one / measured - 1.0) for one in both]
            cells += [f"{measured:{form}}", f"{errors[0]:+.1f} ({errors[1]:+.1f})"]
        before = report.warmup.slowdown if report.warmup else 1.0
        rows.append([*cells, f"{before:.2f}/{report.replay_slowdown or 1.0:.2f}"])
    titles = [word for title, _ in SHOWN.values() for word in (title, "error (as fitted)")]
    columns = ["", "goodput/s", *titles, "slowdown before/in the replay"]
    return markdown(columns, rows)
