"""`llmctl simulate`: one trace under one policy, by fitted laws or in the token-step world.

`compare` takes its options, its trace and its laws from here, too: `StageOptions.scenario` adds
what a tuning recommends, `open_stage` reads the files, and `Stage.world` makes the simulated world.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.cli import arguments
from toolkit.cli.arguments import (
    JsonOption,
    RateOption,
    SetOption,
    SlaOption,
    command_of,
    limit_workers,
    open_recipe,
    option,
    parse_settings,
    parse_sla,
    refuse_useless,
    resolve_recipe,
)
from toolkit.cli.basis import (
    note_bases,
    note_rest,
    note_scaling,
    open_fleet,
    plain,
    read_tuning,
    refuse_workers,
)
from toolkit.cli.output import emit, note, table
from toolkit.cli.results import Simulation
from toolkit.cli.traffic import Traffic, TrafficOptions, read_traffic
from toolkit.engine_traits import traits_of
from toolkit.errors import InputError
from toolkit.files.fit import Fit
from toolkit.files.fleet import fleet_sources, sized
from toolkit.files.io import find_recipe, fit_path, read_file, shipped_fits
from toolkit.files.plan import Kind
from toolkit.files.recipe import Recipe
from toolkit.files.shipped import load_recipe
from toolkit.files.tuning import REFUSED, Tuning
from toolkit.units import number

if TYPE_CHECKING:
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
class StageOptions(TrafficOptions):
    """The options of a command that simulates a trace."""

    fit: str = option(
        "fit.json",
        "fit.json, the name of a recipe that has a shipped fit, or 'unit-step' (a clock of steps).",
        autocompletion=arguments.fits_and_clock,
    )
    recipe: Path | None = option(
        None,
        "The recipe of the fit, which limits lengths; default: the one beside the fit, in the "
        "current folder, or shipped.",
        callback=resolve_recipe,
    )
    fleet: Path | None = option(
        None, "Workers of several kinds, in place of --fit; see the docs on fleets."
    )
    tuning: Path | None = option(
        None,
        "Simulate what this tuning.json of the fit or the fleet recommends: policy, parameters, "
        "router, workers, targets and seed. Options replace them.",
    )
    settings: SetOption = None
    sla: SlaOption = None
    workers: int | None = option(
        None,
        "The number of workers; default: as tuned or profiled, or 1.",
        min=1,
        callback=limit_workers,
    )
    max_new_tokens: int | None = option(
        None,
        "The limit of requests without one in the trace; default: the recipe's, or 4096 in "
        "unit-step.",
        min=1,
    )
    fit_lengths: bool = option(True, "Scale the lengths to the model's context.")
    seed: int | None = option(
        None,
        "Draw the memory limits and the policies' samples from this seed; default: the tuning's, "
        "or 0.",
        min=0,
    )

    def scenario(self) -> Scenario:
        """What to simulate. `InputError` for words that cannot be parsed and for a wrong file."""
        from toolkit.sched.policies import BUILT_IN

        settings, targets = parse_settings(self.settings), parse_sla(self.sla)
        sources = fleet_sources(self.fleet) if self.fleet else []
        kinds = [open_recipe(source.recipe).name for source in sources]
        tuning = read_tuning(self.tuning)
        if tuning is None:
            return Scenario(settings, targets, kinds)
        counts = tuning.sizing.kinds if tuning.sizing else []
        unused = [kind.recipe for kind in counts if not kind.workers]
        kinds = [name for name in kinds if name not in unused]
        # what the tuning recommends, as `assign_settings` takes it; options replace it
        tuned: dict[str, Value] = {}
        best, router = tuning.recommended, tuning.recommended.replica_router
        if router and settings.get("replica_router", router.name) == router.name:
            tuned["replica_router"] = router.name
            tuned |= {f"{router.name}.{key}": value for key, value in router.parameters.items()}
        if REFUSED in best.metrics:
            tuned["admission"] = "targets"
        first = kinds[0] if kinds and best.policy in BUILT_IN else best.policy
        for owner, flags in {first: best.parameters, **best.kind_parameters}.items():
            set_for_all = {key for key in flags if {key, f"{best.policy}.{key}"} & settings.keys()}
            if owner in (first, *kinds):
                tuned |= {f"{owner}.{key}": flags[key] for key in flags if key not in set_for_all}
        return Scenario(tuned | settings, targets or tuning.sla, kinds, tuning)


@dataclass(frozen=True, slots=True)
class Scenario:
    """What to simulate: what the command line says, and else what the tuning recommends.

    `kinds` are the names of the kinds of a fleet.
    """

    settings: Mapping[str, Value]
    targets: Mapping[str, float]
    kinds: Sequence[str]
    tuning: Tuning | None = None

    def policies(self, named: Sequence[str], usual: Sequence[str]) -> Sequence[str]:
        """The policies to simulate: the `named` ones, else the `usual` ones. Tuned servers behind a
        router run no policy but their own. `InputError` where the tuning's policy is not `named`.
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
    """Requests that will be simulated, and the fit of its laws; None: the token-step world."""

    trace: Trace
    traffic: Traffic
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

    def policy(self, name: str, parameters: Mapping[str, Value]) -> AnyPolicy:
        """The policy of this name with the given parameters. The scheduler of a fleet's servers has
        those of the first kind's recipe, too.
        """
        from toolkit.sched.policies import BUILT_IN
        from toolkit.sim.world import flags_of, policy_for, settings_of_kinds

        own = settings_of_kinds(parameters, self.kinds)[0] if self.kinds else parameters
        if len(self.kinds) > 1 and name in BUILT_IN:
            return flags_of(self.kinds[0], own)
        return policy_for(self.fit, name, own)

    def world(
        self,
        settings: Mapping[str, Value],
        flags: Mapping[str, Value] | None,
        targets: Mapping[str, float],
        failures: Path | None = None,
    ) -> World:
        """The simulated world with these settings, `flags` of the scheduler of a fleet's servers,
        targets for its router and its front, and a file of failures of replicas.

        `InputError` for a setting that it cannot have.
        """
        from toolkit.routing.admission import UNLIMITED, LatencyLimits
        from toolkit.routing.routers import make_router, targets_of
        from toolkit.sched.policies.parameters import parameters
        from toolkit.sim.replicas import Routing, read_outages
        from toolkit.sim.world import flagged, make_world

        world = make_world(
            self.fit,
            settings,
            workers=self.workers,
            max_new_tokens=self.max_new_tokens,
            seed=self.seed,
            others=self.kinds[1:],
        )
        world = flagged(world, self.kinds, flags)
        traffic = self.traffic
        world = replace(world, concurrency=traffic.concurrency, ramp_s=traffic.ramp_s)
        routing = world.routing or Routing()
        if failures is not None:
            routing = replace(routing, outages=read_outages(failures, world.size))
        elif world.routing is None:
            return world
        router, own = routing.router, parameters(routing.router)
        known = {k: v for k, v in targets_of(router.name, targets).items() if not own[k]}
        refuses = settings.get("admission") == "targets"
        limits = LatencyLimits.of(targets) if refuses else UNLIMITED
        if refuses and limits == UNLIMITED:
            raise InputError(
                "admission is 'targets', and no target for TTFT or E2E is given",
                "add one, such as --sla ttft_p99_s=1",
            )
        routing = replace(routing, router=make_router(router.name, own | known), limits=limits)
        return replace(world, routing=routing)


