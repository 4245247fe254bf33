"""Ctrl-C at random moments in every long command: how it ends, and what it leaves.

    python -m benchmarks.serving.interrupts [--tries 50] [--commands tune,simulate] [--seed 0]

Takes about two minutes per try of all commands on two shared, busy cores. Needs nothing but the
package. `serve`, `bench` and `trace record` use fake engines, the others the tiny
Llama's laws that ship.

Each command runs once to its end. Then it is started anew for every try, and its whole process
group gets SIGINT, as in a terminal, at a moment between `FIRST_S` and its usual end. A try fails if

- the exit code is not 130,
- the command takes longer than 2 s to end, unless it is a server with requests,
- stderr shows a traceback,
- a process lives 5 s after the command,
- a file is torn, or a temporary file is left.

A signal that comes while Python itself starts does not count.

In every fifth try the same command then runs to its end. Of commands that always write the same
bytes, those must be the bytes of the run without Ctrl-C; `profile` must have measured every point.
The exit code is 1 if a try failed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.common import ROOT
from benchmarks.common.command import LLMCTL, make_parser
from benchmarks.common.serving import Server, fake_plan

FIRST_S = 0.2  # after Python's handler is set: until then Python itself starts, without llmctl
ENDS_S = 2.0  # how long a command may take to end
LEFT_S = 5.0  # how long a process may live after the command
WHOLE_S = 300.0
RESUMED_EVERY = 5
MARK = "LLMCTL_INTERRUPTED_TRY"  # a variable that all processes of a try inherit
INTERRUPTED = {130}

FIT = "profiles/tiny-llama-cpu/fit.json"
TUNE = f"tune tiny-llama-cpu --fit {FIT} --trials 4 --out OUT/tuning.json"
RECIPE = """
schema_version: 1
name: interrupted
model: {source: random, dtype: float32, tokenizer: bytes, max_model_len: 512,
        config: {model_type: fake}}
hardware: {device: cpu, name: any}
engine: {name: fake, kv_cache_memory_mib: 8}
workers: 2
profile: {batch_sizes: [1, 2, 4, 8], input_lengths: [16, 64, 128], cached_lengths: [16, 128, 256],
          memory_lengths: [64, 128], slice_tokens: [8], slices: 24, repeats: 3, clock: cpu}
