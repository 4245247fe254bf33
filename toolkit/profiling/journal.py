"""The journal: every result on disk at once, so that a killed profile resumes where it was.

The file has one JSON object per line: first the conditions of the measurement, then a key and a
result each. A last line that was torn by a kill is cut off. If another line is damaged, that line
and all after it are measured again, and the file is kept as it was. The caller that writes the
profile then deletes the journal.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import IO, TypeVar

from pydantic import Field, ValidationError

from toolkit.errors import InputError
from toolkit.files.profile import (
    EngineFacts,
    FailedPoint,
    FrontPoint,
    MemoryPoint,
    RoundSequence,
    SlicePoint,
    StepPoint,
    differences,
    identity,
)
from toolkit.files.strict import Environment, Strict


class JournalConditions(Strict):
    """The conditions that must be equal for results to belong together."""

    tool_version: str
    recipe: dict[str, str]  # section to the digest of its content
    environment: Environment
    engine: EngineFacts

    def differences(self, now: JournalConditions) -> list[str]:
        """What has changed, in words."""
        sections = sorted(self.recipe.keys() | now.recipe.keys())
        changed = [
            f"'{name}' of the recipe"
            for name in sections
            if self.recipe.get(name) != now.recipe.get(name)
        ]
        if self.tool_version != now.tool_version:
            changed.append(f"llmctl ({self.tool_version}, now {now.tool_version})")
        changed += _environment_changes(self.environment, now.environment)
        if not _same_engine(self.engine, now.engine):
            found = differences(identity(self.engine), identity(now.engine))
            changed += found or ["what the engine says of itself"]
        return changed


class PointVisit(Strict):
    """The samples of a visit to a grid point, in seconds, and its passes if the engine reports
    them.
    """

    seconds: list[float]
    steps: list[StepPoint] = Field(default=[])
    front: list[FrontPoint] = Field(default=[])


ResultT = TypeVar("ResultT")
Result = PointVisit | SlicePoint | MemoryPoint | RoundSequence | FailedPoint


class JournalEntry(Strict):
    """A line of the file."""

    key: str
    result: Result


class Journal:
    """Results by key, each on disk when `put` returns. A context manager, for one process at a
    time.

    Args:
        path: the file. Content that is unusable or unwanted is kept as <path>.old.
        conditions: the present ones.
        fresh: do not resume from an existing file.

    Attributes:
        results: those in the file, and those put since.
        set_aside: why an old file, or its end, was set aside; '' if none was.

    Raises `InputError` if the file cannot be written, or another process has it open.
    """

    def __init__(self, path: Path, conditions: JournalConditions, *, fresh: bool = False) -> None:
        self._path = path
        self.results: dict[str, Result] = {}
        self.set_aside = ""
        self._stream = _open_locked(path)
        self._resume(conditions, fresh)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def put(self, key: str, result: Result) -> None:
        """Record a result."""
        self.results[key] = result
        self._append(JournalEntry(key=key, result=result))

    def _append(self, line: Strict) -> None:
        self._stream.write(line.model_dump_json().encode() + b"\n")
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def _resume(self, conditions: JournalConditions, fresh: bool) -> None:
        lines = self._stream.read().splitlines(keepends=True)
        # Without a line break a kill has torn the first line, and none follows.
        if lines and lines[0].endswith(b"\n"):
            self.set_aside = "--fresh was given" if fresh else _why_not(lines[0], conditions)
            if not self.set_aside:
                self._load(lines)
                return
            self._stream.close()
            os.replace(self._path, self._old)
            self._stream = _open_locked(self._path)
        self._stream.truncate(0)
        self._append(conditions)

    @property
    def _old(self) -> Path:
        return self._path.with_name(self._path.name + ".old")

    def _load(self, lines: list[bytes]) -> None:
        """Load the lines up to the first that is torn or damaged, and cut off it and the rest."""
        end = len(lines[0])
        for number, line in enumerate(lines[1:], start=2):
            try:
                entry = JournalEntry.model_validate_json(line)
            except ValidationError:
                if line.endswith(b"\n"):
                    self._old.write_bytes(b"".join(lines))
                    self.set_aside = f"from line {number} on, which cannot be read"
                break
            if not line.endswith(b"\n"):
                break
            self.results[entry.key] = entry.result
            end += len(line)
        self._stream.truncate(end)
        self._stream.seek(end)


def _environment_changes(then: Environment, now: Environment) -> list[str]:
    """The packages with other versions now, and whether the machine does."""
    names = sorted(then.packages.keys() | now.packages.keys())
    versions = [
        (name, then.packages.get(name, "none"), now.packages.get(name, "none")) for name in names
    ]
    changed = [
        f"{name} ({was}, now {version})" for name, was, version in versions if was != version
    ]
    same: dict[str, object] = {"packages": now.packages}
    if now.device != "cpu" and _without_kernel(then.platform) == _without_kernel(now.platform):
        # Rented GPUs of one kind run on hosts with different kernels.
        same["platform"] = now.platform
    if then.model_copy(update=same) != now:
        changed.append("the machine")
    return changed


def _without_kernel(platform: str) -> str:
    """`platform.platform()` without the kernel's release: Linux-6.18.44-gpu-x86_64-with-glibc2.39
    is Linux-x86_64-with-glibc2.39.
    """
    return re.sub(r"^Linux-.*?-(x86_64|aarch64)", r"Linux-\1", platform)


def _same_engine(then: EngineFacts, now: EngineFacts) -> bool:
    """Whether the facts are equal, but for a change of the KV budget below one percent.

    On a GPU the budget is what was free when the engine loaded.
    """
    moved = abs(then.capacity_tokens / now.capacity_tokens - 1.0)
    budget = {"kv_budget_bytes": now.kv_budget_bytes, "capacity_tokens": now.capacity_tokens}
    return moved < 0.01 and then.model_copy(update=budget) == now


def _open_locked(path: Path) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("a+b")
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written: {error.strerror}", "choose another place with --out"
        ) from None
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        raise InputError(
            f"{path}: another llmctl profile is writing it", "wait for it, or choose another --out"
        ) from None
    stream.seek(0)
    return stream


def _why_not(first_line: bytes, now: JournalConditions) -> str:
    """Why the file with this first line cannot be resumed under the conditions `now`, or ''."""
    try:
        then = JournalConditions.model_validate_json(first_line)
    except ValidationError:
        return "its first line cannot be read"
    changed = then.differences(now)
    return f"changed since: {', '.join(changed)}" if changed else ""


def of_kind(kind: type[ResultT], results: Iterable[object]) -> list[ResultT]:
    """The results of this type."""
    return [result for result in results if isinstance(result, kind)]
