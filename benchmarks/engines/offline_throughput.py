"""Offline throughput of re-batching and its peers on requests that all wait from the start.

    python -m benchmarks.engines.offline_throughput [--sizes 15M 58M] [--systems rebatch vllm ...]

Takes from minutes to an hour, by --requests, --rounds, --sizes and --systems. Needs nothing but the
package for the systems here; `--vllm-python PATH` adds vLLM.

Every system is a process of its own with the same weights, requests, threads and bytes of KV cache.
Each round runs all of them one after the other, in an order that rotates, so that a ratio compares
neighbouring runs. Throughput counts generated tokens: each request gets exactly the length that the
trace gives it, on every system. On every tenth request tokens are compared with those of
transformers' `generate()`, one request at a time.

    rebatch             engine rebatch, kv_layout rows, policy past-future
    rebatch-slab        the same with kv_layout slab
    static-N            engine rebatch's slices, policy sequence: batches of N until all ended (SLS)
    slices              policy slice: 32 tokens at a time, batches cut by DP (SCLS)
    generate            transformers, one request at a time, over every tenth request
    generate_batch-N    transformers' continuous batching in a bounded pool, at most N requests at a
                        time; 0: no limit
    vllm                in its own process, in the environment of --vllm-python

On a shared machine wall times mislead, with two threads more than with one: --clock cpu_s --threads
1 counts the processor time of the serving processes. With --samples runs are added to a file, and
the tables cover all of it: rounds may be measured at different times, and --rounds 0 only writes
the tables.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.command import add_markdown, make_parser, publish
from benchmarks.engines.offline_work import SIZES, Work, prepare
from toolkit.workers.process import engine_environment

SYSTEMS = (
    *("generate", "static-8", "static-16", "static-32", "slices"),
    *("generate_batch-0", "generate_batch-8", "generate_batch-16", "generate_batch-32"),
    *("rebatch-slab", "rebatch", "vllm"),
)
REFERENCE = "generate"  # all other systems must match its tokens
SAMPLE = 10
WARM_UP = 6  # requests
SECTION = "offline-throughput"
UNITS = {"seconds": "s", "cpu_s": "CPU s"}
# one round of one size; its "systems" have their seconds, tokens, and number of equal requests
Run = dict[str, Any]


class System:
    """A system's process. `note` says why there is none."""

    def __init__(self, name: str, folder: Path, options: argparse.Namespace) -> None:
        self.name = name
        self.note = ""
        self.facts: Mapping[str, Any] = {}
        command = _command(name, folder, options)
        if not command:
            self.note = "not installed"
            return
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if options.verbose else subprocess.DEVNULL,
            text=True,
            env=engine_environment(options.threads, "cpu"),
        )

    def wait(self) -> None:
        """Wait until it has loaded."""
        if not self.note:
            self.facts = self._read()["ready"]

    def serve(self, count: int) -> dict[str, Any]:
        """One run over the first `count` requests: its seconds and outputs."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        if not self.note:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise SystemExit(f"{self.name} ended with exit code {code}; --verbose shows its output")
        found: dict[str, Any] = json.loads(line)
        return found


def _command(name: str, folder: Path, options: argparse.Namespace) -> list[str]:
    if name == "vllm":
        python = options.vllm_python
        return [python, "-m", "benchmarks.engines.offline_vllm", str(folder)] if python else []
    return [sys.executable, "-m", "benchmarks.engines.offline_ours", str(folder), name]


def measure(size: str, options: argparse.Namespace, save: Path | None) -> list[Run]:
    """All rounds of one model."""
    runs = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        work = prepare(folder, size, options.trace, options.requests, options.threads, SAMPLE)
        names = [REFERENCE, *(name for name in options.systems if name != REFERENCE)]
        systems = [System(name, folder, options) for name in names]
        try:
            for system in systems:
                system.wait()
            systems = [system for system in systems if not system.note]
            for system in systems:
                system.serve(WARM_UP)
            for index in range(options.rounds):
                turn = index % len(systems)
                run = _round(systems[turn:] + systems[:turn], size, work)
                runs.append(run)
                if save is not None:
                    _save(save, run)
        finally:
            for system in systems:
                system.close()
    return runs


def _round(systems: Sequence[System], size: str, work: Work) -> Run:
    replies: dict[str, dict[str, Any]] = {}
    for system in systems:
        replies[system.name] = reply = system.serve(len(work.outputs))
        reply["outputs"] = {int(index): tokens for index, tokens in reply["outputs"].items()}
        for index, tokens in reply["outputs"].items():
            if len(tokens) != work.outputs[index]:
                got = f"{len(tokens)} tokens, not {work.outputs[index]}"
                raise SystemExit(f"{system.name}: request {index} got {got}")
        reply["tokens"] = sum(len(tokens) for tokens in reply["outputs"].values())
        rates = f"{rate(reply):.0f} tokens/s, {rate(reply, 'cpu_s'):.0f} per CPU s"
        print(f"{size} {system.name}: {rates}", file=sys.stderr, flush=True)
    expected = replies[REFERENCE]["outputs"]
    for system in systems:
        reply = replies[system.name]
        outputs = reply.pop("outputs")
        # our engines end a replayed request with EOS, so the last token is not compared
        same = (outputs[index][:-1] == tokens[:-1] for index, tokens in expected.items())
        reply |= {"equal": sum(same), "facts": dict(system.facts)}
    counts = {"requests": len(work.outputs), "tokens": work.tokens, "compared": len(expected)}
    return {"size": size, **counts, "systems": replies}


def _save(path: Path, run: Run) -> None:
    runs = _load(path)
    path.write_text(json.dumps([*runs, run], indent=1) + "\n", encoding="utf-8")


def _load(path: Path) -> list[Run]:
    runs: list[Run] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return runs


def table(
    runs: Sequence[Run], order: Sequence[str], missing: Sequence[str], clock: str = "seconds"
) -> str:
    """The rates of one size, and how many times as fast `rebatch` was in the same round."""
    heads = f"tokens/{UNITS[clock]} | lowest to highest | rounds | rebatch is | same tokens"
    lines = [f"| system | {heads} |", "|---|---:|---:|---:|---:|---:|"]
    for name in order:
        found = [run["systems"] for run in runs if name in run["systems"]]
        if not found:
            if name in missing:
                lines.append(f"| {name} | not installed | | | | |")
            continue
        rates = [rate(systems[name], clock) for systems in found]
        paired = [systems for systems in found if "rebatch" in systems]
        ratios = [rate(one["rebatch"], clock) / rate(one[name], clock) for one in paired]
        times = f"{statistics.median(ratios):.2f}x" if ratios and name != "rebatch" else ""
        equal = sum(systems[name]["equal"] for systems in found)
        compared = sum(run["compared"] for run in runs if name in run["systems"])
        median = statistics.median(rates)
        spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
        cells = f"{median:,.0f} | {spread} | {len(rates)} | {times} | {equal} of {compared}"
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines) + "\n"


def rate(one: Mapping[str, Any], clock: str = "seconds") -> float:
    """Tokens per second of `clock`."""
    return float(one["tokens"] / one[clock])


def report(runs: Sequence[Run], options: argparse.Namespace) -> str:
    """All tables, and the aims."""
    missing = [] if options.vllm_python else ["vllm"]
    order = list(dict.fromkeys([*SYSTEMS, *options.systems]))
    parts = []
    for size in SIZES:
        mine = [run for run in runs if run["size"] == size]
        if mine:
            work = f"{mine[0]['requests']} requests, {mine[0]['tokens']:,} tokens"
            parts.append(f"A Llama of {size}, {work}:\n")
            parts += [table(mine, order, missing, options.clock), aims(mine, options.clock)]
    return "\n".join(parts)


def aims(runs: Sequence[Run], clock: str = "seconds") -> str:
    """`rebatch` over the best of each kind, per round."""
    found = []
    for kind, aim in (("static", 2.0), ("generate_batch", 1.6), ("vllm", 1.0)):
        ratios = [
            rate(run["systems"]["rebatch"], clock)
            / max(rate(one, clock) for name, one in run["systems"].items() if name.startswith(kind))
            for run in runs
            if "rebatch" in run["systems"] and any(name.startswith(kind) for name in run["systems"])
        ]
        if ratios:
            found.append(f"the best {kind} {statistics.median(ratios):.2f}x (aim {aim})")
    return f"`rebatch` over {', '.join(found)}, medians over rounds.\n" if found else ""


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--trace", default="chat-small", help="a file of any known format, or a shipped trace"
    )
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS))
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=min(os.cpu_count() or 1, 2))
    parser.add_argument(
        "--clock",
        choices=list(UNITS),
        default="seconds",
        help="cpu_s: processor time of the serving processes",
    )
    parser.add_argument(
        "--vllm-python", default="", help="the Python of an environment that has vLLM"
    )
    parser.add_argument(
        "--samples",
        type=Path,
        help="add the runs to this JSON file, and show the tables of all of it",
    )
    add_markdown(parser)
    parser.add_argument("--verbose", action="store_true", help="show the output of the systems")
    options = parser.parse_args()
    sizes = options.sizes if options.rounds else []
    runs = [run for size in sizes for run in measure(size, options, options.samples)]
    text = report(_load(options.samples) if options.samples else runs, options)
    publish(text, options.markdown, SECTION, "Offline throughput beside peers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
