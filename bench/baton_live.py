"""BATON's two tables on the real engine: what the paper says beside what a Llama of 15 million
parameters does.

    python bench/baton_live.py [--rounds 3] [--threads 1] [--out runs/baton-live.jsonl] [--markdown docs/results.md]

The queries are those of bench/baton_tables.py, which simulates the same tables: long - short, short
- long and short - short as 1 : 1 : 2, the first 32 of the 120, with 4 rows at twice the lengths; 30
short ones with 2 to 10 rows. Lengths are divided, by 64 and by 4, so that they suit a small model
on a CPU. All wait from the start. The real scheduler decides, `RebatchEngine` runs what it decides
in this process, greedily, in float32; there is no HTTP and no worker process. On one thread the
clock is the process's CPU time, which other programs disturb little; on more it is wall time, and
the machine must be quiet.

- static batching (the paper's Benchmark): `sequence`, slices that run until all rows of a batch
  have ended.
- PD: as many rows are prefilled apart, in groups of like length, and put together; the next come
  when all have ended.
  The paper's PD also keeps rows that ended in the batch; here, as in all but static batching, they leave it.
- shaping (its BATON): `baton` on an engine that joins by shaping. The padding of a pass is taken
  out of the cache at
  once, where the paper keeps it until all columns before it are released.
- embedding (its BATON-PD): `baton`.

The ways take turns within a round, and what is shown is the median over the rounds. Runs are
appended to --out as they end, and the same command goes on behind them. Memory is what the engine's
ledger was charged at most: slabs, with what they have to spare for growth, and prefills'
activations. Tokens are compared with static batching's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from baton_tables import PAPER_1, PAPER_2, Lengths, mixed_queries, short_queries
from results_file import put_section

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
BUDGET_MIB = 1024.0  # never reached: what each way takes of it is shown
DIVISOR = {1: 64, 2: 4}  # of the queries' lengths, by table
MIXED = 32  # of Table 1's 120 queries
SEED = 0
STEP_LAW = bilinear_law(
    (0, 0, 0, 0), (0, 0, 0, 1), prefill_emits_token=True
)  # decides nothing: one worker, no memory
FREE = SamplingParams(ignore_eos=True)
METHODS = {
    "static batching": "sequence",
    "PD": "baton",
    "shaping": "baton",
    "embedding": "baton",
}  # and its policy
PAPERS_NAME = {
    "static batching": "static batching",
    "shaping": "shaping, padding kept",
    "embedding": "decoupled",
}
PAPERS_TABLE_2 = ("static batching", "embedding")
PAPER_PD = {4: 21_781.0, 8: 6_577.0}  # seconds, Table 1
TABLES = ((1, PAPER_1), (2, PAPER_2))
Key = tuple[int, int, str]  # table, rows, method


class Floor:
    """The engines, one per way of joining, and what a run needs of the clock and the ledger."""

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
        """Serve all of `queries` with `size` rows: seconds, the ledger's peak in MiB, and what each
        query got.
        """
        name = METHODS[method]
        rows = "batch_size" if name == "sequence" else "max_batch_size"
        engine = self._engines["shape" if method == "shaping" else "embed"]
        desk = Desk(engine, queries)
        worker = Worker(
            0, STEP_LAW, ZetaMemory(engine.facts.capacity_tokens), joining=engine.facts.joining
        )
        scheduler = Scheduler(make_policy(name, {rows: size}), [worker])
        engine.ledger.peak_bytes = engine.ledger.used_bytes
        wave = size if method == "PD" else len(queries)
        start_s = self._clock()
        for first in range(0, len(queries), wave):
            for request in desk.requests(first, first + wave):
                scheduler.submit(request, 0.0)
            while scheduler.jobs:
                for batch in scheduler.tick(0.0):
                    scheduler.complete(desk.run(batch), 0.0)
        took_s = self._clock() - start_s
        return {
            "seconds": took_s,
            "peak_mib": engine.ledger.peak_bytes / 2**20,
            "tokens": desk.digests(),
        }


class Desk:
    """Runs what a scheduler decides. A query's number is its place among the queries."""

    def __init__(self, engine: RebatchEngine, queries: Lengths) -> None:
        rng = np.random.default_rng(SEED)
        vocabulary = engine.facts.vocab_size
        self._engine = engine
        self._prompts = [
            tuple(rng.integers(0, vocabulary, prompt).tolist()) for prompt, _ in queries
        ]
        self._outputs = [output for _, output in queries]
        self._limit = max(self._outputs)  # what the scheduler knows of every query's output
        self._got: list[list[int]] = [[] for _ in queries]

    def requests(self, first: int, end: int) -> list[Request]:
        prompts = self._prompts[first:end]
        return [
            Request(str(number), 0.0, len(one), self._limit)
            for number, one in enumerate(prompts, first)
        ]

    def run(self, batch: Batch) -> BatchResult | RoundResult:
        """A slice or a round, from the scheduler's words to the engine's and back."""
        numbers = tuple(int(job.request_id) for job in batch.jobs)
        rows = tuple(self._row(number) for number in numbers)
        if not batch.keep_cache:
            output = self._engine.run_slice(
                rows, batch.steps, lambda step: self._took(numbers, step)
            )
            ended = tuple(bool(finish) for finish in output.finish)
            return BatchResult(
                batch.batch_id, 0, tuple(len(tokens) for tokens in output.tokens), ended
            )
        assert batch.moves is None  # memory is never short
        done = self._engine.run_round(
            Round(batch.steps, rows, numbers), lambda step: self._took(range(10**6), step)
        )
        joined = tuple((str(number), step) for number, step in done.joined)
        return RoundResult(
            batch.batch_id, 0, done.steps, tuple(str(number) for number in done.ended), joined
        )

    def digests(self) -> list[str]:
        """A digest of what each query got, and a proof that it got as much as it wanted."""
        assert [len(got) for got in self._got] == self._outputs
        return [hashlib.sha256(str(got).encode()).hexdigest()[:12] for got in self._got]

    def _row(self, number: int) -> Row:
        prompt, got = self._prompts[number], self._got[number]
        return Row(str(number), (*prompt, *got), len(got), self._limit, FREE, self._outputs[number])

    def _took(self, numbers: Sequence[int], step: StepOutput) -> bool:
        for row, token in zip(step.rows, step.tokens, strict=True):
            self._got[numbers[row]].append(token)
        return True


