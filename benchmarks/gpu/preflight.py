"""What this machine lacks for `benchmarks.gpu.run`, in one line.

    python -m benchmarks.gpu.preflight [--device cuda|cpu] [--recipe FILE]

Takes about ten seconds: it imports everything that the stages import, and on CUDA it allocates and
pins a little memory. Needs nothing but Python. It exits with code 3 if something is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from benchmarks.common import ROOT
from benchmarks.common.command import make_parser

MISSING = 3  # the exit code of an engine or a device that cannot do it (docs/reference/errors.md)
GIB = 1 << 30
# What the stages import, directly or through pydantic; versions are those of pyproject.toml. The
# second part is what images often lack: `benchmarks.gpu.wheels` collects it.
OFTEN_LACKING = (
    *("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "typing-extensions"),
    *("msgspec", "mypy-extensions"),
)
PACKAGES = (
    *("torch", "transformers", "safetensors", "huggingface-hub", "packaging", "pyyaml"),
    *("numpy", "scipy", "numba", *OFTEN_LACKING),
)
STAGES_IMPORT = (
    *("benchmarks.gpu.stages", "benchmarks.gpu.probe", "toolkit.estimators.fitting"),
    *("toolkit.profiling.run", "toolkit.profiling.child", "toolkit.workers.child"),
    *("toolkit.engines.transformers_engine", "toolkit.engines.rebatch_engine"),
)
SHARED_MEMORY_BYTES = 16 << 20
DISK_BYTES = GIB
HOST_BYTES = 8 * GIB
SPARE_DEVICE_BYTES = 4 * GIB  # CUDA's context, activations and graphs beside weights and cache
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF"
CHILD_LIMIT_S = 90.0


@dataclass(slots=True)
class Found:
    """What a machine has.

    Attributes:
        missing: what it lacks, each with the value and the limit.
        notes: what is unusual, but not needed.
        facts: what it has, for the log.
        variables: for the environment of the stages.
    """

    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)

    def line(self) -> str:
        """All of it in one line."""
        if self.missing:
            return f"missing: {'; '.join(self.missing)}"
        return f"ready: {', '.join(self.facts)}" + "".join(f"; {note}" for note in self.notes)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--recipe", type=Path, action="append", default=[])
    parser.add_argument("--results", type=Path, default=Path("profiles"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="of the benchmark's sizes")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(_inside(options.device, options.recipe, quick=options.quick)))
        return 0
    found = check(options.device, options.recipe, options.results, quick=options.quick)
    print(f"preflight: {found.line()}", flush=True)
    return MISSING if found.missing else 0


def check(device: str, recipes: Sequence[Path], results: Path, *, quick: bool) -> Found:
    """What this machine has, and what it lacks for these recipes."""
    found = Found()
    found.facts.append(f"Python {sys.version.split()[0]}")
    for name, wanted in _requirements():
        problem = _package(name, wanted)
        if problem:
            found.missing.append(problem)
        elif name in ("torch", "transformers", "numpy", "numba", "pydantic", "msgspec"):
            found.facts.append(f"{name} {metadata.version(name)}")
    if not found.missing:
        _ask_child(found, device, recipes, quick=quick)
    _room(found, results)
    return found


def _requirements() -> Iterator[tuple[str, str]]:
    """(package, versions) of each of `PACKAGES`."""
    with (ROOT / "pyproject.toml").open("rb") as stream:
        project = tomllib.load(stream)["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["engines"]]
    ranges = {}
    for line in lines:
        name, wanted = re.match(r"([A-Za-z0-9_.-]+)([^;]*)", line).groups()  # type: ignore[union-attr]
        ranges[name.lower()] = wanted.strip()
    for name in PACKAGES:
        yield name, ranges.get(name, "")


def _package(name: str, wanted: str) -> str:
    """Why this package cannot be used; '' if it can."""
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"{name}{wanted}"
    if wanted and importlib.util.find_spec("packaging"):
        from packaging.specifiers import SpecifierSet

        if not SpecifierSet(wanted).contains(version, prereleases=True):
            return f"{name}{wanted} (here {version})"
    return ""


def _ask_child(found: Found, device: str, recipes: Sequence[Path], *, quick: bool) -> None:
    """Add what a process that imports the stages finds."""
    command = [sys.executable, "-m", "benchmarks.gpu.preflight", "--child", "--device", device]
    command += [word for recipe in recipes for word in ("--recipe", str(recipe))]
    command += ["--quick"] if quick else []
    wanted = {EXPANDABLE: "expandable_segments:True"} if device == "cuda" else {}
    if EXPANDABLE in os.environ:
        wanted = {}
    answer = _child(command, wanted)
    if isinstance(answer, str) and wanted:
        # Some drivers and sandboxes cannot map memory in pieces; everything else may work there.
        plain = {EXPANDABLE: "expandable_segments:False"}
        second = _child(command, plain)
        if not isinstance(second, str):
            found.notes.append(f"without expandable segments ({answer})")
            found.variables |= plain
            answer = second
    elif not isinstance(answer, str):
        found.variables |= wanted
    if isinstance(answer, str):
        found.missing.append(answer)
        return
    found.missing += answer["missing"]
    found.notes += answer["notes"]
    found.facts += answer["facts"]


def _child(command: Sequence[str], variables: dict[str, str]) -> dict[str, list[str]] | str:
    """The child's answer, or why there is none."""
    try:
        done = subprocess.run(
            command,
            env=os.environ | variables,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=CHILD_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"an answer of the stages' modules within {CHILD_LIMIT_S:.0f} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return f"a working import of the stages: {lines[-1]}"
    answer: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _inside(device: str, recipes: Sequence[Path], *, quick: bool) -> dict[str, list[str]]:
    """Import what the stages import, and look at the device."""
    for module in STAGES_IMPORT:
        importlib.import_module(module)
    missing: list[str] = []
    notes: list[str] = []
    if device == "cpu":
        return {"missing": missing, "notes": notes, "facts": ["device cpu"]}
    from toolkit.engines.devices import find_devices

    devices = find_devices()
    if not devices.gpus:
        return {
            "missing": [f"a CUDA device (torch {devices.torch} finds none)"],
            "notes": notes,
            "facts": [],
        }
    gpu = devices.gpus[0]
    needed = _needed_bytes(recipes, quick=quick)
    if gpu.free_bytes < needed:
        missing.append(
            f"{needed / GIB:.1f} GiB of device memory ({gpu.free_bytes / GIB:.1f} of "
            f"{gpu.memory_bytes / GIB:.1f} GiB are free)"
        )
    notes += _use_device()
    facts = [f"CUDA {devices.cuda}", f"driver {devices.driver or 'unknown'}", gpu.name]
    facts.append(f"{gpu.free_bytes / GIB:.1f} of {gpu.memory_bytes / GIB:.1f} GiB free")
    return {"missing": missing, "notes": notes, "facts": facts}


def _needed_bytes(recipes: Sequence[Path], *, quick: bool) -> int:
    """Device memory of the largest recipe: weights, KV cache and `SPARE_DEVICE_BYTES`."""
    from benchmarks.gpu.stages import derive
    from toolkit.files.shipped import load_recipe

    sizes = [0]
    for path in recipes:
        recipe = derive(load_recipe(path), "rebatch", "cuda", "", quick=quick)
        cache = int((recipe.engine.kv_cache_memory_mib or 0) * (1 << 20))
        sizes.append((recipe.model.weight_bytes or 0) + cache + SPARE_DEVICE_BYTES)
    return max(sizes)


def _use_device() -> list[str]:
    """Use the device as the stages do; raises what CUDA raises. Returns what does not work but is
    not needed.
    """
    import torch

    block = torch.ones(64 << 20, dtype=torch.uint8, device="cuda")
    try:
        host = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
        host.copy_(block[: 1 << 20], non_blocking=True)
        torch.cuda.synchronize()
    except RuntimeError as error:
        return [f"memory cannot be pinned: {str(error).splitlines()[0]}"]
    return []


def _room(found: Found, results: Path) -> None:
    """Add shared memory, disk and host memory."""
    shared = Path("/dev/shm")
    if not shared.is_dir():
        found.missing.append("/dev/shm")
    elif (free := shutil.disk_usage(shared).free) < SHARED_MEMORY_BYTES:
        found.missing.append(f"16 MiB in /dev/shm ({free >> 20} MiB are free)")
    folder = next(path for path in (results, *results.absolute().parents) if path.is_dir())
    if (free := shutil.disk_usage(folder).free) < DISK_BYTES:
        found.missing.append(f"1 GiB of disk for {results} ({free >> 20} MiB are free)")
    if (free := _available_bytes()) < HOST_BYTES:
        found.missing.append(f"8 GiB of host memory ({free / GIB:.1f} GiB are available)")
    found.facts.append(f"{free / GIB:.0f} GiB of host memory, {os.cpu_count()} cores")


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


if __name__ == "__main__":
    sys.exit(main())
