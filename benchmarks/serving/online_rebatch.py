"""Policies on a live server at several loads, beside their predictions.

    python -m benchmarks.serving.online_rebatch [--trace azure-2023-conv.csv] [--out runs/online]

Takes an hour or more by default: a profile, a backlog, and a minute and more for each policy, load
and repeat. Needs a quiet machine with two cores. The same command skips what --out already has;
--report shows only what is there.

Each step is an `llmctl` command, shown as it runs:

1. The recipe with a KV budget so small that memory binds before the workers' time does (--kv-mib),
   and with one worker, so that the front and the client have a core of their own (--workers); its
   profile and fit.
2. The capacity: requests per second that the recipe's own policy completes on a live server while
   all of a backlog waits, between a fifth and four fifths of its completions.
3. For each policy and load (three times for the recipe's own policy) requests with the trace's
   lengths, scaled to the model, arrive as a Poisson process at that share of the capacity. `llmctl
   serve` serves them, `llmctl bench` sends them after a warm-up and predicts them by the laws, at
   the speed and with the front's delay that the warm-up showed. All runs get the same requests in
   the same order.

A shared machine may change its speed between warm-up and replay. The prediction in hindsight, at
the speed of the replay's own batches, therefore stands beside: the rest of its error belongs to the
simulator and the laws.

Evictions are dropped caches, from the server's event log; in the prediction, from the simulator.
Goodput counts requests that meet --sla. A run during which other programs used more than --quiet of
the CPUs does not count: the same command repeats it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.common.command import add_markdown, make_parser, publish
from benchmarks.serving.online_table import Outcome, goodput, medians, table, verdict
from benchmarks.serving.round_times import dropped, first_after, read_events
from toolkit.cli.demo import Stages
from toolkit.files.bench import BenchReport
from toolkit.files.fit import Fit
from toolkit.files.io import read_file, write_text
from toolkit.files.recipe import Recipe
from toolkit.files.shipped import load_recipe
from toolkit.profiling.run import OtherLoad
from toolkit.traces.generate import Arrivals, draw_arrivals
from toolkit.traces.read import read_trace
from toolkit.traces.types import Trace, trace_path
from toolkit.traces.windows import prepare
from toolkit.traces.write import TraceLine, write_trace
from toolkit.tuning.workload import backlog_rps

POLICIES = ("past-future", "aggressive", "conservative", "mlfq", "slice")
LOADS = (50, 80, 100, 120)  # percent of the capacity
BACKLOG_S = 15.0  # predicted seconds of the backlog that measures the capacity
TARGETS = ("ttft_p99_s=1", "mtpot_p99_s=0.5")  # nearly all requests meet the recipe's
SEED = 0


@dataclass(slots=True, frozen=True)
class Case:
    """One live run."""

    policy: str
    load: int  # percent of the capacity
    repeat: int

    @property
    def name(self) -> str:
        return f"{self.policy}-{self.load}-{self.repeat}"


@dataclass(slots=True, frozen=True)
class Lab:
    """A folder with a recipe and its fit, and the runs in it."""

    folder: Path
    stages: Stages
    lengths: Trace  # of the model's size; its arrival times are not used
    seconds: float
    warmup: float
    sla: Sequence[str]
    quiet: float  # percent of the CPUs that other programs may use during a run

    def file(self, name: str) -> Path:
        return self.folder / name

    def fit_engine(self) -> None:
        """Profile and fit, where these are missing."""
        recipe, profile, fit = map(self.file, ("recipe.yaml", "profile.json", "fit.json"))
        if not fit.exists():
            self.stages.llmctl("profile", recipe, "--out", profile)
            self.stages.llmctl("fit", profile, "--out", fit)

    def plan(self, policy: str) -> Path:
        """The policy's plan, with its parameters' defaults."""
        path = self.file(f"plan-{policy}.json")
        if not path.exists():
            recipe = self.file("recipe.yaml")
            fit = self.file("fit.json")
            words = ["--fit", fit, "--policy", policy, "--out", path]
            self.stages.llmctl("render", recipe, *words)
        return path

    def trace(self, rate_rps: float, seconds: float) -> Trace:
        """Requests of these lengths, repeated as needed, as a Poisson process of `seconds`."""
        count = int(rate_rps * seconds) + 1
        rows = np.arange(count) % len(self.lengths)
        own = self.lengths
        lengths = (own.prompt_tokens[rows], own.output_tokens[rows], own.max_tokens[rows])
        return draw_arrivals(Trace(np.zeros(count), *lengths), Arrivals(rate_rps), SEED)

    def replay(self, name: str, policy: str, trace: Trace, seconds: float) -> None:
        """Serve `trace` live: name.json is the report, name.events.jsonl and name.requests.jsonl
        have the details.

        Where other programs used too much of the CPUs meanwhile the report is name.disturbed.json,
        and the run has to be repeated.
        """
        load = OtherLoad()
        plan = self.plan(policy)
        requests = self.file(f"{name}.trace.jsonl")
        write_trace(trace, requests)
        events = self.file(f"{name}.events.jsonl")
        targets = [word for target in self.sla for word in ("--sla", target)]
        with self.stages.server(plan, "--event-log", events) as url:
            words = ["--url", url, "--plan", plan, "--trace", requests, "--duration", seconds]
            words += ["--save-requests", self.file(f"{name}.requests.jsonl"), *targets]
            words += ["--warmup", self.warmup, "--out", self.file(f"{name}.disturbed.json")]
            self.stages.llmctl("bench", *words)
        percent = load.percent()
        write_text(self.file(f"{name}.others"), f"{percent:.1f}\n")
        if percent <= self.quiet:
            self.file(f"{name}.disturbed.json").rename(self.file(f"{name}.json"))
        else:
            others = f"others used {percent:.0f} % of the CPUs during {name}"
            print(f"disturbed: {others}", file=sys.stderr, flush=True)

    def capacity(self, policy: str) -> float:
        """Requests per second that `policy` completes while all workers are busy."""
        name = "capacity"
        if not self.file(f"{name}.json").exists():
            recipe = self.recipe()
            fit = read_file(Fit, self.file("fit.json"))
            expected_rps = backlog_rps(recipe, fit, self.lengths)
            count = int(expected_rps * BACKLOG_S)
            burst_s = 1.0  # all come within a second
            warming = self.warmup * expected_rps / count
            trace = self.trace(count / burst_s, burst_s * (1.1 + warming))
            self.replay(name, policy, trace, burst_s)
            if not self.file(f"{name}.json").exists():
                disturbed = "the capacity was measured beside other programs"
                raise SystemExit(f"{disturbed}; run the command again")
        return steady_rps(self.file(f"{name}.requests.jsonl"))

    def recipe(self) -> Recipe:
        return load_recipe(self.file("recipe.yaml"))

    def run(self, case: Case, rate_rps: float) -> None:
        """Make the case's live run, where it is missing."""
        if not self.file(f"{case.name}.json").exists():
            trace = self.trace(rate_rps, self.seconds + 2 * self.warmup)
            self.replay(case.name, case.policy, trace, self.seconds)

    def outcome(self, case: Case) -> Outcome | None:
        """The outcome of a run; None: it has not been made."""
        path = self.file(f"{case.name}.json")
        if not path.exists():
            return None
        found = read_file(BenchReport, path)
        events = read_events(self.file(f"{case.name}.events.jsonl"))
        # the first one tries the server out
        before = 1 + (found.warmup.requests if found.warmup else 0)
        other = float(self.file(f"{case.name}.others").read_text(encoding="utf-8"))
        counts = dropped(events, first_after(events, before))
        return Outcome(case.policy, case.load, found, counts, other)


