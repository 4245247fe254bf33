"""What a command is about: a recipe or a plan, its fit, a tuning of them, targets, and a trace.

`Scenario.open` finds and checks all of it for `tune`, `simulate`, `capacity` and `render`,
`Scenario.of_plan` for `bench` and `tune --live`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.cli.arguments import (
    UNIT_STEP,
    ScenarioOptions,
    open_recipe,
    parse_sla,
    refuse_useless,
)
from toolkit.cli.basis import note_basis, note_other_count, warn
from toolkit.cli.output import note
from toolkit.errors import InputError, StaleError, nearest
from toolkit.files.fit import Fit
from toolkit.files.io import (
    FIT,
    fit_path,
    head,
    read_file,
    shipped_fit,
)
from toolkit.files.modelled import refuse_recipe
from toolkit.files.plan import Plan
from toolkit.files.recipe import Recipe, TuneSpec
from toolkit.files.scaling import FleetResult, ScalingResult
from toolkit.files.shipped import is_recipe
from toolkit.files.tuning import REFUSED, Settings, Tuning
from toolkit.report.steps import fit_option, typed

if TYPE_CHECKING:
    from toolkit.sim.deployment import Deployment
    from toolkit.traces.types import Trace


@dataclass(frozen=True, slots=True)
class Scenario:
    """What the options of a command name, read and checked.

    Attributes:
        options: the command line, over the tuning, over the recipe.
        recipe: as in its file or plan; None: the token-step world, or a server without a plan.
        recipe_file: None for a recipe that is in a plan.
        fit: None: the token-step world, or a server without a plan.
        fit_file: None: the fit was computed for this command, or is in a plan.
        targets: in seconds.
    """

    options: ScenarioOptions
    recipe: Recipe | None = None
    recipe_file: Path | None = None
    fit: Fit | None = None
    fit_file: Path | None = None
    plan: Plan | None = None
    tuning: Tuning | None = None
    targets: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def open(cls, options: ScenarioOptions) -> Scenario:
        """Find the recipe, its fit and its tuning.

        For a recipe without a given fit, `find_fit` finds it; with a tuning by computed laws,
        these. Raises InputError for options that contradict each other, for files that are missing
        or of another form, and for what is not modelled; StaleError for a fit or a tuning that was
        made from other files.
        """
        _refuse_two_loads(options)
        targets = parse_sla(options.sla)
        if options.recipe == Path(UNIT_STEP):
            useless = {"--fit": options.fit, "--tuning": options.tuning}
            refuse_useless(useless, f"{UNIT_STEP} has no laws and no settings to tune")
            return cls(options, targets=targets)
        file = options.recipe
        assert file is not None
        recipe = open_recipe(file)
        fit, fit_file = _fit_of(file, recipe, options)
        found = cls(options, recipe, file, fit, fit_file)
        if options.tuning is not None:
            found = replace(found, tuning=read_file(Tuning, options.tuning, found.inputs))
        own = found.tuning or recipe
        return replace(found, targets=targets or own.sla)

    @classmethod
    def of_plan(cls, options: ScenarioOptions) -> Scenario:
        """Read the plan, with the number of workers of the options; without a plan, nothing is
        known of the server. Raises InputError for a recipe in the plan's place, and for what `open`
        refuses.
        """
        _refuse_two_loads(options)
        targets = parse_sla(options.sla)
        if options.plan is None:
            return cls(options, targets=targets)
        if is_recipe(options.plan):
            made = typed("render", options.plan)
            raise InputError(f"{options.plan} is no plan", f"make one with: {made}")
        plan = read_file(Plan, options.plan)
        if options.workers not in (None, plan.workers):
            plan = _with_workers(plan, options.workers)
        targets = targets or plan.recipe.sla
        return cls(options, recipe=plan.recipe, fit=plan.fit, plan=plan, targets=targets)

    @property
    def inputs(self) -> dict[str, Path]:
        """The files by role, for an envelope."""
        files = {"recipe": self.recipe_file, "fit": self.fit_file}
        return {role: path for role, path in files.items() if path is not None}

    @property
    def workers(self) -> int:
        """The number of workers; 0: neither an option nor a file says it."""
        own = self.tuning or self.recipe
        return self.options.workers or (own.workers if own else 0)

    @property
    def seed(self) -> int:
        """The seed of the draws."""
        if self.options.seed is not None:
            return self.options.seed
        if self.tuning:
            return self.tuning.seed
        return self.recipe.tune.seed if self.recipe else 0

    @property
    def concurrency(self) -> int:
        """Requests at once; 0: they come at their times."""
        tuned = self.tuning.concurrency if self.tuning and self.options.rate is None else None
        return self.options.concurrency or tuned or 0

    @property
    def max_new_tokens(self) -> int:
        """The limit of requests without one in the trace; 0: the token-step world's."""
        own = self.recipe.serve.max_new_tokens if self.recipe else 0
        return self.options.max_new_tokens or own

    @property
    def deployment(self) -> Deployment:
        """The recipe with these targets, workers and seed, on its fit."""
        from toolkit.sim.deployment import Deployment

        recipe, fit = self._measured
        tune = recipe.tune.model_copy(update={"seed": self.seed})
        changes = {"sla": dict(self.targets), "workers": self.workers, "tune": tune}
        return Deployment.of(recipe.model_copy(update=changes), fit)

    @property
    def _measured(self) -> tuple[Recipe, Fit]:
        """The recipe and its fit, of a command that always has both."""
        assert self.recipe is not None
        assert self.fit is not None
        return self.recipe, self.fit

    @property
    def sources(self) -> dict[str, Path]:
        """The files by role, with the tuning's."""
        tuning = self.options.tuning
        return self.inputs | ({"tuning": tuning} if tuning else {})

    def make_plan(self, settings: Settings | None = None) -> Plan:
        """Return the plan of the recipe: with `settings`, else with the tuning's, else with its
        own. `toolkit.deploy.plan.make_plan` says what is refused.
        """
        from toolkit.deploy.plan import make_plan

        return make_plan(*self._measured, self.tuning, self.sources, settings)

    def scaled_plan(self, file: Path, rule: str | None, *, force: bool) -> Plan:
        """Return the plan of the recipe with a rule of the scaling.json `file`: the best, or
        `rule`; its static fleet has a fixed number.

        Raises StaleError for a result that was made from other files, and InputError for a rule
        that is not in it, and without `force` for one that does not keep the targets.
        """
        from toolkit.deploy.plan import PlannedFleet, make_plan

        result = read_file(ScalingResult, file, self.sources)
        if "tuning" in result.inputs and self.tuning is None:
            raise InputError(
                f"{file} was made with a tuning, {result.inputs['tuning'].name}",
                "give the same --tuning",
            )
        fleet = result.best if rule is None else _fleet_called(rule, result)
        if fleet is None or not (fleet.kept or force):
            kept = f"rule '{rule}' does not keep" if rule else "no rule keeps"
            raise InputError(
                f"{file}: {kept} the targets",
                "allow `llmctl autoscale` more replicas with --most, or make a plan anyway: --rule "
                "NAME --force",
            )
        made_from = self.sources | {"scaling": file}
        scaled = PlannedFleet(result, fleet)
        return make_plan(*self._measured, self.tuning, made_from, scaled=scaled)

    @property
    def own_settings(self) -> Settings | None:
        """The settings of the tuning, else of the recipe; None: there is neither."""
        if self.tuning:
            return self.tuning.recommended.settings
        return self.deployment.settings if self.recipe else None

    @property
    def refuses(self) -> bool:
        """Whether the front of own replicas refuses what would miss a target."""
        if self.tuning:
            return REFUSED in self.tuning.recommended.metrics
        return self.recipe is not None and self.deployment.refuses

    @property
    def trace_file(self) -> Path:
        """The file of --trace, or of the recipe's. Raises InputError where there is none."""
        from toolkit.traces.types import trace_path

        spec = self.recipe.tune if self.recipe else TuneSpec()
        return trace_path(self.options.trace or spec.trace)

    def read_trace(self) -> Trace:
        """Read the requests, with their own lengths. A fixed concurrency keeps no sessions."""
        from toolkit.traces.read import read_trace

        trace, _ = read_trace(self.trace_file)
        if not self.options.concurrency or trace.sessions is None:
            return trace
        later = int((trace.sessions.previous >= 0).sum())
        text = (
            f"a fixed concurrency keeps no sessions: {later:,} later turns start when a place is "
            "free"
        )
        return replace(trace, sessions=None, notes=(*trace.notes, text))

    def fitted_trace(self) -> Trace:
        """Read the requests, with the lengths that the recipe takes; `tune` does the same."""
        from toolkit.traces.windows import prepare

        trace = self.read_trace()
        if self.recipe is None:
            return trace
        return prepare(trace, self.recipe, max_new_tokens=self.max_new_tokens)

    def note_tuning(self) -> None:
        """Print the command that searches the settings of the recipe; nothing without a recipe."""
        recipe = self.recipe_file
        if recipe is None:
            return
        trace = ["--trace", self.options.trace] if self.options.trace else []
        note(f"next: {typed('tune', recipe, *fit_option(recipe, self.fit_file), *trace)}")

    def note_basis(self) -> None:
        """Print what predictions rest on."""
        if self.fit is not None:
            note_basis((self.fit, self.fit_file))


