"""`llmctl demo`: all steps on this machine, each one the command that a user would type."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, TextIO

import typer

from toolkit.cli.arguments import (
    JsonOption,
    RecipeArgument,
    TraceOption,
    as_typed,
    open_recipe,
)
from toolkit.cli.output import emit, paragraph, table
from toolkit.engine_traits import traits_of
from toolkit.errors import LimitsBrokenError
from toolkit.files.bench import BenchReport
from toolkit.files.fit import Fit
from toolkit.files.io import read_file
from toolkit.files.plan import Plan
from toolkit.files.profile import Profile
from toolkit.files.recipe import PolicySpec, Recipe
from toolkit.files.shipped import load_recipe
from toolkit.files.tuning import UNSERVED, Tuning
from toolkit.interrupts import held
from toolkit.units import seconds

LOAD = 1.0  # rate that is tuned for, as a multiple of what the recipe keeps its targets at
STEADY = 1.1  # a machine that was at most this much slower for a while has no margin
SHARE_SLOWEST = 0.1  # of the profile's time: how slow the machine was then is its spread
POINTS_MIN = 8  # of a moment of the profile that says how fast the machine was
OVERLOAD = 2.5  # rate of arrivals, as a multiple of the tuned policy's predicted capacity
REPLAY_S = 24.0  # about the time that the tuned policy needs for the replayed requests
WARMUP_S = 12.0  # of other requests before each replay
START_TIMEOUT_S = 120.0
END_S = 3.0  # that an interrupted command has to end in order
# The last step: prompts that share a beginning. The demo's engine has no prefix cache, so vLLM is
# simulated, which has one by default, on computed laws.
SHARING = (
    "--rate 10 --duration 60 --system-tokens 1000 --templates 20 --template-tokens uniform:500:2000"
    " --prompt lognormal:150:0.7 --output lognormal:150:0.6 --longest 1024"
)
SHARING_FIT = "llama-3.1-8b-h200"
SHOWN = ("hit_percent", "throughput_rps", "ttft_mean_s", "ttft_p99_s", "tpot_mean_s")
COMPARED = ("throughput_rps", "goodput_rps", "ttft_mean_s", "e2e_mean_s", "e2e_p95_s")
FILES = ("profile", "fit", "tuning", "plan", "plan-sls", "bench-tuned", "bench", "bench-sls")


def command(
    recipe: RecipeArgument = Path("tiny-llama-cpu"),
    out: Annotated[Path, typer.Option(help="Write the files of all steps to this folder.")] = Path(
        "demo-out"
    ),
    trace: TraceOption = "chat-small",
    as_json: JsonOption = False,
) -> None:
    """Profile, fit, tune, serve and check a model on this machine, then compare it with
    sequence-level scheduling.

    First the tuned server gets the tuned rate, and is compared with the promise of `tune`; then
    both schedulers get more requests than they can serve. Last, vLLM is simulated on prompts that
    share a beginning, with its prefix cache and without. Each step is one command, shown before it
    runs; its files stay in the output folder.
    """
    traits_of(load_recipe(recipe).engine.name).require()
    out.mkdir(parents=True, exist_ok=True)
    profile, fit, tuning, plan, plan_sls, bench_tuned, bench, bench_sls = (
        out / f"{name}.json" for name in FILES
    )
    start = time.monotonic()
    named = as_typed(recipe)
    stage = Stages(sys.stderr if as_json else sys.stdout)
    stage.title("1/7  measure the engine")
    stage.llmctl("profile", named, "--out", profile)
    stage.title("2/7  fit how time and memory behave")
    stage.llmctl("fit", profile, "--out", fit)
    stage.title("3/7  search the scheduler's parameters on the trace")
    slower = spread(read_file(Profile, profile))
    load = LOAD
    if slower > STEADY:
        load = round(LOAD / slower, 2)
        stage.say(
            f"While it was profiled, this machine was at times {slower:.2f} times slower: other "
            f"programs run here. So the demo tunes for {load:g} of what the fit keeps."
        )
    given = ["--fit", fit, "--trace", trace, "--load", load]
    allowed = stage.tune(named, *given, "--out", tuning)
    promised = read_file(Tuning, tuning)
    stage.title("4/7  serve what was found, at the rate that it was tuned for")
    stage.llmctl("render", named, "--fit", fit, "--tuning", tuning, "--out", plan, *allowed)
    excerpt = overload(open_recipe(recipe), plan, trace)
    with stage.server(plan, *allowed) as url:
        window = promised.held_out_windows[0]
        rate = promised.request_rate_rps
        first = f"--start {window.start_s:.3f} --duration {window.end_s - window.start_s:.3f}"
        stage.bench(url, plan, trace, f"--rate {rate:.6g} {first}".split(), bench_tuned)
        stage.title("5/7  the same server at an overload")
        stage.bench(url, plan, trace, excerpt, bench)
    stage.title("6/7  the same requests, workers and memory under sequence-level scheduling (SLS)")
    fixed = ["--policy", "sequence", "--set", f"batch_size={_safe_rows(fit)}"]
    stage.llmctl("render", named, "--fit", fit, *fixed, "--out", plan_sls)
    with stage.server(plan_sls) as url:
        stage.bench(url, plan_sls, trace, excerpt, bench_sls)
    sharing = simulate_sharing(stage, out)
    page = out / "report.html"
    stage.llmctl("report", plan, "--out", page)
    held = _held(promised, read_file(BenchReport, bench_tuned))
    scls, sls = (read_file(BenchReport, path).measured for path in (bench, bench_sls))
    both = [key for key in COMPARED if key in sls and key in scls]  # goodput only with targets
    compared = {key: {"sls": sls[key], "scls": scls[key]} for key in both}
    took_s = time.monotonic() - start
    result = Achieved(promised.request_rate_rps, held, compared, str(page), took_s, sharing)
    emit(as_json, result, lambda: _show(result, out))


def spread(profile: Profile) -> float:
    """How many times slower than usual the machine was in the slowest tenth of the profile.

    Every visit of the profile goes round the whole grid, so the k-th samples of all points are of
    one moment. The ratio to each point's median, in the median over the points, is how slow the
    machine was then. At least 1.
    """
    points = [point.seconds for point in profile.prefill]
    points += [point.seconds for point in profile.decode]
    moments = []
    for k in range(max((len(one) for one in points), default=0)):
        ratios = [one[k] / median(one) for one in points if len(one) > k and median(one) > 0.0]
        if len(ratios) >= POINTS_MIN:
            moments.append(median(ratios))
    if not moments:
        return 1.0
    slow = sorted(moments)[-max(round(SHARE_SLOWEST * len(moments)), 1)]
    return max(slow, 1.0)


@dataclass(slots=True, frozen=True)
class Held:
    """A metric as `tune` promised it, as predicted just before the replay, and as measured.

    `limit` is a target's, and `kept` whether the measured value is within it; None: no target.
    """

    metric: str
    limit: float | None
    promised: float | None
    predicted: float | None
    measured: float
    kept: bool | None


@dataclass(slots=True, frozen=True)
class Achieved:
    """The result of the demo: at the tuned rate, under overload by metric and scheduler, and by
    metric what was simulated with a prefix cache and without.
    """

    request_rate_rps: float
    promise: list[Held]
    overload: dict[str, dict[str, float]]
    report: str
    took_s: float
    sharing: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The result in one sentence."""
        targets = [one for one in self.promise if one.limit is not None]
        broken = [one.metric for one in targets if not one.kept]
        goodputs = [one for one in self.promise if one.metric == "goodput_rps"]
        few = ("no target, as the recipe has none", "its target", "both targets")
        every = few[len(targets)] if len(targets) < len(few) else f"all {len(targets)} targets"
        kept = f"broke {', '.join(broken)}" if broken else f"kept {every}"
        tuned = kept
        for one in goodputs:
            beside = f", {one.predicted:.3g} predicted" if one.predicted is not None else ""
            tuned = f"{kept} (goodput {one.measured:.3g}/s{beside})"
        sls, scls = (self.overload["throughput_rps"][name] for name in ("sls", "scls"))
        more = f"{scls / sls:.2f} times the throughput of SLS" if sls else "more than SLS"
        return (
            f"At {self.request_rate_rps:.3g} requests/s the tuned server {tuned}, "
            f"and under overload it served {more}."
        )


