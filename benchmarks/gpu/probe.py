"""Decode steps beside the limit of the memory's bandwidth, cuDNN's attention, CUDA graphs, pinning.

    python -m benchmarks.gpu.probe [--budget-s 180] [--out DIR]
    python -m benchmarks.gpu.probe --recipe recipes/tiny-llama-cpu-rebatch.yaml --device cpu

Takes three minutes on a GPU with Llama-3.1-8B's shape and random weights, and half a minute on a
CPU, where it uses tiny sizes, there is nothing to capture or to pin, and it says so. Needs torch,
transformers, pydantic and msgspec: run it from the repository root.

Of a running batch of N rows, milliseconds per step, each step one column longer than the last:

- kernel by kernel, with cuDNN's attention left out (the default) and let in;
- in fixed shapes, which are captured as CUDA graphs on a GPU (the default there);
- the same for a static slice, of rows that differ less in length.

The floors are the times in which the weights and the rows' caches can be read once, at the
bandwidth of a copy within the device, which is measured first. Then the GB/s of one transfer
between the device and pinned host memory, both ways. The table goes to stdout, and to
DIR/probe.json with all samples.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ROOT
from benchmarks.common.command import ended, make_parser
from benchmarks.gpu.stages import derive, timed
from toolkit.engines.protocol import OutOfMemory, make_engine
from toolkit.engines.rebatch_engine import RebatchEngine
from toolkit.engines.transformers_engine import TransformersEngine
from toolkit.files.io import environment
from toolkit.files.recipe import Recipe
from toolkit.files.shipped import load_recipe

RECIPE = ROOT / "recipes" / "llama-3.1-8b-h200-transformers.yaml"
SIZES = (1, 16, 64, 256)
LENGTHS = (512, 1536)
SIZES_ON_CPU = (1, 4)
LENGTHS_ON_CPU = (64, 128)
SAMPLES = 3  # each is the mean of a few growing steps
CACHE_MIB = 64 * 1024.0
CACHE_MIB_ON_CPU = 64.0
COPY_BYTES = 2 << 30
COPY_BYTES_ON_CPU = 32 << 20
PINNED_BYTES = 512 << 20
PINNED_BYTES_ON_CPU = 16 << 20
COPIES = 5
# Column of the table, engine, cuDNN's attention let in, fixed shapes.
WAYS = (
    ("eager", "rebatch", False, False),
    ("eager, cuDNN", "rebatch", True, False),
    ("fixed", "rebatch", False, True),
    ("slices", "transformers", False, True),
)
SLICES_FLOOR = "their floor"
# The mean of the lengths of a timed batch, as a share of the longest: they fall evenly to a quarter
# of it, and in a slice to three quarters.
MEAN_LENGTHS = {"rebatch": 0.625, "transformers": 0.875}


def main() -> int:
    options = _options()
    logging.basicConfig(format="%(message)s")  # a capture that fails says so in one line
    return ended(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    end_s = time.monotonic() + options.budget_s
    found = probe(_recipe(options.recipe, options.device), options.device == "cpu", end_s)
    print(table(found))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "probe.json").write_text(json.dumps(found, indent=1), encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="a folder for probe.json")
    parser.add_argument(
        "--budget-s", type=float, default=180.0, help="no point is begun after so many seconds"
    )
    return parser.parse_args()


def _recipe(path: Path, device: str) -> Recipe:
    """The recipe with random weights on this device, and a cache that has room for the points."""
    recipe = derive(load_recipe(path), "rebatch", device, device, quick=True)
    mib = CACHE_MIB_ON_CPU if device == "cpu" else CACHE_MIB
    engine = recipe.engine.model_copy(update={"kv_cache_memory_mib": mib})
    return recipe.model_copy(update={"engine": engine})


def probe(recipe: Recipe, on_cpu: bool, end_s: float) -> dict[str, Any]:
    """All measurements. Points not begun before `end_s` (monotonic) are left out."""
    device = torch.device("cpu" if on_cpu else "cuda")
    copied = copy_bandwidth(device, COPY_BYTES_ON_CPU if on_cpu else COPY_BYTES)
    pinned = pinned_bandwidth(device, PINNED_BYTES_ON_CPU if on_cpu else PINNED_BYTES)
    found: dict[str, Any] = {
        "environment": environment("cpu" if on_cpu else torch.cuda.get_device_name()).model_dump(),
        "recipe": recipe.name,
        "copy_bytes_per_s": copied,
        "pinned_bytes_per_s": pinned,
        "points": [],
    }
    sizes, lengths = (SIZES_ON_CPU, LENGTHS_ON_CPU) if on_cpu else (SIZES, LENGTHS)
    loads = dict.fromkeys((name, fixed) for _, name, _, fixed in WAYS)
    for name, fixed in loads:
        if time.monotonic() >= end_s:
            continue
        # Only one engine at a time fits. Without CUDA its fixed shapes run eagerly.
        spec = recipe.engine.model_copy(update={"name": name, "cuda_graphs": fixed})
        engine = make_engine(recipe.model, spec, recipe.hardware)
        assert isinstance(engine, TransformersEngine)
        weights = sum(each.nbytes for each in engine._model.parameters())
        found["weight_bytes"] = weights
        for rows in sizes:
            for length in lengths:
                for way, of_engine, cudnn, wants_fixed in WAYS:
                    due = (of_engine, wants_fixed) == (name, fixed) and not (on_cpu and cudnn)
                    if due and time.monotonic() < end_s:
                        tokens = int(rows * MEAN_LENGTHS[name] * length)
                        cached = tokens * engine.facts.kv_bytes_per_token
                        point = {"way": way, "rows": rows, "length": length}
                        point["floor_s"] = (weights + cached) / copied
                        point["seconds"] = _steps(engine, rows, length, cudnn=cudnn)
                        found["points"].append(point)
        if fixed:
            steps = engine._batch.fixed if isinstance(engine, RebatchEngine) else engine._fixed
            captured = bool(steps and steps.captures)
            found["captured"] = captured and found.get("captured", True)
        del engine
        gc.collect()
        if not on_cpu:
            torch.cuda.empty_cache()
    return found


def _steps(engine: TransformersEngine, rows: int, length: int, *, cudnn: bool) -> list[float]:
    """Seconds of a step; empty if memory has no room."""
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    try:
        engine.time_decode(rows, length, time.perf_counter)
        return [engine.time_decode(rows, length, time.perf_counter) for _ in range(SAMPLES)]
    except OutOfMemory:
        return []
    finally:
        torch.backends.cuda.enable_cudnn_sdp(False)


def copy_bandwidth(device: torch.device, size_bytes: int) -> float:
    """Bytes per second of a copy within the device, read and written."""
    source = torch.empty(size_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    seconds = _median_s(lambda: target.copy_(source))
    return 2 * size_bytes / seconds


def pinned_bandwidth(device: torch.device, size_bytes: int) -> dict[str, float]:
    """Bytes per second of one transfer to host memory and back; pinned where there is CUDA."""
    pin = device.type == "cuda"
    host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pin)
    there = torch.empty(size_bytes, dtype=torch.uint8, device=device).random_()
    return {
        "out": size_bytes / _median_s(lambda: host.copy_(there, non_blocking=True)),
        "in": size_bytes / _median_s(lambda: there.copy_(host, non_blocking=True)),
    }


def _median_s(work: Callable[[], object]) -> float:
    """The median of a few runs, after one that is not timed."""
    samples = [timed(work) for _ in range(COPIES + 1)]
    return statistics.median(samples[1:])


def table(found: dict[str, Any]) -> str:
    """The measurements as text."""
    on_cpu = found["environment"]["device"] == "cpu"
    lines = [f"{found['recipe']} on {found['environment']['device']}"]
    if on_cpu:
        lines.append("a CPU: tiny sizes, no cuDNN, nothing captured, nothing pinned")
    lines.append(
        f"copy within the device {found['copy_bytes_per_s'] / 1e9:.1f} GB/s, to host memory "
        f"{found['pinned_bytes_per_s']['out'] / 1e9:.1f} GB/s, back "
        f"{found['pinned_bytes_per_s']['in'] / 1e9:.1f} GB/s"
    )
    ways = [way for way, _, cudnn, _ in WAYS if not (on_cpu and cudnn)]
    columns = ("floor", *ways, SLICES_FLOOR)
    lines.append("ms per step".ljust(18) + "".join(f"{name:>13}" for name in columns))
    by_point: dict[tuple[int, int], dict[str, float]] = {}
    for point in found["points"]:
        cells = by_point.setdefault((point["rows"], point["length"]), {})
        cells[SLICES_FLOOR if point["way"] == "slices" else "floor"] = point["floor_s"]
        if point["seconds"]:
            cells[point["way"]] = statistics.median(point["seconds"])
    for (rows, length), cells in by_point.items():
        shown = (f"{1e3 * cells[name]:.2f}" if name in cells else "-" for name in columns)
        lines.append(f"N {rows}, L {length}".ljust(18) + "".join(f"{cell:>13}" for cell in shown))
    lines += [] if on_cpu else [_verdict(by_point), _captured(found)]
    return "\n".join(lines)


def _verdict(by_point: dict[tuple[int, int], dict[str, float]]) -> str:
    """Whether leaving cuDNN out is right."""
    both = [cells for cells in by_point.values() if {"eager", "eager, cuDNN"} <= cells.keys()]
    if not both:
        return "cuDNN: not measured"
    ratio = statistics.median(cells["eager, cuDNN"] / cells["eager"] for cells in both)
    right = "right" if ratio >= 1.0 else "wrong"
    return f"cuDNN let in: {ratio:.2f} times the time of a step; leaving it out is {right} here"


def _captured(found: dict[str, Any]) -> str:
    return "fixed: captured as CUDA graphs" if found.get("captured") else "fixed: not captured"


if __name__ == "__main__":
    sys.exit(main())
