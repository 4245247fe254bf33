"""The command line that all benchmarks share: `--help` shows the module's docstring."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.common.results_file import Recorder
from toolkit.errors import LlmctlError
from toolkit.interrupts import EXIT_CODE, InterruptedReplayError

Case = TypeVar("Case", bound=tuple[Any, ...])
Run = TypeVar("Run")


class _Parser(argparse.ArgumentParser):
    """A parser that also does what `--json FILE` says."""

    module = ""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options = super().parse_args(args, namespace)
        path = options.__dict__.pop("json_file", None)
        if path:
            words = sys.argv[1:] if args is None else list(args)
            at = next(k for k, word in enumerate(words) if word.startswith("--json"))
            del words[at : at + (1 if "=" in words[at] else 2)]
            Recorder(path, self.module, words)
        return options


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser that shows `description` as it is written, under the name `python -m MODULE`, and
    has `--json FILE`, for what the run prints.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    parser = _Parser(
        prog=f"python -m {spec.name}" if spec else None,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.module = spec.name if spec else parser.prog
    parser.add_argument(
        "--json",
        dest="json_file",
        type=Path,
        metavar="FILE",
        help="write the tables and lines that are printed to FILE, with command, machine and date",
    )
    return parser


def over_seeds(
    run: Callable[..., Run], cases: Sequence[Case], seeds: int, processes: int
) -> dict[Case, list[Run]]:
    """The results of `run(*case, seed)` for each case and seed, in processes."""
    jobs = [(*case, seed) for case in cases for seed in range(seeds)]
    with ProcessPoolExecutor(processes) as pool:
        runs = list(pool.map(run, *zip(*jobs, strict=True), chunksize=seeds))
    return {case: runs[k * seeds : (k + 1) * seeds] for k, case in enumerate(cases)}


def add_vllm(parser: argparse.ArgumentParser) -> None:
    """Add `--vllm-python PYTHON`."""
    parser.add_argument(
        "--vllm-python", required=True, help="the Python of an environment that has vLLM"
    )


def ended(run: Callable[[], object]) -> int:
    """The exit code of a run, as of a command of llmctl: an error and Ctrl-C end with one line."""
    try:
        run()
    except LlmctlError as error:
        hint = f"\nhint: {error.hint}" if error.hint else ""
        print(f"error: {error.message}{hint}", file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, InterruptedReplayError):
        print("\ninterrupted", file=sys.stderr)
        return EXIT_CODE
    return 0


LLMCTL = (sys.executable, "-m", "toolkit")


def llmctl(
    *words: str,
    before: Sequence[str] = (),
    codes: Container[int] = (0,),
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command of llmctl to its end; its exit code and what it printed on stdout. `before`:
    words in front of it. `SystemExit` for an exit code outside `codes`.
    """
    command = [*before, *LLMCTL, *words]
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in codes:
        raise SystemExit(f"llmctl {' '.join(words)}: exit code {done.returncode}")
    return done