@dataclass(slots=True, frozen=True)
class Stages:
    """Runs commands as a user would and shows each before; their output goes to `out`."""

    out: TextIO

    def title(self, text: str) -> None:
        self.say(f"\n== {text}")

    def say(self, text: str) -> None:
        print(text, file=self.out, flush=True)

    def llmctl(self, *words: object, survives: int = 0) -> int:
        """Run one command; its exit code, 0 or `survives`. Any other code ends the demo."""
        with self._start(words) as process:
            code = process.wait()
        if code not in (0, survives):
            raise typer.Exit(code)
        return code

    def metrics(self, *words: object) -> dict[str, float]:
        """Run one command with `--json`; the numbers that it prints, by name."""
        with self._start([*words, "--json"], out=subprocess.PIPE) as process:
            text, _ = process.communicate()
        if process.returncode:
            raise typer.Exit(process.returncode)
        return {key: value for key, value in json.loads(text).items() if key in SHOWN}

    def tune(self, *words: object) -> list[str]:
        """Run `llmctl tune`. Where no setting keeps the limits: the option that allows that."""
        from toolkit.deploy.order import ALLOW_BROKEN

        if not self.llmctl("tune", *words, survives=LimitsBrokenError.exit_code):
            return []
        self.say(
            f"No setting keeps every limit on this machine; the demo continues with {ALLOW_BROKEN}."
        )
        return [ALLOW_BROKEN]

    def bench(self, url: str, plan: Path, trace: str, excerpt: Sequence[str], report: Path) -> None:
        """Replay an excerpt of the trace against the server of a plan."""
        options = ["--plan", plan, "--trace", trace, *excerpt, "--warmup", f"{WARMUP_S:g}"]
        self.llmctl("bench", "--url", url, *options, "--out", report)

    @contextmanager
    def _start(
        self, words: Sequence[object], end: str = "", out: int | TextIO | None = None
    ) -> Iterator[subprocess.Popen[bytes]]:
        """A command that ends with the block, in order also where an error ends that."""
        line = [str(word) for word in words]
        self.say(f"$ llmctl {shlex.join(line)}{end}")
        command = [sys.executable, "-m", "toolkit", *line]
        with held():
            process = subprocess.Popen(command, stdout=out or self.out)
        try:
            yield process
        finally:
            with suppress(subprocess.TimeoutExpired):  # Ctrl-C in a terminal is for it, too
                process.wait(END_S)
            process.terminate()
            process.wait()

    @contextmanager
    def server(self, plan: Path, *options: object) -> Iterator[str]:
        """`llmctl serve` in the background until the block ends; yields its URL once ready."""
        from toolkit.endpoints.target import look

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = int(free.getsockname()[1])
        words = ["serve", "--plan", plan, "--port", port, "--allow-end-after", *options]
        url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + START_TIMEOUT_S
        with self._start(words, " &") as server:
            try:
                while look(url).state != "ready":
                    if server.poll() is not None:
                        raise typer.Exit(server.returncode or 1)
                    time.sleep(0.2)
                    if time.monotonic() > end:
                        late = f"the server was not ready within {START_TIMEOUT_S:.0f} s"
                        print(f"error: {late}", file=sys.stderr)
                        raise typer.Exit(1)
                yield url
            finally:
                server.terminate()
                server.wait()


