"""What `simulate` runs: a trace, laws, and the settings of one or more policies and routers.

`open_stage` reads the files and finds the settings: the command line's, else those that a tuning
recommends, else the recipe's own, which `tune` judges first. `Stage.contenders` gives each policy
with the world that it runs in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.cli import arguments
from toolkit.cli.arguments import (
    SetOption,
    SlaOption,
    limit_workers,
    option,
    parse_settings,
    parse_sla,
    refuse_useless,
    resolve_recipe,
)
from toolkit.cli.basis import (
    FoundFit,
    find_fit,
    note_found,
    note_scaling,
    read_tuning,
)
from toolkit.cli.output import note
from toolkit.cli.traffic import Traffic, TrafficOptions, read_traffic
from toolkit.errors import InputError
from toolkit.files.fit import Fit
from toolkit.files.io import FIT, find_recipe, fit_path, read_file, shipped_fit, shipped_fits
from toolkit.files.modelled import refuse_recipe
from toolkit.files.recipe import PolicySpec, Recipe
from toolkit.files.shipped import load_recipe, recipe_path, shipped_names
from toolkit.files.tuning import REFUSED, Settings, Tuning
from toolkit.units import counted, number, words

if TYPE_CHECKING:
    from toolkit.sched.policies.parameters import Value
    from toolkit.sched.protocols import AnyPolicy
    from toolkit.sched.types import Refusal
    from toolkit.sim.world import World
    from toolkit.traces.types import Trace


ALL = "all"  # of policies, or of routers


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions(TrafficOptions):
    """The options of a command that simulates a trace."""

    fit: str | None = option(
        None,
        "A fit.json, the name of a shipped recipe, or 'unit-step' (a clock of steps). Default: "
        "fit.json in this folder; with --recipe else the shipped one, else for vLLM on a GPU laws "
        "that are computed from measured operators.",
        autocompletion=arguments.fits_and_clock,
    )
    recipe: Path | None = option(
        None,
        "The recipe of the fit: lengths, policy, targets, workers, router and seed, which options "
        "replace; default: the one beside the fit, in the current folder, or shipped.",
        callback=resolve_recipe,
    )
    tuning: Path | None = option(
        None,
        "Simulate what this tuning.json of the fit recommends: policy, parameters, router, "
        "workers, targets and seed. Options replace them.",
    )
    settings: SetOption = None
    sla: SlaOption = None
    workers: int | None = option(
        None,
        "The number of workers; default: as tuned, the recipe's, as profiled, or 1.",
        min=1,
        callback=limit_workers,
    )
    max_new_tokens: int | None = option(
        None,
        "The limit of requests without one in the trace; default: the recipe's, or 4096 in "
        "unit-step.",
        min=1,
    )
    seed: int | None = option(
        None,
        "Draw the memory limits and the policies' samples from this seed; default: the tuning's, "
        "the recipe's, or 0.",
        min=0,
    )


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy, and the world that it runs in; `router` is the one before its replicas, or ''."""

    policy: AnyPolicy
    world: World
    router: str = ""


