"""Both tables of the BATON paper on the engine `rebatch`, beside the paper's figures.

    python -m benchmarks.papers.baton_live [--rounds 3] [--out runs/baton-live.jsonl]

Takes more than four minutes for one round of Table 2 on two shared, busy cores. Needs nothing but
the package: a Llama of 15 million parameters with random weights on the CPU. On one thread the
clock is the process's CPU time, which other programs disturb little. On more threads it is wall
time, and the machine must be quiet.

The queries are those of `benchmarks.papers.baton_tables`, which simulates the same tables. Table 1:
long-short, short-long and short-short queries as 1 : 1 : 2, the first 32 of the 120; with 4 rows
the lengths are doubled. Table 2: 30 short queries with 2 to 10 rows. To suit a small model on a CPU
the lengths are divided by 64 (Table 1) and by 4 (Table 2). All queries wait from the start. The
real scheduler decides, and `RebatchEngine` runs its decisions in this process, greedily, in
float32, without HTTP and without worker processes.

Methods, by the paper's name:
- static batching (Benchmark): policy `sequence`, slices that run until all rows of a batch ended.
- PD: as many queries as the batch has rows are prefilled separately, in groups of similar length,
  and joined; the next queries follow when all of these have ended. In the paper rows that ended
  stay in the batch; here they leave, as in every method but static batching.
- shaping (BATON): policy `baton` on an engine that joins rows by shaping. The engine removes the
  padding of a pass from the cache at once; the paper keeps it until all columns before it are
  released.
- embedding (BATON-PD): policy `baton`.

The methods alternate within a round; the table shows medians over the rounds. Each run is appended
to --out when it ends, and the same command resumes after the last one. Memory is the peak charge of
the engine's ledger: slabs, with their spare room for growth, and activations of prefills. Tokens
are compared with those of static batching.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common.command import add_markdown, make_parser, publish
from benchmarks.papers.baton_tables import PAPER_1, PAPER_2, Lengths, mixed_queries, short_queries
from toolkit.engines.protocol import Round, Row, SamplingParams, StepOutput
from toolkit.engines.rebatch_engine import RebatchEngine
from toolkit.estimators.laws import bilinear_law
from toolkit.estimators.memory import ZetaMemory
from toolkit.files.recipe import EngineSpec, HardwareSpec, ModelSpec
from toolkit.sched.policies import make_policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Batch, BatchResult, Request, RoundResult, Worker

MODEL = ModelSpec(
    source="random",
    config={
        "model_type": "llama",
        "hidden_size": 288,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "vocab_size": 32_000,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "initializer_range": 0.12,
    },
    dtype="float32",
    tokenizer="bytes",
    max_model_len=1024,
)
BUDGET_MIB = 1024.0  # never reached; the table shows the peak of each method
DIVISOR = {1: 64, 2: 4}  # of the queries' lengths, by table
MIXED = 32  # of Table 1's 120 queries
SEED = 0
# It decides nothing, since there is one worker and memory is never short.
STEP_LAW = bilinear_law((0, 0, 0, 0), (0, 0, 0, 1), prefill_emits_token=True)
FREE = SamplingParams(ignore_eos=True)
METHODS = {  # with the policy of each
    "static batching": "sequence",
    "PD": "baton",
    "shaping": "baton",
    "embedding": "baton",
}
PAPERS_NAME = {  # of a method, in `PAPER_1` and `PAPER_2`
    "static batching": "static batching",
    "shaping": "shaping, padding kept",
    "embedding": "decoupled",
}
PAPERS_TABLE_2 = ("static batching", "embedding")
PAPER_PD = {4: 21_781.0, 8: 6_577.0}  # seconds, Table 1
TABLES = ((1, PAPER_1), (2, PAPER_2))
Key = tuple[int, int, str]  # table, rows, method


class Engines:
    """The engines, one per way of joining, and the clock of a run."""

    def __init__(self, threads: int) -> None:
        cpu = HardwareSpec(device="cpu", name="any CPU")
        self._clock = time.process_time if threads == 1 else time.perf_counter
        self._engines = {
            joining: RebatchEngine(
                MODEL,
                EngineSpec(
                    name="rebatch", threads=threads, kv_cache_memory_mib=BUDGET_MIB, joining=joining
                ),
                cpu,
            )
            for joining in ("embed", "shape")
        }

    def serve(self, method: str, size: int, queries: Lengths) -> dict[str, Any]:
        """Serve all of `queries` with `size` rows: seconds, the ledger's peak in MiB, and a digest
        of each query's tokens.
        """
        name = METHODS[method]
        rows = "batch_size" if name == "sequence" else "max_batch_size"
        engine = self._engines["shape" if method == "shaping" else "embed"]
        runner = QueryRunner(engine, queries)
        memory = ZetaMemory(engine.facts.capacity_tokens)
        worker = Worker(0, STEP_LAW, memory, joining=engine.facts.joining)
        scheduler = Scheduler(make_policy(name, {rows: size}), [worker])
        engine.ledger.peak_bytes = engine.ledger.used_bytes
        wave = size if method == "PD" else len(queries)
        start_s = self._clock()
        for first in range(0, len(queries), wave):
            for request in runner.requests(first, first + wave):
                scheduler.submit(request, 0.0)
            while scheduler.jobs:
                for batch in scheduler.tick(0.0):
                    scheduler.complete(runner.run(batch), 0.0)
        took_s = self._clock() - start_s
        peak_mib = engine.ledger.peak_bytes / 2**20
        return {"seconds": took_s, "peak_mib": peak_mib, "tokens": runner.digests()}


class QueryRunner:
    """Runs the scheduler's decisions. A query's number is its index."""

    def __init__(self, engine: RebatchEngine, queries: Lengths) -> None:
        rng = np.random.default_rng(SEED)
        vocabulary = engine.facts.vocab_size
        self._engine = engine
        prompts = [rng.integers(0, vocabulary, prompt) for prompt, _ in queries]
        self._prompts = [tuple(prompt.tolist()) for prompt in prompts]
        self._outputs = [output for _, output in queries]
        self._limit = max(self._outputs)  # the scheduler's limit of every query's output
        self._got: list[list[int]] = [[] for _ in queries]

    def requests(self, first: int, end: int) -> list[Request]:
        prompts = self._prompts[first:end]
        return [
            Request(str(number), 0.0, len(one), self._limit)
            for number, one in enumerate(prompts, first)
        ]

    def run(self, batch: Batch) -> BatchResult | RoundResult:
        """Run a slice or a round, and translate between scheduler and engine."""
        numbers = tuple(int(job.request_id) for job in batch.jobs)
        rows = tuple(self._row(number) for number in numbers)
        if not batch.keep_cache:
            keep = partial(self._keep, numbers=numbers)
            output = self._engine.run_slice(rows, batch.steps, keep)
            ended = tuple(bool(finish) for finish in output.finish)
            return BatchResult(batch.batch_id, 0, tuple(map(len, output.tokens)), ended)
        assert batch.moves is None  # memory is never short
        done = self._engine.run_round(Round(batch.steps, rows, numbers), self._keep)
        joined = tuple((str(number), step) for number, step in done.joined)
        return RoundResult(batch.batch_id, 0, done.steps, tuple(map(str, done.ended)), joined)

    def digests(self) -> list[str]:
        """A digest of each query's tokens, after a check that it got all of them."""
        assert [len(got) for got in self._got] == self._outputs
        return [hashlib.sha256(str(got).encode()).hexdigest()[:12] for got in self._got]

    def _row(self, number: int) -> Row:
        prompt = self._prompts[number]
        got = self._got[number]
        return Row(str(number), (*prompt, *got), len(got), self._limit, FREE, self._outputs[number])

    def _keep(self, step: StepOutput, numbers: Sequence[int] | None = None) -> bool:
        """Keep the tokens of a step. `numbers` are the queries of a slice's rows; in a round a row
        has the number of its query.
        """
        for row, token in zip(step.rows, step.tokens, strict=True):
            self._got[row if numbers is None else numbers[row]].append(token)
        return True