def _held(tuning: Tuning, tuned: BenchReport) -> list[Held]:
    """The targets, then goodput, throughput and attainment, which have no limit; without targets
    throughput alone.
    """
    served = {target for target, share in tuning.usage.items() if share < UNSERVED}
    targets = [
        Held(
            metric=one.target,
            limit=one.limit_s,
            promised=tuning.usage[one.target] * one.limit_s if one.target in served else None,
            predicted=one.predicted_s,
            measured=one.measured_s,
            kept=one.kept,
        )
        for one in tuned.targets
    ]
    promised = tuning.recommended.metrics
    for name in ("goodput_rps", "throughput_rps", "sla_attainment_percent"):
        if name != "throughput_rps" and not tuned.sla:
            continue
        said = promised.get(name)
        predicted = tuned.predicted.get(name)
        targets.append(Held(name, None, said, predicted, tuned.measured.get(name, 0.0), None))
    return targets


def overload(recipe: Recipe, planned: Path, trace: str) -> list[str]:
    """Options of `bench`: a part of the trace, above the predicted capacity of the tuned policy."""
    from toolkit.traces.read import read_trace
    from toolkit.traces.types import trace_path
    from toolkit.traces.windows import prepare
    from toolkit.tuning.workload import backlog_rps

    plan = read_file(Plan, planned)
    policy = PolicySpec(name=plan.policy.name, parameters=plan.policy.parameters)
    tuned = recipe.model_copy(update={"policy": policy})
    fitted = prepare(read_trace(trace_path(trace))[0], recipe)
    capacity = backlog_rps(tuned, plan.fit, fitted)
    return ["--rate", f"{OVERLOAD * capacity:.1f}", "--duration", f"{REPLAY_S / OVERLOAD:.1f}"]