@dataclass(frozen=True, slots=True)
class Stage:
    """Requests that will be simulated, the laws, and what the command line and the files say about
    the rest. Without a `fit` it is the token-step world.
    """

    trace: Trace
    traffic: Traffic
    fit: Fit | None
    recipe: Recipe | None
    tuning: Tuning | None
    own: Settings | None  # as tuned, or of the recipe; None: there is neither
    refuses: bool  # the front of own replicas refuses what would miss a target
    recipe_says: Sequence[str]  # what was taken from the recipe besides its policy and router
    given: Mapping[str, Value]  # by --set
    targets: Mapping[str, float]
    max_new_tokens: int  # of requests without a limit in the trace; 0: the token-step world's
    workers: int
    seed: int

    @property
    def engine(self) -> str:
        """The engine of the laws; '' in the token-step world."""
        return self.fit.engine.engine if self.fit else ""

    @property
    def own_policy(self) -> str:
        """The policy of the tuning or the recipe; without either the one that the fit's engine has
        built in, or else the default of recipes.
        """
        from toolkit.sched.policies import BUILT_IN
        from toolkit.sim.api import usual_policies

        if self.own:
            return self.own.policy
        built_in = [name for name in usual_policies(self.fit) if name in BUILT_IN]
        return built_in[0] if built_in else PolicySpec().name

    def policies(self, named: Sequence[str]) -> Sequence[str]:
        """Return the policies to simulate: the `named` ones, else the own one; "all" stands for the
        own one and all that need no future. Raises InputError where the tuning's policy is not
        among them.
        """
        from toolkit.sim.api import usual_policies

        if ALL in named:
            named = list(dict.fromkeys([self.own_policy, *usual_policies(self.fit)]))
        tuned = self.tuning.recommended.settings if self.tuning else None
        if tuned and named and tuned.policy not in named:
            raise InputError(
                f"the tuning recommends policy '{tuned.policy}', which is not among those to "
                f"simulate: {', '.join(named)}",
                f"name {tuned.policy}, or leave --tuning out",
            )
        return named or [self.own_policy]

    def contenders(self, names: Sequence[str], routers: Sequence[str] = ()) -> list[Contender]:
        """Return the policies of these names, each with the world that it runs in; print what the
        recipe gave. A router is only before a policy that is built into an engine.

        Args:
            routers: each of them is before such a policy in turn; none: the one of the settings.

        Raises InputError for an unknown policy or router, and for settings that cannot be.
        """
        from toolkit.routing.routers import ROUTERS
        from toolkit.sched.policies import BUILT_IN

        routers = list(ROUTERS) if ALL in routers else routers
        if routers and not BUILT_IN.keys() & names:
            raise InputError(
                f"--router {routers[0]}: policy '{names[0]}' is one scheduler for all workers",
                f"leave it out, or simulate the policy '{next(iter(BUILT_IN))}'",
            )
        found: list[Contender] = []
        for router in routers or [""]:
            others = set(routers) - {router}
            given = {k: v for k, v in self.given.items() if k.partition(".")[0] not in others}
            if router:
                given["replica_router"] = router
            # without a router of its own, a policy runs once
            here = [one for one in names if one in BUILT_IN or router in ("", *routers[:1])]
            found += self._before(here, given, tell=not found)
        return found

    def _before(
        self,
        names: Sequence[str],
        given: Mapping[str, Value],
        *,
        tell: bool,
    ) -> list[Contender]:
        """Return these policies before one router, with the settings `given`; if `tell`, print what
        the recipe gave.
        """
        from toolkit.sched.policies import BUILT_IN
        from toolkit.sim.world import assign_settings, check_capacity, make_world, policy_for

        front: Mapping[str, Value] = {}
        own: Mapping[str, Value] | None = None  # the recipe's policy is not among them
        if self.own and BUILT_IN.keys() & names:
            front = self._front(self.own, given)
        if self.own and self.own_policy in names:
            own = {
                f"{self.own_policy}.{key}": value
                for key, value in self.own.parameters.items()
                if not {key, f"{self.own_policy}.{key}"} & given.keys()
            }
        of_world, of_policy = assign_settings(names, {**front, **(own or {}), **given})
        chosen = {**given, **front}
        of_others = {k: v for k, v in of_world.items() if k in self.given or k not in chosen}
        found = []
        for name in names:
            settings = of_world if name in BUILT_IN else of_others
            world = make_world(
                self.fit,
                settings,
                workers=self.workers,
                max_new_tokens=self.max_new_tokens,
                seed=self.seed,
                targets=self.targets,
                recipe=self.recipe,
            )
            world = replace(world, concurrency=self.traffic.concurrency)
            check_capacity(settings, world, self.trace)
            router = world.routing.router.name if world.routing and name in BUILT_IN else ""
            policy = policy_for(self.fit, name, of_policy[name])
            found.append(Contender(policy, world, router))
        if tell:
            self._note_recipe(front, own)
        return found

    def _front(self, own: Settings, given: Mapping[str, Value]) -> dict[str, Value]:
        """The router before replicas and whether their front refuses, as `--set` takes them; no
        router where another one is `given`.
        """
        front: dict[str, Value] = {"admission": "targets"} if self.refuses else {}
        router = own.replica_router
        if router and given.get("replica_router", router.name) == router.name:
            front["replica_router"] = router.name
            front |= {f"{router.name}.{key}": value for key, value in router.parameters.items()}
        return front

    def _note_recipe(self, front: Mapping[str, Value], own: Mapping[str, Value] | None) -> None:
        """Print in one line what was taken from the recipe: policy, router and `recipe_says`."""
        if self.recipe is None or self.own is None or self.tuning:
            return
        said = list(self.recipe_says)
        if "replica_router" in front:
            said.insert(0, f"router {front['replica_router']}")
        if own is not None:
            flags = {name.rpartition(".")[2]: value for name, value in own.items()}
            said.insert(0, f"policy {self.own_policy}{f' ({words(flags)})' if flags else ''}")
        if said:
            note(f"from recipe {self.recipe.name}: {'; '.join(said)}")


