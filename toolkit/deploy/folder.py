"""A folder of rendered files: written whole, never over what somebody edited, and compared with
what would be written.

`rendered.json` in it says which files are ours, with their sha256. A file that is there and has
another content than was rendered, then or now, was changed by hand: it stays, and the error names
it.
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
NAMED = 3  # in an error; the rest are counted


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
    """A file that differs from what would be rendered, as a unified diff; `new` where it is not
    there yet.
    """

    file: str
    diff: str


def read_manifest(folder: Path) -> Manifest | None:
    """What was rendered to `folder`; None where nothing was."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    return validate(Manifest, read_bytes(path), path, "render to another folder")


def changes(files: Mapping[str, str], folder: Path) -> list[Change]:
    """What `write` would change, file by file; files that it would remove included."""
    manifest = read_manifest(folder)
    gone = [name for name in manifest.files if name not in files] if manifest else []
    found = [_change(inside(folder, name), name, content) for name, content in files.items()]
    found += [
        _change(inside(folder, name), name, "") for name in gone if inside(folder, name).exists()
    ]
    return [each for each in found if each.diff]


def write(files: Mapping[str, str], folder: Path, manifest: Manifest, *, force: bool) -> None:
    """Write all files, each atomically, and then the manifest; what was rendered earlier and is no
    more, is removed.

    `InputError`, before anything is written, naming files that were changed by hand, unless
    `force`.
    """
    before = read_manifest(folder)
    known = before.files if before else {}
    ours = {**dict.fromkeys(known, ""), **files}
    edited = [
        name for name in ours if _edited(inside(folder, name), known.get(name, ""), ours[name])
    ]
    if edited and not force:
        more = f" and {len(edited) - NAMED} more" if len(edited) > NAMED else ""
        names = ", ".join(str(folder / name) for name in edited[:NAMED])
        raise InputError(
            f"changed by hand since they were rendered: {names}{more}",
            "see what differs with --check; --force writes over them",
        )
    for name, content in files.items():
        _write(inside(folder, name), content)
    for name in known.keys() - files.keys():
        inside(folder, name).unlink(missing_ok=True)
    write_file(manifest, folder / MANIFEST)


def manifest_of(
    files: Mapping[str, str], target: str, name: str, made_from: Mapping[str, str]
) -> Manifest:
    """The manifest of what is about to be written."""
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


def _write(path: Path, content: str) -> None:
    write_text(path, content)
    if path.suffix == ".sh":
        path.chmod(path.stat().st_mode | 0o111 & ~_umask())


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _edited(path: Path, recorded: str, content: str) -> bool:
    """Whether the file is neither what was rendered nor what will be."""
    if not path.exists():
        return False
    now = digest(read_bytes(path))
    return now not in (recorded, digest(content.encode()))


def _change(path: Path, name: str, content: str) -> Change:
    old = read_bytes(path).decode(errors="replace") if path.exists() else ""
    lines = difflib.unified_diff(
        old.splitlines(keepends=True),
        content.splitlines(keepends=True),
        f"{name} (there)",
        f"{name} (rendered)",
    )
    return Change(
        name,
        "".join(
            line if line.endswith("\n") else f"{line}\n\\ no newline at the end\n" for line in lines
        ),
    )