def _with_workers(plan: Plan, workers: int) -> Plan:
    """Return the plan with another number of workers; print what then does not hold."""
    from toolkit.deploy.plan import with_workers

    if workers != plan.fit.workers:
        note_other_count("the fit was measured", plan.fit, workers)
    made = with_workers(plan, workers)
    if plan.outcome.metrics and not made.outcome.metrics:
        note("note: the tuning's predictions are for another number of workers")
    return made


def _fleet_called(rule: str, result: ScalingResult) -> FleetResult:
    """Return the fleet of a rule. Raises InputError where the result has no such rule."""
    fleets = [*result.rules, *([result.static] if result.static else [])]
    by_name = {one.rule: one for one in fleets}
    if rule not in by_name:
        raise InputError(f"--rule {rule}: it was not simulated", nearest(rule, by_name))
    return by_name[rule]


def _refuse_two_loads(options: ScenarioOptions) -> None:
    """Raise InputError for a rate or a load beside a fixed concurrency."""
    if options.concurrency is not None:
        why = f"--concurrency {options.concurrency} starts a request when another ends"
        refuse_useless({"--rate": options.rate, "--load": options.load}, why)


def _fit_of(file: Path, recipe: Recipe, options: ScenarioOptions) -> tuple[Fit, Path | None]:
    """Return the recipe's fit (`find_fit`); computed laws where the tuning is by such."""
    if options.tuning is not None and options.fit is None:
        tuned = read_file(Tuning, options.tuning, {"recipe": file})
        if "fit" not in tuned.inputs:
            return computed_fit(file, recipe), None
    path = None if options.fit is None else fit_path(options.fit)
    return find_fit(file, recipe, path, force=options.force)