def open_stage(args: StageOptions, rate: object) -> Stage:
    """Read the trace, and the fit or the fleet; print how lengths were scaled, and what the fit
    rests on. `rate` is the command's.

    Lengths of a trace are scaled as in `tune`, by the limits of the recipe that the fit was made
    from; `max_new_tokens` replaces the recipe's. `InputError` for files that are missing or of
    another kind, and where that recipe is not found; without a fit it names those that ship.
    `StaleError` for a tuning of another fit or fleet.
    """
    from toolkit.sim.world import UNIT_STEP
    from toolkit.traces.windows import prepare, scale_lengths

    traffic = read_traffic(args, rate, seed=args.seed or 0)
    kinds: Sequence[Kind] = ()
    bases: dict[Path, Fit] = {}
    spec: Recipe | None = None
    fitted: Fit | None = None
    tuning: Tuning | None = None
    fleet = None
    if args.fleet is not None:
        refuse_useless({"--recipe": args.recipe}, "a fleet names its recipes")
        refuse_workers(args.workers)
        fleet = open_fleet(args.fleet)
        tuning = read_tuning(args.tuning, fleet.inputs)
        kinds = sized(fleet.kinds, tuning)
        spec, fitted = kinds[0].recipe, kinds[0].fit
    elif args.fit == UNIT_STEP and not Path(args.fit).exists():
        refuse_useless({"--recipe": args.recipe}, f"--fit {UNIT_STEP} has none")
        refuse_useless({"--tuning": args.tuning}, f"--fit {UNIT_STEP} has no settings to tune")
    else:
        path = _existing_fit(args.fit)
        fitted = read_file(Fit, path)
        spec = _recipe_of(fitted, path, args.recipe, needed=args.max_new_tokens is None)
        made_from = {"fit": path} | ({"recipe": args.recipe} if args.recipe else {})
        tuning = read_tuning(args.tuning, made_from)
        if tuning and "fleet" in tuning.inputs:
            raise InputError(
                f"{args.tuning}: it is of the fleet {tuning.inputs['fleet'].name}",
                "name the fleet with --fleet in place of --fit",
            )
        bases[path] = fitted
    limit = args.max_new_tokens or (spec.serve.max_new_tokens if spec else 0)
    requests = traffic.trace
    if traffic.path is None:
        own = fitted is not None and not traits_of(fitted.engine.engine).server
        context = fitted.engine.max_model_len if fitted else None
        traffic.refuse_longer(context, limit if own else None)
    elif args.fit_lengths and spec:
        serve = spec.serve.model_copy(update={"max_new_tokens": limit})
        requests = prepare(requests, spec.model_copy(update={"serve": serve}))
    elif args.fit_lengths and fitted:
        requests = scale_lengths(requests, fitted.engine.max_model_len, limit)
    note_scaling(requests)
    if fleet:
        fleet.note_bases(tuning)
    note_bases(bases)
    if args.tuning and tuning:
        note(f"{args.tuning.name} recommends {tuning.recommended.key}")
    workers = kinds[0].workers if kinds else args.workers or (tuning.workers if tuning else 0)
    seed = args.seed if args.seed is not None else tuning.seed if tuning else 0
    return Stage(requests, traffic, fitted, limit, workers, seed, kinds)


