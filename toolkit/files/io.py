"""Reading and writing workflow files: strictly, atomically, with digests of their inputs.

What a file was made from is recorded when it is written and compared when it is read. A recipe is
recorded by the content of each section, so a new latency target makes a tuning stale but not a
profile, and a comment makes nothing stale. After that come the head that all files share, finding
fits, shipped ones too, by the names of their recipes, and logs of whole lines.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import platform
import re
import secrets
import tempfile
from collections.abc import Collection, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TypedDict, TypeVar

from pydantic import BaseModel

import toolkit
from toolkit.errors import InputError, StaleError
from toolkit.files.fit import Fit
from toolkit.files.plan import Plan
from toolkit.files.profile import Profile
from toolkit.files.recipe import NAME_PATTERN, Recipe
from toolkit.files.shipped import (
    AnyPath,
    load_recipe,
    nearest_shipped,
    shipped_profiles,
    shipped_recipes,
)
from toolkit.files.strict import Envelope, Environment, Input, read_bytes, validate
from toolkit.files.tuning import Tuning
from toolkit.interrupts import held

WORKFLOW_ROLES = ("profile", "fit", "tuning", "plan")
DECIDING_PACKAGES = ("numba", "numpy", "optuna", "scipy", "torch", "transformers")
KINDS = (Recipe, Profile, Fit, Tuning, Plan)
FIT = "fit.json"

EnvelopeT = TypeVar("EnvelopeT", bound=Envelope)


class _MadeFrom(BaseModel):
    """The `inputs` of any workflow file, without the rest of it."""

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
    """Role to input, for `Envelope.inputs`, with the inputs of the workflow files among them."""
    inherited: dict[str, Input] = {}
    recorded: dict[str, Input] = {}
    for role, path in inputs.items():
        if role in WORKFLOW_ROLES:
            inherited |= validate(_MadeFrom, read_bytes(Path(path)), Path(path), "").inputs
        sections = _section_digests(path) if role == "recipe" else {}
        recorded[role] = digest(path).model_copy(update={"sections": sections})
    return inherited | recorded


def _section_digests(path: AnyPath) -> dict[str, str]:
    """The sha256 of each section's content, without values that equal their defaults.

    So writing a default out makes no file stale. Neither does a price.
    """
    sections = load_recipe(path).measured.model_dump(mode="json", exclude_defaults=True)
    return {
        name: hashlib.sha256(
            json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
        ).hexdigest()
        for name, content in sections.items()
    }


def check_input(content: Envelope, file: Path, role: str, source: Path) -> None:
    """Check that `content`, read from `file`, was made from `source` under `role`.

    Raises `StaleError`, which says whether `source` is another file or has changed since.
    """
    recorded = content.inputs.get(role)
    if recorded is None:
        raise StaleError(
            f"{file.name}: does not record from which {role} it was made",
            f"make it with: {content.remake}",
        )
    if role == "recipe" and recorded.sections and content.recipe_sections:
        _check_sections(content, file, recorded, source)
        return
    now = digest(source)
    if now.sha256 != recorded.sha256:
        changed = "has changed since"
        if now.name != recorded.name:
            changed = f"is not {recorded.name}, which it was made from"
        digests = f"(sha256 {recorded.sha256[:12]}, now {now.sha256[:12]})"
        raise StaleError(
            f"{file.name} is stale: its {role} {now.name} {changed} {digests}",
            f"make it again: {content.remake}",
        )


def _check_sections(content: Envelope, file: Path, recorded: Input, source: Path) -> None:
    now = _section_digests(source)
    changed = [
        name for name in content.recipe_sections if now.get(name) != recorded.sections.get(name)
    ]
    if not changed:
        return
    remake = content.remeasure or content.remake
    if now["name"] != recorded.sections.get("name"):
        made_for = getattr(content, "recipe_name", recorded.name)
        name = load_recipe(source).name
        raise StaleError(
            f"{file.name} is of recipe '{made_for}', not '{name}'",
            f"make one of '{name}': {remake}",
        )
    names = ", ".join(f"'{name}'" for name in changed)
    raise StaleError(
        f"{file.name} is stale: {names} of {source.name} changed since it was made from "
        f"{recorded.name}",
        f"make it again: {remake}",
    )


class EnvelopeFields(TypedDict):
    """The fields of `Envelope`, used as `Fit(**head(...), ...)`."""

    tool_version: str
    environment: Environment
    inputs: dict[str, Input]


def read_file(
    model: type[EnvelopeT], path: AnyPath, inputs: Mapping[str, AnyPath] | None = None
) -> EnvelopeT:
    """The workflow file at `path`, checked against the files that it was made from.

    `inputs` maps a role ('recipe', 'profile', ...) to the file that must be recorded under it.
    Otherwise `StaleError` names what changed and the command that remakes `path`. Raises
    `InputError` for a file that is missing or of another kind.
    """
    file = Path(path)
    remade = f"make it with: {model.remake}"
    content = validate(model, read_bytes(file, remade), file, remade, KINDS)
    for role, source in (inputs or {}).items():
        check_input(content, file, role, Path(source))
    return content


def write_file(model: BaseModel, path: AnyPath) -> None:
    """Write a model as JSON, atomically. Raises `InputError` where a file that it was made from
    would be written over.
    """
    if isinstance(model, Envelope):
        keep_sources(path, {source.sha256 for source in model.inputs.values()})
    write_text(path, file_text(model))


def keep_sources(path: AnyPath, digests: Collection[str]) -> None:
    """Raise `InputError` where the file at `path` has one of these sha256, which are of the inputs
    of what will be written there.
    """
    if os.path.isfile(path) and digest(path).sha256 in digests:
        raise overwriting(path)


def overwriting(path: AnyPath) -> InputError:
    """The error for an output that would be written over an input."""
    return InputError(
        f"{os.fspath(path)}: is an input, and would be written over", "write to another file"
    )


def file_text(model: BaseModel) -> str:
    """A model as JSON text. Keys have the model's order, so the same model gives the same text."""
    content = model.model_dump(mode="json")
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_text(path: AnyPath, text: str) -> None:
    """Write text as UTF-8; otherwise like `write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: AnyPath, content: bytes) -> None:
    """Replace a file atomically: readers see the old or the new content, also after a crash.

    Missing folders are made. Behind a link, the file that the link names is replaced. A stream
    (`is_stream`) is written to, since a file must never replace a device. Raises `InputError` where
    the path cannot be written.
    """
    try:
        target = target_of(path)
        if is_stream(path):
            Path(path).write_bytes(content)
            return
        temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"
        target.parent.mkdir(parents=True, exist_ok=True)
        with held():  # Ctrl-C leaves no temporary file
            try:
                with temporary.open("xb") as stream:
                    stream.write(content)
                    stream.flush()
                    os.fsync(stream.fileno())
                os.replace(temporary, target)
            finally:
                with contextlib.suppress(OSError):
                    temporary.unlink()
        # Make the rename durable too. Some file systems cannot; the content is safe there anyway.
        with contextlib.suppress(OSError):
            descriptor = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    except OSError as error:
        raise _unwritable(path, error) from None


def is_stream(path: AnyPath) -> bool:
    """Whether the path is a character device, such as /dev/null, or an open descriptor of this
    process that is no file: /dev/stdout, or the shell's `>(COMMAND)`.
    """
    place = Path(path)
    return place.is_char_device() or (_is_descriptor(place) and place.exists() and _is_odd(place))


def _is_descriptor(place: Path) -> bool:
    named = str(place) in ("/dev/stdout", "/dev/stderr")
    return named or str(place.parent) in ("/dev/fd", "/proc/self/fd")


def _is_odd(place: Path) -> bool:
    return not (place.is_file() or place.is_dir())


def target_of(path: AnyPath) -> Path:
    """The file that is written for `path`: behind a link, the file that it names.

    Raises `OSError` for a folder, for a link that leads to itself, and for what no result is
    written to: a named pipe waits until something reads it, and a disk would be overwritten.
    """
    place = Path(path)
    try:
        target = place.resolve()
    except RuntimeError:  # Python up to 3.12 raises it for a loop of links
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if target.exists() and _is_odd(target) and not is_stream(place):
        raise OSError(errno.ENOTSUP, "it is a named pipe, a socket or a device")
    return target


def check_writable(path: AnyPath) -> None:
    """Raise `InputError` where no file can be written at `path`.

    Called before long work, so that its result cannot be lost. It leaves nothing but the folder.
    """
    try:
        target = target_of(path)
        if not is_stream(path):
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=target.parent):
                pass
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: AnyPath, error: OSError) -> InputError:
    return InputError(
        f"{os.fspath(path)}: cannot be written: {error.strerror}", "choose another place"
    )


def environment(device: str = "cpu", device_memory_bytes: int | None = None) -> Environment:
    """This machine and the versions that decide the numbers; `device` is 'cpu' or a GPU's name."""
    return Environment(
        python=platform.python_version(),
        platform=platform.platform(),
        processor=processor(),
        cpu_count=os.cpu_count() or 1,
        packages=_deciding_packages(),
        device=device,
        device_memory_bytes=device_memory_bytes,
    )


