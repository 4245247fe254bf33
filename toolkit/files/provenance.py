"""What a file was made from: recorded when it is written, compared when it is read.

Of a recipe, each section is recorded by its content: a new latency target makes a tuning stale, not a profile, and a
comment makes nothing stale.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel

from toolkit.errors import InputError, StaleError
from toolkit.files.envelope import Envelope, Input
from toolkit.files.recipes import load_recipe
from toolkit.files.validate import read_bytes, validate

AnyPath = str | os.PathLike[str]
WORKFLOW_ROLES = ("profile", "fit", "tuning", "plan")


class _MadeFrom(BaseModel):
    """Any workflow file, as far as its inputs go."""

    inputs: dict[str, Input]


def digest(path: AnyPath) -> Input:
    """A file's name and the sha256 of its bytes."""
    file = Path(path)
    try:
        with file.open("rb") as stream:
            return Input(name=file.name, sha256=hashlib.file_digest(stream, "sha256").hexdigest())
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from None


def record_inputs(inputs: Mapping[str, AnyPath]) -> dict[str, Input]:
    """Role to input, for `Envelope.inputs`. What workflow files among them were made from comes along."""
    recorded: dict[str, Input] = {}
    for role, path in inputs.items():  # of a fleet's further kinds (`fit.2`) the files themselves suffice
        if role in WORKFLOW_ROLES:
            recorded |= validate(_MadeFrom, read_bytes(Path(path)), Path(path), "").inputs
    return recorded | {role: _digest_as(role, path) for role, path in inputs.items()}


def _digest_as(role: str, path: AnyPath) -> Input:
    found = digest(path)
    return found.model_copy(update={"sections": _section_digests(path)}) if _is_recipe(role) else found


def _is_recipe(role: str) -> bool:
    return role == "recipe" or role.startswith("recipe.")


def _section_digests(path: AnyPath) -> dict[str, str]:
    """The sha256 of each section's content. What equals its default does not count, so that new keys age no file."""
    sections = load_recipe(path).model_dump(mode="json", exclude_defaults=True)
    return {name: hashlib.sha256(_canonical(content)).hexdigest() for name, content in sections.items()}


def _canonical(content: object) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def check_input(content: Envelope, file: Path, role: str, source: Path) -> None:
    """`StaleError` where `source` is not what `content`, read from `file`, was made from under `role`.

    It says whether that is another recipe, or the same one, changed since.
    """
    recorded = content.inputs.get(role)
    if recorded is None:
        raise StaleError(f"{file.name}: does not say from which {role} it was made", f"make it with: {content.remake}")
    if _is_recipe(role) and recorded.sections and content.recipe_sections:
        _check_sections(content, file, recorded, source)
        return
    now = digest(source)
    if now.sha256 != recorded.sha256:
        same_name = now.name == recorded.name
        changed = "has changed since" if same_name else f"is not {recorded.name}, which it was made from"
        digests = f"(sha256 {recorded.sha256[:12]}, now {now.sha256[:12]})"
        raise StaleError(
            f"{file.name} is stale: its {role} {now.name} {changed} {digests}", f"make it again: {content.remake}"
        )


def _check_sections(content: Envelope, file: Path, recorded: Input, source: Path) -> None:
    now = _section_digests(source)
    changed = [name for name in content.recipe_sections if now.get(name) != recorded.sections.get(name)]
    if not changed:
        return
    remake = content.remeasure or content.remake
    if now["name"] != recorded.sections.get("name"):
        made_for = getattr(content, "recipe_name", recorded.name)
        name = load_recipe(source).name
        raise StaleError(f"{file.name} is of recipe '{made_for}', not '{name}'", f"make one of '{name}': {remake}")
    names = ", ".join(f"'{name}'" for name in changed)
    raise StaleError(
        f"{file.name} is stale: {names} of {source.name} changed since it was made from {recorded.name}",
        f"make it again: {remake}",
    )
