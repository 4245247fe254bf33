"""The cost and the gain of re-batching on the tiny Llama, paired, in one process.

    python -m benchmarks.engines.rebatch_step [--rounds 5] [--requests 200] [--json FILE]

Takes more than four minutes per round on two shared, busy cores. Needs nothing but the package:
recipes/tiny-llama-cpu.yaml.

Three tables, medians over interleaved rounds, in process CPU time on one thread (the machine may be
shared):
- a decode step of N rows in the static engine's slab and in the re-batching cache, at equal and at
  ragged lengths;
- the cost of one row that leaves, joins, is swapped out and is swapped in, beside such a step;
- tokens per second on requests that all wait from the start: fixed batches until all have ended
  (SLS), slices (SCLS's engine without its DP: sorted by length), and re-batching with as many rows,
  which join by embedding or by shaping.

Lengths are drawn here, log-uniform, so that batches are unequal. Nothing here schedules by memory;
other benchmarks measure that.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace

from benchmarks.common import ROOT
from benchmarks.common.command import make_parser
from benchmarks.common.results_file import keep
from toolkit.engines.protocol import Round, Row, SamplingParams, StepOutput
from toolkit.engines.rebatch_engine import RebatchEngine
from toolkit.files.recipe import Recipe
from toolkit.files.shipped import load_recipe

FREE = SamplingParams(ignore_eos=True)
RECIPE = ROOT / "recipes" / "tiny-llama-cpu.yaml"
SIZES = (4, 16, 32, 64)
LENGTH = 200
STEPS = 16
SLICE = 32
BUDGET_MIB = 256.0  # more than the recipe's, since a static batch may have 32 rows of 512 tokens
PROMPTS = (16, 256)
OUTPUTS = (8, 256)
Samples = dict[str, list[float]]
clock = time.process_time


def go_on(_: StepOutput) -> bool:
    return True


def engine_of(recipe: Recipe, **changes: object) -> RebatchEngine:
    spec = recipe.engine.model_copy(
        update={"name": "rebatch", "threads": 1, "kv_cache_memory_mib": BUDGET_MIB, **changes}
    )
    return RebatchEngine(recipe.model, spec, recipe.hardware)


def timed(work: Callable[[], object]) -> float:
    start = clock()
    work()
    return clock() - start


def rows_of(count: int, length: int) -> list[Row]:
    """Rows of up to `length` tokens, down to 3/4 of it, as in the static engine's timings."""
    shortest = length - length // 4
    lengths = [length - k * (length - shortest) // max(count - 1, 1) for k in range(count)]
    return [Row(str(k), tuple(range(n)), 0, 512 - n, FREE) for k, n in enumerate(lengths)]


def measure_step(engine: RebatchEngine, size: int, found: Samples) -> None:
    """One round of this table: a static step, a re-batching step, and the moves of one row among
    `size`.
    """
    samples = found.setdefault
    samples(f"static step, N={size}", []).append(engine.time_decode(size, LENGTH, clock))
    rows = tuple(rows_of(size, LENGTH))
    engine.run_round(Round(steps=1, enter=rows, numbers=tuple(range(size))), go_on)
    rounds = timed(lambda: engine.run_round(Round(steps=STEPS), go_on))
    samples(f"rebatch step, N={size}", []).append(rounds / STEPS)
    moves = {
        "leave to host": Round(steps=0, swap_out=(1,)),
        "back to device": Round(steps=0, swap_in=(1,)),
        "join": Round(steps=0, resume=(1,)),
        "evict": Round(steps=0, evict=(1,)),
    }
    for name, move in moves.items():
        samples(f"{name}, N={size}", []).append(timed(partial(engine.run_round, move, go_on)))
    engine.run_round(Round(steps=0, evict=tuple(range(size))), go_on)
    samples("prefill of 1 row", []).append(engine.time_prefill(1, LENGTH, clock))
    samples("prefill of 8 rows, per row", []).append(engine.time_prefill(8, LENGTH, clock) / 8)


def requests_of(count: int) -> list[Row]:
    rng = random.Random(0)

    def draw(bounds: tuple[int, int]) -> int:
        return round(math.exp(rng.uniform(math.log(bounds[0]), math.log(bounds[1]))))

    pairs = [(draw(PROMPTS), draw(OUTPUTS)) for _ in range(count)]
    return [
        Row(str(k), tuple(range(prompt)), 0, output, FREE)
        for k, (prompt, output) in enumerate(pairs)
    ]


def serve_static(engine: RebatchEngine, rows: Sequence[Row], size: int) -> None:
    """SLS: fixed batches in order of arrival, until all rows of a batch have ended."""
    for start in range(0, len(rows), size):
        engine.run_slice(rows[start : start + size], 512, go_on)


def serve_slices(engine: RebatchEngine, rows: Sequence[Row], size: int) -> None:
    """All waiting rows, sorted by length, in batches for `SLICE` tokens; unfinished rows wait
    again.
    """
    waiting = list(rows)
    while waiting:
        waiting.sort(key=lambda row: len(row.tokens))
        batches = [waiting[k : k + size] for k in range(0, len(waiting), size)]
        again = []
        for batch in batches:
            output = engine.run_slice(batch, SLICE, go_on)
            for row, new, finish in zip(batch, output.tokens, output.finish, strict=True):
                if not finish:
                    tokens = (*row.tokens, *new)
                    generated = row.generated + len(new)
                    again.append(replace(row, tokens=tokens, generated=generated))
        waiting = again


def serve_rounds(engine: RebatchEngine, rows: Sequence[Row], size: int) -> None:
    """Re-batching in order of arrival: `size` rows run, and a row that ends is replaced at once."""
    waiting = deque(enumerate(rows))
    running = 0
    while waiting or running:
        enter = [waiting.popleft() for _ in range(min(size - running, len(waiting)))]
        rows_in = tuple(row for _, row in enter)
        numbers = tuple(number for number, _ in enter)
        plan = Round(steps=512, enter=rows_in, numbers=numbers)
        running += len(enter) - len(engine.run_round(plan, go_on).ended)


def measure_throughput(
    engines: dict[str, RebatchEngine], rows: Sequence[Row], sizes: Sequence[int], found: Samples
) -> None:
    embed = engines["embed"]
    shape = engines["shape"]
    tokens = sum(row.max_new_tokens for row in rows)
    ways: dict[str, Callable[[int], None]] = {
        "static batches": lambda size: serve_static(embed, rows, size),
        f"slices of {SLICE}": lambda size: serve_slices(embed, rows, size),
        "rebatch, shaped": lambda size: serve_rounds(shape, rows, size),
        "rebatch, embedded": lambda size: serve_rounds(embed, rows, size),
    }
    for size in sizes:
        for name, serve in ways.items():
            seconds = timed(lambda serve=serve, size=size: serve(size))  # type: ignore[misc]
            found.setdefault(f"{name}, N={size}", []).append(tokens / seconds)


def show(title: str, found: Samples, unit: str, scale: float) -> None:
    print(f"\n| {title} | {unit} | lowest to highest |\n|---|---|---|")
    for name, samples in found.items():
        values = min(samples), statistics.median(samples), max(samples)
        low, middle, high = (scale * value for value in values)
        print(f"| {name} | {middle:,.2f} | {low:,.2f} to {high:,.2f} |")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 16, 32])
    options = parser.parse_args()
    recipe = load_recipe(RECIPE)
    engines = {joining: engine_of(recipe, joining=joining) for joining in ("embed", "shape")}
    rows = requests_of(options.requests)
    steps: Samples = {}
    throughput: Samples = {}
    measure_step(engines["embed"], 4, {})  # warms up
    for _ in range(options.rounds):
        for size in SIZES:
            measure_step(engines["embed"], size, steps)
        measure_throughput(engines, rows, options.sizes, throughput)
    keep("samples", {"seconds": steps, "tokens_per_s": throughput})
    show(f"rows of {LENGTH} tokens", steps, "CPU ms", 1000.0)
    show(f"{options.requests} requests", throughput, "tokens per CPU s", 1.0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
