"""The sheets of a simulation: one run with all its metrics, or several runs side by side."""

from __future__ import annotations

from collections.abc import Mapping

from toolkit.files.simulation import Comparison, Simulation
from toolkit.report.parts import Cell, Sheet, Table
from toolkit.sched.policies import footnote, marked
from toolkit.units import bracketed, number

# goodput is first, since the rows are sorted by it; without targets it is left out
COLUMNS = ("goodput_rps", "throughput_rps", "ttft_p99_s", "mtpot_p99_s", "e2e_mean_s", "e2e_p95_s")
VERDICTS = {
    "kept": "all targets are kept",
    "broken": "not every target is kept",
    "overloaded": "overloaded: the queue grows with the trace",
}


def run_sheet(found: Simulation, used: Mapping[str, float], engine: str) -> Sheet:
    """Return all metrics of a run, then each target with its value and whether all are kept.

    Args:
        used: each target's value over its limit.
        engine: of the laws; '' in the token-step world.
    """
    changes = bracketed(found.trace.changes)
    metrics: Mapping[str, float] = found.model_extra or {}
    title = f"policy '{marked(found.policy, engine)}'{changes}"
    remark = footnote([found.policy], engine)
    tables = [Table(title, ["metric", "value"], list(metrics.items()), remark=remark)]
    if found.verdict is not None:
        rows: list[list[Cell]] = [
            [name, f"{number(limit)} s", f"{number(used[name] * limit)} s", used[name] <= 1.0]
            for name, limit in found.sla.items()
        ]
        heads = ["target", ">limit", ">simulated", "kept"]
        tables.append(Table(f"{VERDICTS[found.verdict]}{changes}", heads, rows))
    return Sheet("simulation", "", tables=tables)


def comparison_sheet(found: Comparison, engine: str) -> Sheet:
    """Return a row for each run: its policy, its router and its rate where these differ, and the
    metrics of `COLUMNS`.
    """
    runs = found.runs
    rates = len({run.rate_rps for run in runs}) > 1
    routers = len({run.router for run in runs}) > 1
    columns = [name for name in COLUMNS if any(name in run.metrics for run in runs)]
    if rates or routers:  # their columns leave room for one metric less
        columns = [name for name in columns if name != "e2e_mean_s"]
    rows: list[list[Cell]] = []
    for run in runs:
        which: list[Cell] = [run.router or ""] * routers + [round(run.rate_rps, 3)] * rates
        metrics = [run.metrics.get(name) for name in columns]
        rows.append([marked(run.policy, engine), *which, *metrics])
    heads = ["policy", *["router"] * routers, *[">rate"] * rates]
    heads += [">" + name.replace("_", "\n", 1).replace("_", " ") for name in columns]
    remark = footnote([run.policy for run in runs], engine)
    return Sheet("simulation", "", tables=[Table(found.trace.changes, heads, rows, remark=remark)])
