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
    data = parse_json(text, file, hint)
    try:
        return model.model_validate_json(text, strict=True)
    except ValidationError as error:
        kind = _other_kind(model, data, kinds)
        if kind:
            raise InputError(f"{file.name}: a {kind} file, not a {model.__name__.lower()} file", hint) from None
        lines = [f"{file.name}: {line}" for line in problems(error, model, data)]
        raise InputError("\n".join(lines), hint) from None


def parse_json(text: str | bytes, file: Path, hint: str = "") -> object:
    """What JSON says, each key once. `InputError`, in one line, for what is not JSON in UTF-8."""

    def no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
        content = dict(pairs)
        if len(content) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise InputError(f"{file.name}: the key {twice[:80]!r} is there twice", hint)
        return content

    try:
        decoded = text.decode() if isinstance(text, bytes) else text
        if not decoded.strip():
            raise InputError(f"{file.name}: empty", hint)
        data: object = json.loads(decoded, object_pairs_hook=no_duplicates)
    except UnicodeDecodeError as error:
        raise InputError(f"{file.name}: not text: byte {error.start + 1} is not UTF-8", hint) from None
    except ValueError as error:
        raise InputError(f"{file.name}: not JSON: {error}", hint) from None
    except RecursionError:
        raise InputError(f"{file.name}: nested too deep", hint) from None
    return data


def _other_kind(model: type[BaseModel], data: object, kinds: Sequence[type[BaseModel]]) -> str:
    """'fit' for a fit.json, also of another version, that was given where another file is wanted, '' otherwise."""
    if not isinstance(data, dict):
        return ""

    def likeness(kind: type[BaseModel]) -> float:  # the keys they share, of all that either has
        return len(data.keys() & kind.model_fields.keys()) / len(data.keys() | kind.model_fields.keys())

    nearest = max([model, *kinds], key=likeness)
    return nearest.__name__.lower() if nearest is not model and likeness(nearest) >= ALIKE else ""
