"""What predictions from a fit rest on, said wherever they are shown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.cli.output import note

if TYPE_CHECKING:
    from toolkit.files.fit import Fit

VALIDATION = "validation.json"  # beside the fit that it is about


def note_basis(fit: Fit, path: Path) -> None:
    """Say that nothing was measured, where that is so, and how good predictions from `fit`, read from `path`, were."""
    if fit.engine.analytic:
        note(f"analytic, nothing of this was measured: {fit.engine.analytic}")
    _note_validation(path)


def _note_validation(fit: Path) -> None:
    from toolkit.errors import InputError
    from toolkit.files.io import read_file
    from toolkit.files.provenance import digest
    from toolkit.files.validation import Validation

    beside = fit.with_name(VALIDATION)
    if not beside.is_file():
        return
    try:
        found = read_file(Validation, beside)
    except InputError as error:
        note(f"{beside.name} is not used: {error.message}")
        return
    about = found.inputs.get("fit")
    if about is None or about.sha256 != digest(fit).sha256:
        note(f"{beside.name} is not used: it is about another fit")
        return
    note(found.summary())
