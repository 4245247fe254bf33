"""Compiles modules with mypyc, where a C compiler is.

    python hatch_build.py          # compile in place, if the sources changed: make compile

Hatchling calls `CompileHook` when it builds a wheel or an editable install. Without a C compiler,
without Python's headers, or with `LLMCTL_COMPILED=0`, the wheel is pure Python; with
`LLMCTL_COMPILED=1` that is an error. mypyc runs in a process of its own: it ends its process where
it finds an error.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # hatchling runs this file from where it pleases

from toolkit.compiled import FOLDER, MANIFEST, SUFFIX, VARIABLE, manifest, wish  # noqa: E402
from toolkit.errors import InputError  # noqa: E402

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # `make compile` needs no hatchling
    BuildHookInterface = object  # type: ignore[assignment, misc]

MODULES = (
    "toolkit.estimators.laws",
    "toolkit.estimators.memory",
    "toolkit.laws.features",
    "toolkit.laws.passes",
    "toolkit.routing.base",
    "toolkit.routing.by_law",
    "toolkit.routing.replicas",
    "toolkit.routing.scored",
    "toolkit.routing.session",
    "toolkit.routing.simple",
    "toolkit.sched.caches",
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
    "toolkit.sched.prefills",
    "toolkit.sched.scheduler",
    "toolkit.sched.types",
    "toolkit.sched.view",
    "toolkit.sched.waiting",
    "toolkit.sim.arrivals",
    "toolkit.sim.clock",
    "toolkit.sim.continuous",
    "toolkit.sim.decoding",
    "toolkit.sim.drafts",
    "toolkit.sim.fleet",
    "toolkit.sim.flight",
    "toolkit.sim.kv_cache",
    "toolkit.sim.ledger",
    "toolkit.sim.loop",
    "toolkit.sim.paged_engine",
    "toolkit.sim.replicas",
    "toolkit.sim.slab",
    "toolkit.sim.vllm",
    "toolkit.sim.worker",
)  # fmt: skip
# What mypyc reads the types of beside mypy's own; their versions are those of the locks.
REQUIRES = ["mypy>=1.15", "setuptools>=75", "numpy>=2.0", "msgspec>=0.19"]
# No fused multiply-add, which would round otherwise than Python does; warnings are no errors.
# Without interposition and with hidden names, functions of the library call each other directly.
C_FLAGS = ["-ffp-contract=off", "-Wno-error", "-fno-semantic-interposition", "-fvisibility=hidden"]
MOST_AT_ONCE = 8  # compilers, with a few hundred MB each: a container may have less than its host
OPTIONS = [
    "--config-file=",
    "--ignore-missing-imports",
]  # of mypy: types that are not there are Any
WITHOUT = "plain Python gives the same results, more slowly"
HEADERS = "Python's headers"


def obstacle() -> str:
    """Why this machine cannot compile; empty if it can."""
    if wish() is False:
        return f"{VARIABLE}=0"
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if not shutil.which(compiler):
        return f"there is no C compiler ({compiler})"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return f"{HEADERS} are not installed (Python.h)"
    return ""


def is_current() -> bool:
    """Whether the libraries are there, of today's sources and of all `MODULES`."""
    path = FOLDER / MANIFEST
    return path.exists() and path.read_text() == manifest(MODULES)


def compile_in_place() -> str:
    """Compile into `FOLDER` unless it is up to date; the reason if that was not possible.

    Raises `InputError` for that reason if `LLMCTL_COMPILED` is 1.
    """
    reason = obstacle()
    if not reason and not is_current():
        digests = manifest(MODULES)  # before the sources are read, should one be edited meanwhile
        FOLDER.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER.parent) as work:
            done = subprocess.run(
                [sys.executable, __file__, "--into", work],
                cwd=ROOT,
                env=os.environ | {VARIABLE: "0"},  # what is compiled now may be of older sources
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            if done.returncode:
                lines = [line for line in done.stdout.splitlines() if "error" in line.lower()]
                reason = f"mypyc failed: {(lines or ['no message'])[0].strip()}"
                if wish():
                    print(done.stdout, file=sys.stderr)
            else:
                fresh = Path(work, "libraries")
                (fresh / MANIFEST).write_text(digests)
                if FOLDER.exists():  # libraries that run stay usable: only their names go
                    FOLDER.rename(Path(work, "old"))
                fresh.rename(FOLDER)
    if reason and wish():
        raise InputError(f"{VARIABLE}=1, and {reason}")
    return reason


def _compile_into(work: Path) -> None:
    """Compile all modules; the libraries lie in `work`/libraries, each named after its module."""
    from mypyc.build import mypycify
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    class ParallelBuild(build_ext):  # type: ignore[misc]
        """Compiles several files at once, each in a process of its own."""

        def build_extension(self, ext: Any) -> None:
            compile_in_turn = self.compiler.compile

            def compile_at_once(sources: list[str], **options: Any) -> list[str]:
                with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_AT_ONCE)) as pool:
                    found = pool.map(lambda one: compile_in_turn([one], **options), sources)
                    return [name for objects in found for name in objects]

            self.compiler.compile = compile_at_once
            try:
                super().build_extension(ext)
            finally:
                self.compiler.compile = compile_in_turn

    paths = [name.replace(".", "/") + ".py" for name in MODULES]
    extensions = mypycify(
        [*OPTIONS, *paths],
        multi_file=True,
        debug_level="0",
        target_dir=str(work / "c"),
        group_name="llmctl",
    )
    for extension in extensions:
        extension.extra_compile_args += C_FLAGS
    command = ParallelBuild(Distribution({"name": "llmctl", "ext_modules": extensions}))
    command.build_lib = str(work / "built")
    command.build_temp = str(work / "objects")
    command.ensure_finalized()
    command.run()
    (work / "libraries").mkdir()
    for extension in extensions:
        built = command.get_ext_fullpath(extension.name)
        shutil.move(built, work / "libraries" / f"{extension.name}{SUFFIX}")


class CompileHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles, and puts the libraries into the wheel."""

    def dependencies(self) -> list[str]:
        """What the build needs besides hatchling; nothing where nothing will be compiled."""
        return [] if obstacle() else REQUIRES

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Before a build: `version` is 'editable' or 'standard'."""
        if self.target_name != "wheel":
            return
        reason = compile_in_place()
        if reason:
            self.app.display_warning(f"not compiled: {reason}; {WITHOUT}")
            return
        build_data["pure_python"], build_data["infer_tag"] = False, True
        if version != "editable":
            for file in FOLDER.iterdir():
                build_data["force_include"][str(file)] = str(file.relative_to(ROOT))


def main() -> None:
    """Compile in place, and say in one line what became of it."""
    if sys.argv[1:2] == ["--into"]:
        _compile_into(Path(sys.argv[2]))
        return
    try:
        stale = not is_current()
        if stale and not obstacle():
            print(f"compiling {len(MODULES)} modules with mypyc; the first time takes minutes")
        reason = compile_in_place()
    except InputError as error:
        sys.exit(f"error: {error.message}")
    if reason:
        print(f"not compiled: {reason}; {WITHOUT}; make compile does it later")
    else:
        print(f"compiled: {len(MODULES)} modules" + ("" if stale else ", up to date"))


if __name__ == "__main__":
    main()
