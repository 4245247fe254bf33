"""Finding what ships beside the code: recipes, profiles with their fits, templates of files and
pages.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection
from pathlib import Path

import toolkit
from toolkit.errors import InputError, nearest
from toolkit.files.recipe import NAME_PATTERN, Recipe
from toolkit.files.strict import load_yaml, validate


def shipped_recipes() -> Path:
    """The folder of recipes inside the installed package, or the repository's in a source tree."""
    return _shipped("recipes")


def shipped_profiles() -> Path:
    """The same of profiles: a folder for each recipe, with profile.json and fit.json."""
    return _shipped("profiles")


def shipped_templates() -> Path:
    """The same of templates."""
    return _shipped("templates")


def _shipped(kind: str) -> Path:
    package = Path(toolkit.__file__).parent
    installed = package / "_data" / kind
    return installed if installed.is_dir() else package.parent / kind


# Finding and loading recipes.

AnyPath = str | os.PathLike[str]
FORMER_SUFFIX = "-vllm"  # of the recipes whose names are bare now


def is_recipe(source: AnyPath) -> bool:
    """Whether a command that takes a plan or a recipe was given a recipe: a name, YAML, or JSON
    that has a model.

    JSON that is not there or cannot be read is left for whoever reads it as a plan to say.
    """
    path = Path(source)
    if path.suffix != ".json":
        return True
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "model" in content


def recipe_path(recipe: AnyPath) -> Path:
    """A recipe's file: a path that exists, or the bare name of a shipped recipe. `InputError` for
    neither.
    """
    path = Path(recipe)
    if path.is_file():
        return path
    text = os.fspath(recipe)
    if text and path.exists():
        raise InputError(
            f"{text}: {'a folder' if path.is_dir() else 'a device or pipe'}, not a recipe"
        )
    if os.sep in text or path.suffix in (".yaml", ".yml"):
        raise InputError(
            f"{text}: no such file",
            f"shipped recipes have bare names; {_nearest_recipe(path.stem)}",
        )
    if not re.fullmatch(NAME_PATTERN, text):
        raise InputError(
            f"{text!r}: neither a file nor a recipe's name", f"names match {NAME_PATTERN}"
        )
    shipped = shipped_recipes() / f"{text}.yaml"
    if not shipped.is_file():
        raise InputError(f"{text}: no such recipe", _nearest_recipe(text))
    return shipped


def shipped_names() -> list[str]:
    """The names of the recipes that ship."""
    return sorted(path.stem for path in shipped_recipes().glob("*.yaml"))


def _nearest_recipe(name: str) -> str:
    return nearest_shipped(name, shipped_names())


def nearest_shipped(name: str, known: Collection[str]) -> str:
    """A hint for a `name` that is not among the `known` shipped ones: its new name, or the nearest."""
    bare = name.removesuffix(FORMER_SUFFIX)
    if bare != name and bare in known:
        return f"it is called '{bare}' now: bare names are the recipes for vLLM"
    return nearest(name, known)


def siblings(recipe: Recipe) -> list[Path]:
    """The shipped recipes that serve `recipe`'s model on its GPU with another engine, by name.

    None for a CPU: that two CPUs are the same hardware is more than a recipe says.
    """
    if recipe.hardware.device == "cpu":
        return []
    return [
        path
        for path in sorted(shipped_recipes().glob("*.yaml"))
        if _is_sibling(load_recipe(path), recipe)
    ]


def _is_sibling(shipped: Recipe, recipe: Recipe) -> bool:
    return (
        shipped.engine.name != recipe.engine.name
        and _served(shipped) == _served(recipe)
        and shipped.model.max_model_len >= recipe.model.max_model_len
    )


def _served(recipe: Recipe) -> tuple[str, str, str, str, int]:
    model, hardware = recipe.model, recipe.hardware
    parallel = recipe.engine.tensor_parallel_size
    return model.source, model.dtype, hardware.device, hardware.name, parallel


def load_recipe(path: AnyPath) -> Recipe:
    """The recipe at `path`, or the shipped one of that name.

    Raises `InputError`: no such recipe, not YAML, or keys and values that are not a recipe's, a line for each of the
    first three. Policies are checked by those who run them: this floor does not know them.
    """
    file = recipe_path(path)
    data = load_yaml(file)
    if not isinstance(data, dict):
        shown = "empty" if data is None else "a list" if isinstance(data, list) else "one value"
        raise InputError(
            f"{file.name}: {shown}, not a mapping",
            "a recipe starts with `name:`; see docs/recipes.md",
        )
    if "fleet" in data:
        raise InputError(
            f"{file.name}: a fleet, not a recipe",
            "give one of the recipes that it names; see docs/fleets.md",
        )
    # Through JSON, because pydantic's strict mode then takes lists for tuples, and still no "5" for
    # 5.
    return validate(Recipe, json.dumps(data), file, "see docs/recipes.md for every key")
