"""`llmctl doctor`, `recipes` and `policies`: what this machine and this version of llmctl have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.arguments import JsonOption, RecipeArgument, open_recipe
from toolkit.cli.output import emit, paragraph, table
from toolkit.errors import EngineError
from toolkit.files.fit import Fit
from toolkit.files.io import read_file, shipped_fit
from toolkit.files.shipped import load_recipe, shipped_names
from toolkit.sched.catalogue import ABOUT

SIMULATED = "in simulations only: they need the future"


def doctor(
    recipe: RecipeArgument = None,  # type: ignore[assignment]
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 3 where something is missing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check this machine, and with RECIPE whether it can run that recipe.

    Prints what is missing and how to add it. A recipe for other hardware is valid (exit 0), except
    with --strict. A wrong recipe is an error (exit 2).
    """
    from toolkit.deploy.doctor import check_engines, check_machine, check_recipe
    from toolkit.engines.devices import find_devices

    loaded = open_recipe(recipe) if recipe else None
    devices = find_devices()
    checks = check_machine(devices, Path.cwd())
    checks += check_recipe(loaded, devices) if loaded else check_engines()
    absent = [check.name for check in checks if check.status == "missing"]

    def show() -> None:
        rows = [
            (one.name, one.status, f"{one.found}\n-> {one.remedy}" if one.remedy else one.found)
            for one in checks
        ]
        table(["check", "", "found"], rows)
        subject = f"recipe {loaded.name}" if loaded else "this machine"
        state = f"missing: {', '.join(absent)}" if absent else "ready"
        paragraph(f"{subject}: {state}")

    result = {"recipe": loaded.name if loaded else None, "usable": not absent, "checks": checks}
    emit(as_json, result, show)
    if strict and absent:
        raise EngineError(f"missing: {', '.join(absent)}", "the table above says how to add it")


def _show_groups(heads: Sequence[str], groups: Mapping[str, Sequence[Sequence[str]]]) -> None:
    """Print rows under `heads`, each group below its title; columns are aligned over all groups."""
    columns = zip(heads, *chain.from_iterable(groups.values()), strict=True)
    widths = [max(map(len, column)) for column in columns]

    def show(row: Sequence[str]) -> None:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())

    show(heads)
    for title, rows in groups.items():
        print(f"\n{title}")
        for row in rows:
            show(row)


def recipes(as_json: JsonOption = False) -> None:
    """List the recipes that ship: model, hardware, engine, policy, and the basis of each recipe's
    fit.

    An analytic fit was computed, from measured operators; a measured one comes from
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
        line = {
            "name": name,
            "description": recipe.description,
            "model": model,
            "hardware": recipe.hardware.name,
            "engine": recipe.engine.name,
            "policy": recipe.policy.name,
            "fit": basis,
        }
        lines.append(line)
    lines.sort(key=lambda line: (line["model"], line["hardware"], line["name"]))
    groups: dict[str, list[list[str]]] = {}
    for line in lines:
        cells = [f"  {line['name']}", line["engine"], line["policy"], line["fit"]]
        groups.setdefault(f"{line['model']} on {line['hardware']}", []).append(cells)
    heads = ("recipe", "engine", "policy", "fit")
    emit(as_json, {"recipes": lines}, lambda: _show_groups(heads, groups))


def policies(as_json: JsonOption = False) -> None:
    """List the policies: what each does, which paper or system describes it, and which engines run
    it.

    A policy that needs the future runs in simulations only. docs/explanation/policies.md has
    the details and the parameters.
    """
    from toolkit.sched.policies import KNOWN, engines_for

    lines = []
    groups: dict[str, list[list[str]]] = {}
    for name in KNOWN:
        about = ABOUT[name]
        engines = engines_for(name)
        line = {"name": name, "does": about.does, "source": about.source}
        lines.append(line | {"engines": engines, "live": bool(engines)})
        title = f"live on {', '.join(engines)}" if engines else SIMULATED
        groups.setdefault(title, []).append([f"  {name}", about.does, about.source])
    groups[SIMULATED] = groups.pop(SIMULATED)  # it is the last one
    heads = ("policy", "what it does", "described by")
    emit(as_json, {"policies": lines}, lambda: _show_groups(heads, groups))
