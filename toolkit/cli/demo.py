"""`llmctl demo`: all steps on this machine, each one the command that a user would type."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
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
from toolkit.errors import LateClientError, LimitsBrokenError
from toolkit.files.bench import NOT_SERVERS, BenchReport
from toolkit.files.capacity import Capacities
from toolkit.files.fit import Fit
from toolkit.files.io import read_file
from toolkit.files.plan import Plan
from toolkit.files.recipe import PolicySpec, Recipe
from toolkit.files.shipped import load_recipe
from toolkit.files.tuning import UNSERVED, Tuning
from toolkit.interrupts import held
from toolkit.units import seconds

LOAD = 0.7  # rate that is tuned for, as a multiple of what the recipe keeps its targets at
SURE = 0.7  # rate of the first replay, as a multiple of what the plan keeps at the speed just seen
LEAST = 0.5  # the tuned rate is replayed if it is between this multiple and the other one
SPEED_S = 10.0  # of a replay that shows how fast the machine is, after a warm-up of half of it
ALIKE = 1.4  # times: a machine is as fast at rates that are no further apart
LONGEST_S = 90.0  # of the first replay
TRIES = 4  # of such replays, each at the rate that the one before allows
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

    First the tuned server shows how fast the machine is now, and gets the tuned rate, or another
    one if the plan keeps less or far more at that speed; it is compared with the promise. Then both
    schedulers get more requests than they can serve. Last, vLLM is simulated on prompts that share
    a beginning, with its prefix cache and without. Each step is one command, shown before it runs;
    its files stay in the output folder.
    """
    traits_of(load_recipe(recipe).engine.name).require()
    out.mkdir(parents=True, exist_ok=True)
    profile, fit, tuning, plan, plan_sls, bench_tuned, bench, bench_sls = (
        out / f"{name}.json" for name in FILES
    )
    speed = out / "speed" / "bench.json"  # no bench of the plan, which the report would show
    speed.parent.mkdir(exist_ok=True)
    start = time.monotonic()
    named = as_typed(recipe)
    stage = Stages(sys.stderr if as_json else sys.stdout)
    stage.title("1/7  measure the engine")
    stage.llmctl("profile", named, "--out", profile)
    stage.title("2/7  fit how time and memory behave")
    stage.llmctl("fit", profile, "--out", fit)
    stage.title("3/7  search the scheduler's parameters on the trace")
    given = ["--fit", fit, "--trace", trace, "--load", LOAD]
    allowed = stage.tune(named, *given, "--out", tuning)
    promised = read_file(Tuning, tuning)
    stage.title("4/7  serve what was found, at a rate that it keeps as fast as the machine is now")
    stage.llmctl("render", named, "--fit", fit, "--tuning", tuning, "--out", plan, *allowed)
    with stage.server(plan, *allowed) as url:
        capacity = ["capacity", named, *given[:4], "--tuning", tuning]

        def keeps(rate_rps: float) -> tuple[float, float | None]:
            part = f"--rate {rate_rps:.6g} --duration {SPEED_S:g}".split()
            stage.bench(url, plan, trace, part, speed, SPEED_S / 2)
            slowdown = read_file(BenchReport, speed).replay_slowdown or 1.0
            return slowdown, stage.capacity(*capacity, "--bench", speed)

        seen = find_rate(promised.request_rate_rps, keeps)
        stage.say(seen.text)
        window = _same_window(promised, seen.rate_rps, _rows(trace))
        stage.bench(url, plan, trace, window, bench_tuned)
        stage.title("5/7  the same server at an overload")
        excerpt = overload(open_recipe(recipe), plan, trace, seen.slowdown)
        stage.bench(url, plan, trace, excerpt, bench)
    stage.title("6/7  the same requests, workers and memory under sequence-level scheduling (SLS)")
    fixed = ["--policy", "sequence", "--set", f"batch_size={_safe_rows(fit)}"]
    stage.llmctl("render", named, "--fit", fit, *fixed, "--out", plan_sls)
    with stage.server(plan_sls) as url:
        stage.bench(url, plan_sls, trace, excerpt, bench_sls)
    sharing = simulate_sharing(stage, out)
    page = out / "report.html"
    stage.llmctl("report", plan, "--out", page)
    held = _held(promised, read_file(BenchReport, bench_tuned), seen)
    scls, sls = (read_file(BenchReport, path).measured for path in (bench, bench_sls))
    both = [key for key in COMPARED if key in sls and key in scls]  # goodput only with targets
    compared = {key: {"sls": sls[key], "scls": scls[key]} for key in both}
    took_s = time.monotonic() - start
    late = [path.name for path in (bench_tuned, bench, bench_sls) if _late(path)]
    result = Achieved(
        seen.rate_rps, promised.request_rate_rps, seen.slowdown, held, compared, str(page), took_s,
        sharing, late,
    )  # fmt: skip
    emit(as_json, result, lambda: _show(result, out))


