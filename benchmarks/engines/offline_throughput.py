"""Offline throughput of re-batching and its peers on requests that all wait from the start.

    python -m benchmarks.engines.offline_throughput [--systems rebatch vllm ...]

Takes from minutes to an hour, by --requests, --rounds and --systems. Needs nothing but the package
for the systems here; `--vllm-python PATH` adds vLLM.

Every system is a process of its own with the same weights, requests, threads and bytes of KV cache.
Each round runs all of them one after the other, in an order that rotates, so that a ratio compares
neighbouring runs. Throughput counts generated tokens: each request gets exactly the length that the
trace gives it, on every system. On every tenth request tokens are compared with those of
transformers' `generate()`, one request at a time.

    rebatch             engine rebatch, kv_layout rows, policy past-future
    static-N            engine rebatch's slices, policy sequence: batches of N until all ended (SLS)
    generate            transformers, one request at a time, over every tenth request
    generate_batch-N    transformers' continuous batching in a bounded pool, at most N requests at a
                        time; 0: no limit
    vllm                in its own process, in the environment of --vllm-python
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.command import make_parser
from benchmarks.common.results_file import markdown
from benchmarks.engines.offline_work import Work, prepare
from toolkit.workers.process import engine_environment

REFERENCE = "generate"  # all other systems must match its tokens
SYSTEMS = (
    *(REFERENCE, "static-8", "static-16", "static-32"),
    *("generate_batch-0", "generate_batch-8", "generate_batch-16", "generate_batch-32"),
    *("rebatch", "vllm"),
)
AIMS = {"static": 2.0, "generate_batch": 1.6, "vllm": 1.0}  # `rebatch` over the best of each kind
COLUMNS = ("system", "tokens/s", "lowest to highest", "rounds", "rebatch is", "same tokens")
SAMPLE = 10
WARM_UP = 6  # requests
# of each system in a round: tokens/s, and how many of the compared requests have the same tokens
Round = Mapping[str, tuple[float, int]]


class System:
    """A system's process."""

    def __init__(self, name: str, folder: Path, options: argparse.Namespace) -> None:
        self.name = name
        command = [sys.executable, "-m", "benchmarks.engines.offline_ours", str(folder), name]
        if name == "vllm":
            python = options.vllm_python
            command = [python, "-m", "benchmarks.engines.offline_vllm", str(folder)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if options.verbose else subprocess.DEVNULL,
            text=True,
            env=engine_environment(options.threads, "cpu"),
        )

    def read(self) -> dict[str, Any]:
        """Its next line: the first says that it has loaded."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise SystemExit(f"{self.name} ended with exit code {code}; --verbose shows its output")
        found: dict[str, Any] = json.loads(line)
        return found

    def serve(self, count: int) -> tuple[float, dict[int, list[int]]]:
        """One run over the first `count` requests: its seconds and outputs."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        reply = self.read()
        outputs = {int(index): tokens for index, tokens in reply["outputs"].items()}
        return reply["seconds"], outputs

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(options: argparse.Namespace) -> list[Round]:
    """All rounds."""
    rounds = []
    names = list(dict.fromkeys([REFERENCE, "rebatch", *options.systems]))
    if not options.vllm_python and "vllm" in names:
        names.remove("vllm")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        work = prepare(folder, options.trace, options.requests, options.threads, SAMPLE)
        systems = [System(name, folder, options) for name in names]
        try:
            for system in systems:
                system.read()
            for system in systems:
                system.serve(WARM_UP)
            for index in range(options.rounds):
                turn = index % len(systems)
                rounds.append(one_round(systems[turn:] + systems[:turn], work))
        finally:
            for system in systems:
                system.close()
    return rounds


def one_round(systems: Sequence[System], work: Work) -> Round:
    """Every system once."""
    rates = {}
    outputs: dict[str, dict[int, list[int]]] = {}
    for system in systems:
        seconds, found = system.serve(len(work.outputs))
        for index, tokens in found.items():
            if len(tokens) != work.outputs[index]:
                got = f"{len(tokens)} tokens, not {work.outputs[index]}"
                raise SystemExit(f"{system.name}: request {index} got {got}")
        rates[system.name] = sum(map(len, found.values())) / seconds
        outputs[system.name] = found
        print(f"{system.name}: {rates[system.name]:.0f} tokens/s", file=sys.stderr, flush=True)
    # our engines end a replayed request with EOS, so the last token is not compared
    expected = {index: tokens[:-1] for index, tokens in outputs[REFERENCE].items()}
    equal = {
        name: sum(found[index][:-1] == tokens for index, tokens in expected.items())
        for name, found in outputs.items()
    }
    return {name: (rate, equal[name]) for name, rate in rates.items()}


def table(rounds: Sequence[Round]) -> str:
    """The rates, and how many times as fast `rebatch` was in the same round."""
    compared = sum(one[REFERENCE][1] for one in rounds)
    rows = []
    for name in sorted(rounds[0], key=SYSTEMS.index):
        rates = [one[name][0] for one in rounds]
        cells = [name, f"{median(rates):,.0f}", f"{min(rates):,.0f} to {max(rates):,.0f}"]
        times = median(one["rebatch"][0] / one[name][0] for one in rounds)
        cells += [str(len(rates)), "" if name == "rebatch" else f"{times:.2f}x"]
        rows.append([*cells, f"{sum(one[name][1] for one in rounds)} of {compared}"])
    return markdown(COLUMNS, rows)


def aims(rounds: Sequence[Round]) -> str:
    """`rebatch` over the best of each kind, medians over rounds."""
    found = []
    for kind, aim in AIMS.items():
        names = [name for name in rounds[0] if name.startswith(kind)]
        if names:
            best = [max(one[name][0] for name in names) for one in rounds]
            times = median(one["rebatch"][0] / top for one, top in zip(rounds, best, strict=True))
            found.append(f"the best {kind} {times:.2f}x (aim {aim})")
    return f"`rebatch` over {', '.join(found)}, medians over rounds."


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--trace", default="chat-small", help="a file of any known format, or a shipped trace"
    )
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=min(os.cpu_count() or 1, 2))
    parser.add_argument(
        "--vllm-python", default="", help="the Python of an environment that has vLLM"
    )
    parser.add_argument("--verbose", action="store_true", help="show the output of the systems")
    rounds = measure(parser.parse_args())
    print(table(rounds))
    print(aims(rounds))


if __name__ == "__main__":
    main()
