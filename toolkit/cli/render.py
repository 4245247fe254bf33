"""`llmctl render`: the plan that `llmctl serve` starts, from a recipe, its fit and perhaps its tuning."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli.arguments import JsonOption, RecipeArgument, SetOption, open_recipe, parse_settings
from toolkit.cli.output import emit, note, table

if TYPE_CHECKING:
    from toolkit.deploy.compare import Difference
    from toolkit.files.plan import Plan, PlannedPolicy

PREDICTED = "predicted "
HEADLINES = {PREDICTED + name for name in ("goodput_rps", "throughput_rps", "ttft_p99_s", "tpot_mean_s", "e2e_p95_s")}
FitOption = Annotated[Path, typer.Option("--fit", help="fit.json, from `llmctl fit`.")]
TuningOption = Annotated[Path | None, typer.Option("--tuning", help="tuning.json; without it, the recipe's policy.")]
PolicyOption = Annotated[
    str | None, typer.Option("--policy", help="This policy, with --set's parameters, instead of the tuning's.")
]
OutOption = Annotated[Path, typer.Option("--out", help="Where to write the plan.")]
CheckOption = Annotated[
    bool, typer.Option("--check", help="Write nothing; compare with the plan at --out, exit 4 if it differs.")
]


def command(
    recipe: RecipeArgument,
    fit: FitOption,
    tuning: TuningOption = None,
    policy: PolicyOption = None,
    settings: SetOption = None,
    out: OutOption = Path("plan.json"),
    check: CheckOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write the plan that `llmctl serve` starts, and say where every value of it comes from.

    The same files give the same plan, to the byte; --check is for CI.
    """
    plan = _make(recipe, fit, tuning, _given(policy, settings))
    if check:
        _compare(plan, out, as_json)
        return
    from toolkit.cli.basis import note_basis
    from toolkit.files.io import write_file

    write_file(plan, out)
    emit(as_json, plan, lambda: _show(plan))
    note_basis(plan.fit, fit)
    note(f"wrote {out}; start it with: llmctl serve {out}")


def _given(policy: str | None, settings: list[str] | None) -> PlannedPolicy | None:
    """The policy that was asked for by name."""
    from toolkit.errors import InputError
    from toolkit.files.plan import PlannedPolicy

    if policy is None:
        if settings:
            raise InputError("--set changes the policy that --policy names", "add --policy NAME")
        return None
    return PlannedPolicy(name=policy, parameters=parse_settings(settings))


def _make(recipe: Path, fit: Path, tuning: Path | None, given: PlannedPolicy | None) -> Plan:
    from toolkit.deploy.plan import make_plan
    from toolkit.files.fit import Fit
    from toolkit.files.io import read_file
    from toolkit.files.tuning import Tuning

    made_from = {"recipe": recipe, "fit": fit}
    tuned = read_file(Tuning, tuning, inputs=made_from) if tuning else None
    inputs = made_from | ({"tuning": tuning} if tuning else {})
    return make_plan(open_recipe(recipe), read_file(Fit, fit, inputs={"recipe": recipe}), tuned, inputs, given)


def _show(plan: Plan) -> None:
    told = {key: item for key, item in plan.explained.items() if not key.startswith(PREDICTED) or key in HEADLINES}
    rows = [(key, item.value, item.source) for key, item in told.items()]
    table(["what", "<planned", "because"], rows, title=f"{plan.recipe.name}: {plan.recipe.description}".rstrip(": "))


def _compare(plan: Plan, existing: Path, as_json: bool) -> None:
    from toolkit.deploy.compare import differences
    from toolkit.errors import TargetMissedError
    from toolkit.files.io import read_file
    from toolkit.files.plan import Plan

    found = differences(read_file(Plan, existing), plan)
    emit(as_json, {"differences": found}, lambda: _show_differences(found))
    if found:
        raise TargetMissedError(f"{existing} is out of date: {len(found)} values differ", "run it without --check")


def _show_differences(found: list[Difference]) -> None:
    if found:
        table(["value", "<in the file", "<now"], [(each.key, each.old, each.new) for each in found])
    else:
        print("up to date")