def queries_of(table: int, size: int) -> Lengths:
    """The paper's queries, shorter: lengths are divided, at least 1 token."""
    queries = (
        mixed_queries(SEED, 2 if size == 4 else 1)[:MIXED] if table == 1 else short_queries(SEED)
    )
    divisor = DIVISOR[table]
    return [(max(prompt // divisor, 1), max(output // divisor, 1)) for prompt, output in queries]


def keys_of(tables: Sequence[int]) -> list[Key]:
    """One round: all ways of one table and size beside each other."""
    return [
        (table, size, method)
        for table, paper in TABLES
        if table in tables
        for size in paper
        for method in METHODS
        if table == 1 or method in PAPERS_TABLE_2
    ]


def measure(out: Path, rounds: int, tables: Sequence[int], threads: int) -> None:
    """Run what is not yet in `out`."""
    done = [tuple(line["key"]) for line in read(out)]
    floor = Floor(threads)
    for method in METHODS:
        floor.serve(method, 4, short_queries(1)[:8])  # warms up
    for turn in range(rounds):
        for key in keys_of(tables):
            if done.count(key) > turn:
                continue
            table, size, method = key
            line = {"key": key, **floor.serve(method, size, queries_of(table, size))}
            print(
                f"round {turn + 1}: table {table}, {size} rows, {method}: {line['seconds']:.2f} s",
                flush=True,
            )
            with out.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(line) + "\n")


def read(out: Path) -> list[dict[str, Any]]:
    return (
        [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        if out.exists()
        else []
    )


def report(lines: Sequence[Mapping[str, Any]]) -> str:
    """Both tables, ours beside the paper's, as Markdown."""
    runs: dict[Key, list[Mapping[str, Any]]] = {}
    for line in lines:
        runs.setdefault(tuple(line["key"]), []).append(line)
    counts = sorted({len(found) for found in runs.values()})
    rounds = " to ".join(map(str, {counts[0]: 0, counts[-1]: 0}))
    text = [
        f"`python bench/baton_live.py`: medians of {rounds} rounds; ratios are the paper's / ours.",
        "",
    ]
    for table, paper in TABLES:
        text += [f"Table {table}:", "", HEAD, "|---:|---|---:|---:|---:|---:|---:|---:|"]
        for size, says in paper.items():
            text += [
                row_of(runs, table, size, method, says)
                for method in METHODS
                if (table, size, method) in runs
            ]
        text.append("")
    for size, says in PAPER_1.items():
        gain = says[PAPERS_NAME["shaping"]] / says[PAPERS_NAME["embedding"]]
        ours = seconds_of(runs, (1, size, "shaping")) / seconds_of(runs, (1, size, "embedding"))
        text += [f"Embedding over shaping, Table 1, {size} rows: {gain:.2f} / {ours:.2f}.", ""]
    return "\n".join(text)


def seconds_of(runs: Mapping[Key, Sequence[Mapping[str, Any]]], key: Key) -> float:
    return median(float(run["seconds"]) for run in runs[key])


HEAD = (
    "| rows | method | seconds | lowest to highest | tokens/s | speed over static batching | peak MiB "
    "| queries whose tokens differ |"
)


def row_of(
    runs: Mapping[Key, Sequence[Mapping[str, Any]]],
    table: int,
    size: int,
    method: str,
    says: Mapping[str, float],
) -> str:
    """One line of a table."""
    found, static = runs[table, size, method], runs[table, size, "static batching"]
    times = [run["seconds"] for run in found]
    seconds, static_s = median(times), seconds_of(runs, (table, size, "static batching"))
    tokens = sum(output for _, output in queries_of(table, size))
    paper_s = (
        PAPER_PD.get(size)
        if method == "PD" and table == 1
        else says.get(PAPERS_NAME.get(method, ""))
    )
    gain = f"{says['static batching'] / paper_s:.2f} / " if paper_s else ""
    differ = sum(
        mine != others for mine, others in zip(found[0]["tokens"], static[0]["tokens"], strict=True)
    )
    return (
        f"| {size} | {method} | {seconds:.2f} | {min(times):.2f} to {max(times):.2f} | {tokens / seconds:,.0f} "
        f"| {gain}{static_s / seconds:.2f} | {found[0]['peak_mib']:.1f} | {differ} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="0: only show what is in --out")
    parser.add_argument("--tables", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/baton-live.jsonl"))
    parser.add_argument(
        "--markdown", type=Path, help="file whose section is written, as docs/results.md"
    )
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.rounds:
        measure(options.out, options.rounds, options.tables, options.threads)
    text = report(read(options.out))
    if options.markdown:
        put_section(options.markdown, "baton_live", "BATON: Tables 1 and 2 on the engine", text)
    print(text)


if __name__ == "__main__":
    main()
