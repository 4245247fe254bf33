"""Finding fits: files, and those that ship under the names of their recipes."""

from __future__ import annotations

import os
import re
from pathlib import Path

from toolkit.errors import InputError
from toolkit.files.fit import Fit
from toolkit.files.io import read_file
from toolkit.files.plan import Kind
from toolkit.files.provenance import check_input
from toolkit.files.recipe import NAME_PATTERN, Recipe
from toolkit.files.recipes import load_recipe, nearest_shipped, siblings
from toolkit.files.shipped import shipped_profiles, shipped_recipes

AnyPath = str | os.PathLike[str]
FIT = "fit.json"


def fit_path(fit: AnyPath) -> Path:
    """A fit's file: a path, or the bare name of a recipe whose fit ships. `InputError` for a name of neither.

    What looks like a file and is not there is left for whoever reads it to say.
    """
    path, text = Path(fit), os.fspath(fit)
    if path.exists() or path.suffix == ".json" or not re.fullmatch(NAME_PATTERN, text):
        return path
    return shipped_fit(text) or _unknown(text)


def shipped_fits() -> list[str]:
    """The names of the recipes whose fits ship."""
    return sorted(path.parent.name for path in shipped_profiles().glob(f"*/{FIT}"))


def shipped_fit(recipe: str) -> Path | None:
    """The fit that ships for the shipped recipe of this name; None: there is none."""
    path = shipped_profiles() / recipe / FIT
    return path if re.fullmatch(NAME_PATTERN, recipe) and path.is_file() else None


def find_recipe(fit: Fit, path: Path) -> Recipe | None:
    """The recipe that the fit at `path` was made from, by the name of its file; None: it is not found.

    Of a fit that ships it is the recipe that ships; else it lies beside the fit, in the working
    folder, or ships. One whose measured sections have changed since is not the fit's.
    """
    shipped = shipped_recipes() / f"{fit.recipe_name}.yaml"
    made_from = fit.inputs.get("recipe")
    if made_from is None or not re.fullmatch(NAME_PATTERN, fit.recipe_name):
        return None
    name = Path(made_from.name).name
    own = path.resolve().is_relative_to(shipped_profiles().resolve())
    for candidate in [shipped] if own else [path.parent / name, Path(name), shipped]:
        if candidate.is_file():
            try:
                check_input(fit, path, "recipe", candidate)
                return load_recipe(candidate)
            except InputError:
                continue
    return None


def shipped_siblings(recipe: Recipe) -> list[Kind]:
    """The recipes that ship for `recipe`'s model and GPU with another engine, each with its shipped fit."""
    found = [(path, shipped_fit(path.stem)) for path in siblings(recipe)]
    kinds = [(load_recipe(path), read_file(Fit, fit, {"recipe": path})) for path, fit in found if fit]
    return [Kind(recipe=sibling, fit=fit, workers=sibling.workers) for sibling, fit in kinds]


def _unknown(name: str) -> Path:
    raise InputError(f"{name}: no such file, and no fit of that name ships", nearest_shipped(name, shipped_fits()))
