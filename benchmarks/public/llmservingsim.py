"""Runs of vLLM that others measured on GPUs, and their prediction from operators measured there.

`benchmarks.public.scoreboard` shows their errors. DIR is a checkout of LLMServingSim (KAIST, MIT
licence): git clone https://github.com/casys-kaist/LLMServingSim DIR

For each run in bench/examples, the profile of its GPU and model (profiler/perf) has the times of
all operators. A law of passes is fitted to their sums; nothing of the run is in it, and no host.
The simulator then serves the run's requests: arrival times and lengths of requests.jsonl, what
prompts share by the tokens of the workload file, vLLM's flags and blocks of meta.json. Times are
those at the engine, where the run's were taken. A run that cannot be predicted is refused by name.

The law is from attention at decodes of equal lengths, or of unequal ones. An engine plans ahead
(`async_scheduling`) or not by its meta.json; without it, it has the default of vLLM 0.19, which
plans ahead.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.public.law_of_operators import (
    Attention,
    Operator,
    OperatorLaw,
    law_of_passes,
    pass_times,
)
from toolkit.errors import InputError
from toolkit.estimators.laws import unit_step
from toolkit.estimators.memory import ZetaMemory
from toolkit.estimators.steps import StepLaw, StepShape, chunk_attended
from toolkit.metrics import Served, summarize
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.api import SimResult, simulate
from toolkit.sim.paged_engine import PagedEngine
from toolkit.sim.world import World
from toolkit.traces.types import SharedBlocks, Trace

KNOTS = (0, 64, 128, 256, 512, 1024)  # new tokens, where the cost of one more may change
BLOCK_TOKENS = 16  # vLLM's default on CUDA
BYTES = 2  # of a number in bf16
REDUCES = 2  # of a layer under tensor parallelism: after attention, after the MLP
RANKS_MAX = 2  # of tensor parallelism
EXPERTS = "moe"  # the operator that has a table of its own
US = 1e-6


@dataclass(frozen=True)
class Case:
    """A run that others measured: `measured` has its requests in order of their arrival, on the
    clock of the trace.
    """

    gpu: str
    model: str
    meta: dict[str, Any]
    trace: Trace
    measured: Served

    @property
    def name(self) -> str:
        """GPU and model."""
        return f"{self.gpu} {self.model}"

    @property
    def flags(self) -> VllmPolicy:
        """vLLM's flags."""
        given = self.meta["engine_kwargs"]
        return VllmPolicy(given["max_num_seqs"], given["max_num_batched_tokens"])

    @property
    def ranks(self) -> int:
        """GPUs of one engine."""
        return int(self.meta["engine_kwargs"]["tensor_parallel_size"])

    @property
    def ahead(self) -> bool:
        """Whether the engine plans ahead."""
        settings = self.meta.get("resolved_config", {}).get("scheduler_config", {})
        return bool(settings.get("async_scheduling", True))

    @property
    def cached_max(self) -> int:
        """No more tokens are ever cached: the lengths of the longest requests that fit in one pass,
        or the cache.
        """
        lengths = np.sort(self.trace.prompt_tokens + self.trace.output_tokens)
        longest = int(lengths[-self.flags.max_num_seqs :].sum())
        return min(longest, BLOCK_TOKENS * self.blocks)

    @property
    def blocks(self) -> int:
        """Blocks of the KV cache, without the one that vLLM keeps. A meta.json without them is
        taken as a cache with room for all; `facts` prints what is used of it.
        """
        if "kv_cache" in self.meta:
            return int(self.meta["kv_cache"]["num_gpu_blocks"]) - 1
        lengths = self.trace.prompt_tokens + self.trace.output_tokens
        return int(lengths.sum()) // BLOCK_TOKENS + len(lengths)


