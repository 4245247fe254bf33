"""The runs of `llmctl simulate`: which policy runs in which world, how each run ended, and what a
reader must know before trusting the figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from toolkit.cli.output import note, progress
from toolkit.cli.scenario import Scenario
from toolkit.errors import InputError
from toolkit.files.recipe import PolicySpec
from toolkit.files.simulation import ComparedRun, Verdict
from toolkit.metrics import judge, sla_ratios
from toolkit.routing.routers import ROUTERS
from toolkit.sched.policies import BUILT_IN, refusal
from toolkit.sched.policies.parameters import Value, from_words, parameters
from toolkit.sched.protocols import AnyPolicy
from toolkit.sched.types import Refusal
from toolkit.sim.api import simulate, usual_policies
from toolkit.sim.loop import SimulationStalledError
from toolkit.sim.world import (
    World,
    assign_settings,
    check_capacity,
    make_world,
    policy_for,
)
from toolkit.traces.types import Trace
from toolkit.traces.windows import mean_rate
from toolkit.tuning.capacity import lasts_long_enough, longest_wait_s
from toolkit.units import counted, number, words

ALL = "all"  # of policies, or of routers


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
    used: Mapping[str, float] = field(default_factory=dict)  # each target's value over its limit
    refusals: Sequence[Refusal] = ()


def engine_of(scenario: Scenario) -> str:
    """Return the engine of the laws; '' in the token-step world."""
    return scenario.fit.engine.engine if scenario.fit else ""


def own_policy(scenario: Scenario) -> str:
    """Return the policy of the tuning or the recipe; in the token-step world, the default."""
    own = scenario.own_settings
    return own.policy if own else PolicySpec().name


def chosen_policies(scenario: Scenario, named: Sequence[str]) -> Sequence[str]:
    """Return the policies to simulate: the `named` ones, else the own one; "all" stands for the own
    one and all that need no future. Raises InputError where the tuning's policy is not among them.
    """
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
        routers: each of them is before such a policy in turn; none: the settings' own router.

    Raises InputError for an unknown policy or router, and for settings that cannot be.
    """
    routers = list(ROUTERS) if ALL in routers else routers
    if routers and not BUILT_IN.keys() & names:
        raise InputError(
            f"--routers {routers[0]}: policy '{names[0]}' is one scheduler for all workers",
            f"leave it out, or simulate the policy '{next(iter(BUILT_IN))}'",
        )
    settings = from_words(scenario.options.settings or [])
    found: list[Contender] = []
    for router in routers or [""]:
        others = set(routers) - {router}
        given = {k: v for k, v in settings.items() if k.partition(".")[0] not in others}
        if router:
            given["replica_router"] = router
        # without a router of its own, a policy runs once
        here = [one for one in names if one in BUILT_IN or router in ("", *routers[:1])]
        own = _own_words(scenario, here, given)
        if not found:
            _note_recipe(scenario, own)
        of_world, of_policy = assign_settings(here, {**own, **given})
        of_others = {k: v for k, v in of_world.items() if k in settings}
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
    router = world.router.name if world.router and name in BUILT_IN else ""
    return Contender(policy_for(scenario.fit, name, of_policy), world, router)


def _own_words(
    scenario: Scenario, names: Sequence[str], given: Mapping[str, Value]
) -> dict[str, Value]:
    """Return the own settings that are not `given`, as `--set` takes them: the parameters of the
    own policy, if it is among `names`; before replicas their router, and whether their front
    refuses.
    """
    own = scenario.own_settings
    found: dict[str, Value] = {}
    if own is None:
        return found
    if own.policy in names:
        parameters = {f"{own.policy}.{key}": value for key, value in own.parameters.items()}
        found |= {
            name: value
            for name, value in parameters.items()
            if not {name, name.rpartition(".")[2]} & given.keys()
        }
    if BUILT_IN.keys() & names:
        router = own.replica_router
        if router and given.get("replica_router", router.name) == router.name:
            found["replica_router"] = router.name
            found |= {f"{router.name}.{key}": value for key, value in router.parameters.items()}
        if scenario.refuses:
            found["admission"] = "targets"
    return found