def _existing_fit(fit: str) -> Path:
    """The file of --fit. `InputError` where there is none."""
    from toolkit.sim.world import UNIT_STEP

    path = fit_path(fit)
    if not path.exists():
        made = "make it with: llmctl fit PROFILE; or name one that ships with --fit"
        raise InputError(
            f"{path}: no such file", f"{made}: {', '.join([UNIT_STEP, *shipped_fits()])}"
        )
    return path


def _recipe_of(fit: Fit, path: Path, recipe: Path | None, *, needed: bool) -> Recipe | None:
    """The recipe that `fit` was made from: `recipe`, or the one at the usual places.

    `InputError` where it is `needed` and not found, `StaleError` where `recipe` is another.
    """
    if recipe is not None:
        read_file(Fit, path, {"recipe": recipe})
        return load_recipe(recipe)
    found = find_recipe(fit, path)
    if found is None and needed:
        raise InputError(
            f"{path}: its recipe '{fit.recipe_name}', which limits the outputs"
            " (serve.max_new_tokens), is not found or has changed since",
            "name the recipe with --recipe, or give the limit with --max-new-tokens",
        )
    return found


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
        first, count = refusals[0], len(refusals)
        counted = "1 request" if count == 1 else f"{count:,} requests"
        example = f"for example number {int(first.request_id) + 1}: {first.reason}"
        lines.append(f"{counted} rejected; {example}")
    beyond_percent = metrics.get("extrapolated_batches_percent", 0.0)
    if measured is not None and beyond_percent:
        lines.append(f"warning: {extrapolation_warning(beyond_percent, measured)}")
    if "hit_percent" in metrics:
        hit_percent, tokens = metrics["hit_percent"], metrics["query_tokens"]
        lost_percent = 100.0 * metrics["lost_hit_tokens"] / max(tokens, 1.0)
        lines.append(
            f"prefix cache: {hit_percent:.3g} % of {tokens:,.0f} prompt tokens found, "
            f"{lost_percent:.3g} % lost to eviction"
        )
    if metrics["unfinished"]:
        unfinished = f"{metrics['unfinished']:,.0f} had not ended"
        lines.append(f"stopped when the last request was admitted; {unfinished}")
    return lines


