"""`llmctl demo`: the whole way on this machine, each stage the command that a user would type."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from toolkit.cli.arguments import JsonOption, RecipeArgument, open_recipe

if TYPE_CHECKING:
    from toolkit.files.recipe import Recipe

OVERLOAD = 2.5  # requests arrive at so many times the rate that the tuned policy is predicted to serve
REPLAY_S = 26.0  # about how long the tuned policy needs for the replayed requests
START_TIMEOUT_S = 120.0
COMPARED = ("throughput_rps", "goodput_rps", "ttft_mean_s", "e2e_mean_s", "e2e_p95_s")
FILES = ("profile", "fit", "tuning", "plan", "plan-sls", "bench", "bench-sls")


def command(
    recipe: RecipeArgument = Path("tiny-llama-cpu"),
    out: Annotated[Path, typer.Option(help="Folder for the files of all stages.")] = Path("demo-out"),
    trace: Annotated[str, typer.Option(help="A trace file, or the name of a shipped trace.")] = "chat-small",
    as_json: JsonOption = False,
) -> None:
    """Profile, fit, tune, serve and check a model on this machine, then compare with sequence-level scheduling.

    Each stage is one command, shown before it runs; its files stay in the output folder.
    """
    from toolkit.cli.output import emit
    from toolkit.deploy.order import ALLOW_BROKEN
    from toolkit.errors import LimitsBrokenError
    from toolkit.files.bench import BenchReport
    from toolkit.files.io import read_file

    out.mkdir(parents=True, exist_ok=True)
    profile, fit, tuning, plan, plan_sls, bench, bench_sls = (out / f"{name}.json" for name in FILES)
    start = time.monotonic()
    stage = Stages(sys.stderr if as_json else sys.stdout)
    stage.title("1/5  measure the engine")
    stage.llmctl("profile", recipe, "--out", profile)
    stage.title("2/5  fit how time and memory behave")
    stage.llmctl("fit", profile, "--out", fit)
    stage.title("3/5  search the scheduler's parameters on the trace")
    tune = ("tune", recipe, "--fit", fit, "--trace", trace, "--out", tuning)
    allowed = [] if stage.llmctl(*tune, or_code=LimitsBrokenError.exit_code) == 0 else [ALLOW_BROKEN]
    if allowed:
        stage.say("No setting kept the limits on this machine. The demo goes on all the same, with", *allowed)
    stage.title("4/5  serve what was found, and replay the trace against it at an overload")
    stage.llmctl("render", recipe, "--fit", fit, "--tuning", tuning, "--out", plan, *allowed)
    excerpt = _overload(open_recipe(recipe), plan, trace)
    stage.serve_and_bench(plan, trace, excerpt, bench, *allowed)
    stage.title("5/5  the same requests, workers and memory under sequence-level scheduling (SLS)")
    fixed = ["--policy", "sequence", "--set", f"batch_size={_safe_rows(fit)}"]
    stage.llmctl("render", recipe, "--fit", fit, *fixed, "--out", plan_sls)
    stage.serve_and_bench(plan_sls, trace, excerpt, bench_sls)
    scls, sls = (read_file(BenchReport, path) for path in (bench, bench_sls))
    result = {key: {"sls": sls.measured[key], "scls": scls.measured[key]} for key in COMPARED}
    emit(as_json, result, lambda: _show(result, out, time.monotonic() - start))


@dataclass(slots=True, frozen=True)
class Stages:
    """Runs commands as a user would, each shown first; what they print goes to `out`."""

    out: TextIO

    def title(self, text: str) -> None:
        print(f"\n== {text}", file=self.out, flush=True)

    def say(self, *words: str) -> None:
        print(*words, file=self.out, flush=True)

    def llmctl(self, *words: object, or_code: int = 0) -> int:
        """Run one command; its exit code. A failure, but one with `or_code`, ends the demo with its exit code."""
        code = self._start(words).wait()
        if code not in (0, or_code):
            raise typer.Exit(code)
        return code

    def serve_and_bench(self, plan: Path, trace: str, excerpt: Sequence[str], report: Path, *options: str) -> None:
        with self.server(plan, *options) as url:
            self.llmctl("bench", "--url", url, "--plan", plan, "--trace", trace, *excerpt, "--out", report)

    def _start(self, words: Sequence[object], end: str = "") -> subprocess.Popen[bytes]:
        line = [str(word) for word in words]
        print(f"$ llmctl {shlex.join(line)}{end}", file=self.out, flush=True)
        return subprocess.Popen([sys.executable, "-m", "toolkit", *line], stdout=self.out)

    @contextmanager
    def server(self, plan: Path, *options: object) -> Iterator[str]:
        """`llmctl serve` in the background until the block ends; yields its URL once it is ready."""
        port = _free_port()
        server = self._start(["serve", "--plan", plan, "--port", port, "--allow-end-after", *options], " &")
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(url, server)
            yield url
        finally:
            server.terminate()
            server.wait()


def _free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    from urllib.request import urlopen

    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end:
        if server.poll() is not None:
            raise typer.Exit(server.returncode or 1)
        try:
            with urlopen(f"{url}/ready", timeout=5):
                return
        except OSError:  # URLError is one: nobody listens yet, or 503 while workers load
            time.sleep(0.2)
    print(f"error: the server was not ready within {START_TIMEOUT_S:.0f} s", file=sys.stderr)
    raise typer.Exit(1)


def _overload(recipe: Recipe, planned: Path, trace: str) -> list[str]:
    """Which part of the trace to replay, and at what rate: more than the tuned policy is predicted to serve."""
    from toolkit.files.io import read_file
    from toolkit.files.plan import Plan
    from toolkit.files.recipe import PolicySpec
    from toolkit.traces.prepare import prepare
    from toolkit.traces.read import read_trace
    from toolkit.traces.shipped import trace_path
    from toolkit.tuning.workload import capacity_rps, make_world

    plan = read_file(Plan, planned)
    policy = PolicySpec(name=plan.policy.name, parameters=plan.policy.parameters)
    tuned = recipe.model_copy(update={"policy": policy})
    fitted = prepare(read_trace(trace_path(trace))[0], recipe)
    capacity = capacity_rps(tuned, make_world(recipe, plan.fit), fitted)
    return ["--rate", f"{OVERLOAD * capacity:.1f}", "--duration", f"{REPLAY_S / OVERLOAD:.1f}"]


def _safe_rows(fit: Path) -> int:
    """SLS's fixed batch: as many of the longest possible requests as memory is sure to hold."""
    import numpy as np

    from toolkit.estimators.load import laws_from_fit
    from toolkit.files.fit import Fit
    from toolkit.files.io import read_file

    fitted = read_file(Fit, fit)
    longest = np.array([fitted.engine.max_model_len])
    return max(1, int(laws_from_fit(fitted).memory.max_batch(longest, 0, 0.0)[0]))


def _show(result: dict[str, dict[str, float]], folder: Path, took_s: float) -> None:
    from toolkit.cli.output import seconds, table

    rows = [
        [key, both["sls"], both["scls"], f"{both['scls'] / both['sls']:.2f}x" if both["sls"] else "-"]
        for key, both in result.items()
    ]
    table(["measured live, same requests", "SLS", "SCLS, tuned", ">ratio"], rows)
    print(f"the demo took {seconds(took_s)}; its files are in {folder}/")