def steady_rps(requests: Path) -> float:
    """Completions per second between the first and the last fifth of them, while all workers are
    busy.
    """
    lines = map(msgspec.json.Decoder(TraceLine).decode, requests.read_bytes().splitlines())
    ended_ms = sorted(line.timestamp + line.e2e_ms for line in lines if line.e2e_ms is not None)
    first = len(ended_ms) // 5
    last = 4 * len(ended_ms) // 5
    return 1e3 * (last - first) / (ended_ms[last] - ended_ms[first])


def cases(policies: Sequence[str], loads: Sequence[int], own: str, repeats: int) -> list[Case]:
    """All cases, round by round, so that a lack of time costs repeats."""
    return [
        Case(policy, load, repeat)
        for repeat in range(repeats)
        for policy in policies
        for load in loads
        if repeat == 0 or policy == own
    ]


def open_lab(options: argparse.Namespace) -> Lab:
    """The folder with its recipe: the given one with another KV budget."""
    folder: Path = options.out
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.yaml"
    if not path.exists():
        recipe = load_recipe(options.recipe)
        engine = recipe.engine.model_copy(update={"kv_cache_memory_mib": options.kv_mib})
        changes = {"engine": engine, "workers": options.workers or recipe.workers}
        write_text(path, recipe.model_copy(update=changes).model_dump_json(indent=1))  # YAML, too
    lengths = prepare(read_trace(trace_path(options.trace))[0], load_recipe(path))
    limits = options.seconds, options.warmup, options.sla, options.quiet
    return Lab(folder, Stages(sys.stderr), lengths, *limits)


