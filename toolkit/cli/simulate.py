"""`llmctl simulate`: a trace under policies, routers and rates, by fitted laws or in the token-step
world.

One run is a table of all its metrics. Several are a row each, side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING

import typer

from toolkit.cli import arguments
from toolkit.cli.arguments import (
    FIT_HELP,
    JsonOption,
    ScenarioOptions,
    command_of,
    names_in,
    option,
    parse_settings,
)
from toolkit.cli.basis import note_rest, note_scaling, plain, sharing_notes
from toolkit.cli.output import emit, note, paragraph, progress, table
from toolkit.cli.results import ComparedRun, Comparison, Simulation, Verdict
from toolkit.cli.scenario import Scenario
from toolkit.errors import InputError
from toolkit.files.recipe import PolicySpec
from toolkit.interrupts import EXIT_CODE, held
from toolkit.units import bracketed, counted, number, words

if TYPE_CHECKING:
    from toolkit.sched.policies.parameters import Value
    from toolkit.sched.protocols import AnyPolicy
    from toolkit.sched.types import Refusal
    from toolkit.sim.world import World
    from toolkit.traces.types import Trace

ALL = "all"  # of policies, or of routers
# goodput is first, since the rows are sorted by it; without targets it is left out
COLUMNS = ("goodput_rps", "throughput_rps", "ttft_p99_s", "mtpot_p99_s", "e2e_mean_s", "e2e_p95_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions(ScenarioOptions):
    fit: str | None = option(None, FIT_HELP, autocompletion=arguments.fits_and_clock)
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
        autocompletion=arguments.router,
    )
    rates: list[str] | None = option(
        None,
        "Scale arrivals to this many requests per second; several: 5,10,20. Default: the trace's "
        "own rate.",
        "--rate",
    )
    as_json: JsonOption = False


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy, and the world that it runs in; `router` is the one before its replicas, or ''."""

    policy: AnyPolicy
    world: World
    router: str = ""


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """One policy before one router at one rate, and what its notes need."""

    shown: ComparedRun
    ratios: Mapping[str, float] = field(default_factory=dict)  # each target's value over its limit
    refusals: Sequence[Refusal] = ()


@command_of(
    SimulateOptions, "trace", "fit", "recipe", "tuning", "settings", "sla", "concurrency",
    "workers", "max_new_tokens", "seed",
)  # fmt: skip
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

    named = names_in("--policies", args.policies) or []
    routers = names_in("--routers", args.routers) or []
    rates = _rates(args.rates)
    scenario = Scenario.open(replace(args, rate=rates[0] if rates else None))
    trace = scenario.fitted_trace()
    note_scaling(trace)
    scenario.note_basis()
    if args.tuning and scenario.own_settings:
        note(f"{args.tuning.name} recommends {scenario.own_settings.key}")
    names = chosen_policies(scenario, named)
    found = contenders(scenario, trace, names, routers)
    total = len(found) * max(len(rates), 1)
    note_rest(trace)
    note(*sharing_notes(trace, names))
    traces = [scale_rate(trace, rate) for rate in rates] or [trace]
    if total == 1:
        run = _run(scenario, traces[0], found[0])
        _print_run(scenario, found[0], traces[0], run, as_json=args.as_json)
        return
    runs = _collect(scenario, traces, found)
    interrupted = len(runs) < total
    with held():  # finished runs are shown
        _print_notes(runs, found, scenario.targets)
        shown = [run.shown for run in runs]
        result = Comparison(
            sla=dict(scenario.targets),
            workers=found[0].world.workers,
            seed=scenario.seed,
            interrupted=interrupted,
            trace=plain(trace),
            concurrency=found[0].world.concurrency,
            runs=shown,
        )
        emit(args.as_json, result, lambda: _show(shown, _engine(scenario), trace.changes))
    if interrupted:
        note(f"interrupted: {len(runs)} of {total} runs are finished and shown")
        raise typer.Exit(EXIT_CODE)


def _engine(scenario: Scenario) -> str:
    """Return the engine of the laws; '' in the token-step world."""
    return scenario.fit.engine.engine if scenario.fit else ""


def own_policy(scenario: Scenario) -> str:
    """Return the policy of the tuning or the recipe; without either the one that the fit's engine
    has built in, or else the default of recipes.
    """
    from toolkit.sched.policies import BUILT_IN
    from toolkit.sim.api import usual_policies

    own = scenario.own_settings
    if own:
        return own.policy
    built_in = [name for name in usual_policies(scenario.fit) if name in BUILT_IN]
    return built_in[0] if built_in else PolicySpec().name