@cache  # reading a version takes milliseconds
def _deciding_packages() -> dict[str, str]:
    versions = {}
    for name in DECIDING_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def usable_cpus() -> int:
    """The number of CPUs that this process may use; containers and `taskset` can limit it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """The CPU's name."""
    with contextlib.suppress(OSError):
        facts = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        for line in facts.splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def head(
    inputs: Mapping[str, AnyPath], device: str = "cpu", device_memory_bytes: int | None = None
) -> EnvelopeFields:
    """The common fields of a new file: `Fit(**head(inputs={"profile": path}), ...)`.

    The inputs of its inputs are recorded too, so a fit knows its recipe.
    """
    return EnvelopeFields(
        tool_version=toolkit.__version__,
        environment=environment(device, device_memory_bytes),
        inputs=record_inputs(inputs),
    )


def fit_path(fit: AnyPath) -> Path:
    """The file of a fit, given as a path or as the bare name of a recipe with a shipped fit.

    Raises `InputError` for an unknown name. A missing file is returned: reading it gives the error.
    """
    path = Path(fit)
    text = os.fspath(fit)
    if path.exists() or path.suffix == ".json" or not re.fullmatch(NAME_PATTERN, text):
        return path
    if shipped := shipped_fit(text):
        return shipped
    hint = nearest_shipped(text, shipped_fits())
    raise InputError(f"{text}: no such file, and no shipped fit has that name", hint)


