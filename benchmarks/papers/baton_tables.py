"""Both tables of the BATON paper in the simulator, beside the paper's figures.

    python -m benchmarks.papers.baton_tables [--seeds 10] [--markdown docs/results/index.md]

Takes seconds. Needs nothing but the package.

All queries wait from the start for one worker. Table 1: 120 queries, long-short, short-long and
short-short (input-output) as 1 : 1 : 2 in random order; long is uniform(3600, 4400) tokens, short
uniform(24, 400); with 4 rows every length is doubled. Table 2: 30 queries of uniform(24, 200)
tokens in and out. The paper's queries are not public. It gives their lengths in words ("around
4,000", "a few dozen to 400"); here a word is a token.

The paper gives no laws, so these are assumed: Llama-2-7B in 16 bits on transformers, on the paper's
GPUs.

- A decode step takes 30 ms (the launches of 32 layers hide the reading of the weights). It reads
  the cache, writes a longer copy of it and reads that: 3 x 0.5 MiB per token of the padded batch,
  at the GPU's bandwidth.
- A prefill takes 30 ms, and 2 x 6.74e9 FLOP per token and 4 x 4096 x 32 FLOP per pair of tokens, at
  60 % of the GPU's peak.

Static batching is `sequence`. The paper's BATON-PD is `baton`. Its BATON, which it calls equal to
Orca in throughput, is `baton` where rows join by shaping, with one difference: a pass removes its
padding from the cache, as the engine `rebatch` does, and the paper keeps it until all columns
before it are released (section 4.1). `kept_padding` is simulated here only. The paper's PD, static
batches after grouped prefills, is not simulated. Memory is not bounded, and its peak is shown;
beside the weights (12.6 GiB) an A6000 has room for 35 GiB.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np

from benchmarks.common.command import add_markdown, make_parser, publish
from toolkit.estimators.laws import SegmentedLaw
from toolkit.estimators.memory import ZetaMemory
from toolkit.files.fit import Segment
from toolkit.sched.policies import make_policy
from toolkit.sched.policies.parameters import Value
from toolkit.sched.types import Joining
from toolkit.sim.api import simulate
from toolkit.sim.world import World
from toolkit.traces.types import Trace

KV_BYTES = 2 * 32 * 4096 * 2  # per token
STEP_S = PREFILL_S = 0.03
UNBOUNDED = 10_000_000  # tokens
METHODS: dict[str, tuple[str, dict[str, Value], Joining | None]] = {
    "static batching": ("sequence", {}, None),
    "shaping": ("baton", {"max_prefill_tokens": UNBOUNDED}, "shape"),
    "decoupled": ("baton", {"max_prefill_tokens": UNBOUNDED}, "embed"),
}
KEPT = "shaping, padding kept"
SHOWN = ("static batching", KEPT, "shaping", "decoupled")
PAPER_1 = {  # batch size: seconds of Benchmark, BATON, BATON-PD
    4: {"static batching": 21_901.0, KEPT: 20_549.0, "decoupled": 11_771.0},
    8: {"static batching": 6_619.0, KEPT: 3_424.0, "decoupled": 2_654.0},
}
PAPER_2 = {
    2: {"static batching": 161.77, "decoupled": 83.43},
    4: {"static batching": 92.68, "decoupled": 49.61},
    6: {"static batching": 61.70, "decoupled": 37.25},
    8: {"static batching": 50.07, "decoupled": 31.08},
    10: {"static batching": 40.45, "decoupled": 30.99},
}
Lengths = Sequence[tuple[int, int]]
Run = tuple[float, float]  # completion time in seconds, peak of the KV cache in GiB


def law(bandwidth: float, flops: float) -> SegmentedLaw:
    """The assumed law of a GPU with this many bytes/s and FLOP/s."""
    rate = 0.6 * flops
    prefill = Segment(
        batch_size_min=1,
        nl=2 * 6.74e9 / rate,
        n=0.0,
        l=0.0,
        const=PREFILL_S,
        nll=4 * 4096 * 32 / rate,
    )
    decode = Segment(batch_size_min=1, nl=3 * KV_BYTES / bandwidth, n=0.0, l=0.0, const=STEP_S)
    return SegmentedLaw((prefill,), (decode,), prefill_emits_token=True)


A6000 = law(768e9, 154.8e12)
RTX_4090 = law(1008e9, 165.2e12)


def mixed_queries(seed: int, scale: int) -> Lengths:
    """Prompt and output tokens of each query of Table 1."""
    rng = np.random.default_rng(seed)
    long = rng.integers(3600, 4401, (2, 30))
    short = rng.integers(24, 401, (6, 30))
    pairs = [(long[0], short[0]), (short[1], long[1]), (short[2], short[3]), (short[4], short[5])]
    rows = np.concatenate([np.stack(pair, axis=1) for pair in pairs])
    return [(scale * int(prompt), scale * int(output)) for prompt, output in rng.permutation(rows)]


def short_queries(seed: int) -> Lengths:
    """Prompt and output tokens of each query of Table 2."""
    pairs = np.random.default_rng(seed).integers(24, 201, (30, 2))
    return [(int(prompt), int(output)) for prompt, output in pairs]


def simulated(method: str, size: int, queries: Lengths, latency: SegmentedLaw) -> Run:
    """One run of a policy."""
    prompts, outputs = np.array(queries, dtype=np.int64).T
    trace = Trace(np.zeros(len(queries)), prompts, outputs, outputs)
    policy, parameters, joining = METHODS[method]
    world = World(latency, ZetaMemory(UNBOUNDED), 1, int(outputs.max()), joining=joining)
    rows = "batch_size" if policy == "sequence" else "max_batch_size"
    result = simulate(trace, make_policy(policy, parameters | {rows: size}), world)
    peak = result.counters["peak_memory_percent"] / 100.0 * UNBOUNDED
    return float(result.served.finish_s.max()), peak * KV_BYTES / 2**30


def kept_padding(size: int, queries: Lengths, latency: SegmentedLaw) -> Run:
    """Vector shaping as in section 4.1: each pass leaves its padding in the cache, and columns are
    released from the left.

    A row is the column where its padding ends, and the number of tokens that it will still get.
    Before waiting queries enter, the columns before the first row's are released.
    """
    waiting = deque(queries)
    first = [waiting.popleft() for _ in range(min(size, len(waiting)))]
    width = max(prompt for prompt, _ in first)
    rows = [(width - prompt, output - 1) for prompt, output in first]
    now_s = latency.prefill_s(len(rows), width)
    peak = 0
    while rows:
        steps = min(left for _, left in rows)
        now_s += latency.decode_s(len(rows), width, steps) if steps else 0.0
        width += steps
        peak = max(peak, len(rows) * width)
        rows = [(begin, left - steps) for begin, left in rows if left > steps]
        if not waiting or not rows:
            continue
        released = min(begin for begin, _ in rows)
        enter = [waiting.popleft() for _ in range(min(size - len(rows), len(waiting)))]
        longest = max(prompt for prompt, _ in enter)
        now_s += latency.prefill_s(len(rows) + len(enter), longest)
        width += longest - released
        rows = [(begin - released, left - 1) for begin, left in rows]
        rows += [(width - prompt, output - 1) for prompt, output in enter]
    return now_s, peak * KV_BYTES / 2**30


def mean_run(method: str, size: int, table: int, seeds: int) -> Run:
    """The mean over seeds."""
    runs = []
    for seed in range(seeds):
        queries = mixed_queries(seed, 2 if size == 4 else 1) if table == 1 else short_queries(seed)
        latency = A6000 if table == 1 else RTX_4090
        if method == KEPT:
            runs.append(kept_padding(size, queries, latency))
        else:
            runs.append(simulated(method, size, queries, latency))
    return fmean(run[0] for run in runs), fmean(run[1] for run in runs)


def most_gained_in_pairs(seeds: int) -> float:
    """The largest gain of re-batching with 2 rows: the steps of static batches in the worst order
    over the steps of batches without idle rows.

    No order of Table 2's outputs gains more, as long as a step takes constant time.
    """
    gains = []
    for seed in range(seeds):
        outputs = sorted((output for _, output in short_queries(seed)), reverse=True)
        gains.append(2 * sum(outputs[: len(outputs) // 2]) / sum(outputs))
    return fmean(gains)


def beside(paper: float | None, ours: float, form: str) -> str:
    """The paper's figure, if there is one, and ours."""
    return f"{'' if paper is None else format(paper, form)} / {ours:{form}}"