def text_of(lab: Lab, found: Sequence[Outcome], rate_rps: float, command: str) -> str:
    """The section: the setting, all runs, and the errors of the predictions."""
    recipe = lab.recipe()
    engine = read_file(Fit, lab.file("fit.json")).engine
    lengths = lab.lengths
    prompt = lengths.prompt_tokens.mean()
    output = lengths.output_tokens.mean()
    setting = (
        f"{recipe.name} with {engine.capacity_tokens:,} tokens of KV cache for each worker"
        f" ({recipe.workers}); lengths of {lengths.source}, scaled: prompts of {prompt:.0f} tokens"
        f" on average, outputs of {output:.0f}; {lab.seconds:g} s of Poisson arrivals after"
        f" {lab.warmup:g} s of warm-up; the capacity is {rate_rps:.2f} requests/s. Good:"
        f" {', '.join(lab.sla)}"
    )
    errors = "the prediction's error; its error in hindsight, at the replay's own speed"
    lines = [f"`{command}`", "", setting, f"Measured / predicted ({errors}):", "", *table(found)]
    errors = "The prediction's errors, medians of the repeats and each run; bold: beyond the target"
    lines += ["", f"{errors}:", "", *medians(found), "", *verdict(found)]
    lines += ["", "Goodput, requests/s, measured / predicted:", "", *goodput(found)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--recipe", default="tiny-llama-cpu-rebatch")
    parser.add_argument("--kv-mib", type=float, default=16.0, help="KV budget of a worker")
    parser.add_argument("--workers", type=int, default=1, help="0: as many as the recipe has")
    parser.add_argument("--trace", default="chat-small", help="the trace of the lengths")
    parser.add_argument("--out", type=Path, default=Path("runs/online"))
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument(
        "--loads", type=int, nargs="+", default=LOADS, help="percent of the capacity"
    )
    parser.add_argument("--repeats", type=int, default=3, help="of the recipe's own policy")
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals in a run")
    parser.add_argument(
        "--warmup", type=float, default=20.0, help="seconds of other requests before each"
    )
    parser.add_argument("--sla", nargs="+", default=TARGETS, help="what a good request meets")
    parser.add_argument(
        "--quiet", type=float, default=10.0, help="percent of the CPUs that others may use in a run"
    )
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="begin no run later; the next command goes on"
    )
    parser.add_argument("--report", action="store_true", help="run nothing: show what is there")
    add_markdown(parser)
    options = parser.parse_args()
    until_s = time.monotonic() + 60.0 * options.minutes
    lab = open_lab(options)
    own = lab.recipe().policy.name
    if not options.report:
        lab.fit_engine()
    rate_rps = lab.capacity(own)
    todo = cases(options.policies, options.loads, own, options.repeats)
    for case in [] if options.report else todo:
        if time.monotonic() < until_s:
            lab.run(case, rate_rps * case.load / 100.0)
    found = [
        one
        for case in sorted(todo, key=order(options.policies))
        if (one := lab.outcome(case)) is not None
    ]
    trace = Path(options.trace).name
    command = f"python -m benchmarks.serving.online_rebatch --trace {trace}"
    title = "Continuous re-batching online: predicted beside measured"
    publish(text_of(lab, found, rate_rps, command), options.markdown, "online_rebatch", title)


def order(policies: Sequence[str]) -> Callable[[Case], tuple[int, int, int]]:
    """The order in tables: by policy, load and repeat."""
    return lambda case: (list(policies).index(case.policy), case.load, case.repeat)


if __name__ == "__main__":
    main()
