"""From text to a checked model, with errors that a person can act on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from toolkit.errors import InputError
from toolkit.files.problems import problems

MAX_FILE_BYTES = 1 << 28
ALIKE = 0.7  # of the keys; a fit and a profile, the most alike of different kinds, share two thirds

ModelT = TypeVar("ModelT", bound=BaseModel)


def read_bytes(file: Path, hint: str = "") -> bytes:
    """A whole file. `InputError` where it cannot be read or is too large to be one of ours."""
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}", hint) from None
    if len(content) > MAX_FILE_BYTES:
        raise InputError(f"{file}: larger than {MAX_FILE_BYTES >> 20} MiB", hint)
    return content


def validate(
    model: type[ModelT], text: str | bytes, file: Path, hint: str, kinds: Sequence[type[BaseModel]] = ()
) -> ModelT:
    """`text` as a `model`. `InputError` with a line for each of the first problems, naming key, value and remedy.

    `kinds` are what `file` might be instead: where it is, the error says so.
    """
    try:
        return model.model_validate_json(text, strict=True)
    except ValidationError as error:
        try:
            data = json.loads(text)
        except ValueError as reason:
            raise InputError(f"{file.name}: {_no_json(text, reason)}", hint) from None
        kind = _other_kind(model, data, kinds)
        if kind:
            raise InputError(f"{file.name}: a {kind} file, not a {model.__name__.lower()} file", hint) from None
        lines = [f"{file.name}: {line}" for line in problems(error, model, data)]
        raise InputError("\n".join(lines), hint) from None


def _no_json(text: str | bytes, reason: ValueError) -> str:
    """Why a text is no JSON, in words for people."""
    if not text.strip():
        return "empty"
    if isinstance(reason, UnicodeDecodeError):
        return f"not text: byte {reason.start + 1} is not UTF-8"
    return f"not JSON: {reason}"


def _other_kind(model: type[BaseModel], data: object, kinds: Sequence[type[BaseModel]]) -> str:
    """'fit' for a fit.json, also of another version, that was given where another file is wanted, '' otherwise."""
    if not isinstance(data, dict):
        return ""

    def likeness(kind: type[BaseModel]) -> float:  # the keys they share, of all that either has
        return len(data.keys() & kind.model_fields.keys()) / len(data.keys() | kind.model_fields.keys())

    nearest = max([model, *kinds], key=likeness)
    return nearest.__name__.lower() if nearest is not model and likeness(nearest) >= ALIKE else ""