def chosen_policies(scenario: Scenario, named: Sequence[str]) -> Sequence[str]:
    """Return the policies to simulate: the `named` ones, else the own one; "all" stands for the own
    one and all that need no future. Raises InputError where the tuning's policy is not among them.
    """
    from toolkit.sim.api import usual_policies

    own = own_policy(scenario)
    if ALL in named:
        named = list(dict.fromkeys([own, *usual_policies(scenario.fit)]))
    if scenario.tuning and named and own not in named:
        raise InputError(
            f"the tuning recommends policy '{own}', which is not among those to "
            f"simulate: {', '.join(named)}",
            f"name {own}, or leave --tuning out",
        )
    return named or [own]


def contenders(
    scenario: Scenario, trace: Trace, names: Sequence[str], routers: Sequence[str] = ()
) -> list[Contender]:
    """Return the policies of these names, each with the world that it runs in; print what the
    recipe gave. A router is only before a policy that is built into an engine.

    Args:
        routers: each of them is before such a policy in turn; none: the one of the settings.

    Raises InputError for an unknown policy or router, and for settings that cannot be.
    """
    from toolkit.routing.routers import ROUTERS
    from toolkit.sched.policies import BUILT_IN
    from toolkit.sim.world import assign_settings

    routers = list(ROUTERS) if ALL in routers else routers
    if routers and not BUILT_IN.keys() & names:
        raise InputError(
            f"--routers {routers[0]}: policy '{names[0]}' is one scheduler for all workers",
            f"leave it out, or simulate the policy '{next(iter(BUILT_IN))}'",
        )
    settings = parse_settings(scenario.options.settings)
    found: list[Contender] = []
    for router in routers or [""]:
        others = set(routers) - {router}
        given = {k: v for k, v in settings.items() if k.partition(".")[0] not in others}
        if router:
            given["replica_router"] = router
        # without a router of its own, a policy runs once
        here = [one for one in names if one in BUILT_IN or router in ("", *routers[:1])]
        front = _own_front(scenario, here, given)
        own = _own_parameters(scenario, here, given)
        if not found:
            _note_recipe(scenario, front, own)
        of_world, of_policy = assign_settings(here, {**front, **(own or {}), **given})
        chosen = {**given, **front}
        of_others = {k: v for k, v in of_world.items() if k in settings or k not in chosen}
        for name in here:
            own_world = of_world if name in BUILT_IN else of_others
            found.append(_contender(scenario, trace, name, own_world, of_policy[name]))
    return found


def _contender(
    scenario: Scenario,
    trace: Trace,
    name: str,
    of_world: Mapping[str, Value],
    of_policy: Mapping[str, Value],
) -> Contender:
    """Return one policy with these settings, and its world."""
    from toolkit.sched.policies import BUILT_IN
    from toolkit.sim.world import check_capacity, make_world, policy_for

    world = make_world(
        scenario.fit,
        of_world,
        workers=scenario.workers,
        max_new_tokens=scenario.max_new_tokens,
        seed=scenario.seed,
        targets=scenario.targets,
        recipe=scenario.recipe,
    )
    world = replace(world, concurrency=scenario.concurrency)
    check_capacity(of_world, world, trace)
    router = world.routing.router.name if world.routing and name in BUILT_IN else ""
    return Contender(policy_for(scenario.fit, name, of_policy), world, router)


def _own_front(
    scenario: Scenario, names: Sequence[str], given: Mapping[str, Value]
) -> dict[str, Value]:
    """Return the own router before replicas and whether their front refuses, as `--set` takes them;
    no router where another one is `given`.
    """
    from toolkit.sched.policies import BUILT_IN

    own = scenario.own_settings
    if own is None or not BUILT_IN.keys() & names:
        return {}
    front: dict[str, Value] = {"admission": "targets"} if scenario.refuses else {}
    router = own.replica_router
    if router and given.get("replica_router", router.name) == router.name:
        front["replica_router"] = router.name
        front |= {f"{router.name}.{key}": value for key, value in router.parameters.items()}
    return front


def _own_parameters(
    scenario: Scenario, names: Sequence[str], given: Mapping[str, Value]
) -> dict[str, Value] | None:
    """Return the parameters of the own policy that are not `given`, as `--set` takes them; None:
    the policy is not among `names`.
    """
    own = scenario.own_settings
    if own is None or own.policy not in names:
        return None
    return {
        f"{own.policy}.{key}": value
        for key, value in own.parameters.items()
        if not {key, f"{own.policy}.{key}"} & given.keys()
    }


