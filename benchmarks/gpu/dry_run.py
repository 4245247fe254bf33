"""The half hour on a GPU machine, tried on this CPU from a bare environment and without network.

    python -m benchmarks.gpu.dry_run --python BARE/bin/python --wheels .whl --work DIR
    python -m benchmarks.gpu.dry_run --vllm-python VENV/bin/python --fit FIT --work DIR

The first takes about 15 minutes on two cores. Needs git, a virtual environment with the packages of
the GPU machine and no others (torch, transformers, numpy, scipy, numba, pytest, hypothesis, psutil,
typer, ...), and the folder that `benchmarks.gpu.wheels` fills for that Python.

It does what docs/how-to/gpu.md says, with the tiny recipe on the CPU. Each machine is a fresh copy
of the tracked files. On the first, the preflight runs without the wheels and has to name them, and
then with them; the tests of GPUs and the probe run; the benchmark runs with its budget and is
killed with SIGKILL in the middle. No process of it may be left. On the second machine it continues
from the archive and has to be done. On the third it runs once more, whole. It prints each command
with its time and its limit, and exits with code 1 if anything was not as it should be.

The second takes four minutes: `benchmarks.gpu.tune_live` tries forty settings of a vLLM with the
tiny model on one start, by this Python, which has llmctl's core. FIT is one of recipe
tiny-llama-vllm. --budget-s gives a busy machine more time."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import ROOT
from benchmarks.common.command import make_parser
from benchmarks.gpu.run import ARCHIVE, PART_BYTES, STAGES, marked
from benchmarks.gpu.wheels import LIMIT_BYTES

COMMAND_LIMIT_S = 600.0
BUDGET_S = 540
RECIPE = "recipes/tiny-llama-cpu-rebatch.yaml"
LEFT_S = 15.0  # after the kill, for the processes to be gone
LIMITS = {"preflight": 90.0, "tests": 90.0, "probe": 180.0}
# Without the project's options: a bare machine lacks pytest-timeout, so its keys are unknown there.
GPU_TESTS = (
    *("-m", "pytest", "-q", "-o", "addopts=", "-W", "default", "-p", "no:cacheprovider"),
    "tests/test_engines_gpu.py",
)
TUNE_LIVE_S = 240.0
LIVE_RECIPE = "tiny-llama-vllm"
LIVE_RATE = "2"  # requests/s: this server keeps its targets with some settings, and not with all
QUICK = ("-m", "benchmarks.gpu.run", "--quick", "--budget-s", str(BUDGET_S))


@dataclass(slots=True)
class DryRun:
    """The machines, the bare interpreter, and what was not as it should be."""

    python: Path
    work: Path
    site: Path
    problems: list[str]
    prefix: Sequence[str] = ()

    def machine(self, name: str) -> Path:
        """A folder with the tracked files."""
        folder = self.work / name
        shutil.rmtree(folder, ignore_errors=True)
        listed = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z")
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout
        for word in filter(None, names.decode().split("\0")):
            source = ROOT / word
            target = folder / word
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        return folder

    def run(
        self,
        machine: Path,
        *words: str,
        limit_s: float,
        bare: bool = False,
        expected: int = 0,
        python: Path | None = None,
    ) -> str:
        """Run Python with these words on a machine; its output. `python`: another one, which has
        llmctl's core, and the environment of this process.
        """
        shown = " ".join(("python3", *words))
        print(f"\n$ {shown}    ({machine.name}, at most {limit_s:.0f} s)", flush=True)
        start_s = time.monotonic()
        try:
            done = subprocess.run(
                [*self.prefix, str(python or self.python), *words],
                cwd=machine,
                env=os.environ | {"PYTHONPATH": "."} if python else self.environment(bare=bare),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=limit_s,
            )
            code = done.returncode
            text = done.stdout
        except subprocess.TimeoutExpired as error:
            code = -1
            text = (error.stdout or b"").decode(errors="replace")
        took_s = time.monotonic() - start_s
        print(text.rstrip())
        print(f"-- exit code {code}, {took_s:.0f} s", flush=True)
        if code != expected:
            self.problems.append(f"{shown}: exit code {code} after {took_s:.0f} s, not {expected}")
        return text

    def kill_in_the_middle(self, machine: Path, out: Path, after_s: float) -> None:
        """Start the benchmark, and kill it when it has worked for `after_s` seconds and has written
        an archive.
        """
        print(f"\n$ python3 {' '.join(QUICK)} ... ({machine.name})", flush=True)
        log = (self.work / "killed.log").open("w")
        words = (*QUICK, "--recipe", RECIPE, "--device", "cpu", "--out", str(out))
        process = subprocess.Popen(
            [*self.prefix, str(self.python), *words],
            cwd=machine,
            env=self.environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        start_s = time.monotonic()
        while process.poll() is None:
            long_enough = time.monotonic() - start_s > after_s
            if long_enough and (out / ARCHIVE).is_file():
                break
            time.sleep(0.5)
        if process.poll() is not None:
            self.problems.append("the benchmark ended before it could be killed")
        process.kill()
        process.wait()
        log.close()
        print((self.work / "killed.log").read_text().rstrip())
        print(f"-- killed with SIGKILL after {time.monotonic() - start_s:.0f} s", flush=True)
        end_s = time.monotonic() + LEFT_S
        while (left := list(marked())) and time.monotonic() < end_s:
            time.sleep(0.2)
        print(f"-- {len(left)} of its processes are left")
        if left:
            self.problems.append(f"processes {left} outlived the benchmark")

    def environment(self, *, bare: bool = False) -> dict[str, str]:
        """What a bare machine has; without `bare`, with the wheels."""
        found = {"PATH": "/usr/bin:/bin", "HOME": str(self.work), "PYTHONUNBUFFERED": "1"}
        found |= {"HF_HUB_OFFLINE": "1", "LANG": "C.UTF-8"}
        return found if bare else found | {"PYTHONPATH": str(self.site)}

    def check_archive(self, out: Path) -> None:
        """All outputs are in one file that may come back."""
        path = out / ARCHIVE
        if not path.is_file():
            self.problems.append(f"{path.name} was not written")
            return
        with tarfile.open(path) as archive:
            names = {Path(name).name for name in archive.getnames()}
        lacks = [stage.output for stage in STAGES if stage.output not in names]
        size = path.stat().st_size
        print(f"-- {path.name}: {size} bytes, {len(names)} files")
        if lacks or size > PART_BYTES:
            self.problems.append(f"{path}: {size} bytes, without {', '.join(lacks) or 'nothing'}")


def main() -> int:
    options = _options()
    work = options.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    if options.vllm_python is not None:
        run = DryRun(Path(sys.executable), work, work / "site", [])
        _tune_live(run, options)
        return _verdict(run)
    python = options.python.absolute()  # resolved it would be the base interpreter
    run = DryRun(python, work, work / "site", [], _without_network())
    print(f"network: {'none' if run.prefix else 'this machine cannot hide it'}")
    first, second, third = (run.machine(f"machine-{number}") for number in (1, 2, 3))
    _install(run, options.wheels, first)
    on_cpu = ("--device", "cpu", "--recipe", RECIPE)
    line = run.run(
        *(first, "-m", "benchmarks.gpu.preflight", *on_cpu),
        limit_s=LIMITS["preflight"],
        bare=True,
        expected=3,
    )
    if "pydantic" not in line or "msgspec" not in line:
        run.problems.append("the preflight does not name what is missing")
    run.run(first, "-m", "benchmarks.gpu.preflight", *on_cpu, limit_s=LIMITS["preflight"])
    run.run(first, *GPU_TESTS, "-rs", limit_s=LIMITS["tests"])
    run.run(first, "-m", "benchmarks.gpu.probe", *on_cpu, limit_s=LIMITS["probe"])
    outs = [work / f"out-{number}" for number in (1, 2, 3)]
    for out in outs:
        shutil.rmtree(out, ignore_errors=True)
    run.kill_in_the_middle(first, outs[0], options.kill_after_s)
    resume = ("--resume", str(outs[0] / ARCHIVE), "--out", str(outs[1]))
    run.run(second, *QUICK, *on_cpu, *resume, limit_s=COMMAND_LIMIT_S)
    run.check_archive(outs[1])
    run.run(third, *QUICK, *on_cpu, "--out", str(outs[2]), limit_s=COMMAND_LIMIT_S)
    run.check_archive(outs[2])
    return _verdict(run)


def _tune_live(run: DryRun, options: argparse.Namespace) -> None:
    """Forty settings of the tiny model on one start, and what comes back of them."""
    out = run.work / "out-live"
    shutil.rmtree(out, ignore_errors=True)
    words = ["-m", "benchmarks.gpu.tune_live", "--recipe", LIVE_RECIPE, "--rate", LIVE_RATE]
    words += ["--vllm-python", str(options.vllm_python.absolute())]
    words += ["--fit", str(options.fit.absolute()), "--out", str(out)]
    words += ["--budget-s", f"{options.budget_s:g}"]
    limit_s = options.budget_s + LEFT_S
    run.run(run.machine("machine-live"), *words, limit_s=limit_s, python=run.python)
    for name in ("plan.json", "live-tuning.json", "live-plan.json", "server.log", "passes.jsonl"):
        if not (out / name).is_file():
            run.problems.append(f"{out / name} was not written")


def _verdict(run: DryRun) -> int:
    """Print what was not as it should be; the exit code."""
    for problem in run.problems:
        print(f"not as it should be: {problem}")
    print("\nthe dry run failed" if run.problems else "\nthe dry run passed")
    return 1 if run.problems else 0


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--python", type=Path, help="of the bare environment")
    parser.add_argument("--wheels", type=Path, default=Path(".whl"))
    parser.add_argument("--work", type=Path, required=True, help="a folder for the machines")
    parser.add_argument(
        "--kill-after-s", type=float, default=60.0, help="not before the first stage is done"
    )
    parser.add_argument(
        "--vllm-python", type=Path, help="of an environment with vLLM: try tune_live alone"
    )
    parser.add_argument("--fit", type=Path, help=f"of recipe {LIVE_RECIPE}, for --vllm-python")
    parser.add_argument("--budget-s", type=float, default=TUNE_LIVE_S, help="of tune_live")
    options = parser.parse_args()
    if (options.python is None) == (options.vllm_python is None):
        parser.error("give either --python or --vllm-python")
    if (options.vllm_python is None) != (options.fit is None):
        parser.error("--vllm-python and --fit go together")
    return options


def _without_network() -> Sequence[str]:
    """A command's prefix that gives it no network; empty where that is not permitted."""
    prefix = ("unshare", "--net", "--map-root-user")
    if shutil.which("unshare") is None:
        return ()
    works = subprocess.run([*prefix, "true"], capture_output=True).returncode == 0
    return prefix if works else ()


def _install(run: DryRun, wheels: Path, tree: Path) -> None:
    """Install the wheels as on the machine, and check that they may travel with the tree."""
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise SystemExit(f"error: {wheels} has no wheels: python -m benchmarks.gpu.wheels")
    size = sum(path.stat().st_size for path in (*files, *tree.rglob("*")) if path.is_file())
    print(f"the tree and {len(files)} wheels: {size / (1 << 20):.1f} MiB")
    if size > LIMIT_BYTES:
        run.problems.append(f"the tree and the wheels are {size} bytes")
    shutil.rmtree(run.site, ignore_errors=True)
    install = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    install += ("--disable-pip-version-check", "--target", str(run.site))
    words = [*run.prefix, str(run.python), *install, *map(str, files)]
    subprocess.run(words, check=True, env=run.environment(bare=True))


if __name__ == "__main__":
    sys.exit(main())
