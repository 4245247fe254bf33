"""The whole way on a GPU, unattended: profile, fit, swap bandwidth, SCLS over SLS, Past-Future
under overload.

    python bench/gpu.py [--models 7b,13b] [--out profiles] [--quick]
    python bench/gpu.py --recipe recipes/tiny-llama-cpu-rebatch.yaml --device cpu --quick    # every line but CUDA's

Models have the published shapes and random weights: nothing is downloaded. For each, on the engines
`transformers` (slices) and `rebatch` (rounds): a profile and a fit; the bandwidth of swaps both
ways; then requests at an overload through the same driver, workers and policies that `llmctl serve`
runs, without HTTP. All is written to OUT/DEVICE/MODEL, with the environment in every file, and
OUT/DEVICE/table.md has it as tables.

Each stage runs in a process of its own with a time limit, and is skipped when its output is there:
after Ctrl-C, or a stage that ran out of time, the same command goes on (profiles from their
journal). --quick measures less and sets limits that come to ten minutes a model. It needs torch,
transformers, numpy, scipy, numba, pydantic and msgspec.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a checkout that was not installed will do

GRACE_S = 20.0  # for a stage that was told to end
SMALLER_GPU_GIB = 100.0  # below: the grid of the recipes for 80 GB
INTERRUPTED = 130


@dataclass(slots=True, frozen=True)
class Stage:
    """One step: its name, its output, what must be there before, and how long it may take, quick
    and not.
    """

    name: str
    output: str
    needs: tuple[str, ...]
    quick_limit_s: float
    limit_s: float

    def allowed_s(self, *, quick: bool) -> float:
        return self.quick_limit_s if quick else self.limit_s


STAGES = (
    Stage("profile-transformers", "profile-transformers.json", (), 130, 2400),
    Stage("profile-rebatch", "profile-rebatch.json", (), 130, 2400),
    Stage("fit-transformers", "fit-transformers.json", ("profile-transformers",), 15, 120),
    Stage("fit-rebatch", "fit-rebatch.json", ("profile-rebatch",), 15, 120),
    Stage("swap", "swap.json", (), 50, 300),
    Stage("slices", "slices.json", ("fit-transformers",), 105, 1200),
    Stage("rounds", "rounds.json", ("fit-rebatch",), 150, 1500),
)


@dataclass(slots=True, frozen=True)
class Run:
    """One model on this device."""

    recipe: Path
    folder: Path
    device: str
    device_name: str
    quick: bool

    def command(self, stage: str) -> list[str]:
        where = ["--recipe", self.recipe, "--folder", self.folder]
        device = ["--device", self.device, "--device-name", self.device_name]
        quick = ["--quick"] if self.quick else []
        return [
            str(word)
            for word in (sys.executable, __file__, "--stage", stage, *where, *device, *quick)
        ]


def main() -> int:
    options = _options()
    if options.stage:
        from gpu_stages import (
            run_stage,  # torch and all else is imported in the stages' own processes
        )

        return run_stage(options.stage, options.recipe[0], options.folder, options)
    device = _device(options.device)
    if device is None:
        print(
            "error: torch finds no CUDA device; --device cpu with a tiny recipe tries the way out",
            file=sys.stderr,
        )
        return 1
    folder = options.out / _slug(device.name)
    recipes = options.recipe or [
        _recipe_of(model, device.memory_gib) for model in options.models.split(",")
    ]
    runs = [
        Run(path, folder / _model(path), options.device, device.name, options.quick)
        for path in recipes
    ]
    _say_what_will_be_done(runs)
    try:
        failed = [f"{run.folder.name}: {name}" for run in runs for name in _go(run)]
    except KeyboardInterrupt:
        print("\ninterrupted: what is done is kept, and the same command goes on", file=sys.stderr)
        return INTERRUPTED
    finally:
        _write_tables(folder)
    for name in failed:
        print(f"not done: {name}", file=sys.stderr)
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("profiles"), help="folder of all devices' results"
    )
    parser.add_argument("--models", default="7b,13b", help="of Llama-2, with commas")
    parser.add_argument(
        "--recipe", type=Path, action="append", help="instead of --models; repeatable"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="at most ten minutes a model")
    for internal in ("--stage", "--device-name"):
        parser.add_argument(internal, default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


class Device(NamedTuple):
    """What it runs on."""

    name: str
    memory_gib: float


def _device(kind: str) -> Device | None:
    """The first device; asked for in another process, so that this one holds no memory of it."""
    if kind == "cpu":
        return Device("cpu", 0.0)
    code = "import json; from toolkit.engines.devices import find_devices as f; g = f().gpus; "
    code += "print(json.dumps([(one.name, one.memory_bytes / 2**30) for one in g[:1]]))"
    answer = subprocess.run(
        [sys.executable, "-c", code], env=_environment(), capture_output=True, text=True
    )
    if answer.returncode:
        raise SystemExit(f"error: the GPU cannot be used: {answer.stderr.strip().splitlines()[-1]}")
    return next((Device(*each) for each in json.loads(answer.stdout.splitlines()[-1])), None)


def _recipe_of(model: str, memory_gib: float) -> Path:
    hardware = "a100-80gb" if memory_gib < SMALLER_GPU_GIB else "h200"
    path = ROOT / "recipes" / f"llama-2-{model}-{hardware}-transformers.yaml"
    if not path.is_file():
        raise SystemExit(f"error: --models {model}: there is no {path.name}; 7b and 13b there are")
    return path


def _model(recipe: Path) -> str:
    """A recipe's name without the hardware, which the folder above has."""
    return re.sub(r"-(h200-transformers|a100-80gb-transformers|cpu-rebatch|cpu)$", "", recipe.stem)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _left(run: Run) -> list[Stage]:
    return [stage for stage in STAGES if not (run.folder / stage.output).is_file()]