sla: {ttft_p99_s: 5.0}
policy: {name: slice}
serve: {max_new_tokens: 64, port: 0}
tune: {trials: 8, load: 1.0, policies: [own], windows: 2, held_out_windows: 2}
"""


def points(profile: bytes) -> object:
    """What a profile measured, without the times."""
    found = json.loads(profile)
    kinds = ("prefill", "decode", "slices")
    return [len(found[kind]) for kind in kinds]


@dataclass(frozen=True)
class Case:
    """A command; OUT in its words is the folder of a try, PLAN and URL are those of the server."""

    name: str
    words: str
    codes: set[int] = field(default_factory=lambda: INTERRUPTED)
    result: str = ""  # the file that is the same after each whole run
    same: Callable[[bytes], object] = bytes
    for_s: float = 0.0  # it has no end of its own: Ctrl-C comes within these seconds
    stdout: bool = False  # prints one JSON object, or nothing


CASES = (
    Case("profile", "profile RECIPE --out OUT/profile.json", result="profile.json", same=points),
    Case("fit", "fit profiles/tiny-llama-cpu/profile.json --out OUT/fit.json", result="fit.json"),
    Case("tune, one process", f"{TUNE} --jobs 1", result="tuning.json"),
    Case("tune, two processes", f"{TUNE} --jobs 2", result="tuning.json"),
    Case(
        "render",
        f"render tiny-llama-cpu --fit {FIT} --policy slice --out OUT/plan.json",
        result="plan.json",
    ),
    Case("report", "report PLAN --out OUT/report.html"),
    Case(
        "simulate, policies",
        f"simulate --fit {FIT} --trace chat-small --policy all --json",
        stdout=True,
    ),
    Case("capacity", f"capacity tiny-llama-cpu --fit {FIT} --trace chat-small --json", stdout=True),
    Case("simulate, slices", f"simulate --fit {FIT} --trace TRACE --json", stdout=True),
    Case(
        "simulate, vLLM",
        "simulate --fit llama-3.1-8b-h200 --trace TRACE --policy vllm --json",
        stdout=True,
    ),
    Case(
        "simulate, routed",
        "simulate --fit llama-3.1-8b-h200 --trace TRACE --policy vllm --workers 4"
        " --router least-requests --json",
        stdout=True,
    ),
    Case(
        "trace generate",
        "trace generate --out OUT/made.jsonl --rate 60 --duration 600",
        result="made.jsonl",
    ),
    Case("trace convert", "trace convert TRACE OUT/converted.jsonl", result="converted.jsonl"),
    Case("trace record", "trace record --upstream URL --out OUT/recorded.jsonl", for_s=3),
    Case("bench", "bench --url URL --plan PLAN --duration 4 --warmup 1 --out OUT/bench.json"),
    Case("serve", "serve PLAN --port 0", for_s=5),
    Case("doctor", "doctor tiny-llama-cpu"),
)


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


@dataclass
class Found:
    """What came of the tries of one command."""

    codes: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    resumed: int = 0
    resumed_equal: int = 0
    finished: int = 0  # tries that ended before their signal
    slowest_s: float = 0.0  # from the signal to the end

    def row(self, case: Case) -> str:
        codes = ", ".join(f"{code}: {count}" for code, count in sorted(self.codes.items()))
        equal = f"{self.resumed_equal} of {self.resumed}" if self.resumed else "-"
        tries = self.codes.total()
        return f"| {case.name} | {tries} | {codes} | {equal} | {self.slowest_s:.1f} |"


def words_of(case: Case, given: dict[str, str], out: Path) -> list[str]:
    known = {**given, "OUT": str(out)}
    words = []
    for word in case.words.split():
        first, slash, rest = word.partition("/")
        words.append(known.get(first, first) + slash + rest)
    return words


def start(words: Sequence[str], mark: str = "") -> subprocess.Popen[str]:
    command = [*LLMCTL, *words]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {MARK: mark},
        start_new_session=True,
    )


def whole(words: Sequence[str]) -> Ended:
    process = start(words)
    out, err = process.communicate(timeout=WHOLE_S)
    return Ended(process.returncode, out, err)


def interrupted(words: Sequence[str], mark: str, after_s: float) -> tuple[Ended, float] | None:
    """How it ended, and after how many seconds; None if it ended before Ctrl-C."""
    process = start(words, mark)
    while process.poll() is None and not catches(process.pid):
        time.sleep(0.005)
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=after_s)
        return None
    os.killpg(process.pid, signal.SIGINT)
    sent_s = time.monotonic()
    out, err = process.communicate(timeout=60)
    return Ended(process.returncode, out, err), time.monotonic() - sent_s


def catches(process: int) -> bool:
    """Whether a process has a handler for SIGINT; True where the system does not say."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return True
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGINT - 1) & 1)