def _note_recipe(scenario: Scenario, own: Mapping[str, Value]) -> None:
    """Print in one line what the recipe and the options say."""
    recipe = scenario.recipe
    if recipe is None or scenario.tuning:
        return
    said = [words(own)] if own else []
    said += [counted(scenario.workers, "worker"), f"seed {scenario.seed}"]
    said.append(f"targets {words(scenario.targets)}" if scenario.targets else "no targets")
    note(f"recipe {recipe.name}: {'; '.join(said)}")


def run_of(scenario: Scenario, trace: Trace, contender: Contender) -> PolicyRun:
    """Simulate one run. Raises SimulationStalledError."""
    targets = scenario.targets
    result = simulate(trace, contender.policy, contender.world)
    verdict = judge(result.served, targets) if targets else None
    shown = _compared(scenario, trace, contender, verdict=verdict, metrics=result.metrics(targets))
    return PolicyRun(shown, sla_ratios(result.served, targets), result.refusals)


def _compared(
    scenario: Scenario,
    trace: Trace,
    contender: Contender,
    *,
    problem: str = "",
    verdict: Verdict = None,
    metrics: Mapping[str, float] | None = None,
) -> ComparedRun:
    """Return what `--json` shows of a run beside others."""
    policy = contender.policy
    refused = refusal(policy.name, engine_of(scenario))
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


def collect(
    scenario: Scenario, traces: Sequence[Trace], contenders: Sequence[Contender]
) -> list[PolicyRun]:
    """Return the runs, best first at each rate; after Ctrl-C the finished ones. Where one stalls,
    it has a `problem`.
    """
    runs: list[PolicyRun] = []
    try:
        with progress("simulating", len(traces) * len(contenders)) as advance:
            for trace, one in product(traces, contenders):
                try:
                    runs.append(run_of(scenario, trace, one))
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


def notes_of(
    found: Sequence[PolicyRun], contenders: Sequence[Contender], trace: Trace, scenario: Scenario
) -> list[str]:
    """Return what a reader must know before trusting the figures of these runs, a line each."""
    lines = []
    if not scenario.targets:
        lines.append("without targets there is no goodput: add some, such as --sla ttft_p99_s=2")
    worlds = {one.policy.name: one.world for one in contenders}
    runs = [one.shown for one in found]
    beyond: dict[str, list[str]] = {}
    for one, run in zip(found, runs, strict=True):
        name = _name(run, runs)
        about = [run.problem] if run.problem else result_notes(one.refusals, run.metrics)
        lines += [f"{name}: {line}" for line in about]
        share = run.metrics.get("extrapolated_batches_percent", 0.0)
        if share:
            valid = worlds[run.policy].range_of(run.policy)
            beyond.setdefault(valid, []).append(f"{name} {number(share)} %")
    for valid, shares in beyond.items():
        batches = f"batches outside what the fit measured ({valid})"
        lines.append(f"warning: {batches} are extrapolated: {', '.join(shares)}")
    if len(runs) == 1:
        lines += short_notes(trace, scenario.targets, contenders[0].world)
    return lines


def _name(run: ComparedRun, runs: Sequence[ComparedRun]) -> str:
    """Return the policy, or the router, with the rate: what differs between the runs."""
    name = run.policy
    if run.router and len({other.router for other in runs}) > 1:
        several = len({other.policy for other in runs}) > 1
        name = f"{run.policy}, {run.router}" if several else run.router
    rates = len({other.rate_rps for other in runs}) > 1
    return f"{name} at {number(run.rate_rps)}/s" if rates else name


def result_notes(refusals: Sequence[Refusal], metrics: Mapping[str, float]) -> list[str]:
    """Return what a reader must know of a simulation, a line each: requests that can never be
    served, hits of a prefix cache, and unfinished requests.
    """
    lines = []
    if refusals:
        first = refusals[0]
        example = f"for example number {int(first.request_id) + 1}: {first.reason}"
        lines.append(f"{counted(len(refusals), 'request')} rejected; {example}")
    if "hit_percent" in metrics:
        hit_percent = metrics["hit_percent"]
        tokens = metrics["query_tokens"]
        lines.append(f"prefix cache: {hit_percent:.3g} % of {tokens:,.0f} prompt tokens found")
    if metrics["unfinished"]:
        unfinished = f"{metrics['unfinished']:,.0f} had not ended"
        lines.append(f"stopped when the last request was admitted; {unfinished}")
    return lines


def short_notes(trace: Trace, targets: Mapping[str, float], world: World) -> list[str]:
    """A line where the trace is over before a queue could break a target; else none."""
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
