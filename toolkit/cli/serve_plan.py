"""`llmctl serve`: the plan that is served, from a file or made here, with what the command line says otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.cli.arguments import parse_settings
from toolkit.cli.basis import plan_of_recipe
from toolkit.cli.output import note

if TYPE_CHECKING:
    from toolkit.files.plan import Plan, PlannedPolicy


def plan_to_serve(source: str | None, plan: Path | None, fit: Path | None, tuning: Path | None, force: bool) -> Plan:
    """A plan's file, or what a recipe or a fleet with its fits makes. `InputError` for both, and for neither."""
    from toolkit.cli.fleet import plan_of_fleet
    from toolkit.errors import InputError
    from toolkit.files.fleet import is_fleet
    from toolkit.files.io import read_file
    from toolkit.files.plan import Plan
    from toolkit.files.recipes import is_recipe

    usage = "llmctl serve plan.json, or llmctl serve RECIPE --fit fit.json [--tuning tuning.json]"
    if plan is None and source and not is_recipe(source):
        plan, source = Path(source), None
    if plan is not None:
        if source or fit or tuning:
            raise InputError("a plan holds the recipe, the fit and the tuning; give one or the other", usage)
        return read_file(Plan, plan)
    if source and is_fleet(source):
        if fit:
            raise InputError("a fleet names its fits", "leave --fit out")
        return plan_of_fleet(Path(source), tuning, force=force)[0]
    if source is None or fit is None:
        raise InputError("there is no plan to serve", usage)
    return plan_of_recipe(source, fit, tuning, force=force)


def changed(plan: Plan, policy: str | None, settings: list[str] | None, workers: int | None) -> Plan:
    """The plan with what the command line says otherwise. `InputError` for a policy or parameter that is unknown."""
    from toolkit.cli.fleet import refuse_workers
    from toolkit.deploy.plan import replaced

    if plan.others:
        refuse_workers(workers)
    if workers is not None and workers != plan.fit.workers:
        note(f"note: the fit was measured with {plan.fit.workers} workers at once; {workers} may take other times")
    chosen = _policy(plan, policy, changes := parse_settings(settings))
    if policy is None and not changes and workers is None:
        return plan
    made = replaced(plan, chosen, policy is not None, changes, workers or plan.workers)
    if plan.predicted and not made.predicted:
        note("note: what the tuning predicts does not hold for these settings; nothing is predicted")
    return made


def _policy(plan: Plan, name: str | None, changes: dict[str, bool | int | float | str]) -> PlannedPolicy:
    from toolkit.files.plan import PlannedPolicy
    from toolkit.sched.policies import make_any
    from toolkit.sched.policies.parameters import parameters

    same = name is None or name == plan.policy.name
    chosen = make_any(plan.policy.name if same else str(name), (plan.policy.parameters if same else {}) | changes)
    return PlannedPolicy(name=chosen.name, parameters=parameters(chosen))


def check_engine(plan: Plan, engine: str | None) -> None:
    """`InputError` where somebody expects another engine than the plan's."""
    from toolkit.errors import InputError

    planned = " and ".join(dict.fromkeys(kind.recipe.engine.name for kind in plan.kinds))
    if engine is not None and engine != planned:
        raise InputError(
            f"--engine {engine}: this plan is for engine '{planned}'",
            f"set engine.name to {engine} in the recipe; then: llmctl profile, fit, tune and render",
        )