@dataclass(slots=True, frozen=True)
class Speed:
    """How fast the machine is now, and the rate of the first replay.

    `slowdown` is the measured over the fitted time of a batch.
    """

    slowdown: float
    rate_rps: float
    tuned_rps: float

    @property
    def at_tuned(self) -> bool:
        """Whether the rate is the tuned one."""
        return self.rate_rps == self.tuned_rps

    @property
    def text(self) -> str:
        """The speed and the rate in two sentences."""
        gets = f"the tuned {self.rate_rps:.3g} requests/s"
        if not self.at_tuned:
            gets = f"{self.rate_rps:.3g} requests/s, in place of the tuned {self.tuned_rps:.3g}"
        took = f"Batches now take {self.slowdown:.2f} times as long as fitted"
        return f"{took}. The server gets {gets}."


def find_rate(tuned_rps: float, keeps: Callable[[float], tuple[float, float | None]]) -> Speed:
    """The rate that the plan keeps with a margin (`SURE`) at the machine's present speed; the tuned
    one if it is no larger, and no less than `LEAST` of what the plan keeps.

    A machine that others use is slower under load. So the speed is measured again until that was
    about at the rate that it allows. Where others come and go, so that this does not settle, the
    slowest speed decides.

    Args:
        keeps: the slowdown that a replay at this rate shows, and the rate that the plan keeps at
            that speed; None: no rate. Then the rate is slowed as the batches are.
    """
    rate_rps = tuned_rps
    seen: list[tuple[float, float]] = []  # allowed rates with their slowdowns
    for _ in range(TRIES):
        tried_rps = rate_rps
        slowdown, found_rps = keeps(tried_rps)
        capacity_rps = found_rps or tuned_rps / max(slowdown, 1.0)
        rate_rps = SURE * capacity_rps
        if LEAST * capacity_rps <= tuned_rps <= rate_rps:
            rate_rps = tuned_rps
        seen.append((rate_rps, slowdown))
        if 1.0 / ALIKE <= rate_rps / tried_rps <= ALIKE:
            break
    else:
        rate_rps, slowdown = min(seen)
    if rate_rps != tuned_rps:
        rate_rps = round(rate_rps, 3)
    return Speed(slowdown, rate_rps, tuned_rps)


def _same_window(promised: Tuning, rate_rps: float, requests: int) -> list[str]:
    """Options of `bench`: the first window that `tune` held out, with its requests at this rate; of
    a slow rate the first `LONGEST_S`. `tune` repeats a short trace: the window is then the same
    part of the trace itself, of `requests`.
    """
    window = promised.held_out_windows[0]
    slower = promised.request_rate_rps / rate_rps
    lasts_s = min(slower * (window.end_s - window.start_s), LONGEST_S)
    start_s = slower * window.start_s
    whole_s = requests / rate_rps
    if start_s + lasts_s > whole_s:
        start_s = max(min(start_s % whole_s, whole_s - lasts_s), 0.0)
    return f"--rate {rate_rps:.6g} --start {start_s:.3f} --duration {lasts_s:.3f}".split()


def _rows(trace: str) -> int:
    """How many requests a trace has."""
    from toolkit.traces.read import read_trace
    from toolkit.traces.types import trace_path

    return len(read_trace(trace_path(trace))[0])


