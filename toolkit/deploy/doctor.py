"""The checks of `llmctl doctor`: the machine, then a recipe on this machine.

The machine: devices, memory, room to write. A recipe: whether its hardware is here, where its model
would come from, and whether weights and KV cache fit. The last is arithmetic; nothing is loaded,
and only `llmctl profile` measures what a model really takes.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import psutil

from toolkit.backends import Check, backend_of
from toolkit.catalogue.caches import row_bytes
from toolkit.catalogue.classes import HINT, not_simulated, refusal
from toolkit.catalogue.gpus import gpu_of
from toolkit.catalogue.models import cache_parts, kv_bytes_per_token, weight_bytes_on
from toolkit.engine_traits import MODEL_LIBRARIES
from toolkit.engines.devices import CudaDevice, Devices
from toolkit.errors import InputError
from toolkit.extras import absent, install
from toolkit.files.io import usable_cpus
from toolkit.files.modelled import classes_of
from toolkit.files.recipe import HardwareSpec, ModelSpec, Recipe
from toolkit.units import GIB, MIB, size

SAME_MEMORY = 0.98  # drivers keep slightly different shares of the memory for themselves


def check_machine(devices: Devices, work_folder: Path) -> list[Check]:
    """The checks of the machine. `work_folder` is where results would be written."""
    memory = psutil.virtual_memory()
    free_memory = f"memory {size(memory.total)}, {size(memory.available)} free"
    processor = Check("cpu", "ok", f"{usable_cpus()} CPUs usable; {free_memory}")
    existing = next(
        path for path in (work_folder, *work_folder.absolute().parents) if path.exists()
    )
    disk = Check("disk", "ok", f"{size(shutil.disk_usage(existing).free)} free in {existing}")
    if not os.access(existing, os.W_OK):
        remedy = "run from a folder of yours, or use --out"
        disk = Check("disk", "missing", f"{existing} cannot be written", remedy)
    return [_check_devices(devices), processor, disk]


def _check_devices(devices: Devices) -> Check:
    build = f"torch {devices.torch}" if devices.torch else "without torch"
    if devices.gpus:
        gpus = ", ".join(
            f"{gpu.name} ({size(gpu.memory_bytes)}, {size(gpu.free_bytes)} free)"
            for gpu in devices.gpus
        )
        driver = devices.driver or "unknown"
        cuda = f", CUDA {devices.cuda}" if devices.cuda else ""
        found = f"{gpus}; driver {driver}; {build}{cuda}"
        return Check("device", "ok", found)
    if devices.torch and devices.driver and not devices.cuda:
        remedy = f"install a torch for CUDA; driver {devices.driver} is here"
        return Check("device", "note", f"CPU only: {build} is built without CUDA", remedy)
    if devices.cuda:
        found = f"CPU only: {build} is built for CUDA {devices.cuda} and sees no GPU"
        return Check("device", "note", found)
    return Check("device", "ok", f"CPU only; {build}")


def check_recipe(recipe: Recipe, devices: Devices) -> list[Check]:
    """The checks of a recipe on this machine.

    Raises `InputError` where the recipe's numbers contradict each other.
    """
    check_kv_bytes(recipe)
    if recipe.engine.url is not None:
        remedy = "start it before you profile; it need not run on this machine"
        return [Check("engine", "note", f"a server at {recipe.engine.url}", remedy)]
    checks = [_check_hardware(recipe, devices), _check_model(recipe.model), *check_sizes(recipe)]
    return [*checks, *backend_of(recipe.engine.name).check(recipe)]


def check_engines() -> list[Check]:
    """Return a note where torch or transformers is not installed, which our own engines need."""
    lacking = absent(MODEL_LIBRARIES)
    if not lacking:
        return []
    found = f"without {' and '.join(lacking)}: our own engines cannot be profiled or served here"
    return [Check("engines", "note", found, install("engines"))]


def check_kv_bytes(recipe: Recipe) -> None:
    """Raise `InputError` where `kv_bytes_per_token` contradicts `config` (SCLS Eq. 5; MLA).

    Nothing is checked where either is not given.
    """
    model = recipe.model
    vllm = recipe.engine.vllm
    claimed = model.kv_bytes_per_token
    dtype = (vllm.kv_cache_dtype if vllm else None) or model.dtype
    gpu = recipe.hardware.gpu
    packed = gpu_of(gpu).packs_sparse if gpu else True
    found = kv_bytes_per_token(model.config, dtype, packed=packed)
    if claimed is None or found is None:
        return
    right, formula = found
    if claimed != right:
        raise InputError(f"model.kv_bytes_per_token: {claimed}: the config gives {right}", formula)


def check_sizes(recipe: Recipe) -> list[Check]:
    """The checks that depend on the recipe's numbers alone, not on this machine."""
    checks = [_check_capacity(recipe)]
    if why := refusal(classes_of(recipe)):
        remedy = f"profile, simulate, tune and serve refuse it: {HINT}"
        checks.append(Check("not modelled", "missing", why, remedy))
    vllm = recipe.engine.vllm
    remedy = "their times come out too short; measure them apart"
    notes = not_simulated(vllm.args if vllm else ())
    return [*checks, *(Check("not simulated", "note", one, remedy) for one in notes)]


