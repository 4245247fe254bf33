"""How many times as fast the simulator is as that of another checkout, paired in one run.

    python -m benchmarks.papers.simulator_pairs TRACE --before FOLDER [--policies mlfq] [--whole]

Takes half a minute for each policy, load and number of workers. Needs a trace, and a checkout of
the commit to compare with: git worktree add FOLDER COMMIT.

Processor time of the loop, or with `--whole` of `simulate`, which also makes the requests and
counts. For each row the other checkout runs, compiled if it was compiled, then this one in plain
Python and, if it was compiled, this one compiled, one after the other, each in a process of its own
that takes the median of `--repeats` runs.

The world is the SCLS paper's: the laws of LLaMA2-13B on transformers (Fig. 11), 33,792 KV tokens
per worker, outputs up to 1,024 tokens. vLLM's own scheduler runs on a law of passes with the same
coefficients, one engine per worker. `load` multiplies the trace's rate, which is scaled with the
workers. `vllm-ahead` plans one pass ahead, and `vllm-launches` has a law of launches too; where a
checkout cannot simulate one it runs `vllm-ahead`. First and last tokens and the largest gaps must
be equal to the last bit. Policies of `--changed` may differ from the other checkout: those with
decisions that were corrected since.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

HERE = Path(__file__).resolve().parents[2]
POLICIES = "conservative,fcfs,aggressive,past-future,slice,mlfq,baton,past-future-sla"
POLICIES += ",slice-continuous,vllm"
AHEAD = "vllm-ahead"
LAUNCHES = "vllm-launches"
ENGINES = ("vllm", AHEAD, LAUNCHES)
# Requests of a run where a policy takes several times as long as the others.
SHORTER = {"mlfq": 4000, "past-future-sla": 6000, "slice-continuous": 6000}
WARM_UP = 500  # requests that compile the kernels
BLOCK_TOKENS = 16
CAPACITY_TOKENS = 33_792


def child(
    trace_file: str, policy: str, load: float, workers: int, whole: bool, repeats: int
) -> None:
    """Print the seconds per request, the median of `repeats` runs, and a digest, of the checkout
    that Python finds first.

    It takes few names from the checkout, so that it runs with old ones.
    """
    import numpy as np

    from toolkit.estimators.laws import bilinear_law
    from toolkit.estimators.memory import ZetaMemory
    from toolkit.estimators.steps import StepLaw
    from toolkit.sched.policies import make_policy
    from toolkit.sched.policies.vllm import VllmPolicy
    from toolkit.sim import api
    from toolkit.sim.paged_engine import PagedEngine
    from toolkit.sim.world import World
    from toolkit.traces.read import read_trace
    from toolkit.traces.types import Trace

    law = bilinear_law(p=(1.3e-4, 1e-3, 1e-5, 0.03), d=(3.5421e-6, 2e-4, 5e-7, 0.022956))
    passes = StepLaw(0.022956, 2e-4, 1e-3, 3.5421e-6, 0.0, (1.3e-4,))
    law_of_passes = law_of_launches() if policy == LAUNCHES else None
    engine = PagedEngine(
        law_of_passes or passes,
        CAPACITY_TOKENS // BLOCK_TOKENS,
        BLOCK_TOKENS,
        ahead=policy in (AHEAD, LAUNCHES),
    )
    memory = ZetaMemory(CAPACITY_TOKENS, zeta=0.9)
    world = World(law, memory, workers, 1024, paged=engine)
    read, _ = read_trace(Path(trace_file))
    arrival_s = read.arrival_s * (8 / load / workers)
    count = SHORTER.get(policy, len(read))
    chosen = VllmPolicy() if policy in ENGINES else make_policy(policy, {})
    loop_s = 0.0

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def loop(*args: Any, **options: Any) -> Any:
            nonlocal loop_s
            start_s = process_time()
            found = call(*args, **options)
            loop_s = process_time() - start_s
            return found

        return loop

    if not whole:
        for name in ("run", "serve"):
            setattr(api, name, timed(getattr(api, name)))
    taken: list[float] = []
    for requests in (WARM_UP, *[count] * repeats):
        part = slice(requests)
        lengths = read.prompt_tokens[part], read.output_tokens[part]
        trace = Trace(arrival_s[part], *lengths, read.max_tokens[part])
        start_s = process_time()
        served = api.simulate(trace, chosen, world).served
        taken.append(process_time() - start_s if whole else loop_s)
    found = hashlib.sha256()
    for column in (served.first_token_s, served.finish_s, served.max_gap_s):
        found.update((np.asarray(column, dtype="<f8") + 0.0).tobytes())  # -0.0 is 0.0
    print(json.dumps([statistics.median(taken[1:]) / count, found.hexdigest()]))


def law_of_launches() -> Any:
    """A law of the same passes on a GPU, launched in 3 ms as graphs and in 10 ms otherwise; None in
    a checkout that cannot simulate it.
    """
    if not importlib.util.find_spec("toolkit.sim.flight"):
        return None
    from toolkit.estimators.pipeline import GraphSettings, PipelineLaw

    return PipelineLaw(
        GraphSettings("FULL_DECODE_ONLY", (1, 2, 4, *range(8, 257, 8))),
        decode_s=0.022956,
        row_s=2e-4,
        cached_s=3.5421e-6,
        floor_s=0.022956,
        floor_token_s=1.3e-4,
        token_s=1.3e-4,
        attended_s=0.0,
        beside_s=3.5421e-6,
        graph_s=3e-3,
        graph_row_s=3e-5,
        piece_s=5e-3,
        piece_row_s=3e-5,
        eager_s=1e-2,
        eager_chunk_s=3e-4,
    )


def seconds_of(tree: Path, compiled: str, case: list[str]) -> tuple[float, str]:
    """Seconds per request of a checkout, and the digest of its times."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "LLMCTL_COMPILED": compiled}
    command = [sys.executable, __file__, "--child", *case]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{tree}: {done.stderr.strip().splitlines()[-1]}")
    seconds, digest = json.loads(done.stdout.splitlines()[-1])
    return seconds, digest


