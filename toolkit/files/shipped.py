"""Finding what ships beside the code: recipes, profiles with their fits, templates of files and pages."""

from __future__ import annotations

from pathlib import Path

import toolkit


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
