"""The traces that ship with the package; docs/traces.md has the commands that made them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from toolkit.errors import InputError, nearest
from toolkit.files.recipe import NAME_PATTERN

FOLDER = Path(__file__).parent / "data"


def trace_path(trace: str | os.PathLike[str]) -> Path:
    """A trace's file: a path that exists, or the bare name of a shipped trace. InputError for neither."""
    path = Path(trace)
    if path.is_file():
        return path
    text = os.fspath(trace)
    if path.is_dir():
        raise InputError(f"{text}: a folder, not a trace", "name a file in it")
    shipped = FOLDER / f"{text}.jsonl"
    if re.fullmatch(NAME_PATTERN, text) and shipped.is_file():
        return shipped
    hint = nearest(path.stem, shipped_traces())
    raise InputError(f"{text}: no such file, and no shipped trace has that name", hint)


def shipped_traces() -> list[str]:
    """The names of the traces that ship."""
    return sorted(file.stem for file in FOLDER.glob("*.jsonl"))
