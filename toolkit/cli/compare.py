"""`llmctl compare`: several policies on one trace in the simulator, as a table and plots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from toolkit.cli import arguments
from toolkit.cli.arguments import JsonOption, command_of, names_in, option
from toolkit.cli.basis import note_rest, plain
from toolkit.cli.output import (
    FigurePanel,
    check_png,
    draw,
    emit,
    note,
    paragraph,
    progress,
    show_panels,
    table,
)
from toolkit.cli.results import ComparedRun, Comparison
from toolkit.cli.stage import StageOptions, open_stage, result_notes, sharing_notes
from toolkit.errors import InputError, nearest
from toolkit.interrupts import EXIT_CODE, held
from toolkit.units import number

if TYPE_CHECKING:
    from toolkit.sim.api import PolicyRun
    from toolkit.sim.world import World

# goodput is first, since the rows are sorted by it; without targets it is left out
COLUMNS = ("goodput_rps", "throughput_rps", "ttft_p99_s", "mtpot_p99_s", "e2e_mean_s", "e2e_p95_s")
OF_TARGETS = ("goodput_rps", "sla_attainment_percent")  # not without targets
CDF_POINTS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions(StageOptions):
    policies: str | None = option(
        None,
        "Names, separated by commas; default: all except the oracles, which need the future; of "
        "servers that were tuned, their own.",
        autocompletion=arguments.policies,
    )
    rate: list[str] | None = option(
        None, "Scale arrivals to this many requests per second; several: 5,10,20."
    )
    columns: str | None = option(None, "Metrics to show, separated by commas; --json has all.")
    png: Path | None = option(None, "Draw the plots to this file; needs the extra 'plot'.")
    as_json: JsonOption = False


@command_of(CompareOptions)
def command(args: CompareOptions) -> None:
    """Simulate policies on the same requests with the same random draws, and show which one serves
    them best.

    --set policy.key=value sets a parameter of that policy, key=value one of every policy that has
    it. Ctrl-C prints the finished runs.
    """
    from toolkit.sim.api import compare, usual_policies

    if args.png:
        check_png(args.png)
    listed = [] if args.policies is None else _words("--policies", args.policies)
    named = list(dict.fromkeys(listed))
    rates = _rates(args.rate)
    stage = open_stage(args, args.rate)
    targets = stage.targets
    usual = dict.fromkeys([stage.own_policy, *usual_policies(stage.fit)])
    names = stage.policies(named, list(usual))
    contenders = stage.contenders(names)
    world = contenders[0].world
    note_rest(stage.trace)
    note(*sharing_notes(stage.trace, names))
    total = len(names) * max(len(rates), 1)
    each = (compare(stage.trace, [c.policy], c.world, rates, targets) for c in contenders)
    runs = _collect(chain.from_iterable(each), total)
    interrupted = len(runs) < total
    with held():  # finished runs are shown
        shown = _columns(args.columns, runs)
        _print_notes(runs, world, targets)
        result = Comparison(
            sla=dict(targets),
            workers=world.workers,
            seed=stage.seed,
            interrupted=interrupted,
            trace=plain(stage.trace),
            concurrency=world.concurrency,
            runs=[_of_run(run, stage.engine) for run in runs],
        )
        emit(args.as_json, result, lambda: _show(runs, shown, stage.engine, stage.trace.changes))
        if args.png:
            draw(_panels(runs), args.png)
    if interrupted:
        note(f"interrupted: {len(runs)} of {total} runs are finished and shown")
        raise typer.Exit(EXIT_CODE)


def _collect(simulations: Iterator[PolicyRun], total: int) -> list[PolicyRun]:
    """The runs, best first at each rate; after Ctrl-C those that are finished."""
    runs: list[PolicyRun] = []
    try:
        with progress("comparing", total) as advance:
            for run in simulations:
                runs.append(run)
                advance(text=run.policy)
    except KeyboardInterrupt:
        if not runs:
            raise
    objective = _objective(runs)

    def place(run: PolicyRun) -> tuple[float, float, float]:
        """By rate; then the best first, between equals the lower mean E2E, as in `tune`."""
        found = run.metrics
        return run.rate_rps, -found.get(objective, -1.0), found.get("e2e_mean_s", 0.0)

    return sorted(runs, key=place)


def _objective(runs: Sequence[PolicyRun]) -> str:
    """The metric by which runs are sorted: goodput, or throughput without targets."""
    known = any("goodput_rps" in run.metrics for run in runs)
    return "goodput_rps" if known else "throughput_rps"


def _words(name: str, text: str) -> list[str]:
    """The words between the commas. `InputError` where there are none."""
    words = names_in(text)
    if not words:
        hint = "leave the option out for the default"
        raise InputError(f"{name} '{text}': the list is empty", hint)
    return words


def _rates(words: Sequence[str] | None) -> list[float]:
    rates = []
    for word in _words("--rate", ",".join(words)) if words else []:
        try:
            rates.append(float(word))
        except ValueError:
            found = f"--rate {word}: not a number of requests per second"
            raise InputError(found, "for example 5,10,20") from None
    return sorted(set(rates))


def _columns(text: str | None, runs: Sequence[PolicyRun]) -> Sequence[str]:
    """The metrics to show. `InputError` for one that no run has."""
    if text is None:
        columns = [name for name in COLUMNS if any(name in run.metrics for run in runs)]
        # the column of rates leaves room for one metric less
        return [name for name in columns if name != "e2e_mean_s" or not _several_rates(runs)]
    metrics = {name for run in runs for name in run.metrics}
    columns = _words("--columns", text)
    for name in columns:
        if name not in metrics and name in OF_TARGETS:
            hint = "it needs targets, such as --sla ttft_p99_s=2"
            raise InputError(f"--columns: there is no metric '{name}'", hint)
        if name not in metrics:
            raise InputError(f"--columns: there is no metric '{name}'", nearest(name, metrics))
    return columns


def _of_run(run: PolicyRun, engine: str) -> ComparedRun:
    from toolkit.sched.policies import refusal

    refused = refusal(run.policy, engine)
    return ComparedRun(
        policy=run.policy,
        parameters=dict(run.parameters),
        rate_rps=run.rate_rps,
        servable=refused is None,
        refusal=refused,
        problem=run.problem,
        metrics=dict(run.metrics),
    )


def _print_notes(runs: Sequence[PolicyRun], world: World, sla: Mapping[str, float]) -> None:
    """Print what a reader must know before trusting the table."""
    if not sla:
        note("without targets there is no goodput: add some, such as --sla ttft_p99_s=2")
    many = _several_rates(runs)
    beyond: dict[str, list[str]] = {}
    for run in runs:
        name = f"{run.policy} at {number(run.rate_rps)}/s" if many else run.policy
        for line in [run.problem] if run.problem else result_notes(run.refusals, run.metrics):
            note(f"{name}: {line}")
        share = run.metrics.get("extrapolated_batches_percent", 0.0)
        if share:
            valid = str(world.range_of(run.policy))
            beyond.setdefault(valid, []).append(f"{name} {number(share)} %")
    for valid, shares in beyond.items():
        batches = f"batches outside what the fit measured ({valid})"
        note(f"warning: {batches} are extrapolated: {', '.join(shares)}")


def _several_rates(runs: Sequence[PolicyRun]) -> bool:
    return len({run.rate_rps for run in runs}) > 1


def _show(runs: Sequence[PolicyRun], columns: Sequence[str], engine: str, title: str) -> None:
    from toolkit.sched.policies import footnote, marked

    many = _several_rates(runs)
    rows: list[list[object]] = []
    for run in runs:
        cells: list[object] = [marked(run.policy, engine)]
        cells += [round(run.rate_rps, 3)] * many
        rows.append([*cells, *(run.metrics.get(name) for name in columns)])
    heads = [">" + name.replace("_", "\n", 1).replace("_", " ") for name in columns]
    table(["policy", *[">rate"] * many, *heads], rows, title)
    remark = footnote([run.policy for run in runs], engine)
    if remark:
        paragraph(remark)
    show_panels(_panels(runs))


def _panels(runs: Sequence[PolicyRun]) -> list[FigurePanel]:
    """Goodput (throughput without targets) and tail latency, over the rates or as bars; for one
    rate also the CDF of E2E.
    """
    import numpy as np

    done = [run for run in runs if len(run.e2e_s)]
    if not done:
        return []
    objective = _objective(runs)
    rates = f"{objective.removesuffix('_rps')}, requests/s"
    if _several_rates(runs):
        panels = []
        for title, metric in (
            (rates, objective),
            ("TTFT, p99, s", "ttft_p99_s"),
        ):
            over_rates: dict[str, tuple[list[float], list[float]]] = {}
            for run in done:  # by rate, ascending
                xs, ys = over_rates.setdefault(run.policy, ([], []))
                xs.append(run.rate_rps)
                ys.append(run.metrics[metric])
            panels.append(FigurePanel(title, curves=over_rates, x_name="requests/s that arrive"))
        return panels
    shares = np.linspace(0.0, 100.0, CDF_POINTS)
    curves = {
        run.policy: (np.percentile(run.e2e_s, shares).tolist(), shares.tolist()) for run in done
    }
    objectives = {run.policy: run.metrics[objective] for run in done}
    tails = {run.policy: run.metrics["e2e_p99_s"] for run in done}
    share = "requests with an E2E of at most x, %"
    return [
        FigurePanel(rates, bars=objectives),
        FigurePanel("E2E, p99, s", bars=tails),
        FigurePanel(share, curves=curves, x_name="E2E, s (log)", log_x=True),
    ]