def _say_what_will_be_done(runs: Sequence[Run]) -> None:
    for run in runs:
        left = _left(run)
        limit_s = sum(stage.allowed_s(quick=run.quick) for stage in left)
        print(
            f"{run.folder}: {len(left)} of {len(STAGES)} stages to go, at most {limit_s / 60:.0f} min",
            flush=True,
        )


def _go(run: Run) -> list[str]:
    """Run the stages that are left; the names of those that were not done."""
    failed: list[str] = []
    for stage in _left(run):
        if any(name in failed for name in stage.needs):
            failed.append(stage.name)
            continue
        start_s, limit_s = time.monotonic(), stage.allowed_s(quick=run.quick)
        print(f"\n== {run.folder.name}: {stage.name}, at most {limit_s:.0f} s", flush=True)
        problem = _run(run.command(stage.name), limit_s)
        if problem:
            print(f"{stage.name}: {problem}", file=sys.stderr, flush=True)
            failed.append(stage.name)
        else:
            print(f"{stage.name}: done in {time.monotonic() - start_s:.0f} s", flush=True)
    return failed


def _run(command: Sequence[str], limit_s: float) -> str:
    """Why the stage is not done, or ''. Its processes end with it, also where it is interrupted or
    out of time.
    """
    child = subprocess.Popen(command, env=_environment(), start_new_session=True)
    try:
        code = child.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"not done within {limit_s:.0f} s; the same command goes on with it"
    finally:
        _end(child)
    return f"exit code {code}" if code else ""


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a stage and what it started; workers that are left see their sockets close, and end."""
    if child.poll() is not None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
            return


def _environment() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def _write_tables(folder: Path) -> None:
    from gpu_table import tables

    text = tables(folder)
    if text:
        (folder / "table.md").write_text(text, encoding="utf-8")
        print(f"\n{text}\nwrote {folder / 'table.md'}")


if __name__ == "__main__":
    sys.exit(main())