def _note_recipe(
    scenario: Scenario, front: Mapping[str, Value], own: Mapping[str, Value] | None
) -> None:
    """Print in one line what was taken from the recipe."""
    recipe = scenario.recipe
    options = scenario.options
    if recipe is None or scenario.tuning:
        return
    said = []
    if own is not None:
        flags = {name.rpartition(".")[2]: value for name, value in own.items()}
        said.append(f"policy {own_policy(scenario)}{f' ({words(flags)})' if flags else ''}")
    if "replica_router" in front:
        said.append(f"router {front['replica_router']}")
    if not options.sla:
        said.append(f"targets {words(recipe.sla)}" if recipe.sla else "no targets")
    if options.workers is None:
        said.append(counted(scenario.workers, "worker"))
    if options.seed is None:
        said.append(f"seed {scenario.seed}")
    if said:
        note(f"from recipe {recipe.name}: {'; '.join(said)}")


def _rates(given: Sequence[str] | None) -> list[float]:
    rates = []
    for word in names_in("--rate", ",".join(given) if given else None) or []:
        try:
            rates.append(float(word))
        except ValueError:
            found = f"--rate {word}: not a number of requests per second"
            raise InputError(found, "for example 5,10,20") from None
    return sorted(set(rates))


def _run(scenario: Scenario, trace: Trace, contender: Contender) -> PolicyRun:
    """Simulate one run. Raises SimulationStalledError."""
    from toolkit.metrics import judge
    from toolkit.sim.api import simulate

    targets = scenario.targets
    result = simulate(trace, contender.policy, contender.world)
    verdict = judge(result.served, targets) if targets else None
    shown = _compared(scenario, trace, contender, verdict=verdict, metrics=result.metrics(targets))
    return PolicyRun(shown, result.sla_ratios(targets), result.refusals)


def _compared(
    scenario: Scenario,
    trace: Trace,
    contender: Contender,
    *,
    problem: str = "",
    verdict: Verdict = None,
    metrics: Mapping[str, float] | None = None,
) -> ComparedRun:
    """Return a run as `--json` shows it beside others."""
    from toolkit.sched.policies import refusal
    from toolkit.sched.policies.parameters import parameters
    from toolkit.traces.windows import mean_rate

    policy = contender.policy
    refused = refusal(policy.name, _engine(scenario))
    return ComparedRun(
        policy=policy.name,
        router=contender.router or None,
        parameters=parameters(policy),
        rate_rps=0.0 if contender.world.concurrency else mean_rate(trace),
        servable=refused is None,
        refusal=refused,
        problem=problem,
        verdict=verdict,
        metrics=dict(metrics or {}),
    )


def _print_run(
    scenario: Scenario, contender: Contender, trace: Trace, run: PolicyRun, *, as_json: bool
) -> None:
    """Print one run: its notes, all its metrics, and its targets."""
    from toolkit.sched.policies import footnote, marked

    world = contender.world
    engine = _engine(scenario)
    shown = run.shown
    note(*result_notes(run.refusals, shown.metrics, world.range_of(shown.policy)))
    note(*short_notes(trace, scenario.targets, world))
    note(*filter(None, [footnote([shown.policy], engine)]))
    found = Simulation(
        policy=shown.policy,
        router=shown.router,
        parameters=shown.parameters,
        workers=world.workers,
        seed=scenario.seed,
        sla=dict(scenario.targets),
        verdict=shown.verdict,
        trace=plain(trace),
        concurrency=world.concurrency,
        **shown.metrics,
    )

    def show() -> None:
        title = f"policy '{marked(shown.policy, engine)}'{bracketed(trace.changes)}"
        table(["metric", "value"], list(shown.metrics.items()), title)
        _show_targets(found, run.ratios)

    emit(as_json, found, show)


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
    scenario: Scenario, traces: Sequence[Trace], contenders: Sequence[Contender]
) -> list[PolicyRun]:
    """Return the runs, best first at each rate; after Ctrl-C those that are finished. Where one
    stalls, it has a `problem`.
    """
    from toolkit.sim.loop import SimulationStalledError

    runs: list[PolicyRun] = []
    try:
        with progress("simulating", len(traces) * len(contenders)) as advance:
            for trace, one in product(traces, contenders):
                try:
                    runs.append(_run(scenario, trace, one))
                except SimulationStalledError as error:
                    problem = _compared(scenario, trace, one, problem=error.message)
                    runs.append(PolicyRun(problem))
                advance(text=one.policy.name)
    except KeyboardInterrupt:
        if not runs:
            raise
    known = any("goodput_rps" in run.shown.metrics for run in runs)  # there are targets
    objective = "goodput_rps" if known else "throughput_rps"

    def place(run: PolicyRun) -> tuple[float, float, float]:
        """By rate; then the best first, between equals the lower mean E2E, as in `tune`."""
        found = run.shown.metrics
        return run.shown.rate_rps, -found.get(objective, -1.0), found.get("e2e_mean_s", 0.0)

    return sorted(runs, key=place)


