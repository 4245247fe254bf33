"""`llmctl doctor`: what this machine has, and what a recipe would need that it has not."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli.arguments import JsonOption, RecipeArgument, open_recipe
from toolkit.cli.output import WIDTH, emit, table

if TYPE_CHECKING:
    from toolkit.backends import Check

StrictOption = Annotated[bool, typer.Option("--strict", help="Exit 3 where something is missing.")]


def command(
    recipe: RecipeArgument = None,  # type: ignore[assignment]
    strict: StrictOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check this machine, and with RECIPE whether that recipe can be used on it.

    Says what is missing and what to do about it. A recipe for hardware that is elsewhere is fine
    (exit 0), unless
    --strict; a recipe that is wrong is an error (exit 2).
    """
    from toolkit.deploy.doctor import check_engine, check_machine, check_recipe, missing
    from toolkit.engines.devices import find_devices
    from toolkit.errors import EngineError

    loaded = open_recipe(recipe) if recipe else None
    devices = find_devices()
    checks = check_machine(devices, Path.cwd())
    if loaded:
        checks += check_recipe(loaded, devices)
    checks += check_engine(loaded, devices)
    absent = missing(checks)
    result = {"recipe": loaded.name if loaded else None, "usable": not absent, "checks": checks}
    emit(as_json, result, lambda: _show(checks, loaded.name if loaded else ""))
    if strict and absent:
        raise EngineError(
            f"missing: {', '.join(check.name for check in absent)}",
            "run it without --strict for details",
        )


def _show(checks: list[Check], recipe: str) -> None:
    table(["check", "", "found"], [(check.name, check.status, _found(check)) for check in checks])
    absent = [check.name for check in checks if check.status == "missing"]
    subject = f"recipe {recipe}" if recipe else "this machine"
    if not absent:
        print(f"{subject}: ready" + (" to be used on this machine" if recipe else ""))
    elif recipe:
        print(fill(f"{subject}: valid; missing on this machine: {', '.join(absent)}", WIDTH))
    else:
        print(f"{subject}: missing: {', '.join(absent)}")


def _found(check: Check) -> str:
    return f"{check.found}\n-> {check.remedy}" if check.remedy else check.found