def _late(bench: Path) -> bool:
    """Whether this replay does not count as measured."""
    return bool(read_file(BenchReport, bench).late)


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
    """The result of the demo: at the rate that the machine's speed allows, under overload by metric
    and scheduler, and by metric what was simulated with a prefix cache and without.

    `slowdown` is the measured over the fitted time of a batch before the replays; `late` the files
    of replays that do not count, as the client was late.
    """

    request_rate_rps: float
    tuned_rate_rps: float
    slowdown: float
    promise: list[Held]
    overload: dict[str, dict[str, float]]
    report: str
    took_s: float
    sharing: dict[str, dict[str, float]] = field(default_factory=dict)
    late: list[str] = field(default_factory=list)

    @property
    def at_tuned(self) -> bool:
        """Whether the judged rate is the tuned one."""
        return self.request_rate_rps == self.tuned_rate_rps

    @property
    def text(self) -> str:
        """The result in a few sentences."""
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
        text = (
            f"At {self.request_rate_rps:.3g} requests/s the tuned server {tuned}, "
            f"and under overload it served {more}."
        )
        if not self.at_tuned:
            text += (
                f" Batches took {self.slowdown:.2f} times as long as in the fit, by which the plan "
                f"was tuned for {self.tuned_rate_rps:.3g} requests/s."
            )
        if self.late:
            text += f" {NOT_SERVERS.capitalize()}, as the client was late: {', '.join(self.late)}."
        return text


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

    def capacity(self, *words: object) -> float | None:
        """Run `llmctl capacity`; the rate that the tuned settings keep, None if there is none."""
        with self._start([*words, "--no-at-once", "--json"], out=subprocess.PIPE) as process:
            text, _ = process.communicate()
        if process.returncode not in (0, LimitsBrokenError.exit_code):
            raise typer.Exit(process.returncode)
        return Capacities.model_validate_json(text).capacities[-1].capacity_rps

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

    def bench(
        self,
        url: str,
        plan: Path,
        trace: str,
        excerpt: Sequence[str],
        report: Path,
        warmup_s: float | None = None,
    ) -> None:
        """Replay an excerpt of the trace against the server of a plan, after some seconds
        (`WARMUP_S`) of other requests.
        """
        warmup_s = WARMUP_S if warmup_s is None else warmup_s
        options = ["--plan", plan, "--trace", trace, *excerpt, "--warmup", f"{warmup_s:g}"]
        words = ["bench", "--url", url, *options, "--out", report]
        self.llmctl(*words, survives=LateClientError.exit_code)

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


def _held(tuning: Tuning, tuned: BenchReport, seen: Speed) -> list[Held]:
    """The targets, then goodput, throughput and attainment, which have no limit; without targets
    throughput alone. `tune` promised nothing for another rate than the tuned one.
    """
    usage = tuning.usage if seen.at_tuned else {}
    served = {target for target, share in usage.items() if share < UNSERVED}
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
    promised = tuning.recommended.metrics if seen.at_tuned else {}
    for name in ("goodput_rps", "throughput_rps", "sla_attainment_percent"):
        if name != "throughput_rps" and not tuned.sla:
            continue
        said = promised.get(name)
        predicted = tuned.predicted.get(name)
        targets.append(Held(name, None, said, predicted, tuned.measured.get(name, 0.0), None))
    return targets


def overload(recipe: Recipe, planned: Path, trace: str, slowdown: float) -> list[str]:
    """Options of `bench`: a part of the trace, above the predicted capacity of the tuned policy at
    this speed.
    """
    from toolkit.traces.read import read_trace
    from toolkit.traces.types import trace_path
    from toolkit.traces.windows import prepare
    from toolkit.tuning.workload import backlog_rps

    plan = read_file(Plan, planned)
    policy = PolicySpec(name=plan.policy.name, parameters=plan.policy.parameters)
    tuned = recipe.model_copy(update={"policy": policy})
    fitted = prepare(read_trace(trace_path(trace))[0], recipe)
    capacity = backlog_rps(tuned, plan.fit, fitted) / slowdown
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
    rate = f"{result.request_rate_rps:.4g} requests/s"
    title = f"what tune promised, at the tuned rate: {rate}"
    columns = ["", ">limit", ">tune said", ">predicted", ">measured", "kept"]
    if not result.at_tuned:  # `tune` said nothing of this rate
        title = f"what tune promised, at the speed of now: {rate}"
        columns.pop(2)
        rows = [[*row[:2], *row[3:]] for row in rows]
    table(columns, rows, title)
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
