"""`llmctl doctor`, `recipes`, `policies` and `schema`: what this machine and this version of llmctl
have.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli.arguments import JsonOption, RecipeArgument, open_recipe
from toolkit.cli.output import WIDTH, aligned, emit, table
from toolkit.errors import EngineError
from toolkit.sched.catalogue import ABOUT

if TYPE_CHECKING:
    from toolkit.backends import Check

SIMULATED = "in simulations only: they need the future"
StrictOption = Annotated[
    bool, typer.Option("--strict", help="Exit with 3 where something is missing.")
]


def doctor(
    recipe: RecipeArgument = None,  # type: ignore[assignment]
    strict: StrictOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check this machine, and with RECIPE whether it can run that recipe.

    Prints what is missing and how to add it. A recipe for other hardware is valid (exit 0), except
    with --strict. A wrong recipe is an error (exit 2).
    """
    from toolkit.deploy.doctor import check_engine, check_machine, check_recipe, missing
    from toolkit.engines.devices import find_devices

    loaded = open_recipe(recipe) if recipe else None
    devices = find_devices()
    checks = check_machine(devices, Path.cwd())
    if loaded:
        checks += check_recipe(loaded, devices)
    checks += check_engine(loaded, devices)
    absent = missing(checks)
    result = {"recipe": loaded.name if loaded else None, "usable": not absent, "checks": checks}
    emit(as_json, result, lambda: _show_checks(checks, loaded.name if loaded else ""))
    if strict and absent:
        raise EngineError(
            f"missing: {', '.join(check.name for check in absent)}",
            "the table above says how to add it",
        )


def _show_checks(checks: list[Check], recipe: str) -> None:
    from toolkit.deploy.doctor import missing

    rows = [
        (one.name, one.status, f"{one.found}\n-> {one.remedy}" if one.remedy else one.found)
        for one in checks
    ]
    table(["check", "", "found"], rows)
    absent = [check.name for check in missing(checks)]
    subject = f"recipe {recipe}" if recipe else "this machine"
    if not absent:
        print(f"{subject}: ready" + (" to be used on this machine" if recipe else ""))
    elif recipe:
        print(fill(f"{subject}: valid; missing on this machine: {', '.join(absent)}", WIDTH))
    else:
        print(f"{subject}: missing: {', '.join(absent)}")


@dataclass(frozen=True, slots=True)
class RecipeLine:
    """A recipe. `fit` is the basis of its shipped fit: measured, analytic, or none."""

    name: str
    description: str
    model: str
    hardware: str
    engine: str
    policy: str
    fit: str

    @property
    def subject(self) -> str:
        """The model and its hardware."""
        return f"{self.model} on {self.hardware}"


def recipes(as_json: JsonOption = False) -> None:
    """List the recipes that ship: model, hardware, engine, policy, and the basis of each recipe's
    fit.

    An analytic fit was computed from data sheets; a measured one comes from a profile of that
    hardware.
    """
    from toolkit.files.shipped import shipped_names

    lines = sorted(
        (_recipe_line(name) for name in shipped_names()), key=lambda line: (line.subject, line.name)
    )
    emit(as_json, {"recipes": lines}, lambda: _show_recipes(lines))


def _recipe_line(name: str) -> RecipeLine:
    from toolkit.files.fit import Fit
    from toolkit.files.io import read_file, shipped_fit
    from toolkit.files.shipped import load_recipe

    recipe, path = load_recipe(name), shipped_fit(name)
    basis = (
        "none"
        if path is None
        else "analytic"
        if read_file(Fit, path).engine.analytic
        else "measured"
    )
    source = recipe.model.source
    model = (
        f"random {recipe.model.config['model_type']}"
        if source == "random"
        else source.rpartition("/")[2]
    )
    policy = recipe.policy.name
    return RecipeLine(
        name, recipe.description, model, recipe.hardware.name, recipe.engine.name, policy, basis
    )


def _show_recipes(lines: list[RecipeLine]) -> None:
    heads = ("recipe", "engine", "policy", "fit")
    cells = [(f"  {line.name}", line.engine, line.policy, line.fit) for line in lines]
    show = aligned([heads, *cells])
    show(heads)
    for subject, group in groupby(zip(lines, cells, strict=True), key=lambda pair: pair[0].subject):
        print(f"\n{subject}")
        for _, row in group:
            show(row)


@dataclass(frozen=True, slots=True)
class PolicyLine:
    """A policy. `engines` are those that can serve with it; none: it runs in simulations only."""

    name: str
    does: str
    source: str
    engines: list[str]

    @property
    def live(self) -> bool:
        """Whether a server can run it."""
        return bool(self.engines)


def policies(as_json: JsonOption = False) -> None:
    """List the policies: what each does, which paper or system describes it, and which engines run
    it.

    A policy that needs the future runs in simulations only. docs/explanation/policies.md has the
    details and the parameters.
    """
    from toolkit.sched.policies import KNOWN, engines_for

    lines = [
        PolicyLine(name, ABOUT[name].does, ABOUT[name].source, engines_for(name)) for name in KNOWN
    ]
    found = [asdict(one) | {"live": one.live} for one in lines]
    emit(as_json, {"policies": found}, lambda: _show_policies(lines))


def _show_policies(lines: list[PolicyLine]) -> None:
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for one in sorted(lines, key=lambda line: not line.live):
        groups.setdefault(tuple(one.engines), []).append((f"  {one.name}", one.does, one.source))
    heads = ("policy", "what it does", "described by")
    show = aligned([heads, *(row for rows in groups.values() for row in rows)])
    show(heads)
    for engines, rows in groups.items():
        where = f"live on {', '.join(engines)}" if engines else SIMULATED
        print(f"\n{where}")
        for row in rows:
            show(row)


def schema(as_json: JsonOption = False) -> None:
    """Print the JSON Schema of recipes, which is also in recipes/recipe.schema.json; --json prints
    it on one line.
    """
    from toolkit.files.recipe import recipe_schema

    print(json.dumps(recipe_schema(), indent=None if as_json else 2))
