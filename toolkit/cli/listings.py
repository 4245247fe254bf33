"""`llmctl doctor`, `recipes`, `policies` and `schema`: what this machine and this version of llmctl
have.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.arguments import JsonOption, RecipeArgument, open_recipe
from toolkit.cli.output import aligned, emit, paragraph, table
from toolkit.errors import EngineError
from toolkit.files.fit import Fit
from toolkit.files.io import read_file, shipped_fit
from toolkit.files.recipe import recipe_schema
from toolkit.files.shipped import load_recipe, shipped_names
from toolkit.sched.catalogue import ABOUT

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
    from toolkit.deploy.doctor import check_engine, check_machine, check_recipe
    from toolkit.engines.devices import find_devices

    loaded = open_recipe(recipe) if recipe else None
    devices = find_devices()
    checks = check_machine(devices, Path.cwd())
    if loaded:
        checks += check_recipe(loaded, devices)
    checks += check_engine(loaded, devices)
    absent = [check.name for check in checks if check.status == "missing"]

    def show() -> None:
        rows = [
            (one.name, one.status, f"{one.found}\n-> {one.remedy}" if one.remedy else one.found)
            for one in checks
        ]
        table(["check", "", "found"], rows)
        subject = f"recipe {loaded.name}" if loaded else "this machine"
        if not absent:
            print(f"{subject}: ready" + (" to be used on this machine" if loaded else ""))
        elif loaded:
            paragraph(f"{subject}: valid; missing on this machine: {', '.join(absent)}")
        else:
            print(f"{subject}: missing: {', '.join(absent)}")

    result = {"recipe": loaded.name if loaded else None, "usable": not absent, "checks": checks}
    emit(as_json, result, show)
    if strict and absent:
        raise EngineError(f"missing: {', '.join(absent)}", "the table above says how to add it")


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

    An analytic fit was computed, from measured operators or data sheets; a measured one comes from
    a profile of that hardware.
    """
    lines = []
    for name in shipped_names():
        recipe = load_recipe(name)
        fit = shipped_fit(name)
        basis = "none"
        if fit is not None:
            basis = "analytic" if read_file(Fit, fit).engine.analytic else "measured"
        source = recipe.model.source
        model = source.rpartition("/")[2]
        if source == "random":
            model = f"random {recipe.model.config['model_type']}"
        machine = recipe.hardware.name
        engine = recipe.engine.name
        policy = recipe.policy.name
        lines.append(RecipeLine(name, recipe.description, model, machine, engine, policy, basis))
    lines.sort(key=lambda line: (line.subject, line.name))
    heads = ("recipe", "engine", "policy", "fit")
    cells = [(f"  {line.name}", line.engine, line.policy, line.fit) for line in lines]

    def show_all() -> None:
        show = aligned([heads, *cells])
        show(heads)
        pairs = zip(lines, cells, strict=True)
        for subject, group in groupby(pairs, key=lambda pair: pair[0].subject):
            print(f"\n{subject}")
            for _, row in group:
                show(row)

    emit(as_json, {"recipes": lines}, show_all)


@dataclass(frozen=True, slots=True)
class PolicyLine:
    """A policy, and the engines that can serve with it. Without any it is not `live`."""

    name: str
    does: str
    source: str
    engines: list[str]
    live: bool


def policies(as_json: JsonOption = False) -> None:
    """List the policies: what each does, which paper or system describes it, and which engines run
    it.

    A policy that needs the future runs in simulations only. `llmctl docs explanation/policies` has
    the details and the parameters.
    """
    from toolkit.sched.policies import KNOWN, engines_for

    lines = []
    for name in KNOWN:
        about = ABOUT[name]
        engines = engines_for(name)
        lines.append(PolicyLine(name, about.does, about.source, engines, bool(engines)))

    def show_all() -> None:
        groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
        for one in sorted(lines, key=lambda line: not line.live):
            cells = (f"  {one.name}", one.does, one.source)
            groups.setdefault(tuple(one.engines), []).append(cells)
        heads = ("policy", "what it does", "described by")
        show = aligned([heads, *(row for rows in groups.values() for row in rows)])
        show(heads)
        for engines, rows in groups.items():
            print(f"\nlive on {', '.join(engines)}" if engines else f"\n{SIMULATED}")
            for row in rows:
                show(row)

    emit(as_json, {"policies": lines}, show_all)


def schema(as_json: JsonOption = False) -> None:
    """Print the JSON Schema of recipes, which is also in recipes/recipe.schema.json; --json prints
    it on one line.
    """
    print(json.dumps(recipe_schema(), indent=None if as_json else 2))
