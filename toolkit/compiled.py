"""Runs the modules that mypyc has compiled, as long as their sources were not changed since.

`hatch_build.py` compiles them, at set-up and for a wheel. Their libraries lie in
`toolkit/_compiled/`, in a folder for each Python and platform. The finder here hands them out if
the sha256 of every source is the one in their manifest; otherwise all sources run, with a warning,
because compiled modules call each other directly. `LLMCTL_COMPILED=0` runs (and builds) plain
Python, 1 makes it an error if compiled code cannot be used. Both give the same results.

A value that another module declares `Final` is copied into compiled code, so a module that is not
compiled must not use `Final`; tests/test_compiled.py holds that.
"""

from __future__ import annotations

import copyreg
import os
import sys
from collections.abc import Iterable
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "LLMCTL_COMPILED"
REMEDY = "make compile"
PACKAGE = Path(__file__).parent
SUFFIX = EXTENSION_SUFFIXES[0]  # as '.cpython-311-x86_64-linux-gnu.so'
FOLDER = PACKAGE / "_compiled" / SUFFIX.split(".")[1]
MANIFEST = "manifest"  # a line for each module: the sha256 of its source, and its name
NEEDED = "toolkit.sched.types"  # a compiled module, by which missing libraries are noticed


def wish() -> bool | None:
    """Whether `LLMCTL_COMPILED` asks for compiled code; None: run it if it is there."""
    value = os.environ.get(VARIABLE, "")
    if value not in {"", "0", "1"}:
        from toolkit.errors import InputError

        raise InputError(f"{VARIABLE}={value}: it is 0, 1 or unset", "0: plain Python; 1: compiled")
    return bool(int(value)) if value else None


def manifest(modules: Iterable[str]) -> str:
    """The manifest that libraries of these modules have, if compiled from today's sources."""
    from hashlib import sha256

    lines = []
    for name in modules:
        source = PACKAGE.parent.joinpath(*name.split(".")).with_suffix(".py")
        digest = sha256(source.read_bytes()).hexdigest() if source.exists() else "none"
        lines.append(f"{digest}  {name}\n")
    return "".join(lines)


def unusable() -> str:
    """Why the libraries cannot be used; empty if they can."""
    path = FOLDER / MANIFEST
    if not path.exists():
        return "not compiled for this Python"
    there = path.read_text().splitlines()
    now = manifest(line.split()[1] for line in there).splitlines()
    changed = [line.split()[1] for line in now if line not in there]
    return f"{changed[0]} has changed since the code was compiled" if changed else ""


class _Loader(ExtensionFileLoader):
    """Loads a library, and says how its frozen data classes are pickled."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _pickle_by_fields(module)
        for other in list(sys.modules.values()):  # compiled code loads some past the finder
            is_library = str(FOLDER) in (getattr(other, "__file__", None) or "")
            if is_library and not isinstance(other.__loader__, _Loader):
                _pickle_by_fields(other)


def _pickle_by_fields(module: ModuleType) -> None:
    """Frozen data classes are pickled and copied by their fields: compiled, they have no
    `__dict__`.
    """
    for made in list(vars(module).values()):
        parameters = getattr(made, "__dataclass_params__", None)
        if parameters and parameters.frozen and made.__module__ == module.__name__:
            copyreg.pickle(made, _by_fields)


def _by_fields(instance: Any) -> tuple[type, tuple[object, ...]]:
    from dataclasses import fields

    return type(instance), tuple([getattr(instance, f.name) for f in fields(instance) if f.init])


class Finder:
    """Finds the libraries, after it has looked at their sources once."""

    def __init__(self) -> None:
        self._usable: bool | None = None

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith("toolkit.") and not name.endswith("__mypyc"):  # their shared part
            return None
        file = FOLDER / f"{name}{SUFFIX}"
        is_there = file.exists()
        if self._usable is None and (is_there or name == NEEDED):
            self._usable = self._look()
        if not (self._usable and is_there):
            return None
        spec = ModuleSpec(name, _Loader(name, str(file)), origin=str(file))
        spec.has_location = True
        return spec

    def _look(self) -> bool:
        wished = wish()
        if wished is False:
            return False
        reason = unusable()
        if reason and wished:
            from toolkit.errors import InputError

            raise InputError(f"{VARIABLE}=1, and {reason}", REMEDY)
        if reason and FOLDER.exists():
            os.environ[VARIABLE] = "0"  # processes that this one starts do not warn again
            print(f"warning: {reason}: plain Python runs; {REMEDY}", file=sys.stderr)
        return not reason