def table_rows(
    paper: Mapping[int, Mapping[str, float]], found: Mapping[tuple[int, str], Run]
) -> list[str]:
    """Seconds, and the speed over static batching, of each method."""
    lines = []
    for size, figures in paper.items():
        static = figures["static batching"]
        ours_static = found[size, "static batching"][0]
        for method in SHOWN:
            seconds, peak = found[size, method]
            says = figures.get(method)
            gain = beside(None if says is None else static / says, ours_static / seconds, ".2f")
            lines.append(
                f"| {size} | {method} | {beside(says, seconds, ',.0f')} | {gain} | {peak:.1f} |"
            )
    return lines


def report(seeds: int) -> str:
    """Both tables, and the paper's headline beside ours."""
    found_1, found_2 = (
        {(size, method): mean_run(method, size, table, seeds) for size in paper for method in SHOWN}
        for table, paper in ((1, PAPER_1), (2, PAPER_2))
    )
    head = ["| rows | method | seconds | speed over static | peak of KV, GiB |"]
    head.append("|---:|---|---:|---:|---:|")
    command = "`python -m benchmarks.papers.baton_tables`"
    lines = [f"Paper / ours, the mean of {seeds} seeds; assumed laws. {command}", ""]
    lines += ["Table 1: long and short queries, A6000.", "", *head, *table_rows(PAPER_1, found_1)]
    lines += ["", "Table 2: short queries, RTX 4090.", "", *head, *table_rows(PAPER_2, found_2), ""]
    lines += ["Decoupled over not, Table 1:", "", "| rows | over padding kept | over shaping |"]
    lines.append("|---:|---:|---:|")
    for size, figures in PAPER_1.items():
        fast = found_1[size, "decoupled"][0]
        kept = beside(figures[KEPT] / figures["decoupled"], found_1[size, KEPT][0] / fast, ".2f")
        lines.append(f"| {size} | {kept} | {found_1[size, 'shaping'][0] / fast:.2f} |")
    most = "The most that re-batching could gain with 2 rows, in any order of Table 2's outputs"
    lines += ["", f"{most}: {most_gained_in_pairs(seeds):.2f}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    add_markdown(parser)
    options = parser.parse_args()
    text = report(options.seeds)
    publish(text, options.markdown, "baton_tables", "BATON: Tables 1 and 2")


if __name__ == "__main__":
    main()
