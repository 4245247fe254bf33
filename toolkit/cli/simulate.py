"""`llmctl simulate`: a trace under policies, routers and rates, by fitted laws or in the token-step
world.

One run is a table of all its metrics. Several are a row each, side by side. `toolkit.cli.runs`
makes the runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from toolkit.cli import arguments
from toolkit.cli.arguments import (
    UNIT_STEP,
    ScenarioOptions,
    argument,
    command_of,
    names_in,
    numbers_in,
    option,
)
from toolkit.cli.basis import note_trace, plain, sharing_notes
from toolkit.cli.output import emit, note, show
from toolkit.cli.scenario import Scenario
from toolkit.files.shipped import recipe_path
from toolkit.interrupts import EXIT_CODE, held


def _recipe_or_clock(recipe: Path) -> Path:
    """Return the file of a recipe; the token-step world has none."""
    return recipe if recipe == Path(UNIT_STEP) else recipe_path(recipe)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions(ScenarioOptions):
    recipe: Path = argument(
        "A recipe's file, or the name of a shipped recipe; unit-step: a world in which a decode "
        "step takes a second, as in Past-Future's Table 1.",
        metavar="RECIPE",
        callback=_recipe_or_clock,
        autocompletion=arguments.recipes,
    )
    policies: str | None = option(
        None,
        "Simulate these policies, separated by commas; 'all' means all policies except the "
        "oracles. Default: the tuning's, or the recipe's.",
        metavar="NAME,...",
        autocompletion=arguments.policies,
    )
    routers: str | None = option(
        None,
        "Simulate these routers before replicas of vLLM, separated by commas; 'all' means all. "
        "Default: the tuning's, or the recipe's.",
        metavar="NAME,...",
    )
    rates: list[str] | None = option(
        None,
        "Scale arrivals to this many requests per second; several: 5,10,20. Default: the trace's "
        "own rate.",
        "--rate",
    )


@command_of(
    SimulateOptions, "recipe", "trace", "fit", "tuning", "settings", "sla", "concurrency",
    "workers", "max_new_tokens", "seed",
)  # fmt: skip
def command(args: SimulateOptions) -> None:
    """Simulate a trace under a policy by the fitted laws, and print the metrics; several policies,
    routers and rates side by side, on the same requests and random draws.

    --set policy.key=value sets a parameter of that policy, key=value one of every policy that has
    it. --json has the metrics with their units in their names: throughput_rps, ttft_p99_s,
    batch_size_mean, ...; its `trace` describes the requests; see docs/reference/simulation.md.
    Ctrl-C prints the finished runs.
    """
    from toolkit.cli.runs import (
        chosen_policies,
        collect,
        contenders,
        engine_of,
        notes_of,
        run_of,
    )
    from toolkit.files.simulation import Comparison, Simulation
    from toolkit.report.simulation import comparison_sheet, run_sheet
    from toolkit.traces.windows import scale_rate

    named = names_in("--policies", args.policies) or []
    routers = names_in("--routers", args.routers) or []
    given = ",".join(args.rates) if args.rates else None
    rates = sorted(set(numbers_in("--rate", given, math.inf, "5,10,20")))
    scenario = Scenario.open(replace(args, rate=rates[0] if rates else None))
    trace = scenario.fitted_trace()
    note_trace(trace)
    scenario.note_basis()
    names = chosen_policies(scenario, named)
    found = contenders(scenario, trace, names, routers)
    total = len(found) * max(len(rates), 1)
    note(*sharing_notes(trace, names))
    traces = [scale_rate(trace, rate) for rate in rates] or [trace]
    engine = engine_of(scenario)
    about = {
        "sla": dict(scenario.targets),
        "workers": found[0].world.workers,
        "seed": scenario.seed,
        "trace": plain(traces[0]),
        "concurrency": found[0].world.concurrency,
    }
    if total == 1:
        run = run_of(scenario, traces[0], found[0])
        one = run.shown
        note(*notes_of([run], found, traces[0], scenario))
        which = {key: getattr(one, key) for key in ("policy", "router", "parameters", "verdict")}
        single = Simulation(**which, **about, **one.metrics)
        emit(args.as_json, single, lambda: show(run_sheet(single, run.used, engine)))
        scenario.note_tuning()
        return
    runs = collect(scenario, traces, found)
    interrupted = len(runs) < total
    with held():  # finished runs are shown
        note(*notes_of(runs, found, trace, scenario))
        result = Comparison(**about, interrupted=interrupted, runs=[run.shown for run in runs])
        emit(args.as_json, result, lambda: show(comparison_sheet(result, engine)))
    if interrupted:
        note(f"interrupted: {len(runs)} of {total} runs are finished and shown")
        raise typer.Exit(EXIT_CODE)
    scenario.note_tuning()
