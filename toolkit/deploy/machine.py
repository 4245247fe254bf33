"""What this machine has, whatever the recipe: Python, packages, devices, compiled kernels, room to write."""

from __future__ import annotations

import os
import platform
import shutil
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from toolkit.deploy.checks import GIB, Check, gib
from toolkit.engines.devices import Devices

DISTRIBUTION = "llmctl"
LITTLE_DISK_BYTES = 2 * GIB


def check_machine(devices: Devices, work_folder: Path) -> list[Check]:
    """The checks of the machine, in the order to read them. `work_folder` is where results would be written."""
    return [
        _check_python(),
        _check_packages(),
        _check_devices(devices),
        _check_processor(),
        _check_kernels(),
        _check_disk(work_folder),
        _check_model_cache(),
    ]


def usable_cpus() -> int:
    """CPUs that this process may run on, which containers and `taskset` can limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def model_cache() -> Path:
    """The folder where downloaded models are kept."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _check_python() -> Check:
    version = platform.python_version()
    wanted = SpecifierSet(metadata.metadata(DISTRIBUTION)["Requires-Python"])
    if version in wanted:
        return Check("python", "ok", version)
    return Check("python", "missing", version, f"use Python {wanted}")


def _check_packages() -> Check:
    requirements = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or []]
    needed = [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]
    problems = [problem for each in needed if (problem := _package_problem(each))]
    if problems:
        return Check("packages", "missing", "; ".join(problems), "install with: make setup")
    return Check("packages", "ok", f"all {len(needed)} within their ranges")


def _package_problem(requirement: Requirement) -> str:
    wanted = f"{requirement.name}{requirement.specifier}"
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{wanted} is not installed"
    if requirement.specifier.contains(version, prereleases=True):
        return ""
    return f"{requirement.name} is {version}, needs {requirement.specifier}"


def _check_devices(devices: Devices) -> Check:
    build = f"torch {devices.torch}"
    if devices.gpus:
        gpus = ", ".join(f"{gpu.name} ({gib(gpu.memory_bytes)}, {gib(gpu.free_bytes)} free)" for gpu in devices.gpus)
        return Check("device", "ok", f"{gpus}; driver {devices.driver or 'unknown'}; {build}, CUDA {devices.cuda}")
    if devices.driver and not devices.cuda:
        remedy = f"install a torch for CUDA; driver {devices.driver} is here"
        return Check("device", "note", f"CPU only: {build} is built without CUDA", remedy)
    if devices.cuda:
        return Check("device", "note", f"CPU only: {build} is built for CUDA {devices.cuda} and sees no GPU")
    return Check("device", "ok", f"CPU only; {build}")


def _check_processor() -> Check:
    memory = psutil.virtual_memory()
    return Check("cpu", "ok", f"{usable_cpus()} CPUs usable; memory {gib(memory.total)}, {gib(memory.available)} free")


def _check_kernels() -> Check:
    try:
        import toolkit.sched.kernels  # noqa: F401  (importing asks numba for a place to cache what it compiles)
    except RuntimeError as error:
        remedy = "set NUMBA_CACHE_DIR to a folder that can be written"
        return Check("numba", "missing", str(error).splitlines()[0], remedy)
    return Check("numba", "ok", f"{metadata.version('numba')}; compiled kernels can be cached")


def _check_disk(folder: Path) -> Check:
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    found = f"{gib(free)} free in {existing}"
    if not os.access(existing, os.W_OK):
        return Check("disk", "missing", f"{existing} cannot be written", "run from a folder of yours, or use --out")
    if free < LITTLE_DISK_BYTES:
        return Check("disk", "note", found, "little room: results are small, models are not")
    return Check("disk", "ok", found)


def _check_model_cache() -> Check:
    cache = model_cache()
    existing = next(parent for parent in (cache, *cache.parents) if parent.exists())
    if os.access(existing, os.W_OK):
        return Check("model cache", "ok", f"{cache} ({gib(shutil.disk_usage(existing).free)} free)")
    return Check("model cache", "note", f"{cache} cannot be written", "set HF_HOME to a folder that can be written")