def open_stage(args: StageOptions, rate: object = None) -> Stage:
    """Read the trace and the fit; print what was done to the requests, and what the fit rests on.
    `rate` is the command's.

    Requests are fitted to the engine as in `tune`, by the limits of the recipe that the fit was
    made from; `max_new_tokens` replaces the recipe's. `InputError` for words that cannot be parsed,
    for files that are missing or of another kind, and where that recipe is not found; without a fit
    it names those that ship. `StaleError` for a tuning of another fit.
    """
    from toolkit.sim.deployment import Deployment
    from toolkit.sim.world import UNIT_STEP
    from toolkit.traces.windows import fit_lengths, prepare

    given = parse_settings(args.settings)
    targets = parse_sla(args.sla)
    traffic = read_traffic(args, rate)
    found: list[FoundFit] = []
    spec: Recipe | None = None
    fitted: Fit | None = None
    tuning: Tuning | None = None
    if args.fit == UNIT_STEP and not Path(UNIT_STEP).exists():
        refuse_useless({"--recipe": args.recipe}, f"--fit {UNIT_STEP} has none")
        refuse_useless({"--tuning": args.tuning}, f"--fit {UNIT_STEP} has no settings to tune")
    else:
        one, spec, made_from = _of_files(args)
        fitted = one.fit
        tuning = read_tuning(args.tuning, made_from)
        found = [one]
    limit = args.max_new_tokens or (spec.serve.max_new_tokens if spec else 0)
    requests = traffic.trace
    if spec:
        requests = prepare(requests, spec, max_new_tokens=limit)
    elif fitted:
        engine = fitted.engine
        requests = fit_lengths(requests, engine.engine, engine.max_model_len, limit)
    note_scaling(requests)
    note_found(found)
    if args.tuning and tuning:
        note(f"{args.tuning.name} recommends {tuning.recommended.settings.key}")
    if tuning and tuning.concurrency and rate is None and not traffic.concurrency:
        traffic = replace(traffic, concurrency=tuning.concurrency)
    recipe_says: list[str] = []
    workers = args.workers or 0
    seed = args.seed or 0
    own: Settings | None = None
    refuses = False
    if tuning:
        own = tuning.recommended.settings
        refuses = REFUSED in tuning.recommended.metrics
        targets = targets or tuning.sla
        workers = args.workers or tuning.workers
        seed = tuning.seed if args.seed is None else args.seed
    elif spec and fitted:
        targets = targets or spec.sla
        workers = args.workers or spec.workers
        seed = spec.tune.seed if args.seed is None else args.seed
        changed = spec.model_copy(update={"sla": targets, "workers": workers})
        deployment = Deployment.of(changed, fitted)
        own = deployment.settings
        refuses = deployment.refuses
        if not args.sla:
            recipe_says.append(f"targets {words(spec.sla)}" if spec.sla else "no targets")
        if args.workers is None:
            recipe_says.append(counted(workers, "worker"))
        if args.seed is None:
            recipe_says.append(f"seed {seed}")
    return Stage(
        trace=requests,
        traffic=traffic,
        fit=fitted,
        recipe=spec,
        tuning=tuning,
        own=own,
        refuses=refuses,
        recipe_says=recipe_says,
        given=given,
        targets=targets,
        max_new_tokens=limit,
        workers=workers,
        seed=seed,
    )


def _of_files(args: StageOptions) -> tuple[FoundFit, Recipe | None, dict[str, Path]]:
    """The fit of --fit and its recipe; or the recipe of --recipe and its fit, as `find_fit` finds
    or computes it. Last, the files that a tuning of them names, by role.
    """
    file = args.recipe
    fit = args.fit
    if fit in shipped_names() and shipped_fit(fit) is None and not Path(fit).exists():
        refuse_useless({"--recipe": file}, f"--fit {fit} is a recipe without a fit of its own")
        file = recipe_path(fit)
        fit = None
    if fit is None and file is not None:
        recipe = load_recipe(file)
        one = find_fit(file, recipe, None)
        return one, recipe, one.inputs(file)
    path = _existing_fit(fit or FIT)
    fitted = read_file(Fit, path)
    spec = _recipe_of(fitted, path, file, needed=args.max_new_tokens is None)
    if spec is not None:
        refuse_recipe(spec)
    made_from = {"fit": path} | ({"recipe": file} if file else {})
    return FoundFit(fitted, path), spec, made_from


def _existing_fit(fit: str) -> Path:
    """The file of --fit. `InputError` where there is none."""
    from toolkit.sim.world import UNIT_STEP

    path = fit_path(fit)
    if not path.exists():
        made = "make it with: llmctl fit PROFILE; or name a recipe (--recipe), or a shipped fit"
        names = ", ".join([UNIT_STEP, *shipped_fits()])
        raise InputError(f"{path}: no such file", f"{made} with --fit: {names}")
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
