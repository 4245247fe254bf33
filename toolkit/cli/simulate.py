"""`llmctl simulate`: a trace under policies, routers and rates, by fitted laws or in the token-step
world.

One run is a table of all its metrics. Several are a row each, side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import typer

from toolkit.cli import arguments
from toolkit.cli.arguments import JsonOption, command_of, names_in, option
from toolkit.cli.basis import note_rest, plain
from toolkit.cli.output import emit, note, paragraph, progress, table
from toolkit.cli.results import ComparedRun, Comparison, Simulation
from toolkit.cli.stage import (
    Contender,
    Stage,
    StageOptions,
    open_stage,
    result_notes,
    sharing_notes,
    short_notes,
)
from toolkit.errors import InputError
from toolkit.interrupts import EXIT_CODE, held
from toolkit.units import bracketed, number

if TYPE_CHECKING:
    from toolkit.sched.policies.parameters import Value
    from toolkit.sched.types import Refusal
    from toolkit.traces.types import Trace

# goodput is first, since the rows are sorted by it; without targets it is left out
COLUMNS = ("goodput_rps", "throughput_rps", "ttft_p99_s", "mtpot_p99_s", "e2e_mean_s", "e2e_p95_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions(StageOptions):
    policy: str | None = option(
        None,
        "Policies, separated by commas, that `llmctl policies` lists; all: all but the oracles, "
        "which need the future. Default: the tuning's, or the recipe's.",
        autocompletion=arguments.policies,
    )
    router: str | None = option(
        None,
        "Routers before replicas of vLLM, separated by commas; all: each of them. Default: the "
        "tuning's, or the recipe's.",
        autocompletion=arguments.router,
    )
    rate: list[str] | None = option(
        None, "Scale arrivals to this many requests per second; several: 5,10,20."
    )
    as_json: JsonOption = False


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """One policy before one router at one rate. `problem` says why there are no metrics."""

    policy: str
    router: str  # '': none
    parameters: Mapping[str, Value]
    rate_rps: float  # of arrivals; 0: all come at once, or at a fixed concurrency
    metrics: Mapping[str, float] = field(default_factory=dict)
    ratios: Mapping[str, float] = field(default_factory=dict)  # each target's value over its limit
    verdict: Literal["kept", "broken", "overloaded"] | None = None  # None: no targets
    refusals: Sequence[Refusal] = ()
    problem: str = ""


@command_of(SimulateOptions)
def command(args: SimulateOptions) -> None:
    """Simulate a trace under a policy by the fitted laws, and print the metrics; several policies,
    routers and rates side by side, on the same requests and random draws.

    --set policy.key=value sets a parameter of that policy, key=value one of every policy that has
    it. --json has the metrics with their units in their names: throughput_rps, ttft_p99_s,
    batch_size_mean, ...; its `trace` describes the requests. With --fit unit-step a second is a
    decode step, as in Past-Future's Table 1; see docs/reference/simulation.md. Ctrl-C prints the
    finished runs.
    """
    from toolkit.traces.windows import scale_rate

    named = _listed("--policy", args.policy)
    routers = _listed("--router", args.router)
    rates = _rates(args.rate)
    stage = open_stage(args, args.rate)
    names = stage.policies(named)
    contenders = stage.contenders(names, routers)
    total = len(contenders) * max(len(rates), 1)
    note_rest(stage.trace)
    note(*sharing_notes(stage.trace, names))
    traces = [scale_rate(stage.trace, rate) for rate in rates] or [stage.trace]
    if total == 1:
        run = _run(traces[0], contenders[0], stage.targets)
        _print_run(args, stage, contenders[0], traces[0], run)
        return
    runs = _collect(traces, contenders, stage.targets, total)
    interrupted = len(runs) < total
    with held():  # finished runs are shown
        _print_notes(runs, contenders, stage.targets)
        result = Comparison(
            sla=dict(stage.targets),
            workers=contenders[0].world.workers,
            seed=stage.seed,
            interrupted=interrupted,
            trace=plain(stage.trace),
            concurrency=contenders[0].world.concurrency,
            runs=[_plain_run(run, stage.engine) for run in runs],
        )
        emit(args.as_json, result, lambda: _show(runs, stage))
    if interrupted:
        note(f"interrupted: {len(runs)} of {total} runs are finished and shown")
        raise typer.Exit(EXIT_CODE)


def _listed(name: str, text: str | None) -> list[str]:
    """Return the different words between the commas. Raises InputError where there are none."""
    words = list(dict.fromkeys(names_in(text) or ()))
    if text is not None and not words:
        hint = "leave the option out for the default"
        raise InputError(f"{name} '{text}': the list is empty", hint)
    return words


def _rates(words: Sequence[str] | None) -> list[float]:
    rates = []
    for word in _listed("--rate", ",".join(words)) if words else []:
        try:
            rates.append(float(word))
        except ValueError:
            found = f"--rate {word}: not a number of requests per second"
            raise InputError(found, "for example 5,10,20") from None
    return sorted(set(rates))


def _run(trace: Trace, contender: Contender, targets: Mapping[str, float]) -> PolicyRun:
    """Simulate one run. Raises SimulationStalledError."""
    from toolkit.metrics import judge
    from toolkit.sched.policies.parameters import parameters
    from toolkit.sim.api import simulate
    from toolkit.traces.windows import mean_rate

    policy = contender.policy
    world = contender.world
    result = simulate(trace, policy, world)
    return PolicyRun(
        policy.name,
        contender.router,
        parameters(policy),
        0.0 if world.concurrency else mean_rate(trace),
        result.metrics(targets),
        result.sla_ratios(targets),
        judge(result.served, targets) if targets else None,
        result.refusals,
    )


def _print_run(
    args: SimulateOptions, stage: Stage, contender: Contender, trace: Trace, run: PolicyRun
) -> None:
    """Print one run: its notes, all its metrics, and its targets."""
    from toolkit.sched.policies import footnote, marked

    world = contender.world
    note(*result_notes(run.refusals, run.metrics, world.range_of(run.policy)))
    note(*short_notes(trace, stage.targets, world))
    note(*filter(None, [footnote([run.policy], stage.engine)]))
    found = Simulation(
        policy=run.policy,
        router=run.router or None,
        parameters=dict(run.parameters),
        workers=world.workers,
        seed=stage.seed,
        sla=dict(stage.targets),
        verdict=run.verdict,
        trace=plain(trace),
        concurrency=world.concurrency,
        **run.metrics,
    )

    def show() -> None:
        title = f"policy '{marked(run.policy, stage.engine)}'{bracketed(trace.changes)}"
        table(["metric", "value"], list(run.metrics.items()), title)
        _show_targets(found, run.ratios)

    emit(args.as_json, found, show)


def _show_targets(found: Simulation, ratios: Mapping[str, float]) -> None:
    """Print each target with its value, and whether all are kept; nothing without targets."""
    if found.verdict is None:
        return
    rows = [
        [name, f"{number(limit)} s", f"{number(ratios[name] * limit)} s", ratios[name] <= 1.0]
        for name, limit in found.sla.items()
    ]
    titles = {
        "kept": "all targets are kept",
        "broken": "not every target is kept",
        "overloaded": "overloaded: the queue grows with the trace",
    }
    title = f"{titles[found.verdict]}{bracketed(found.trace.changes)}"
    table(["target", ">limit", ">simulated", "kept"], rows, title)


def _collect(
    traces: Sequence[Trace],
    contenders: Sequence[Contender],
    targets: Mapping[str, float],
    total: int,
) -> list[PolicyRun]:
    """Return the runs, best first at each rate; after Ctrl-C those that are finished."""
    runs: list[PolicyRun] = []
    try:
        with progress("simulating", total) as advance:
            for run in _all_runs(traces, contenders, targets):
                runs.append(run)
                advance(text=run.policy)
    except KeyboardInterrupt:
        if not runs:
            raise
    known = any("goodput_rps" in run.metrics for run in runs)  # there are targets
    objective = "goodput_rps" if known else "throughput_rps"

    def place(run: PolicyRun) -> tuple[float, float, float]:
        """By rate; then the best first, between equals the lower mean E2E, as in `tune`."""
        found = run.metrics
        return run.rate_rps, -found.get(objective, -1.0), found.get("e2e_mean_s", 0.0)

    return sorted(runs, key=place)


def _all_runs(
    traces: Sequence[Trace], contenders: Sequence[Contender], targets: Mapping[str, float]
) -> Iterator[PolicyRun]:
    """Run each contender at each rate. Where one stalls, its run has a `problem`."""
    from toolkit.sched.policies.parameters import parameters
    from toolkit.sim.loop import SimulationStalledError
    from toolkit.traces.windows import mean_rate

    for trace in traces:
        for one in contenders:
            try:
                yield _run(trace, one, targets)
            except SimulationStalledError as error:
                rate_rps = 0.0 if one.world.concurrency else mean_rate(trace)
                given = parameters(one.policy)
                yield PolicyRun(one.policy.name, one.router, given, rate_rps, problem=error.message)


def _plain_run(run: PolicyRun, engine: str) -> ComparedRun:
    from toolkit.sched.policies import refusal

    refused = refusal(run.policy, engine)
    return ComparedRun(
        policy=run.policy,
        router=run.router or None,
        parameters=dict(run.parameters),
        rate_rps=run.rate_rps,
        servable=refused is None,
        refusal=refused,
        problem=run.problem,
        verdict=run.verdict,
        metrics=dict(run.metrics),
    )


def _print_notes(
    runs: Sequence[PolicyRun], contenders: Sequence[Contender], sla: Mapping[str, float]
) -> None:
    """Print what a reader must know before trusting the table."""
    if not sla:
        note("without targets there is no goodput: add some, such as --sla ttft_p99_s=2")
    worlds = {one.policy.name: one.world for one in contenders}
    many = _several_rates(runs)
    beyond: dict[str, list[str]] = {}
    for run in runs:
        name = _name(run, runs)
        name = f"{name} at {number(run.rate_rps)}/s" if many else name
        for line in [run.problem] if run.problem else result_notes(run.refusals, run.metrics):
            note(f"{name}: {line}")
        share = run.metrics.get("extrapolated_batches_percent", 0.0)
        if share:
            valid = str(worlds[run.policy].range_of(run.policy))
            beyond.setdefault(valid, []).append(f"{name} {number(share)} %")
    for valid, shares in beyond.items():
        batches = f"batches outside what the fit measured ({valid})"
        note(f"warning: {batches} are extrapolated: {', '.join(shares)}")


def _name(run: PolicyRun, runs: Sequence[PolicyRun]) -> str:
    """Return the policy, the router, or both: what differs between the runs."""
    if not run.router or len({other.router for other in runs}) == 1:
        return run.policy
    several = len({other.policy for other in runs}) > 1
    return f"{run.policy}, {run.router}" if several else run.router


def _several_rates(runs: Sequence[PolicyRun]) -> bool:
    return len({run.rate_rps for run in runs}) > 1


def _show(runs: Sequence[PolicyRun], stage: Stage) -> None:
    from toolkit.sched.policies import footnote, marked

    rates = _several_rates(runs)
    routers = len({run.router for run in runs}) > 1
    columns = [name for name in COLUMNS if any(name in run.metrics for run in runs)]
    if rates or routers:  # their columns leave room for one metric less
        columns = [name for name in columns if name != "e2e_mean_s"]
    rows: list[list[object]] = []
    for run in runs:
        cells: list[object] = [marked(run.policy, stage.engine)]
        cells += [run.router] * routers + [round(run.rate_rps, 3)] * rates
        rows.append([*cells, *(run.metrics.get(name) for name in columns)])
    heads = [">" + name.replace("_", "\n", 1).replace("_", " ") for name in columns]
    names = ["policy", *["router"] * routers, *[">rate"] * rates]
    table([*names, *heads], rows, stage.trace.changes)
    remark = footnote([run.policy for run in runs], stage.engine)
    if remark:
        paragraph(remark)
