"""A folder of rendered files: writing it without losing edits, and comparing it with new files.

`rendered.json` in it lists the rendered files with their sha256. A file with content that is
neither the recorded nor the new one was changed by hand: it is kept, and the error names it.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import toolkit
from toolkit.deploy.order import inside
from toolkit.errors import InputError
from toolkit.files.io import write_file, write_text
from toolkit.files.strict import Strict, read_bytes, validate

MANIFEST = "rendered.json"
MAX_NAMES = 3  # in an error; the other files are counted


class Manifest(Strict):
    """rendered.json."""

    schema_version: Literal[1] = 1
    tool_version: str
    target: str
    name: str
    made_from: dict[str, str]
    files: dict[str, str]


@dataclass(frozen=True, slots=True)
class Change:
    """A file that differs from the one that would be rendered, with a unified diff."""

    file: str
    diff: str


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of `folder`; None where nothing was rendered to it."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    return validate(Manifest, read_bytes(path), path, "render to another folder")


def changes(files: Mapping[str, str], folder: Path) -> list[Change]:
    """The changes that `write` would make, also to files that it would remove."""
    manifest = read_manifest(folder)
    gone = [name for name in manifest.files if name not in files] if manifest else []
    found = [_change(inside(folder, name), name, content) for name, content in files.items()]
    found += [
        _change(inside(folder, name), name, "") for name in gone if inside(folder, name).exists()
    ]
    return [change for change in found if change.diff]


def write(files: Mapping[str, str], folder: Path, manifest: Manifest, *, force: bool) -> None:
    """Write all files, each atomically, then the manifest; remove files of an earlier rendering.

    Unless `force`, files that were changed by hand raise `InputError` before anything is written.
    """
    before = read_manifest(folder)
    known = before.files if before else {}
    edited = []
    for name, content in {**dict.fromkeys(known, ""), **files}.items():
        path = inside(folder, name)
        expected = (known.get(name, ""), digest(content.encode()))
        if path.exists() and digest(read_bytes(path)) not in expected:
            edited.append(name)
    if edited and not force:
        more = f" and {len(edited) - MAX_NAMES} more" if len(edited) > MAX_NAMES else ""
        names = ", ".join(str(folder / name) for name in edited[:MAX_NAMES])
        raise InputError(
            f"changed by hand since they were rendered: {names}{more}",
            "see what differs with --check; --force writes over them",
        )
    mask = os.umask(0o022)  # the mask can only be read by setting it
    os.umask(mask)
    for name, content in files.items():
        path = inside(folder, name)
        write_text(path, content)
        if path.suffix == ".sh":
            path.chmod(path.stat().st_mode | 0o111 & ~mask)
    for name in known.keys() - files.keys():
        inside(folder, name).unlink(missing_ok=True)
    write_file(manifest, folder / MANIFEST)


def manifest_of(
    files: Mapping[str, str], target: str, name: str, made_from: Mapping[str, str]
) -> Manifest:
    """The manifest of `files`."""
    return Manifest(
        tool_version=toolkit.__version__,
        target=target,
        name=name,
        made_from=dict(made_from),
        files={name: digest(content.encode()) for name, content in files.items()},
    )


def digest(content: bytes) -> str:
    """sha256, in hex."""
    return hashlib.sha256(content).hexdigest()


def _change(path: Path, name: str, content: str) -> Change:
    old = read_bytes(path).decode(errors="replace") if path.exists() else ""
    lines = difflib.unified_diff(
        old.splitlines(keepends=True),
        content.splitlines(keepends=True),
        f"{name} (there)",
        f"{name} (rendered)",
    )
    whole = (ln if ln.endswith("\n") else f"{ln}\n\\ no newline at the end\n" for ln in lines)
    return Change(name, "".join(whole))