def queries_of(table: int, size: int) -> Lengths:
    """The paper's queries, with lengths divided, at least 1 token."""
    queries = short_queries(SEED)
    if table == 1:
        queries = mixed_queries(SEED, 2 if size == 4 else 1)[:MIXED]
    divisor = DIVISOR[table]
    return [(max(prompt // divisor, 1), max(output // divisor, 1)) for prompt, output in queries]


def keys_of(tables: Sequence[int]) -> list[Key]:
    """One round: all methods of a table and size, in turns."""
    return [
        (table, size, method)
        for table, paper in TABLES
        if table in tables
        for size in paper
        for method in METHODS
        if table == 1 or method in PAPERS_TABLE_2
    ]


def measure(out: Path, rounds: int, tables: Sequence[int], threads: int) -> None:
    """Run the methods of all rounds, except the runs that `out` has already."""
    done = [tuple(line["key"]) for line in read(out)]
    engines = Engines(threads)
    for method in METHODS:
        engines.serve(method, 4, short_queries(1)[:8])  # warms up
    for turn in range(rounds):
        for key in keys_of(tables):
            if done.count(key) > turn:
                continue
            table, size, method = key
            line = {"key": key, **engines.serve(method, size, queries_of(table, size))}
            run = f"table {table}, {size} rows, {method}: {line['seconds']:.2f} s"
            print(f"round {turn + 1}: {run}", flush=True)
            with out.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(line) + "\n")


def read(out: Path) -> list[dict[str, Any]]:
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    return [json.loads(line) for line in lines]


def report(lines: Sequence[Mapping[str, Any]]) -> str:
    """Both tables, ours beside the paper's, as Markdown."""
    runs: dict[Key, list[Mapping[str, Any]]] = {}
    for line in lines:
        runs.setdefault(tuple(line["key"]), []).append(line)
    counts = sorted({len(found) for found in runs.values()})
    rounds = f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"
    command = "`python -m benchmarks.papers.baton_live`"
    text = [f"{command}: medians of {rounds} rounds; ratios are the paper's / ours.", ""]
    for table, paper in TABLES:
        text += [f"Table {table}:", "", HEAD, "|---:|---|---:|---:|---:|---:|---:|---:|"]
        for size, says in paper.items():
            shown = [method for method in METHODS if (table, size, method) in runs]
            text += [row_of(runs, table, size, method, says) for method in shown]
        text.append("")
    for size, says in PAPER_1.items():
        gain = says[PAPERS_NAME["shaping"]] / says[PAPERS_NAME["embedding"]]
        ours = seconds_of(runs, (1, size, "shaping")) / seconds_of(runs, (1, size, "embedding"))
        text += [f"Embedding over shaping, Table 1, {size} rows: {gain:.2f} / {ours:.2f}.", ""]
    return "\n".join(text)


def seconds_of(runs: Mapping[Key, Sequence[Mapping[str, Any]]], key: Key) -> float:
    return median(float(run["seconds"]) for run in runs[key])


HEAD = (
    "| rows | method | seconds | lowest to highest | tokens/s | speed over static batching "
    "| peak MiB | queries with other tokens |"
)


def row_of(
    runs: Mapping[Key, Sequence[Mapping[str, Any]]],
    table: int,
    size: int,
    method: str,
    says: Mapping[str, float],
) -> str:
    """One line of a table. `says` has the paper's seconds for `size` rows, by method."""
    found = runs[table, size, method]
    static = runs[table, size, "static batching"]
    times = [run["seconds"] for run in found]
    seconds = median(times)
    static_s = seconds_of(runs, (table, size, "static batching"))
    tokens = sum(output for _, output in queries_of(table, size))
    paper_s = says.get(PAPERS_NAME.get(method, ""))
    if method == "PD" and table == 1:
        paper_s = PAPER_PD.get(size)
    gain = f"{says['static batching'] / paper_s:.2f} / " if paper_s else ""
    differ = sum(
        mine != others for mine, others in zip(found[0]["tokens"], static[0]["tokens"], strict=True)
    )
    return (
        f"| {size} | {method} | {seconds:.2f} | {min(times):.2f} to {max(times):.2f} "
        f"| {tokens / seconds:,.0f} | {gain}{static_s / seconds:.2f} "
        f"| {found[0]['peak_mib']:.1f} | {differ} |"
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="0: only show what is in --out")
    parser.add_argument("--tables", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/baton-live.jsonl"))
    add_markdown(parser)
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.rounds:
        measure(options.out, options.rounds, options.tables, options.threads)
    title = "BATON: Tables 1 and 2 on the engine"
    publish(report(read(options.out)), options.markdown, "baton_live", title)


if __name__ == "__main__":
    main()
