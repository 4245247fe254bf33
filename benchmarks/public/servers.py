"""Servers that others measured at a fixed concurrency: rows, models and protocols.

Rows are those of systems/silicon_sample.csv in a checkout of ai-dynamo/aiconfigurator (Apache-2.0,
NVIDIA).

Rows of InferenceX (SemiAnalysisAI/InferenceX, Apache-2.0) have the protocol of its scripts of their
day: ten requests for each place, lengths drawn evenly from 0.8 to 1 times the stated ones with the
seed 0, which gives the very lengths, and vLLM's flags as they are there. The others say nothing:
ten requests for each place, of the stated lengths, and vLLM's defaults are assumed.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.public.operators import CORE, GPUS
from toolkit.traces.types import Trace

MS = 1e-3
SEED = 39
ONE_IN = 10  # settings sets the constants

# ---- rows ----


@dataclass(frozen=True, slots=True)
class Row:
    """A server as it was measured.

    Attributes:
        source: InferenceX or NVIDIA, where it was measured.
        version: of vLLM; "": not said.
        precision: bf16, fp8 or fp4.
        ranks, expert_ranks, data_ranks: of tensor, expert and data parallelism.
        concurrency: requests at once; 0: not said.
        day: of the measurement, such as 2026-04-03; "": not said.
    """

    name: str
    source: str
    model: str
    gpu: str
    version: str
    precision: str
    ranks: int
    expert_ranks: int
    data_ranks: int
    prompt: int
    output: int
    concurrency: int
    day: str
    ttft_s: float
    tpot_s: float

    @property
    def group(self) -> tuple[str, str, str, str, int]:
        """The line of the table that it belongs to."""
        return (self.gpu, self.model, self.precision, self.version, self.ranks)

    @property
    def setting(self) -> tuple[Any, ...]:
        """What repeats of a measurement have in common."""
        ranks = (self.ranks, 1) if self.misread else (self.expert_ranks, self.data_ranks)
        return (*self.group, *ranks, self.prompt, self.output, self.concurrency)

    @property
    def misread(self) -> bool:
        """Whether the file says data parallelism, but InferenceX's configuration expert parallelism
        alone: where it says `ep` the file has as many copies of attention, too. The same
        measurements are in the file without these.
        """
        if self.model != "MiniMax-M2.5" or self.name.rpartition("_")[2] in DP_ATTENTION:
            return False
        return self.data_ranks == self.ranks > 1 and self.expert_ranks == self.ranks**2


# Rows of configurations with `dp-attn` in InferenceX's nvidia-master.yaml at 13962fc.
DP_ATTENTION = ("cfg707", "cfg727", "cfg827")


def read_rows(data: Path, engine: str = "vllm") -> list[Row]:
    """All rows of an engine without disaggregation, each once, though the file has some twice."""
    path = data / CORE / "systems" / "silicon_sample.csv"
    if not path.exists():
        raise SystemExit(f"{path}: it is missing; is it a checkout of ai-dynamo/aiconfigurator?")
    found: dict[tuple[object, ...], Row] = {}
    with path.open(encoding="utf-8") as file:
        for given in csv.DictReader(file):
            if (given["backend"], given["mode"]) != (engine, "agg"):
                continue
            row = read_row(given)
            times = f"{row.ttft_s:.6g}", f"{row.tpot_s:.6g}"
            found.setdefault((*row.setting, *times), row)
    return list(found.values())


def read_row(given: Mapping[str, str]) -> Row:
    """A row of the file. Where tensor parallelism of experts exceeds the ranks of attention, there
    are several copies of attention, whatever `attention_dp_size` says.
    """
    ranks = int(given["tp_size"])
    expert_ranks = max(int(given["moe_ep_size"] or 1), 1)
    together = max(int(given["moe_tp_size"] or 1), 1) * expert_ranks
    data_ranks = int(given["attention_dp_size"] or 1)
    if "A22B" in given["model_path"]:
        data_ranks = max(data_ranks, together // ranks)
    concurrency = re.search(r"silicon_concurrency=(\d+)", given["silicon_data_source"])
    day = re.search(r"measured=(\d{4}-\d\d-\d\d)", given["silicon_data_source"])
    ours = "aic-auto-gap-analysis" in given["silicon_data_source"]
    return Row(
        name=given["id"],
        source="NVIDIA" if ours else "InferenceX",
        model=given["model_path"].rpartition("/")[2],
        gpu=given["system"],
        version=given["backend_version"].partition("-")[0],
        precision=given["precision"] or "bf16",
        ranks=ranks,
        expert_ranks=expert_ranks,
        data_ranks=data_ranks,
        prompt=int(given["isl"]),
        output=int(given["osl"]),
        concurrency=int(concurrency[1]) if concurrency else 0,
        day=day[1] if day else "",
        ttft_s=MS * float(given["silicon_ttft_ms"]),
        tpot_s=MS * float(given["silicon_tpot_ms"]),
    )


def not_modelled(row: Row) -> str:
    """Why a row is not predicted; "": it is."""
    if row.gpu not in GPUS:
        return f"no operators of {row.gpu}"
    if not row.concurrency:
        return "concurrency not said"
    if row.model in IN_MXFP4 and row.gpu == "h100_sxm" and row.day[:7] == "2025-12":
        return "concurrency not said (the script of that day has 512 for any)"
    if row.data_ranks > 1 and not row.misread:
        return "engines that wait for one another (data parallel)"
    if row.model not in MODELS:
        return f"no configuration of {row.model}"
    return ""


def tenth_of(rows: Sequence[Row]) -> set[tuple[object, ...]]:
    """The settings that the constants are set on: of each line of the table one of ten, at least
    one, drawn by a hash with the seed. All rows of a setting are of the tenth, or none.
    """
    groups: dict[tuple[object, ...], set[tuple[object, ...]]] = {}
    for row in rows:
        groups.setdefault(row.group, set()).add(row.setting)
    drawn = set()
    for settings in groups.values():
        order = sorted(settings, key=lambda one: hashlib.sha256(f"{SEED} {one}".encode()).digest())
        drawn |= set(order[: max(round(len(order) / ONE_IN), 1)])
    return drawn


@dataclass(frozen=True)
class Split:
    """The rows that were read: those that are not modelled by reason, those that the constants were
    set on, and the judged ones.
    """

    rows: list[Row]
    reasons: Counter[str]
    tenth: list[Row]
    judged: list[Row]


def split_rows(data: Path) -> Split:
    """Read all rows; no row that sets constants is judged, nor is a repeat of one. Rows of
    `SET_NONE` set no constant.
    """
    rows = read_rows(data)
    reasons = Counter(reason for row in rows if (reason := not_modelled(row)))
    known = [row for row in rows if not not_modelled(row)]
    drawn = tenth_of([row for row in known if not row.misread and row.model not in SET_NONE])
    tenth = [row for row in known if row.setting in drawn]
    return Split(rows, reasons, tenth, [row for row in known if row.setting not in drawn])


# ---- models ----

MODELS = {
    "Qwen3-32B": "Qwen--Qwen3-32B",
    "Llama-3.1-70B": "meta-llama--Meta-Llama-3.1-70B",
    "Llama-3.1-8B-Instruct-FP8": "meta-llama--Meta-Llama-3.1-8B",
    "MiniMax-M2.5": "MiniMaxAI--MiniMax-M2.5",
    "Qwen3-235B-A22B-FP8": "Qwen--Qwen3-235B-A22B-FP8",
    "gpt-oss-120b": "openai--gpt-oss-120b",
    "Kimi-K2.5": "moonshotai--Kimi-K2.5",
}
IN_NVFP4 = {"Kimi-K2.5": "nvidia--Kimi-K2.5-NVFP4"}  # checkpoints of rows in fp4
IN_MXFP4 = ("gpt-oss-120b",)
SET_NONE = ("Kimi-K2.5",)  # all judged: latent attention came after the constants had been set

# ---- protocols ----


@dataclass(frozen=True, slots=True)
class Protocol:
    """How a server was started and loaded.

    Attributes:
        requests: of a run, for each place.
        ratio: lengths are drawn evenly from so many times the stated ones up to these.
        rows, tokens: vLLM's `max_num_seqs` and `max_num_batched_tokens`.
        share: `gpu_memory_utilization`.
        cache_bytes: of a number in the KV cache.
        ahead: `async_scheduling`.
        whole_experts: `enable_expert_parallel`.
        longest: `max_model_len`; 0: not said.
        said: whether a script of the source says so; otherwise it is assumed.
    """

    requests: int = 10
    ratio: float = 1.0
    rows: int = 1024
    tokens: int = 8192
    share: float = 0.9
    cache_bytes: int = 2
    ahead: bool = False
    whole_experts: bool = False
    longest: int = 0
    said: bool = False


# Where all lengths are alike, requests that begin together stay together, here as in a server.
# Times to the first token show that those of NVIDIA's runs did not; a spread of 2 % was set on the
# tenth.
NEARLY_ALIKE = 0.98
# Rows with times that no GPU explains set no constants; they are judged like the others.
# Qwen3-235B: 34 to 58 ms at every concurrency. Llama-3.1-8B: more prompts a second than its GEMMs
# alone allow, so that requests were fewer at once, or prompts found in the cache.
UNEXPLAINED = ("Qwen3-235B-A22B-FP8", "Llama-3.1-8B-Instruct-FP8")
APRIL = "2026-04-03"  # since then the scripts for Blackwell have other flags


def protocol_of(row: Row) -> Protocol:
    """The protocol of a row's source on its day.

    InferenceX: benchmarks/70b_*_slurm.sh and 70b_*_docker.sh at ac1998a (October 2025), and
    minimaxm2.5_{fp8,fp4}_GPU.sh at a363463, 0f78cf4, f342df1, bddbf40, 79bd988, 340d785, 22d0f12,
    gptoss_fp4_GPU*.sh at ac1998a, 25506e8, d2c2acb, cec542a; kimik2.5_fp4_b200.sh at 04107b3,
    kimik2.5_int4_b200.sh at 2b7b694, kimik2.5_int4_h200.sh at 34bc7c4.
    """
    if row.model in UNEXPLAINED:  # set on the tenth of these: longer runs, of lengths that differ
        return Protocol(requests=40, ratio=0.8)
    if row.source != "InferenceX":
        return Protocol(ratio=NEARLY_ALIKE)  # vLLM 0.12 does not plan ahead by default
    common = Protocol(ratio=0.8, ahead=True, said=True)
    hopper = row.gpu in ("h100_sxm", "h200_sxm")
    if row.model == "Llama-3.1-70B":
        rows = row.concurrency if hopper else 512
        # The script for the H100 names a cache of 8 bits too, but the rows of the tenth read and
        # hold as many bytes as one of 16 bits has.
        return replace(common, cache_bytes=2 if row.gpu == "h100_sxm" else 1, rows=rows)
    apart = row.expert_ranks > 1
    if row.model in IN_NVFP4:
        if row.precision == "fp4":  # the checkpoint asks for a cache of 8 bits
            return replace(common, rows=row.concurrency, cache_bytes=1, whole_experts=apart)
        if hopper:
            return replace(common, rows=row.concurrency, share=0.95)
        return replace(common, share=0.97)
    if row.model in IN_MXFP4:
        longest = max_model_len_of(row)
        if hopper:
            return replace(common, rows=row.concurrency, longest=longest)
        return replace(
            common,
            rows=512,
            cache_bytes=1 if row.day >= "2025-12" else 2,
            longest=longest,
        )
    if row.gpu == "h100_sxm":
        return replace(common, rows=256, whole_experts=apart)
    if row.gpu == "h200_sxm":  # the script of vLLM 0.18 turns it on for every row
        return replace(common, share=0.95, whole_experts=apart or row.version == "0.18.0")
    if row.day < APRIL:
        return replace(common, share=0.95, whole_experts=True)
    return replace(common, cache_bytes=1, tokens=2 * row.prompt, whole_experts=apart)


def max_model_len_of(row: Row) -> int:
    """`max_model_len` of InferenceX's scripts for gpt-oss-120b."""
    if row.gpu == "h100_sxm":
        return 10240
    return row.prompt + row.output + (20 if row.prompt == row.output else 200)


def trace_of(row: Row, protocol: Protocol) -> Trace:
    """The requests of a run. With a ratio, the lengths are those that InferenceX's
    benchmark_serving.py draws.
    """
    count = protocol.requests * row.concurrency
    drawn = np.random.RandomState(0)
    lengths = []
    for length in (row.prompt, row.output):
        low = int(length * protocol.ratio)
        lengths.append(drawn.randint(low, length + 1, size=count).astype(np.int64))
    prompts = lengths[0]
    outputs = lengths[1]
    return Trace(np.zeros(count), prompts, outputs, outputs.copy())
