"""Profile, fit, slices and rounds under overload, and swap bandwidth on a GPU, unattended.

    python -m benchmarks.gpu.run [--quick] [--budget-s 540] [--out DIR]
    python -m benchmarks.gpu.run --recipe recipes/tiny-llama-cpu-rebatch.yaml --device cpu --quick

Takes at most ten minutes with --quick (and at most --budget-s, which may be less), else up to 2.8
hours a model. Needs torch, transformers, numpy, scipy, numba, pydantic and msgspec, and no
installed package: run it from the repository root. The second command tries everything but CUDA.

A preflight comes first (`benchmarks.gpu.preflight`): it names what is missing in one line, and the
run exits with code 3. Models have the published shapes and random weights: nothing is downloaded.
--quick is Llama-3.1-8B with a context of 2,048 tokens and outputs of at most 256.

For each model, on the engines `transformers` (slices) and `rebatch` (rounds): a profile and a fit;
then requests at an overload through the driver, workers and policies of `llmctl serve`, without
HTTP: SLS beside SCLS, and Past-Future beside its baselines; last the bandwidth of swaps both ways.
Results go to RESULTS/DEVICE/MODEL, each file with its environment, and to RESULTS/DEVICE/table.md
as tables. With --out, DIR has all of it as one archive after every stage (in parts of 16 MiB if it
is larger), and --resume ARCHIVE continues from one, also on another machine with such a GPU.

Each stage runs in a process of its own with a time limit, and is skipped when its output exists.
With --budget-s, a stage that would not fit into what is left is not started. After Ctrl-C, or a
stage that ran out of time, the same command continues (profiles from their journal). Exit codes:
0 all stages are done, 1 some are not, 2 wrong input, 3 the preflight found something missing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import ROOT
from benchmarks.common.command import make_parser
from benchmarks.gpu.preflight import MISSING, check

GRACE_S = 10.0  # for a stage's processes to end after a signal
INTERRUPTED = 130
RECIPE = ROOT / "recipes" / "llama-3.1-8b-h200-transformers.yaml"
MARK = "LLMCTL_GPU_STAGE"  # in the environment of all processes of a stage
PROCESSES = Path("/proc")
ARCHIVE = "gpu-results.tar.gz"
PART_BYTES = 16 << 20
PARTS_MAX = 7  # and a table beside them


@dataclass(slots=True, frozen=True)
class Stage:
    """One step.

    Attributes:
        needs: the stages that write what it reads.
        about_s: an estimate with --quick on a GPU of 4 TB/s. It is not started with less time.
        quick_limit_s, limit_s: it is ended after this, with and without --quick.
    """

    name: str
    output: str
    needs: tuple[str, ...]
    about_s: float
    quick_limit_s: float
    limit_s: float

    def allowed_s(self, *, quick: bool) -> float:
        return self.quick_limit_s if quick else self.limit_s


# In the order of what they are worth: predicted beside measured comes first.
STAGES = (
    Stage("profile-transformers", "profile-transformers.json", (), 60, 130, 2400),
    Stage("fit-transformers", "fit-transformers.json", ("profile-transformers",), 5, 20, 120),
    Stage("slices", "slices.json", ("fit-transformers",), 60, 150, 1200),
    Stage("profile-rebatch", "profile-rebatch.json", (), 75, 200, 2400),
    Stage("fit-rebatch", "fit-rebatch.json", ("profile-rebatch",), 5, 20, 120),
    Stage("rounds", "rounds.json", ("fit-rebatch",), 80, 210, 1500),
    Stage("swap", "swap.json", (), 30, 60, 300),
)


@dataclass(slots=True, frozen=True)
class Run:
    """One model on this device. `variables` are for the environment of its stages."""

    recipe: Path
    folder: Path
    device: str
    device_name: str
    quick: bool
    variables: Mapping[str, str] = field(default_factory=dict)

    def command(self, stage: str) -> list[str]:
        where = ["--recipe", str(self.recipe), "--folder", str(self.folder)]
        device = ["--device", self.device, "--device-name", self.device_name]
        quick = ["--quick"] if self.quick else []
        words = [sys.executable, "-m", "benchmarks.gpu.run", "--stage", stage]
        return [*words, *where, *device, *quick]


@dataclass(slots=True, frozen=True)
class Budget:
    """Seconds for all stages, from now on."""

    seconds: float
    start_s: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        return self.seconds - (time.monotonic() - self.start_s)


def main() -> int:
    options = _options()
    if options.stage:
        # torch and the rest are imported only in the stages' own processes
        from benchmarks.gpu.stages import run_stage

        return run_stage(options.stage, options.recipe[0], options.folder, options)
    budget = Budget(options.budget_s or math.inf)
    recipes = options.recipe or [RECIPE]
    found = check(options.device, recipes, options.results, quick=options.quick)
    print(f"preflight: {found.line()}", flush=True)
    if found.missing:
        return MISSING
    if options.resume:
        unpack(options.resume, options.results)
    device = _device(options.device)
    folder = options.results / _slug(device.name)
    runs = [
        Run(
            path, folder / _model(path), options.device, device.name, options.quick, found.variables
        )
        for path in recipes
    ]
    _print_stages(runs)
    undone: list[str] = []
    try:
        for run in runs:
            names = go(run, budget, lambda: keep(folder, options.results, options.out))
            undone += [f"{run.folder.name}: {name}" for name in names]
    except KeyboardInterrupt:
        print(
            "\ninterrupted: finished stages are kept, and the same command resumes", file=sys.stderr
        )
        return INTERRUPTED
    finally:
        keep(folder, options.results, options.out)
        _print_tables(folder)
    for name in undone:
        print(f"not done: {name}", file=sys.stderr)
    return 1 if undone else 0


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--results", type=Path, default=Path("profiles"), help="the folder of all devices' results"
    )
    parser.add_argument(
        "--out", type=Path, help=f"a folder for {ARCHIVE} and table.md, renewed after every stage"
    )
    parser.add_argument(
        "--resume", type=Path, metavar="ARCHIVE", help="unpack this into --results first"
    )
    parser.add_argument(
        "--budget-s", type=float, help="seconds for everything; default: the stages' limits"
    )
    parser.add_argument(
        "--recipe", type=Path, action="append", help=f"default: {RECIPE.stem}; repeatable"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="at most ten minutes a model")
    for internal in ("--stage", "--device-name"):
        parser.add_argument(internal, default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


class Device(NamedTuple):
    """The device of the run."""

    name: str
    memory_gib: float


def _device(kind: str) -> Device:
    """The first device, found by another process, so that this one holds none of its memory."""
    if kind == "cpu":
        return Device("cpu", 0.0)
    code = "import json; from toolkit.engines.devices import find_devices as f; g = f().gpus; "
    code += "print(json.dumps([(one.name, one.memory_bytes / 2**30) for one in g[:1]]))"
    answer = subprocess.run(
        [sys.executable, "-c", code], env=_environment(), capture_output=True, text=True
    )
    if answer.returncode:
        raise SystemExit(f"error: the GPU cannot be used: {answer.stderr.strip().splitlines()[-1]}")
    return Device(*json.loads(answer.stdout.splitlines()[-1])[0])


def _model(recipe: Path) -> str:
    """A recipe's name without the hardware, which the folder above names."""
    return re.sub(r"-(h200-transformers|a100-80gb-transformers|cpu-rebatch|cpu)$", "", recipe.stem)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _left(run: Run) -> list[Stage]:
    return [stage for stage in STAGES if not (run.folder / stage.output).is_file()]