def read_case(data: Path, folder: Path) -> Case:
    """The run with its files in `folder`. `InputError` if it is not modelled.

    `arrival_time` is on the wall's clock, the other times are on the machine's. The least time from
    a request's arrival to the engine's queue is taken as their difference.
    """
    gpu, model = folder.parts[-3:-1]
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    given = meta["engine_kwargs"]
    ranks = given["tensor_parallel_size"]
    engines = given["data_parallel_size"]
    if ranks > RANKS_MAX:
        raise InputError(f"{gpu} {model}: what {ranks} GPUs exchange is not modelled")
    if engines > 1 or given["enable_expert_parallel"]:
        raise InputError(
            f"{gpu} {model}: data_parallel_size {engines}, enable_expert_parallel "
            f"{given['enable_expert_parallel']}; only tensor parallelism is modelled"
        )
    lines = (folder / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    requests = [json.loads(line) for line in lines]
    column = {name: np.array([request[name] for request in requests]) for name in requests[0]}
    arrival_s = column["arrival_time"] + (column["queued_ts"] - column["arrival_time"]).min()
    begin_s = arrival_s.min()
    order = np.argsort(arrival_s, kind="stable")
    outputs = column["output_toks"]
    shared = shared_prompts(data / meta["dataset_path"], meta["dataset_hash"])
    trace = Trace(arrival_s - begin_s, column["input_toks"], outputs, outputs, shared=shared)
    trace = trace.take(order)
    measured = Served(
        trace.arrival_s,
        column["first_token_ts"][order] - begin_s,
        column["last_token_ts"][order] - begin_s,
        trace.output_tokens,
        np.zeros(len(trace)),
        np.ones(len(trace), dtype=bool),
    )
    return Case(gpu, model, meta, trace, measured)


def shared_prompts(path: Path, sha256: str) -> SharedBlocks:
    """What the prompts of a workload file share, by their tokens."""
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != sha256:
        raise InputError(f"{path}: it is not the workload of the run, with the sha256 {sha256}")
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    ids: list[int] = []
    offsets = [0]
    for line in content.splitlines():
        tokens = json.loads(line)["input_tok_ids"]
        number = -1
        for start in range(0, len(tokens), BLOCK_TOKENS):
            block = number, tuple(tokens[start : start + BLOCK_TOKENS])
            number = numbers.setdefault(block, len(numbers))
            ids.append(number)
        offsets.append(len(ids))
    return SharedBlocks(BLOCK_TOKENS, np.array(ids), np.array(offsets))


def read_rows(path: Path) -> Iterator[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(encoding="utf-8") as file:
        yield from csv.DictReader(file)


def read_operators(data: Path, case: Case) -> list[Operator]:
    """The operators of the case's model on its GPU, except attention and experts. How often each
    runs is in the profile's description of the architecture.
    """
    tables = tables_of(data, case)
    architecture = profiled(tables)["architecture"]
    described = data / "profiler" / "models" / f"{architecture}.yaml"
    sequence = yaml.safe_load(described.read_text(encoding="utf-8"))["sequence"]
    layers = layers_of(data, case)
    times: dict[str, int] = defaultdict(int)
    for part, names in sequence.items():
        for name in names:
            times[name] += 1 if part in ("prologue", "head") else layers
    del times["attention"]
    times.pop(EXPERTS, None)
    seconds: dict[str, dict[int, float]] = defaultdict(dict)
    by_rows = set()
    for row in read_rows(tables / "dense.csv"):
        seconds[row["layer"]][int(row["tokens"])] = US * float(row["time_us"])
    for row in read_rows(tables / "per_sequence.csv"):
        by_rows.add(row["layer"])
        seconds[row["layer"]][int(row["sequences"])] = US * float(row["time_us"])
    if seconds.keys() != times.keys():
        differ = ", ".join(sorted(seconds.keys() ^ times.keys()))
        raise InputError(f"{case.name}: operators without times, or unknown: {differ}")
    return [
        Operator(
            name,
            "rows" if name in by_rows else "tokens",
            times[name],
            tuple(sorted(measured)),
            tuple(measured[size] for size in sorted(measured)),
        )
        for name, measured in seconds.items()
    ]


def tables_of(data: Path, case: Case) -> Path:
    """The folder of the profile's tables."""
    model = str(case.meta["model"])
    return data / "profiler" / "perf" / case.gpu / model / "bf16" / f"tp{case.ranks}"


def profiled(tables: Path) -> dict[str, Any]:
    """What the profile says of itself."""
    about: dict[str, Any] = yaml.safe_load((tables.parent / "meta.yaml").read_text("utf-8"))
    return about


def model_of(data: Path, case: Case) -> dict[str, Any]:
    """The model's configuration."""
    path = data / "configs" / "model" / f"{case.meta['model']}.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return config


def layers_of(data: Path, case: Case) -> int:
    """Layers of the model."""
    return int(model_of(data, case)["num_hidden_layers"])


def all_reduce(data: Path, case: Case) -> Operator:
    """The all-reduce of two GPUs, which the profile does not have: that of a ring over the link
    that the run's config.json gives to LLMServingSim's own simulation, two latencies and the bytes
    over the bandwidth.
    """
    latency_s, bytes_per_s = link_of(data, case)
    token_s = BYTES * model_of(data, case)["hidden_size"] / bytes_per_s
    sizes = 1, case.flags.max_num_batched_tokens
    seconds = tuple(2.0 * latency_s + token_s * tokens for tokens in sizes)
    return Operator("all-reduce", "tokens", REDUCES * layers_of(data, case), sizes, seconds)


def link_of(data: Path, case: Case) -> tuple[float, float]:
    """Seconds and bytes/s of the link between two GPUs, that of LLMServingSim's own simulation."""
    path = data / "bench" / "examples" / case.gpu / case.model / "config.json"
    link = json.loads(path.read_text(encoding="utf-8"))
    return 1e-9 * link["link_latency"], 1e9 * link["link_bw"]


def read_attention(data: Path, case: Case, *, unequal: bool) -> Attention:
    """The measured attention at those passes that the run could have: by its flags, by the lengths
    of its requests and by its cache.

    Beside a chunk a run has one decode less than `max_num_seqs`. The measured passes nearest to
    that have as many, and count, since the next fewer decodes are half of it.

    In attention.csv all decodes of a pass have as much cached. With `unequal`, passes of several
    decodes are those of skew.csv in its place, where a share of them has more than the others. Its
    times are sums over the measured iterations; those of attention.csv are means.
    """
    tables = tables_of(data, case)
    flags = case.flags
    lengths = case.trace.prompt_tokens + case.trace.output_tokens
    shapes: list[StepShape] = []
    seconds: list[float] = []

    def add(chunk: int, behind: int, decodes: int, mean: float, most: float, us: float) -> None:
        attended = chunk_attended(behind, chunk)
        cached = round(decodes * mean)
        shape = StepShape(decodes, cached, int(chunk > 0), chunk, attended, behind)
        if (
            shape.tokens <= flags.max_num_batched_tokens
            and shape.decodes <= flags.max_num_seqs
            and max(chunk + behind, most) <= lengths.max()
            and cached + behind <= case.cached_max
        ):
            shapes.append(shape)
            seconds.append(US * us)

    for row in read_rows(tables / "attention.csv"):
        decodes = int(row["n_decode"])
        cached = float(row["kv_decode"])
        chunk = int(row["prefill_chunk"])
        behind = int(row["kv_prefill"])
        if decodes <= 1 or not unequal:
            add(chunk, behind, decodes, cached, cached, float(row["time_us"]))
    if unequal:
        iterations = profiled(tables)["measurement_iterations"]
        for row in read_rows(tables / "skew.csv"):
            mean = float(row["kv_mean"])
            most = float(row["kv_big"])
            us = float(row["t_skew_us"]) / iterations
            add(int(row["pc"]), int(row["kp"]), int(row["n"]), mean, most, us)
    return Attention(layers_of(data, case), tuple(shapes), tuple(seconds))


def predict(case: Case, law: StepLaw) -> SimResult:
    """Serve the case's requests."""
    engine = PagedEngine(law, case.blocks, BLOCK_TOKENS, case.ahead)
    memory = ZetaMemory(engine.capacity_tokens, zeta=1.0)
    world = World(unit_step(), memory, 1, 1, paged=engine)
    return simulate(case.trace, case.flags, world)


def law_of(data: Path, case: Case, *, unequal: bool) -> OperatorLaw:
    """The law of the case's passes."""
    operators = read_operators(data, case)
    if case.ranks > 1:
        operators.append(all_reduce(data, case))
    attention = read_attention(data, case, unequal=unequal)
    return law_of_passes(attention.shapes, pass_times(operators, attention), KNOTS)


def metrics(served: Served) -> dict[str, float]:
    """What is compared."""
    of = summarize(served, {})
    return {
        "makespan, s": of["makespan_s"],
        "mean TTFT, s": of["ttft_mean_s"],
        "mean TPOT, ms": 1e3 * of["tpot_mean_s"],
        "mean E2E, s": of["e2e_mean_s"],
    }


def runs_of(data: Path) -> list[Path]:
    """The folders of a checkout's runs; without any, the command ends."""
    folders = sorted(path.parent for path in data.glob("bench/examples/*/*/vllm/meta.json"))
    if not folders:
        raise SystemExit(f"{data}: no runs in bench/examples; is it a checkout of LLMServingSim?")
    return folders
