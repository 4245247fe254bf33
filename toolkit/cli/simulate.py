"""`llmctl simulate`: one trace under one policy, by fitted laws or in the token-step world.

`compare` takes its options, its trace and its laws from here, too: `StageOptions.asked` adds what a
tuning recommends, `open_stage` reads the files, `Stage.world` makes the simulated world, and the
functions after it make the notes on a result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.cli import arguments
from toolkit.cli.arguments import (
    JsonOption,
    RateOption,
    SetOption,
    SlaOption,
    TraceOption,
    command_of,
    limit_workers,
    option,
    parse_settings,
    parse_sla,
    resolve_recipe,
)
from toolkit.cli.basis import (
    FleetOption,
    kind_names,
    note_basis,
    note_rest,
    note_scaling,
    open_fleet,
    plain,
    refuse_workers,
)
from toolkit.cli.output import emit, note, table
from toolkit.errors import InputError
from toolkit.units import number

if TYPE_CHECKING:
    from toolkit.files.fit import Fit
    from toolkit.files.plan import Kind
    from toolkit.files.recipe import Recipe
    from toolkit.files.tuning import Tuning
    from toolkit.sched.policies.parameters import Value
    from toolkit.sched.protocols import AnyPolicy
    from toolkit.sched.types import Refusal
    from toolkit.sim.api import SimResult
    from toolkit.sim.world import World
    from toolkit.traces.types import Trace

OF_KINDS = (  # what the table of kinds shows
    *("workers", "requests", "goodput_rps", "ttft_mean_s", "ttft_p99_s", "e2e_mean_s"),
    *("mtpot_p99_s", "hit_percent", "utilisation_percent", "consumed_memory_percent"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """The options of a command that simulates a trace."""

    trace: TraceOption = "chat-small"
    fit: str = option(
        "fit.json",
        autocompletion=arguments.fits_and_clock,
        help="fit.json, the name of a recipe that has a shipped fit, or 'unit-step' (a clock "
        "of steps).",
    )
    recipe: Path | None = option(
        None,
        callback=resolve_recipe,
        help="The recipe of the fit, which limits lengths; default: the one beside the fit, in "
        "the current folder, or shipped.",
    )
    fleet: FleetOption = None
    tuning: Path | None = option(
        None,
        help="Simulate what this tuning.json of the fit or the fleet recommends: policy, "
        "parameters, router, workers, targets and seed. Options replace them.",
    )
    settings: SetOption = None
    sla: SlaOption = None
    workers: int | None = option(
        None,
        min=1,
        callback=limit_workers,
        help="The number of workers; default: as tuned or profiled, or 1.",
    )
    max_new_tokens: int | None = option(
        None,
        min=1,
        help="The limit of requests without one in the trace; default: the recipe's, or 4096 "
        "in unit-step.",
    )
    fit_lengths: bool = option(True, help="Scale the lengths to the model's context.")
    seed: int | None = option(
        None,
        min=0,
        help="Draw the memory limits and the policies' samples from this seed; default: the "
        "tuning's, or 0.",
    )

    def asked(self) -> Asked:
        """What to simulate. `InputError` for words that cannot be parsed, and for a file that is no
        tuning.
        """
        from toolkit.files.tuning import REFUSED
        from toolkit.sched.policies import BUILT_IN

        given, targets = parse_settings(self.settings), parse_sla(self.sla)
        kinds, tuning = kind_names(self.fleet), _read_tuning(self, {})
        if tuning is None:
            return Asked(given, targets, kinds)
        counts = tuning.sizing.kinds if tuning.sizing else []
        left_out = [kind.recipe for kind in counts if not kind.workers]
        kinds = [name for name in kinds if name not in left_out]
        # what the tuning recommends, as `assign_settings` takes it; options replace it
        found: dict[str, Value] = {}
        best, router = tuning.recommended, tuning.recommended.replica_router
        if router and given.get("replica_router", router.name) == router.name:
            found["replica_router"] = router.name
            found |= {f"{router.name}.{key}": value for key, value in router.parameters.items()}
        if REFUSED in best.metrics:
            found["admission"] = "targets"
        first = kinds[0] if kinds and best.policy in BUILT_IN else best.policy
        for owner, flags in {first: best.parameters, **best.kind_parameters}.items():
            set_for_all = {key for key in flags if {key, f"{best.policy}.{key}"} & given.keys()}
            if owner in (first, *kinds):
                found |= {f"{owner}.{key}": flags[key] for key in flags if key not in set_for_all}
        return Asked(found | given, targets or tuning.sla, kinds, tuning)


@dataclass(frozen=True, slots=True)
class Asked:
    """What to simulate, of the command line and, where that leaves it out, of a tuning."""

    settings: Mapping[str, Value]
    targets: Mapping[str, float]
    kinds: Sequence[str]  # the names of those of a fleet
    tuning: Tuning | None = None

    def policies(self, named: Sequence[str], usual: Sequence[str]) -> Sequence[str]:
        """The policies to simulate: those that are `named`; else of tuned servers behind a router,
        which run no others, their own; else the `usual` ones. `InputError` where the policy of the
        tuning is not among those that are named.
        """
        if self.tuning is None:
            return named or usual
        tuned = self.tuning.recommended
        if named and tuned.policy not in named:
            raise InputError(
                f"the tuning recommends policy '{tuned.policy}', which is not among those to "
                f"simulate: {', '.join(named)}",
                f"name {tuned.policy}, or leave --tuning out",
            )
        return named or ([tuned.policy] if tuned.replica_router else usual)


@dataclass(frozen=True, slots=True)
class Stage:
    """A trace as it will be simulated, and its fit; None: the token-step world."""

    trace: Trace
    fit: Fit | None
    max_new_tokens: int  # of requests without a limit in the trace; 0: the token-step world's
    workers: int  # 0: as many as were profiled, or 1
    seed: int
    kinds: Sequence[Kind] = ()  # of a fleet; the first kind has the fit

    @property
    def engines(self) -> list[str]:
        """The engines of the laws; none in the token-step world."""
        if self.kinds:
            return [kind.fit.engine.engine for kind in self.kinds]
        return [self.fit.engine.engine] if self.fit else []

    def policy(self, name: str, given: Mapping[str, Value]) -> AnyPolicy:
        """The policy of this name with the parameters `given`; before them, of the scheduler of a
        fleet's servers, those of the first kind's recipe.
        """
        from toolkit.sched.policies import BUILT_IN
        from toolkit.sim.world import flags_of, policy_for, settings_of_kinds

        own = settings_of_kinds(given, self.kinds)[0] if self.kinds else given
        if len(self.kinds) > 1 and name in BUILT_IN:
            return flags_of(self.kinds[0], own)
        return policy_for(self.fit, name, own)

    def world(self, given: Mapping[str, Value], flags: Mapping[str, Value] | None = None) -> World:
        """The simulated world, with the given settings, and `flags` of the scheduler of a fleet's
        servers. `InputError` for a setting that it cannot have.
        """
        from toolkit.sim.world import flagged, make_world

        made = make_world(
            self.fit,
            given,
            workers=self.workers,
            max_new_tokens=self.max_new_tokens,
            seed=self.seed,
            others=self.kinds[1:],
        )
        return flagged(made, self.kinds, flags)


def open_stage(given: StageOptions) -> Stage:
    """Read the trace, and the fit or the fleet; print how lengths were scaled, and what the fit
    rests on.

    Lengths are scaled as in `tune`, by the limits of the recipe that the fit was made from;
    `max_new_tokens` replaces the recipe's. `InputError` for files that are missing or of another
    kind, and where that recipe is not found; without a fit it names those that ship. `StaleError`
    for a tuning of another fit or fleet.
    """
    from toolkit.files.fit import Fit
    from toolkit.files.fleet import sized
    from toolkit.files.io import read_file
    from toolkit.sim.world import UNIT_STEP
    from toolkit.traces.read import read_trace
    from toolkit.traces.types import trace_path
    from toolkit.traces.windows import prepare, scale_lengths

    kinds: Sequence[Kind] = ()
    spec: Recipe | None = None
    fitted: Fit | None = None
    tuning: Tuning | None = None
    note_bases: Callable[[], None] | None = None
    if given.fleet is not None:
        _refuse("--recipe", given.recipe, "a fleet names its recipes")
        refuse_workers(given.workers)
        opened = open_fleet(given.fleet)
        tuning = _read_tuning(given, opened.inputs)
        kinds, note_bases = sized(opened.kinds, tuning), partial(opened.note_bases, tuning)
        spec, fitted = kinds[0].recipe, kinds[0].fit
    elif given.fit == UNIT_STEP and not Path(given.fit).exists():
        _refuse("--recipe", given.recipe, f"--fit {UNIT_STEP} has none")
        _refuse("--tuning", given.tuning, f"--fit {UNIT_STEP} has no settings to tune")
    else:
        path = _existing_fit(given.fit)
        fitted = read_file(Fit, path)
        spec = _recipe_of(fitted, path, given.recipe, needed=given.max_new_tokens is None)
        made_from = {"fit": path} | ({"recipe": given.recipe} if given.recipe else {})
        tuning = _read_tuning(given, made_from)
        if tuning and "fleet" in tuning.inputs:
            raise InputError(
                f"{given.tuning}: it is of the fleet {tuning.inputs['fleet'].name}",
                "name the fleet with --fleet in place of --fit",
            )
        note_bases = partial(note_basis, fitted, path)
    limit = given.max_new_tokens or (spec.serve.max_new_tokens if spec else 0)
    requests, _ = read_trace(trace_path(given.trace))
    if given.fit_lengths and spec:
        serve = spec.serve.model_copy(update={"max_new_tokens": limit})
        requests = prepare(requests, spec.model_copy(update={"serve": serve}))
    elif given.fit_lengths and fitted:
        requests = scale_lengths(requests, fitted.engine.max_model_len, limit)
    note_scaling(requests)
    if note_bases:
        note_bases()
    if given.tuning and tuning:
        note(f"{given.tuning.name} recommends {tuning.recommended.key}")
    workers = kinds[0].workers if kinds else given.workers or (tuning.workers if tuning else 0)
    seed = given.seed if given.seed is not None else tuning.seed if tuning else 0
    return Stage(requests, fitted, limit, workers, seed, kinds)


def _read_tuning(given: StageOptions, made_from: Mapping[str, Path]) -> Tuning | None:
    """The file of --tuning. `StaleError` where it was made from other files."""
    from toolkit.files.io import read_file
    from toolkit.files.tuning import Tuning

    return read_file(Tuning, given.tuning, made_from) if given.tuning else None


def _refuse(option: str, file: Path | None, why: str) -> None:
    if file is not None:
        raise InputError(f"{option} {file.name} changes nothing: {why}", f"leave {option} out")


def _existing_fit(fit: str) -> Path:
    """The file of --fit. `InputError` where there is none."""
    from toolkit.files.io import fit_path, shipped_fits
    from toolkit.sim.world import UNIT_STEP

    path = fit_path(fit)
    if not path.exists():
        made = "make it with: llmctl fit PROFILE; or name one that ships with --fit"
        raise InputError(
            f"{path}: no such file", f"{made}: {', '.join([UNIT_STEP, *shipped_fits()])}"
        )
    return path


def _recipe_of(fit: Fit, path: Path, given: Path | None, *, needed: bool) -> Recipe | None:
    """The recipe that `fit` was made from: the `given` one, or the one at the usual places.

    `InputError` where it is `needed` and not found, `StaleError` where `given` is another.
    """
    from toolkit.files.fit import Fit
    from toolkit.files.io import find_recipe, read_file
    from toolkit.files.shipped import load_recipe

    if given is not None:
        read_file(Fit, path, {"recipe": given})
        return load_recipe(given)
    found = find_recipe(fit, path)
    if found is None and needed:
        raise InputError(
            f"{path}: its recipe '{fit.recipe_name}', which limits the outputs"
            " (serve.max_new_tokens), is not found or has changed since",
            "name the recipe with --recipe, or give the limit with --max-new-tokens",
        )
    return found


def refusal_notes(refusals: Sequence[Refusal]) -> list[str]:
    """A line that counts the requests that can never be served, with an example; none where all can
    be.
    """
    if not refusals:
        return []
    first, count = refusals[0], len(refusals)
    counted = "1 request" if count == 1 else f"{count:,} requests"
    return [f"{counted} rejected; for example number {int(first.request_id) + 1}: {first.reason}"]


def sharing_notes(trace: Trace, policies: Sequence[str]) -> list[str]:
    """What simulations under these policies make of a trace that says what prompts share; empty for
    one that does not.
    """
    from toolkit.sched.policies import BUILT_IN

    if trace.shared is None and trace.sessions is None:
        return []
    without = [name for name in policies if name not in BUILT_IN]
    if not without:
        return []
    if len(without) == 1:
        return [f"policy '{without[0]}' reuses no prompts: simulated as if they shared nothing"]
    return [f"{len(without)} of the policies reuse no prompts: simulated as if they shared nothing"]


def hit_notes(metrics: Mapping[str, float]) -> list[str]:
    """A line on what a simulated prefix cache found; empty where there is none."""
    if "hit_percent" not in metrics:
        return []
    found, lost = metrics["hit_percent"], metrics["lost_hit_tokens"]
    share = 100.0 * lost / max(metrics["query_tokens"], 1.0)
    return [
        f"prefix cache: {found:.3g} % of {metrics['query_tokens']:,.0f} prompt tokens found, "
        f"{share:.3g} % lost to eviction"
    ]


def world_notes(world: World, policy: str, metrics: Mapping[str, float]) -> list[str]:
    """What a reader must know before trusting the figures of one simulation of this policy."""
    from toolkit.sim.world import extrapolation_warning

    valid, share = world.range_of(policy), metrics.get("extrapolated_batches_percent", 0.0)
    warning = extrapolation_warning(share, valid) if valid is not None else None
    lines = [f"warning: {warning}"] if warning else []
    return [*lines, *hit_notes(metrics), *unfinished_notes(metrics)]


def unfinished_notes(metrics: Mapping[str, float]) -> list[str]:
    """A line that counts the unfinished requests of a simulation without `drain`; none where there
    are none.
    """
    if not metrics["unfinished"]:
        return []
    return [
        f"stopped when the last request was admitted; {metrics['unfinished']:,.0f} had not ended"
    ]


def routed(
    world: World, targets: Mapping[str, float], given: Mapping[str, Value], failures: Path | None
) -> World:
    """The world with the targets given to its router, and to its front if the world's settings
    `given` say that it refuses requests, and failures of replicas from a file.
    """
    from toolkit.routing.admission import UNLIMITED, LatencyLimits
    from toolkit.routing.routers import make_router, targets_of
    from toolkit.sched.policies.parameters import parameters
    from toolkit.sim.replicas import Routing, read_outages

    routing = world.routing or Routing()
    if failures is not None:
        routing = replace(routing, outages=read_outages(failures, world.size))
    elif world.routing is None:
        return world
    router, own = routing.router, parameters(routing.router)
    known = {k: v for k, v in targets_of(router.name, targets).items() if not own[k]}
    refuses = given.get("admission") == "targets"
    limits = LatencyLimits.of(targets) if refuses else UNLIMITED
    if refuses and limits == UNLIMITED:
        raise InputError(
            "admission is 'targets', and no target for TTFT or E2E is given",
            "add one, such as --sla ttft_p99_s=1",
        )
    routing = replace(routing, router=make_router(router.name, own | known), limits=limits)
    return replace(world, routing=routing)


def _failure_notes(
    requests: Trace,
    policy: AnyPolicy,
    world: World,
    result: SimResult,
    targets: Mapping[str, float],
) -> list[str]:
    """What failures of replicas cost: a line for each metric, without and with them."""
    from toolkit.sim.api import simulate

    moved = result.counters.get("moved_requests", 0.0)
    if not moved or world.routing is None:
        return []
    tokens = result.counters["recomputed_tokens"]
    quiet = replace(world, routing=replace(world.routing, outages=()))
    before, after = simulate(requests, policy, quiet).metrics(targets), result.metrics(targets)
    return [
        f"{moved:,.0f} times a request went on elsewhere, {tokens:,.0f} tokens sent again",
        *(
            f"  {name}: {number(before[name])} without failures, {number(after[name])} with"
            for name in ("goodput_rps", "ttft_p99_s", "e2e_mean_s", "mtpot_p99_s")
            if name in before and name in after
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions(StageOptions):
    """The command line of `llmctl simulate`."""

    policy: str | None = option(
        None,
        autocompletion=arguments.policy,
        help="The policy, one that `llmctl policies` lists; default: the tuning's, or slice.",
    )
    rate: RateOption = None
    replica_failures: Path | None = option(
        None,
        "--failures",
        help="JSON lines of replicas that die or drain, and when they come back; the result "
        "says what that costs.",
    )
    as_json: JsonOption = False


@command_of(SimulateOptions)
def command(given: SimulateOptions) -> None:
    """Simulate a trace under a policy by the fitted laws, and print the metrics.

    --json has the metrics with their units in their names: throughput_rps, ttft_p99_s,
    batch_size_mean, ...; its `trace` describes the requests. With --fit unit-step a second is a
    decode step, as in Past-Future's Table 1; see docs/reference/simulation.md.
    """
    from toolkit.cli.results import Simulation
    from toolkit.sched.policies import footnote, marked
    from toolkit.sched.policies.parameters import parameters
    from toolkit.sim.api import simulate
    from toolkit.sim.world import assign_settings, check_capacity
    from toolkit.traces.windows import scale_rate

    asked = given.asked()
    targets, tuning = asked.targets, asked.tuning
    tuned = tuning.recommended.policy if tuning else "slice"
    [policy] = asked.policies([given.policy] if given.policy else [], [tuned])
    of_world, of_policy = assign_settings([policy], asked.settings, asked.kinds)
    stage = open_stage(given)
    requests = stage.trace if given.rate is None else scale_rate(stage.trace, given.rate)
    chosen = stage.policy(policy, of_policy[policy])
    world = stage.world(of_world, of_policy[policy])
    check_capacity(of_world, world, requests)
    note_rest(requests)
    for line in sharing_notes(requests, [policy]):
        note(line)
    world = routed(world, targets, of_world, given.replica_failures)
    result = simulate(requests, chosen, world)
    metrics = result.metrics(targets)
    notes = _failure_notes(requests, chosen, world, result, targets)
    notes += [*refusal_notes(result.refusals), *world_notes(world, policy, metrics)]
    name, remark = marked(policy, stage.engines), footnote([policy], stage.engines)
    for line in [*notes, *([remark] if remark else [])]:
        note(line)
    found = Simulation(
        policy=chosen.name,
        parameters=parameters(chosen),
        workers=world.size,
        seed=stage.seed,
        sla=dict(targets),
        trace=plain(requests),
        kinds=_of_kinds(stage, result, targets),
        kind_parameters={each.name: parameters(each.flags) for each in world.others if each.flags}
        or None,
        **metrics,
    )

    def show() -> None:
        table(["metric", "value"], list(metrics.items()), title=f"policy '{name}'")
        if found.kinds:
            kinds = found.kinds
            shown = [name for name in OF_KINDS if any(name in each for each in kinds.values())]
            rows = [[name, *(each.get(key, "") for key in shown)] for name, each in kinds.items()]
            table(["kind", *(f">{key}" for key in shown)], rows, title="by kind")

    emit(given.as_json, found, show)


def _of_kinds(
    stage: Stage, result: SimResult, targets: Mapping[str, float]
) -> dict[str, dict[str, float]] | None:
    """The metrics of each kind of a fleet's servers, by its recipe's name; None elsewhere."""
    if not result.kinds:
        return None
    return {
        kind.recipe.name: {"workers": float(kind.workers)} | part.metrics(targets)
        for kind, part in zip(stage.kinds, result.kinds, strict=True)
    }
