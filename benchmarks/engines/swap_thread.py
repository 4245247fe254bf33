"""A swap's copy in a thread beside a decode step, compared with a copy before the step, on a CPU.

    python -m benchmarks.engines.swap_thread [--rounds 200] [--json FILE]

Takes about two minutes with five rounds. Needs nothing but the package.

Wall seconds, medians over interleaved rounds: a step of 16 rows alone; the copy of one row out of
the batch, then a step; and the same copy on another thread while the step runs, from a row that
nothing else moves meanwhile, which is the best that a thread could do. For the tiny Llama of the
recipes and for one of 8 layers with hidden size 512, on one and on two threads.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.common import ROOT
from benchmarks.common.command import make_parser
from benchmarks.common.results_file import keep
from toolkit.engines.protocol import Round, Row, SamplingParams, StepOutput
from toolkit.engines.rebatch_engine import RebatchEngine
from toolkit.files.shipped import load_recipe

RECIPE = ROOT / "recipes" / "tiny-llama-cpu.yaml"
LARGER = {"hidden_size": 512, "intermediate_size": 1408}
LARGER |= {"num_hidden_layers": 8, "num_attention_heads": 8}
ROWS = 16
LENGTH = 300
FREE = SamplingParams(ignore_eos=True)


def go_on(_: StepOutput) -> bool:
    return True


def engine_of(changes: dict[str, int], threads: int) -> RebatchEngine:
    recipe = load_recipe(RECIPE)
    model = recipe.model.model_copy(update={"config": recipe.model.config | changes})
    spec = recipe.engine.model_copy(
        update={"name": "rebatch", "threads": threads, "kv_cache_memory_mib": 1024.0}
    )
    return RebatchEngine(model, spec, recipe.hardware)


def measure(engine: RebatchEngine, rounds: int, pool: ThreadPoolExecutor) -> dict[str, float]:
    """Median milliseconds of each method."""
    rows = tuple(Row(str(k), tuple(range(1, LENGTH + 1)), 0, 200, FREE) for k in range(ROWS))

    def step() -> None:
        engine.run_round(Round(steps=1), go_on)

    def copy() -> None:
        engine._suspended.copy_of(*engine._batch.peek(1))

    def before() -> None:
        copy()
        step()

    def beside() -> None:
        copied = pool.submit(copy)
        step()
        copied.result()

    ways: dict[str, Callable[[], None]] = {"step": step, "copy": copy}
    ways |= {"copy, then step": before, "copy beside": beside}
    found: dict[str, list[float]] = {way: [] for way in ways}
    for k in range(rounds):
        if k % 50 == 0:  # the rows grow by three steps a round
            numbers = tuple(range(ROWS))
            engine.run_round(Round(steps=1, enter=rows, numbers=numbers, evict=numbers), go_on)
        order = list(ways)
        random.Random(k).shuffle(order)
        for way in order:
            start = time.perf_counter()
            ways[way]()
            found[way].append(1e3 * (time.perf_counter() - start))
    return {way: statistics.median(times) for way, times in found.items()}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    table = {}
    with ThreadPoolExecutor(1) as pool, torch.inference_mode():
        pool.submit(torch.set_num_threads, 1).result()
        for name, changes in (("tiny", {}), ("hidden 512, 8 layers", LARGER)):
            for threads in (1, 2):
                engine = engine_of(changes, threads)
                table[f"{name}, {threads} threads"] = measure(engine, arguments.rounds, pool)
    keep("ms", table)
    for name, found in table.items():
        ratio = found["copy beside"] / found["copy, then step"]
        times = ", ".join(f"{way} {ms:.2f} ms" for way, ms in found.items())
        print(f"{name}: {times}; beside/then {ratio:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