def _print_stages(runs: Sequence[Run]) -> None:
    for run in runs:
        left = _left(run)
        limit_s = sum(stage.allowed_s(quick=run.quick) for stage in left)
        print(
            f"{run.folder}: {len(left)} of {len(STAGES)} stages to go, at most"
            f" {limit_s / 60:.0f} min",
            flush=True,
        )


def go(run: Run, budget: Budget, done: Callable[[], None] = lambda: None) -> list[str]:
    """Run the stages that are left, and call `done` after each; the names of those not done."""
    undone: list[str] = []
    for stage in _left(run):
        if any(name in undone for name in stage.needs):
            undone.append(stage.name)
            continue
        left_s = budget.left_s
        if stage.about_s > left_s:
            print(
                f"\n== {stage.name}: not started: it takes about {stage.about_s:.0f} s, and "
                f"{max(left_s, 0.0):.0f} s of the budget are left",
                flush=True,
            )
            undone.append(stage.name)
            continue
        # What is left also has to end the stage's processes and to write the archive.
        limit_s = min(stage.allowed_s(quick=run.quick), max(left_s - GRACE_S, 1.0))
        start_s = time.monotonic()
        print(f"\n== {run.folder.name}: {stage.name}, at most {limit_s:.0f} s", flush=True)
        problem = _run(run.command(stage.name), limit_s, run.variables)
        if problem:
            print(f"{stage.name}: {problem}", file=sys.stderr, flush=True)
            undone.append(stage.name)
        else:
            print(f"{stage.name}: done in {time.monotonic() - start_s:.0f} s", flush=True)
        done()
    return undone