def simulate_sharing(stage: Stages, out: Path) -> dict[str, dict[str, float]]:
    """The metrics of made prompts under vLLM, by metric with its prefix cache and without."""
    stage.title("7/7  prompts that share a beginning: vLLM's prefix cache, simulated")
    trace = out / "shared.jsonl"
    stage.llmctl("trace", "generate", "--out", trace, *SHARING.split())
    words = ["simulate", "--trace", trace, "--fit", SHARING_FIT, "--policy", "vllm"]
    cached = stage.metrics(*words)
    whole = stage.metrics(*words, "--set", "prefix_caching=false")
    return {key: {"without": whole[key], "with": cached[key]} for key in SHOWN}


def _safe_rows(fit: Path) -> int:
    """SLS's fixed batch: as many of the longest possible requests as surely fit into memory."""
    import numpy as np

    from toolkit.estimators.load import laws_from_fit

    fitted = read_file(Fit, fit)
    longest = np.array([fitted.engine.max_model_len])
    return max(1, int(laws_from_fit(fitted).memory.max_batch(longest, 0, 0.0)[0]))


def _show(result: Achieved, folder: Path) -> None:
    words = {True: "yes", False: "NO", None: None}
    rows = [
        [one.metric, one.limit, one.promised, one.predicted, one.measured, words[one.kept]]
        for one in result.promise
    ]
    title = f"what tune promised, at the tuned rate: {result.request_rate_rps:.4g} requests/s"
    table(["", ">limit", ">tune said", ">predicted", ">measured", "kept"], rows, title)
    ratios: list[list[object]] = []
    for key, both in result.overload.items():
        sls = both["sls"]
        scls = both["scls"]
        ratios.append([key, sls, scls, f"{scls / sls:.2f}x" if sls else "-"])
    columns = ["measured live, same requests", "SLS", "SCLS, tuned", ">ratio"]
    table(columns, ratios, "under overload")
    shared = [[key, both["without"], both["with"]] for key, both in result.sharing.items()]
    if shared:
        titles = ["simulated, vLLM on an H200", ">no prefix cache", ">its default"]
        table(titles, shared, "prompts that share a beginning, computed laws")
    print(f"the demo took {seconds(result.took_s)}; its files are in {folder}/")
    print(f"the page about it: {result.report}\n")
    paragraph(result.text)