def find_fit(
    file: Path, recipe: Recipe, given: Path | None, *, force: bool = False
) -> tuple[Fit, Path | None]:
    """Return the fit of the recipe in `file`, and its own file: a `given` file, fit.json of this
    folder, the shipped fit, or computed laws, without a file.

    Raises InputError where none of these is possible, and for what is not modelled; StaleError for
    a fit of another recipe, or of sections that changed. With `force` that is a warning.
    """
    refuse_recipe(recipe)
    path = given or _fit_here(recipe) or shipped_fit(file.stem)
    if path is not None:
        return _read_fit(path, file, force=force), path
    from toolkit.profiling.analytic import by_operators

    if not by_operators(recipe):
        raise InputError(
            f"recipe '{recipe.name}' has no shipped fit, and there is no fit.json of it here",
            "llmctl profile RECIPE and llmctl fit profile.json give one, for --fit fit.json",
        )
    found = computed_fit(file, recipe)
    note(f"{recipe.name}: there is no fit of it, so its laws are computed; nothing is measured")
    return found, None


def _read_fit(path: Path, recipe: Path, *, force: bool) -> Fit:
    """See `find_fit`."""
    ships = ""
    if shipped_fit(recipe.stem) not in (None, path):
        ships = f", or take the one that ships: --fit {recipe.stem}"
    try:
        return read_file(Fit, path, {"recipe": recipe})
    except StaleError as error:
        if not force:
            raise StaleError(error.message, f"{error.hint}{ships}") from None
        warn(error.message)
        return read_file(Fit, path)


def _fit_here(recipe: Recipe) -> Path | None:
    """Return fit.json in the current folder, if it is a fit of this recipe."""
    here = Path(FIT)
    if not here.is_file():
        return None
    other = read_file(Fit, here).recipe_name
    if other != recipe.name:
        note(f"fit.json of this folder is of recipe '{other}', and is not used")
        return None
    return here


def computed_fit(file: Path, recipe: Recipe) -> Fit:
    """Return the analytic fit of a recipe, which may differ from its file. `analytic_fit` says what
    is refused.
    """
    from toolkit.profiling.analytic import analytic_fit

    made_from = head(inputs={"recipe": file}, device=recipe.hardware.name)
    return analytic_fit(recipe.measured, made_from)
