"""Predicted beside measured under overload, on traces of unlike shape.

    python -m benchmarks.serving.overload_shapes --work DIR [--azure FILE.csv] [SHAPE ...]

Takes a profile and a fit, then a tuning for each shape, then about 10 s of replay and a warm-up for
each shape and repeat. Needs a quiet machine; DIR keeps what was made, and it is used again.

Shapes: `bursts` (short outputs, gaps with cv 3), `chat` (the shipped trace), `long` (long prompts
and outputs) and `azure`. The tiny Llama is profiled and fitted once, and tuned for each shape. Each
repeat serves the tuned plan and replays some 10 s of the trace at 2.5 times the rate that it is
predicted to serve. The same warm-up gives two predictions: with batches that take a constant factor
of the fitted time, and with the cost that each arriving request adds to the slices that run then
(docs/how-to/measure.md). Errors are the prediction's, 100 (predicted / measured - 1).
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.common.command import make_parser
from toolkit.bench.client import fitted, limits_of
from toolkit.bench.predict import predict
from toolkit.cli.demo import Stages, overload
from toolkit.cli.output import table
from toolkit.endpoints.target import Target
from toolkit.files.bench import BenchReport, Warmup
from toolkit.files.io import read_file
from toolkit.files.plan import Plan
from toolkit.sim.conditions import ServerConditions
from toolkit.sim.worker import FrontDelay
from toolkit.traces.read import read_trace
from toolkit.traces.types import trace_path
from toolkit.traces.windows import cut
from toolkit.units import percent

RECIPE = "tiny-llama-cpu"
METRICS = ("throughput_rps", "goodput_rps", "ttft_mean_s", "e2e_mean_s")
GENERATED = {
    "bursts": "--rate 100 --duration 90 --cv 3 --prompt lognormal:60:0.6 --output"
    " lognormal:14:0.7 --seed 3",
    "long": "--rate 10 --duration 200 --prompt lognormal:150:0.4 --output"
    " lognormal:150:0.4 --seed 5",
}
LONGEST = {"bursts": 240, "long": 250}  # tokens
SHAPES = (*GENERATED, "chat", "azure")
NO_SERVER = Target("", "", "", None, own=True)


def prepare(stages: Stages, work: Path, shape: str, azure: str) -> tuple[Path, str]:
    """The tuned plan of a shape, and its trace; existing files are used again."""
    fit = work / "fit.json"
    if not fit.exists():
        stages.llmctl("profile", RECIPE, "--out", work / "profile.json")
        stages.llmctl("fit", work / "profile.json", "--out", fit)
    trace = {"chat": "chat-small", "azure": azure}.get(shape, str(work / f"{shape}.jsonl"))
    if shape in GENERATED and not Path(trace).exists():
        words = [*GENERATED[shape].split(), "--longest", LONGEST[shape]]
        stages.llmctl("trace", "generate", "--out", trace, *words)
    tuning = work / f"tuning-{shape}.json"
    plan = work / f"plan-{shape}.json"
    if not plan.exists():
        stages.llmctl("tune", RECIPE, "--fit", fit, "--trace", trace, "--out", tuning)
        stages.llmctl("render", RECIPE, "--fit", fit, "--tuning", tuning, "--out", plan)
    return plan, trace


def without_arrivals(
    plan: Plan, trace: str, excerpt: list[str], report: BenchReport
) -> dict[str, float]:
    """The prediction of a replay by the warm-up's mean slowdown alone."""
    options = dict(zip(excerpt[::2], excerpt[1::2], strict=True))
    whole = read_trace(trace_path(trace))[0]
    whole = fitted(whole, limits_of(plan, NO_SERVER), float(options["--rate"]))
    part = cut(whole, 0.0, float(options["--duration"]))
    warm = report.warmup
    assert warm is not None
    front = FrontDelay(warm.front.first_s, warm.front.last_s) if warm.front else None
    return predict(plan, part, report.sla, ServerConditions(ratio(warm), front))


def ratio(warm: Warmup) -> float:
    return warm.batch_s / warm.predicted_batch_s


def row(name: str, before: dict[str, float], report: BenchReport) -> list[object]:
    """The row of a replay: each metric measured, and its errors before and after."""
    errors = [
        f"{percent(100.0 * (before[metric] / report.measured[metric] - 1.0))} -> "
        f"{percent(100.0 * (report.predicted[metric] / report.measured[metric] - 1.0))}"
        for metric in METRICS
    ]
    warm = report.warmup
    assert warm is not None
    speed = f"{ratio(warm):.2f} -> {warm.slowdown:.2f} + {1e3 * warm.arrival_cost_s:.2f} ms"
    return [name, speed, *errors]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("shapes", nargs="*", default=[])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--azure", default="azure-2023-conv.csv")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--prepare", action="store_true", help="profile, fit and tune alone")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    stages = Stages(sys.stderr)
    rows = []
    for shape in given.shapes or SHAPES:
        path, trace = prepare(stages, given.work, shape, given.azure)
        plan = read_file(Plan, path)
        excerpt = overload(plan.recipe, path, trace)
        for repeat in range(0 if given.prepare else given.repeats):
            out = given.work / f"bench-{shape}-{repeat}.json"
            with stages.server(path) as url:
                stages.bench(url, path, trace, excerpt, out)
            report = read_file(BenchReport, out)
            before = without_arrivals(plan, trace, excerpt, report)
            rows.append(row(f"{shape} {excerpt[1]}/s", before, report))
    if rows:
        table(["replay", "warm-up", *METRICS], rows)


if __name__ == "__main__":
    main()
