"""The arguments and options that several commands share, so that they read and behave alike."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from toolkit.files.recipe import Recipe


def _resolve_recipe(recipe: Path | None) -> Path | None:
    from toolkit.files.io import recipe_path

    return None if recipe is None else recipe_path(recipe)


RecipeArgument = Annotated[
    Path,
    typer.Argument(metavar="RECIPE", callback=_resolve_recipe, help="A recipe's file, or the name of a shipped one."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout; notes go to stderr.")]


def open_recipe(path: Path) -> Recipe:
    """A recipe, its policy checked against the registry. `InputError` naming what is right."""
    from toolkit.errors import InputError
    from toolkit.files.io import load_recipe
    from toolkit.sched.policies import make_policy

    recipe = load_recipe(path)
    try:
        make_policy(recipe.policy.name, recipe.policy.parameters)
    except InputError as error:
        raise InputError(f"{path.name}: policy: {error.message}", error.hint) from None
    return recipe