def main() -> None:
    from benchmarks.common.command import make_parser
    from toolkit.compiled import unusable

    parser = make_parser(__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--loads", default="0.4,1")
    parser.add_argument("--workers", default="8,512")
    parser.add_argument("--changed", default="", metavar="POLICIES")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--whole", action="store_true")
    options = parser.parse_args()
    kinds = [("before", options.before.resolve(), ""), ("plain", HERE, "0")]
    if not unusable():
        kinds.append(("compiled", HERE, "1"))
    names = [name for name, _, _ in kinds]
    columns = [f"{name}, us" for name in names] + [f"{name}, times" for name in names[1:]]
    print(f"| policy | load | workers | {' | '.join(columns)} |")
    print(f"|---|{'---:|' * (2 + len(columns))}")
    for policy in options.policies.split(","):
        for load in options.loads.split(","):
            for workers in options.workers.split(","):
                case = [str(options.trace), policy, load, workers]
                case += [str(int(options.whole)), str(options.repeats)]
                runs = [seconds_of(tree, compiled, case) for _, tree, compiled in kinds]
                new = int(policy in options.changed.split(","))  # the first kind that is compared
                if len({digest for _, digest in runs[new:]}) > 1:
                    raise SystemExit(f"{policy}, load {load}, {workers} workers: times differ")
                medians = [seconds for seconds, _ in runs]
                cells = [f"{1e6 * seconds:.1f}" for seconds in medians]
                cells += [f"{medians[0] / seconds:.1f}" for seconds in medians[1:]]
                print(f"| {policy} | {load} | {workers} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        file, name, rate, workers, everything, times = sys.argv[2:]
        child(file, name, float(rate), int(workers), everything == "1", int(times))
    else:
        main()
