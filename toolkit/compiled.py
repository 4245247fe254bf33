"""The modules that mypyc compiles, and which code runs: compiled, or plain Python.

`make compile`, an editable install and the build of a wheel compile `MODULES` into shared libraries
where a C compiler is (`hatch_build.py`). The libraries lie in `toolkit/_compiled/`, in a folder for
each Python and platform, where Python itself does not look. The finder of this module hands them
out, and only if the sha256 of every source is the one that they were compiled from. Otherwise the
sources run, with a warning: a compiled module never stands in for an edited source. It is all or
nothing, because compiled modules call each other directly.

`LLMCTL_COMPILED=0` runs (and builds) plain Python, `LLMCTL_COMPILED=1` makes it an error if
compiled code cannot be used. Both give the same results.

A value that another module declares `Final` is copied into the compiled code, and so a module that
is not in `MODULES` must not use `Final`; tests/test_compiled.py holds that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from pathlib import Path
from typing import NamedTuple, TypeAlias

MODULES = (
    "toolkit.estimators.laws",
    "toolkit.estimators.memory",
    "toolkit.estimators.pipeline",
    "toolkit.estimators.steps",
    "toolkit.routing.replicas",
    "toolkit.routing.routers",
    "toolkit.sched.caches",
    "toolkit.sched.figures",
    "toolkit.sched.memory",
    "toolkit.sched.policies.base",
    "toolkit.sched.policies.baton",
    "toolkit.sched.policies.continuous",
    "toolkit.sched.policies.mlfq",
    "toolkit.sched.policies.past_future",
    "toolkit.sched.policies.past_future_sla",
    "toolkit.sched.policies.preemptive",
    "toolkit.sched.policies.routers",
    "toolkit.sched.policies.slice_continuous",
    "toolkit.sched.policies.srpt",
    "toolkit.sched.queues",
    "toolkit.sched.ranked",
    "toolkit.sched.rounds",
    "toolkit.sched.scheduler",
    "toolkit.sched.types",
    "toolkit.sched.view",
    "toolkit.sched.waiting",
    "toolkit.sim.arrivals",
    "toolkit.sim.blocks",
    "toolkit.sim.continuous",
    "toolkit.sim.decoding",
    "toolkit.sim.drafts",
    "toolkit.sim.flight",
    "toolkit.sim.groups.caches",
    "toolkit.sim.groups.chunk",
    "toolkit.sim.groups.full",
    "toolkit.sim.groups.pool",
    "toolkit.sim.groups.row",
    "toolkit.sim.groups.scheduler",
    "toolkit.sim.groups.state",
    "toolkit.sim.groups.steady",
    "toolkit.sim.groups.window",
    "toolkit.sim.installed",
    "toolkit.sim.ledger",
    "toolkit.sim.loop",
    "toolkit.sim.paged",
    "toolkit.sim.paged_engine",
    "toolkit.sim.passes",
    "toolkit.sim.slab",
    "toolkit.sim.worker",
)  # fmt: skip
VARIABLE = "LLMCTL_COMPILED"
REMEDY = "make compile"
HEADERS = "Python's headers"
PACKAGE = Path(__file__).parent
SUFFIX = EXTENSION_SUFFIXES[0]  # as '.cpython-311-x86_64-linux-gnu.so'
FOLDER = PACKAGE / "_compiled" / SUFFIX.split(".")[1]
MANIFEST = "manifest"  # a line for each module: the sha256 of its source, and its name
_NAMES = frozenset(MODULES)
_SHARED = "__mypyc"  # the end of the name of the library that the compiled modules share


class RunningCode(NamedTuple):
    """Which code runs: `compiled`, or plain Python and why, with the remedy."""

    compiled: bool
    reason: str = ""
    remedy: str = ""


def wish() -> bool | None:
    """Whether `LLMCTL_COMPILED` asks for compiled code; None: run it if it is there."""
    value = os.environ.get(VARIABLE, "")
    if value not in {"", "0", "1"}:
        from toolkit.errors import InputError

        raise InputError(f"{VARIABLE}={value}: it is 0, 1 or unset", "0: plain Python; 1: compiled")
    return bool(int(value)) if value else None


Reduced: TypeAlias = tuple[Callable[..., object], tuple[object, ...]]


def reduced(instance: object) -> Reduced:
    """For `__reduce__` of a frozen dataclass in `MODULES`: its class, and its fields in order.

    Python makes frozen instances again by their `__dict__`; compiled ones have none.
    """
    from dataclasses import fields

    values = (getattr(instance, field.name) for field in fields(instance) if field.init)  # type: ignore[arg-type]
    return type(instance), tuple(values)


def source(module: str) -> Path:
    """The source of a module of `MODULES`."""
    return PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py")


def manifest() -> str:
    """The manifest that libraries of the current sources have."""
    from hashlib import sha256

    return "".join(f"{sha256(source(name).read_bytes()).hexdigest()}  {name}\n" for name in MODULES)


def unusable() -> str:
    """Why the compiled code cannot be used; empty if it can."""
    path = FOLDER / MANIFEST
    if not path.exists():
        return "not compiled for this Python"
    there = path.read_text().splitlines()
    now = manifest().splitlines()
    if there == now:
        return ""
    changed = [line.split()[-1] for line in now if line not in there]
    what = changed[0] if changed else "the list of compiled modules"
    return f"{what} has changed since the code was compiled"


def obstacle() -> str:
    """Why this machine cannot compile; empty if it can."""
    import shutil
    import sysconfig

    if wish() is False:
        return f"{VARIABLE}=0"
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if not shutil.which(compiler):
        return f"there is no C compiler ({compiler})"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return f"{HEADERS} are not installed (Python.h)"
    return ""


def running() -> RunningCode:
    """Which code this process runs, or would run."""
    if any(name in sys.modules and _is_library(name) for name in MODULES):
        return RunningCode(True)
    if wish() is False and not _finder.refused:
        return RunningCode(False, f"{VARIABLE}=0", f"unset {VARIABLE}")
    reason = _finder.refused or unusable()
    if not reason:
        return RunningCode(True)
    remedy = REMEDY
    if not (PACKAGE.parent / "hatch_build.py").exists():
        remedy = "install llmctl from its source (the sdist) where a C compiler is"
    elif not _finder.refused and (lacking := obstacle()):
        reason = f"{reason}; {lacking}"
        remedy = f"install gcc or clang, and {HEADERS}; {REMEDY}"
    return RunningCode(False, reason, remedy)


def _is_library(name: str) -> bool:
    return isinstance(getattr(sys.modules[name], "__loader__", None), ExtensionFileLoader)


class _Finder:
    """Finds the compiled modules, after it has looked at their sources once."""

    def __init__(self) -> None:
        self._usable: bool | None = None
        self.refused = ""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in _NAMES and not name.endswith(_SHARED):
            return None
        if self._usable is None:
            self._usable = self._look()
        file = FOLDER / f"{name}{SUFFIX}"
        if not self._usable or not file.exists():
            return None
        spec = ModuleSpec(name, ExtensionFileLoader(name, str(file)), origin=str(file))
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
            self.refused = reason
            os.environ[VARIABLE] = "0"  # processes that this one starts do not warn again
            print(f"warning: {reason}: plain Python runs; {REMEDY}", file=sys.stderr)
        return not reason


_finder = _Finder()


def install() -> None:
    """Make imports of `MODULES` take the compiled code."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