def processes(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def left_behind(mark: str, folder: Path) -> Iterator[str]:
    """What is wrong after a try: processes and files."""
    end_s = time.monotonic() + LEFT_S
    while time.monotonic() < end_s and any(processes(mark)):
        time.sleep(0.05)
    for process in processes(mark):
        yield f"a process lives: {' '.join(process.cmdline())[-60:]}"
        process.kill()
    for path in folder.rglob("*"):
        if path.name.endswith(".tmp"):
            yield f"a temporary file is left: {path.name}"
        if path.suffix == ".json":
            try:
                json.loads(path.read_bytes())
            except ValueError:
                yield f"a torn file: {path.name}"


def faults_of(case: Case, ended: Ended) -> Iterator[str]:
    if ended.code not in case.codes:
        yield f"exit code {ended.code}: {ended.err.strip()[-200:]}"
    if "Traceback" in ended.err or "Exception ignored" in ended.err:
        yield f"a traceback: {ended.err.strip()[-400:]}"
    if case.stdout and ended.out.strip():
        with suppress(ValueError):
            json.loads(ended.out)
            return
        yield "stdout is no JSON"


def is_whole(case: Case, ended: Ended, usual: Ended, out: Path, reference: bytes) -> bool:
    """Whether Ctrl-C came when all was done: exit code and result, or the number of printed lines,
    are those of a whole run.
    """
    if ended.code != usual.code:
        return False
    if not case.result:
        return len(ended.out.splitlines()) == len(usual.out.splitlines())
    path = out / case.result
    return path.exists() and case.same(path.read_bytes()) == case.same(reference)


def examine(
    case: Case, given: dict[str, str], tries: int, rng: random.Random, folder: Path
) -> Found:
    """Run one command to its end, then interrupt it `tries` times."""
    found = Found()
    lasts_s = case.for_s
    usual = Ended(-1, "", "")
    reference = b""
    out = folder / "whole"
    out.mkdir()
    if not lasts_s:
        began_s = time.monotonic()
        usual = whole(words_of(case, given, out))
        lasts_s = time.monotonic() - began_s
        if usual.code not in (0, 5):
            raise RuntimeError(f"{case.name}: exit code {usual.code}: {usual.err}")
        reference = (out / case.result).read_bytes() if case.result else b""
    while found.codes.total() < tries:
        if found.finished > 2 * tries:
            found.faults.append(f"only {found.codes.total()} tries came before the end")
            break
        mark = uuid.uuid4().hex
        out = folder / mark
        out.mkdir()
        words = words_of(case, given, out)
        hit = interrupted(words, mark, rng.uniform(FIRST_S, lasts_s))
        if hit is None or is_whole(case, hit[0], usual, out, reference):
            found.finished += 1
            continue
        ended, took_s = hit
        if ended.code == -signal.SIGINT and " in main\n" not in ended.err:
            continue  # Python itself was starting: no line of llmctl's own had run
        found.codes[ended.code] += 1
        found.slowest_s = max(found.slowest_s, took_s)
        found.faults += [*faults_of(case, ended), *left_behind(mark, out)]
        if took_s > ENDS_S and case.name not in ("serve", "trace record"):
            found.faults.append(f"it took {took_s:.1f} s to end")
        if case.result and found.codes.total() % RESUMED_EVERY == 0:
            again = whole(words)
            path = out / case.result
            equal = path.exists() and case.same(path.read_bytes()) == case.same(reference)
            found.resumed += 1
            found.resumed_equal += equal
            if not equal:
                found.faults.append(f"resumed, the result differs: {again.err.strip()[-200:]}")
    return found


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--tries", type=int, default=50)
    parser.add_argument("--commands", help="only commands with one of these words in the name")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # a shell without job control starts background commands with SIGINT ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    wanted = options.commands.split(",") if options.commands else [""]
    cases = [case for case in CASES if any(word in case.name for word in wanted)]
    failed = False
    print("| command | Ctrl-C | exit codes | same result when resumed | slowest end, s |")
    print("|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        (folder / "recipe.yaml").write_text(RECIPE)
        fake_plan(folder, decode_s=0.002)
        trace = folder / "long.jsonl"
        made = whole(f"trace generate --out {trace} --rate 40 --duration 600".split())
        if made.code:
            raise RuntimeError(made.err)
        with Server(folder / "plan.json", "--allow-end-after") as server:
            given = {
                "RECIPE": str(folder / "recipe.yaml"),
                "PLAN": str(folder / "plan.json"),
                "TRACE": str(trace),
                "URL": server.url,
            }
            for number, case in enumerate(cases):
                place = folder / str(number)
                place.mkdir()
                rng = random.Random(f"{options.seed} {case.name}")
                found = examine(case, given, options.tries, rng, place)
                print(found.row(case), flush=True)
                for fault in found.faults:
                    print(f"  {fault}", file=sys.stderr, flush=True)
                failed = failed or bool(found.faults)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
