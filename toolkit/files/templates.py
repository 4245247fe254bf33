"""Finding the templates and pages that ship with the package."""

from __future__ import annotations

from pathlib import Path

import toolkit


def shipped_templates() -> Path:
    """The folder of templates inside the installed package, or the repository's in a source tree."""
    package = Path(toolkit.__file__).parent
    installed = package / "_data" / "templates"
    return installed if installed.is_dir() else package.parent / "templates"