def sharing_notes(trace: Trace, policies: Sequence[str]) -> list[str]:
    """A line on the policies that ignore what the trace says that prompts share; else none."""
    from toolkit.sched.policies import BUILT_IN

    if trace.shared is None and trace.sessions is None:
        return []
    without = [name for name in policies if name not in BUILT_IN]
    which = f"{len(without)} of the policies reuse"
    if len(without) == 1:
        which = f"policy '{without[0]}' reuses"
    return [f"{which} no prompts: simulated as if they shared nothing"] if without else []


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
        "The policy, one that `llmctl policies` lists; default: the tuning's, or slice.",
        autocompletion=arguments.policy,
    )
    rate: RateOption = None
    replica_failures: Path | None = option(
        None,
        "JSON lines of replicas that die or drain, and when they come back; the result says what "
        "that costs.",
        "--failures",
    )
    as_json: JsonOption = False


@command_of(SimulateOptions)
def command(args: SimulateOptions) -> None:
    """Simulate a trace under a policy by the fitted laws, and print the metrics.

    --json has the metrics with their units in their names: throughput_rps, ttft_p99_s,
    batch_size_mean, ...; its `trace` describes the requests. With --fit unit-step a second is a
    decode step, as in Past-Future's Table 1; see docs/reference/simulation.md.
    """
    from toolkit.sched.policies import footnote, marked
    from toolkit.sched.policies.parameters import parameters
    from toolkit.sim.api import simulate
    from toolkit.sim.world import assign_settings, check_capacity
    from toolkit.traces.windows import scale_rate

    scenario = args.scenario()
    targets, tuning = scenario.targets, scenario.tuning
    usual = tuning.recommended.policy if tuning else "slice"
    [policy] = scenario.policies([args.policy] if args.policy else [], [usual])
    of_world, of_policy = assign_settings([policy], scenario.settings, scenario.kinds)
    stage = open_stage(args, args.rate)
    requests = stage.trace if args.rate is None else scale_rate(stage.trace, args.rate)
    chosen = stage.policy(policy, of_policy[policy])
    world = stage.world(of_world, of_policy[policy], targets, args.replica_failures)
    check_capacity(of_world, world, requests)
    note_rest(requests)
    note(*sharing_notes(requests, [policy]))
    result = simulate(requests, chosen, world)
    metrics = result.metrics(targets)
    note(*_failure_notes(requests, chosen, world, result, targets))
    note(*result_notes(result.refusals, metrics, world.range_of(policy)))
    note(*filter(None, [footnote([policy], stage.engines)]))
    of_kinds = {  # of a fleet's servers
        kind.recipe.name: {"workers": float(kind.workers)} | part.metrics(targets)
        for kind, part in zip(stage.kinds, result.kinds, strict=False)
    }
    flags = {kind.name: parameters(kind.flags) for kind in world.others if kind.flags}
    found = Simulation(
        policy=chosen.name,
        parameters=parameters(chosen),
        workers=world.size,
        seed=stage.seed,
        sla=dict(targets),
        trace=plain(requests),
        concurrency=result.concurrency,
        kinds=of_kinds or None,
        kind_parameters=flags or None,
        **metrics,
    )

    def show() -> None:
        table(
            ["metric", "value"],
            list(metrics.items()),
            title=f"policy '{marked(policy, stage.engines)}'",
        )
        if of_kinds:
            shown = [key for key in OF_KINDS if any(key in each for each in of_kinds.values())]
            rows = [[kind, *(one.get(key, "") for key in shown)] for kind, one in of_kinds.items()]
            table(["kind", *(f">{key}" for key in shown)], rows, "by kind")

    emit(args.as_json, found, show)