def _run(command: Sequence[str], limit_s: float, variables: Mapping[str, str] | None = None) -> str:
    """Why the stage failed, or ''. When this returns, no process of the stage is left."""
    mark = secrets.token_hex(8)
    environment = _environment() | dict(variables or {}) | {MARK: mark}
    child = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        code = child.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"not done within {limit_s:.0f} s; the same command resumes it"
    finally:
        _end(child, mark)
    return f"exit code {code}" if code else ""


def _end(child: subprocess.Popen[bytes], mark: str) -> None:
    """End a stage and every process that it started, also in sessions of their own, and wait until
    they are gone: the next stage needs the device's memory, and measures time.
    """
    killed: set[int] = set()  # a process loses its mark early in its death, and its files later
    for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        with contextlib.suppress(ProcessLookupError):
            if child.poll() is None:
                os.killpg(child.pid, number)
        if number == signal.SIGKILL:
            for process in marked(mark):
                killed.add(process)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process, number)
        end_s = time.monotonic() + wait_s
        while time.monotonic() < end_s:
            if child.poll() is not None and not any(marked(mark)) and all(map(_has_ended, killed)):
                return
            time.sleep(0.05)


def _has_ended(process: int) -> bool:
    """Whether a process is gone, or waits to be reaped."""
    try:
        state = (PROCESSES / str(process) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


def marked(mark: str = "", processes: Path = PROCESSES) -> Iterator[int]:
    """The processes that have this mark, or any, in their environment and are not just waiting to
    be reaped.
    """
    wanted = f"{MARK}={mark}".encode()
    for folder in processes.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                variables = (folder / "environ").read_bytes().split(b"\0")
                if any(each.startswith(wanted) for each in variables):
                    yield int(folder.name)


def _environment() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def keep(folder: Path, results: Path, out: Path | None) -> None:
    """Write the tables of a device's folder, and with `out` the archive of it."""
    from benchmarks.gpu.table import tables

    text = tables(folder)
    if text:
        (folder / "table.md").write_text(text, encoding="utf-8")
    if out is None or not folder.is_dir():
        return
    out.mkdir(parents=True, exist_ok=True)
    if text:
        (out / "table.md").write_text(text, encoding="utf-8")
    pack(folder, results, out)


def pack(folder: Path, results: Path, out: Path, part_bytes: int = PART_BYTES) -> list[Path]:
    """Write all files of `folder`, journals too, as one archive into `out`; its paths are relative
    to `results`. An archive that is too large for one file is written in parts, which `cat` joins.

    Raises `SystemExit` for more parts than may come back.
    """
    unfinished = out / f".{ARCHIVE}.new"
    with tarfile.open(unfinished, "w:gz") as archive:
        archive.add(folder, arcname=folder.relative_to(results).as_posix())
    for old in out.glob(f"{ARCHIVE}*"):
        old.unlink()
    size = unfinished.stat().st_size
    if size <= part_bytes:
        unfinished.rename(out / ARCHIVE)
        return [out / ARCHIVE]
    if size > PARTS_MAX * part_bytes:
        raise SystemExit(f"error: the results are {size >> 20} MiB, more than {PARTS_MAX} parts")
    parts: list[Path] = []
    with unfinished.open("rb") as stream:
        while block := stream.read(part_bytes):
            parts.append(out / f"{ARCHIVE}.{len(parts)}")
            parts[-1].write_bytes(block)
    unfinished.unlink()
    return parts


def unpack(archive: Path, results: Path) -> None:
    """Unpack an archive of an earlier run; results that are here already are replaced."""
    results.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(archive, "r:gz") as opened:
            if hasattr(tarfile, "data_filter"):  # Python 3.11 has it from 3.11.4 on
                opened.extraction_filter = tarfile.data_filter
            opened.extractall(results)
    except (OSError, tarfile.TarError) as error:
        raise SystemExit(f"error: --resume {archive}: {error}") from None


def _print_tables(folder: Path) -> None:
    table = folder / "table.md"
    if table.is_file():
        print(f"\n{table.read_text(encoding='utf-8')}\nwrote {table}")


if __name__ == "__main__":
    sys.exit(main())
