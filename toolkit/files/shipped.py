"""What ships with the code (recipes, profiles, templates), and finding and loading recipes.

A recipe is given as a path or as the bare name of a shipped recipe. Its text is checked here;
policies are checked by the commands that run them, since this floor does not know them.
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

AnyPath = str | os.PathLike[str]


def shipped_recipes() -> Path:
    """The folder of recipes inside the installed package, or the repository's in a source tree."""
    return _shipped("recipes")


def shipped_profiles() -> Path:
    """The folder of shipped profiles: a folder for each recipe, with profile.json and fit.json."""
    return _shipped("profiles")


def shipped_templates() -> Path:
    """The folder of templates of files and pages."""
    return _shipped("templates")


def _shipped(kind: str) -> Path:
    package = Path(toolkit.__file__).parent
    installed = package / "_data" / kind
    return installed if installed.is_dir() else package.parent / kind


def is_recipe(source: AnyPath) -> bool:
    """Whether `source` is a recipe rather than a plan: a name, YAML, or JSON with a `model`.

    False for JSON that is missing or unreadable: reading it as a plan then gives the error.
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
    """The file of a recipe, given as an existing path or as the bare name of a shipped recipe.

    Raises `InputError` where neither exists.
    """
    path = Path(recipe)
    if path.is_file():
        return path
    text = os.fspath(recipe)
    if text and path.exists():
        kind = "a folder" if path.is_dir() else "a device or pipe"
        raise InputError(f"{text}: {kind}, not a recipe", _made_from(path / "config.json", text))
    if os.sep in text or path.suffix in (".yaml", ".yml"):
        hint = nearest_shipped(path.stem, shipped_names())
        raise InputError(f"{text}: no such file", f"shipped recipes have bare names; {hint}")
    if not re.fullmatch(NAME_PATTERN, text):
        problem = f"{text!r}: neither a file nor a recipe's name"
        raise InputError(problem, f"names match {NAME_PATTERN}")
    shipped = shipped_recipes() / f"{text}.yaml"
    if not shipped.is_file():
        raise InputError(f"{text}: no such recipe", nearest_shipped(text, shipped_names()))
    return shipped


def _made_from(config: Path, model: str) -> str:
    """A hint for a model where a recipe is needed; '' where there is no config.json."""
    made = f"make a recipe from it: llmctl recipe new {model} --gpu GPU > recipe.yaml"
    return made if config.is_file() else ""


def shipped_names() -> list[str]:
    """The names of the shipped recipes."""
    return sorted(path.stem for path in shipped_recipes().glob("*.yaml"))


def nearest_shipped(name: str, known: Collection[str]) -> str:
    """Return a hint for an unknown `name`: the nearest, or where all are listed."""
    hint = nearest(name, known)
    return hint if hint.startswith("did you mean") else "llmctl recipes lists those that ship"


def load_recipe(path: AnyPath) -> Recipe:
    """The recipe at `path`, or the shipped recipe of that name.

    Raises `InputError` where there is no such recipe, it is not YAML, or keys or values are wrong
    (a line for each of the first three).
    """
    file = recipe_path(path)
    data = load_yaml(file)
    if not isinstance(data, dict):
        shown = "one value"
        if data is None:
            shown = "empty"
        elif isinstance(data, list):
            shown = "a list"
        hint = "a recipe starts with `name:`; see docs/reference/recipe.md"
        raise InputError(f"{file.name}: {shown}, not a mapping", hint)
    if "model" not in data and {"architectures", "model_type"} & data.keys():
        problem = f"{file.name}: a model's config, not a recipe"
        raise InputError(problem, _made_from(file, str(path)))
    # Validate as JSON: pydantic's strict mode then takes lists for tuples, but not "5" for 5.
    return validate(Recipe, json.dumps(data), file, "see docs/reference/recipe.md for every key")
