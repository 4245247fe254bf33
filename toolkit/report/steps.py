"""The commands of the workflow, as they are typed: each command ends with the next one, and the
first screen and the report name it.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from toolkit.files.io import FIT, shipped_fit
from toolkit.files.shipped import shipped_recipes
from toolkit.files.strict import Envelope

OWN_TRAFFIC = "for your own traffic: --trace, a log of requests in any known form"


def typed(*words: object) -> str:
    """Return a command line of llmctl. A recipe or a fit that ships is written by its name."""
    return shlex.join(["llmctl", *map(_typed_word, words)])


def _typed_word(word: object) -> str:
    if not isinstance(word, Path):
        return str(word)
    if word.parent == shipped_recipes():
        return word.stem
    return word.parent.name if word == shipped_fit(word.parent.name) else str(word)


def fit_option(recipe: Path, fit: Path | None) -> list[object]:
    """Return the option that names the fit; nothing where commands find it by themselves."""
    found = fit in (None, Path(FIT), shipped_fit(recipe.stem))
    return [] if found else ["--fit", fit]


def recipe_of(content: Envelope, folder: Path) -> Path:
    """Return the file of the recipe that a file in `folder` was made from: beside it, or the
    shipped one; where both are gone, its name.
    """
    recorded = content.inputs.get("recipe")
    name = Path(recorded.name if recorded else "recipe.yaml")
    places = (folder / name.name, shipped_recipes() / name.name)
    return next((place for place in places if place.is_file()), Path(name.name))