def _print_notes(
    found: Sequence[PolicyRun], contenders: Sequence[Contender], sla: Mapping[str, float]
) -> None:
    """Print what a reader must know before trusting the table."""
    if not sla:
        note("without targets there is no goodput: add some, such as --sla ttft_p99_s=2")
    worlds = {one.policy.name: one.world for one in contenders}
    runs = [one.shown for one in found]
    many = _several_rates(runs)
    beyond: dict[str, list[str]] = {}
    for one, run in zip(found, runs, strict=True):
        name = _name(run, runs)
        name = f"{name} at {number(run.rate_rps)}/s" if many else name
        for line in [run.problem] if run.problem else result_notes(one.refusals, run.metrics):
            note(f"{name}: {line}")
        share = run.metrics.get("extrapolated_batches_percent", 0.0)
        if share:
            valid = str(worlds[run.policy].range_of(run.policy))
            beyond.setdefault(valid, []).append(f"{name} {number(share)} %")
    for valid, shares in beyond.items():
        batches = f"batches outside what the fit measured ({valid})"
        note(f"warning: {batches} are extrapolated: {', '.join(shares)}")


def _name(run: ComparedRun, runs: Sequence[ComparedRun]) -> str:
    """Return the policy, the router, or both: what differs between the runs."""
    if not run.router or len({other.router for other in runs}) == 1:
        return run.policy
    several = len({other.policy for other in runs}) > 1
    return f"{run.policy}, {run.router}" if several else run.router


def _several_rates(runs: Sequence[ComparedRun]) -> bool:
    return len({run.rate_rps for run in runs}) > 1


def _show(runs: Sequence[ComparedRun], engine: str, changes: str) -> None:
    from toolkit.sched.policies import footnote, marked

    rates = _several_rates(runs)
    routers = len({run.router for run in runs}) > 1
    columns = [name for name in COLUMNS if any(name in run.metrics for run in runs)]
    if rates or routers:  # their columns leave room for one metric less
        columns = [name for name in columns if name != "e2e_mean_s"]
    rows: list[list[object]] = []
    for run in runs:
        cells: list[object] = [marked(run.policy, engine)]
        cells += [run.router or ""] * routers + [round(run.rate_rps, 3)] * rates
        rows.append([*cells, *(run.metrics.get(name) for name in columns)])
    heads = [">" + name.replace("_", "\n", 1).replace("_", " ") for name in columns]
    names = ["policy", *["router"] * routers, *[">rate"] * rates]
    table([*names, *heads], rows, changes)
    remark = footnote([run.policy for run in runs], engine)
    if remark:
        paragraph(remark)


def result_notes(
    refusals: Sequence[Refusal], metrics: Mapping[str, float], measured: object = None
) -> list[str]:
    """What a reader must know before trusting the figures of a simulation, a line each: requests
    that can never be served, batches outside the `measured` range of the laws, if that is given,
    hits of a prefix cache, and unfinished requests.
    """
    from toolkit.sim.world import extrapolation_warning

    lines = []
    if refusals:
        first = refusals[0]
        example = f"for example number {int(first.request_id) + 1}: {first.reason}"
        lines.append(f"{counted(len(refusals), 'request')} rejected; {example}")
    beyond_percent = metrics.get("extrapolated_batches_percent", 0.0)
    if measured is not None and beyond_percent:
        lines.append(f"warning: {extrapolation_warning(beyond_percent, measured)}")
    if "hit_percent" in metrics:
        hit_percent = metrics["hit_percent"]
        tokens = metrics["query_tokens"]
        line = f"prefix cache: {hit_percent:.3g} % of {tokens:,.0f} prompt tokens found"
        if "lost_hit_tokens" in metrics:
            lost_percent = 100.0 * metrics["lost_hit_tokens"] / max(tokens, 1.0)
            line += f", {lost_percent:.3g} % lost to eviction"
        lines.append(line)
    if metrics["unfinished"]:
        unfinished = f"{metrics['unfinished']:,.0f} had not ended"
        lines.append(f"stopped when the last request was admitted; {unfinished}")
    return lines


def short_notes(trace: Trace, targets: Mapping[str, float], world: World) -> list[str]:
    """A line where the trace is over before a queue could break a target; else none."""
    from toolkit.traces.windows import mean_rate
    from toolkit.tuning.capacity import lasts_long_enough, longest_wait_s

    rate_rps = mean_rate(trace)
    wait_s, name = longest_wait_s(targets)
    if world.concurrency or not rate_rps or not wait_s or lasts_long_enough(trace, wait_s):
        return []
    times = float(trace.arrival_s[-1]) / wait_s
    return [
        f"the trace lasts {number(times)} times the target {name}, too short to tell whether "
        f"{number(rate_rps)} requests/s can be served for long: `llmctl capacity` repeats it, and "
        "so does `llmctl trace convert --repeat N`"
    ]