def shipped_fits() -> list[str]:
    """The names of the recipes with shipped fits."""
    return sorted(path.parent.name for path in shipped_profiles().glob(f"*/{FIT}"))


def shipped_fit(recipe: str) -> Path | None:
    """The shipped fit of the shipped recipe of this name, or None."""
    path = shipped_profiles() / recipe / FIT
    return path if re.fullmatch(NAME_PATTERN, recipe) and path.is_file() else None


def find_recipe(fit: Fit, path: Path) -> Recipe | None:
    """Find the recipe that the fit at `path` was made from, by its file name, or None.

    A shipped fit belongs to a shipped recipe. For other fits the fit's folder, the working folder
    and the shipped recipes are searched. A recipe with changed measured sections is skipped.
    """
    shipped = shipped_recipes() / f"{fit.recipe_name}.yaml"
    made_from = fit.inputs.get("recipe")
    if made_from is None or not re.fullmatch(NAME_PATTERN, fit.recipe_name):
        return None
    name = Path(made_from.name).name
    ships = path.resolve().is_relative_to(shipped_profiles().resolve())
    for candidate in [shipped] if ships else [path.parent / name, Path(name), shipped]:
        with contextlib.suppress(InputError):
            if candidate.is_file():
                check_input(fit, path, "recipe", candidate)
                return load_recipe(candidate)
    return None


NEWLINE = b"\n"

_logger = logging.getLogger(__name__)


class LineLog:
    """A log of whole lines that never stops the process that writes it.

    No method raises for a full disk, the limit on the size or a failing device. The first loss logs
    a warning; `lost` counts the lines that were not written. Raises `InputError` where the file
    cannot be opened.

    Args:
        max_bytes: the greatest length of the file.
        endless: lines are appended to the file, and written again after a loss; at `max_bytes` it
            is renamed to `path`.1, and a new one begins. Otherwise the file is new, and the first
            loss ends it: behind a gap, later lines would explain nothing.
    """

    def __init__(self, path: Path, max_bytes: int, *, endless: bool = False) -> None:
        self.lost = 0  # lines
        self._path = path
        self._max_bytes = max_bytes
        self._endless = endless
        self._ended = False
        try:
            self._open()
        except OSError as error:
            raise InputError(
                f"{path}: cannot be written: {error.strerror}", "choose another file"
            ) from None

    def _open(self) -> None:
        # O_NONBLOCK: a full pipe must not stall the process.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        flags |= os.O_APPEND if self._endless else os.O_TRUNC
        self._fd = os.open(self._path, flags, 0o666)
        self._regular = self._path.is_file()  # a pipe or a device has no size
        self._size = os.fstat(self._fd).st_size if self._regular else 0
        # A part of a line is at the end: of a write to a pipe, or as the machine crashed.
        self._torn = self._size > 0 and os.pread(self._fd, 1, self._size - 1) != NEWLINE

    def write(self, lines: bytes) -> None:
        """Append whole lines. Lines that do not fit are lost."""
        if not self._ended:
            done, reason = self._append(lines)
            lines = lines[done:]
            if lines and not self.lost:
                _logger.warning(
                    "%s: cannot be written: %s; requests are served and not logged",
                    self._path.name,
                    reason,
                )
            self._ended = bool(lines) and not self._endless
        self.lost += lines.count(NEWLINE)

    def _append(self, lines: bytes) -> tuple[int, str]:
        """Write lines. Returns the size of those written whole, and why the rest was not."""
        done = 0
        reason = ""
        try:
            if self._regular and self._size + self._torn + len(lines) > self._max_bytes:
                if not self._endless:
                    return 0, f"its limit of {self._max_bytes} bytes is reached"
                os.replace(self._path, self._path.with_name(f"{self._path.name}.1"))
                os.close(self._fd)
                self._open()
            data = NEWLINE * self._torn + lines
            while done < len(data):
                done += os.write(self._fd, data[done:])
        except OSError as error:
            reason = error.strerror or str(error)
        if not done:
            return 0, reason
        done -= self._torn
        whole = lines.rfind(NEWLINE, 0, done) + 1
        self._size += self._torn + whole
        self._torn = whole < done
        if self._torn and self._regular:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
                self._torn = False
        return whole, reason

    def close(self) -> None:
        """Close the file; a warning says how many lines were lost."""
        if self.lost:
            _logger.warning("%s: %d lines are missing in it", self._path.name, self.lost)
        os.close(self._fd)
