"""Finding what ships with the package beside its code: recipes, and templates of files and pages."""

from __future__ import annotations

from pathlib import Path

import toolkit


def shipped_recipes() -> Path:
    """The folder of recipes inside the installed package, or the repository's in a source tree."""
    return _shipped("recipes")


def shipped_templates() -> Path:
    """The same of templates."""
    return _shipped("templates")


def _shipped(kind: str) -> Path:
    package = Path(toolkit.__file__).parent
    installed = package / "_data" / kind
    return installed if installed.is_dir() else package.parent / kind