def _check_hardware(recipe: Recipe, devices: Devices) -> Check:
    """Whether the recipe's GPUs are here, or CPUs for the threads of all its processes."""
    hardware = recipe.hardware
    engine = recipe.engine
    workers = recipe.workers
    shares = engine.tensor_parallel_size
    if hardware.device == "cuda":
        wanted = f"{workers * shares} x {hardware.name}"
        if hardware.memory_gib is not None:
            wanted += f" of {hardware.memory_gib:g} GiB"
        matching = [gpu for gpu in devices.gpus if _is_wanted(gpu, hardware)]
        if len(matching) >= workers * shares:
            return Check("hardware", "ok", f"{wanted}: found {len(matching)}")
        here = ", ".join(gpu.name for gpu in devices.gpus) or "no GPU"
        remedy = "profile and serve it on a machine that has it; fit, tune and simulate run here"
        return Check("hardware", "missing", f"{wanted}: this machine has {here}", remedy)
    cpus = usable_cpus()
    threads = engine.threads
    if threads is None:
        found = f"{workers} workers on all {cpus} CPUs"
        remedy = "set engine.threads: workers that share CPUs distort each other's times"
        return Check("hardware", "note" if workers > 1 else "ok", found, remedy)
    own = f"{shares} processes x {threads} threads" if shares > 1 else f"{threads} threads"
    found = f"{workers} workers x {own} on {cpus} CPUs"
    if workers * shares * threads > cpus:
        remedy = "more threads than CPUs: times will vary; use fewer workers or threads"
        return Check("hardware", "note", found, remedy)
    return Check("hardware", "ok", found)


def _is_wanted(gpu: CudaDevice, hardware: HardwareSpec) -> bool:
    """Whether a GPU has the name's words ('A100-80GB': 'NVIDIA A100 80GB PCIe') and the memory."""
    words = set(re.findall(r"[a-z0-9]+", hardware.name.lower()))
    return (
        words <= set(re.findall(r"[a-z0-9]+", gpu.name.lower()))
        and gpu.memory_bytes >= SAME_MEMORY * (hardware.memory_gib or 0.0) * GIB
    )


