"""How the workflow's files are read and written: strictly, atomically, with the digests of what they were made from.

This is the room's front door; what it imports under the same name is meant to be imported from here.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import secrets
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TypedDict, TypeVar

from pydantic import BaseModel

import toolkit
from toolkit.errors import InputError
from toolkit.files.envelope import Envelope, Environment, Input
from toolkit.files.fit import Fit
from toolkit.files.plan import Plan
from toolkit.files.profile import Profile
from toolkit.files.provenance import AnyPath, check_input, digest, record_inputs
from toolkit.files.recipe import Recipe
from toolkit.files.recipes import load_recipe, recipe_path
from toolkit.files.tuning import Tuning
from toolkit.files.validate import read_bytes, validate

__all__ = [
    "Head",
    "check_writable",
    "digest",
    "environment",
    "file_text",
    "head",
    "load_recipe",
    "processor",
    "read_file",
    "recipe_path",
    "write_bytes",
    "write_file",
    "write_text",
]

DECIDING_PACKAGES = ("numba", "numpy", "optuna", "scipy", "torch", "transformers")
KINDS = (Recipe, Profile, Fit, Tuning, Plan)

EnvelopeT = TypeVar("EnvelopeT", bound=Envelope)


class Head(TypedDict):
    """The fields of `Envelope`, to be passed on as `Fit(**head(...), ...)`."""

    tool_version: str
    environment: Environment
    inputs: dict[str, Input]


def read_file(model: type[EnvelopeT], path: AnyPath, inputs: Mapping[str, AnyPath] | None = None) -> EnvelopeT:
    """The workflow file at `path`, checked against the files that it was made from.

    `inputs` maps a role ('recipe', 'profile', ...) to the file that must be the one recorded under it: else
    `StaleError`, naming what changed and the command that remakes `path`. Raises `InputError` for a file that is
    missing or of another kind.
    """
    file = Path(path)
    remade = f"make it with: {model.remake}"
    content = validate(model, read_bytes(file, remade), file, remade, KINDS)
    for role, source in (inputs or {}).items():
        check_input(content, file, role, Path(source))
    return content


def write_file(model: BaseModel, path: AnyPath) -> None:
    """Write a model as JSON, atomically."""
    write_text(path, file_text(model))


def file_text(model: BaseModel) -> str:
    """A model as it is written. Fields keep the model's order: the same model gives the same text."""
    return json.dumps(model.model_dump(mode="json"), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_text(path: AnyPath, text: str) -> None:
    """`write_bytes` of UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: AnyPath, content: bytes) -> None:
    """Replace a file in one step: readers see the old content or the new, also after a crash. Folders are made.

    Behind a link, the file that the link names is replaced. What is no regular file (/dev/stdout, a pipe) is written
    to: a device must never be replaced by a file.
    """
    target = Path(path).resolve()
    temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(content)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
        _sync_folder(target.parent)
    except OSError as error:
        raise _unwritable(path, error) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def check_writable(path: AnyPath) -> None:
    """`InputError` where no file can be written at `path`: asked before work whose result would be lost.

    Makes the folder, and nothing else that lasts.
    """
    target = Path(path).resolve()
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not target.exists() or target.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=target.parent):
                pass
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: AnyPath, error: OSError) -> InputError:
    return InputError(f"{os.fspath(path)}: cannot be written: {error.strerror}", "choose another place")


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable. Some file systems cannot; the content is safe there all the same."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def environment(device: str = "cpu", device_memory_bytes: int | None = None) -> Environment:
    """This machine and the versions that decide the numbers. `device` is 'cpu' or the GPU's name."""
    packages = {name: version for name in DECIDING_PACKAGES if (version := _version(name))}
    return Environment(
        python=platform.python_version(),
        platform=platform.platform(),
        processor=processor(),
        cpu_count=os.cpu_count() or 1,
        packages=packages,
        device=device,
        device_memory_bytes=device_memory_bytes,
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def processor() -> str:
    """The CPU's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def head(inputs: Mapping[str, AnyPath], device: str = "cpu", device_memory_bytes: int | None = None) -> Head:
    """The common fields of a new file: `Fit(**head(inputs={"profile": path}), ...)`.

    What the inputs were themselves made from is recorded too, so a fit knows its recipe.
    """
    return Head(
        tool_version=toolkit.__version__,
        environment=environment(device, device_memory_bytes),
        inputs=record_inputs(inputs),
    )