def _check_model(model: ModelSpec) -> Check:
    """Where the model comes from: its config, a folder, the hub's cache here, or the hub."""
    if model.source == "random":
        kind = model.config["model_type"]
        return Check("model", "ok", f"{kind} with random weights from its config; no download")
    folder = Path(model.source)
    if folder.is_dir():
        problem = _folder_problem(folder, model)
        return Check("model", "missing" if problem else "ok", f"folder {folder}{problem}")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model.source):
        remedy = "model.source is 'random', a folder, or a hub id like org/name"
        return Check("model", "missing", f"{model.source}: no such folder", remedy)
    if model.load_format == "dummy" and "model_type" in model.config:
        found = f"{model.source} with random weights from model.config; no download"
        if model.tokenizer == "bytes":
            return Check("model", "ok", found)
        remedy = "to serve text, fetch its tokenizer, or set tokenizer: bytes"
        return Check("model", "note", found, remedy)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.constants import HF_HUB_CACHE

    config = try_to_load_from_cache(model.source, "config.json", revision=model.revision)
    if isinstance(config, str) and not _folder_problem(Path(config).parent, model):
        return Check("model", "ok", f"{model.source}, downloaded before")
    weights = ""
    if model.weight_bytes and model.load_format == "auto":
        weights = f", {size(model.weight_bytes)}"
    revision = f" --revision {model.revision}" if model.revision else ""
    found = f"{model.source}: not in {HF_HUB_CACHE}; from the hub{weights}"
    remedy = f"fetch it once with: hf download {model.source}{revision}"
    return Check("model", "missing", found, remedy)


def _folder_problem(folder: Path, model: ModelSpec) -> str:
    if not (folder / "config.json").is_file():
        return ": no config.json in it"
    if model.load_format == "auto" and not any(folder.glob("*.safetensors")):
        return ": no *.safetensors in it"
    return ""


def _check_capacity(recipe: Recipe) -> Check:
    """How many tokens' KV cache fits beside the weights, by the recipe's numbers."""
    model = recipe.model
    engine = recipe.engine
    shares = engine.tensor_parallel_size
    weights = model.weight_bytes
    if model.kv_bytes_per_token is None:
        remedy = "give model.kv_bytes_per_token to have it computed"
        return Check("memory", "note", "unknown before profiling", remedy)
    if engine.kv_cache_memory_mib is not None:
        budget = engine.kv_cache_memory_mib * MIB
        terms = "engine.kv_cache_memory_mib"
    elif recipe.hardware.memory_gib is None or weights is None:
        remedy = "give hardware.memory_gib and model.weight_bytes, or engine.kv_cache_memory_mib"
        return Check("memory", "note", "unknown before profiling", remedy)
    else:
        share = engine.gpu_memory_utilization
        memory = recipe.hardware.memory_gib * GIB
        own = weight_bytes_on(model.config, model.quantization or "", weights, shares)
        budget = share * memory - own
        each = f" on each of {shares} GPUs" if shares > 1 else ""
        terms = f"{share:g} x {size(memory)} - weights {size(own)}{each}"
    parts = cache_parts(model.config, shares)
    per_token = model.kv_bytes_per_token // parts  # of one process of a worker
    row = row_bytes(model.config, model.dtype, model.max_model_len, shares)
    if row is None:
        row = per_token * model.max_model_len
    tokens = int(budget * model.max_model_len // row)
    rows = int(budget // row)
    longest = f"{model.max_model_len:,}"
    if rows < 1:
        found = f"{terms} = {size(max(budget, 0))} for KV: not one row of {longest} tokens"
        remedy = "a smaller model.max_model_len, dtype or model, or more memory"
        return Check("memory", "missing", found, remedy)
    found = f"{terms} = {size(budget)} for KV: {tokens:,} tokens, {rows:,} rows of {longest}"
    if recipe.hardware.device == "cpu":
        need = recipe.workers * (shares * budget + (weights or 0))
        free = psutil.virtual_memory().available
        if need > free:
            found = f"{recipe.workers} workers need {size(need)}, {size(free)} is free"
            remedy = "use fewer workers or a smaller engine.kv_cache_memory_mib, or free memory"
            return Check("memory", "missing", found, remedy)
    return Check("memory", "ok", found)
