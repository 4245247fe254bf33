"""The work of `offline_throughput`: a folder with a model and requests that every system reads.

    FOLDER/model/      config.json and safetensors, random weights from a seed
    FOLDER/work.json   `Work`

Lengths are a trace's, scaled down: a prompt has input // 8 tokens clipped to 4..256, an output
output // 4 tokens clipped to 4..128. Tokens are random. Every system gives each request exactly its
output's length, whatever it samples.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.engines.random_llama import save_llama
from toolkit.traces.read import read_trace
from toolkit.traces.types import trace_path

VOCAB = 32_000  # Llama 2's
LONGEST_PROMPT = 256
LONGEST_OUTPUT = 128
SHORTEST = 4
STATIC_ROWS = 32  # the largest static batch; its memory is the budget of every system
MODEL = {  # 14.5 million parameters
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class Work:
    """The requests and the resources for them."""

    prompts: list[list[int]]
    outputs: list[int]  # tokens that each request gets
    kv_tokens: int  # of KV cache that a system may hold
    threads: int
    sample: int  # slow systems serve, and tokens are compared on, every sample-th request

    @property
    def tokens(self) -> int:
        return sum(self.outputs)

    @classmethod
    def read(cls, folder: Path) -> Work:
        return cls(**json.loads((folder / "work.json").read_text(encoding="utf-8")))


def prepare(folder: Path, trace: str, count: int, threads: int, sample: int) -> Work:
    """Write the folder."""
    lengths, _ = read_trace(trace_path(trace))
    if len(lengths) < count:
        raise SystemExit(f"{trace} has {len(lengths)} requests; {count} are needed")
    prompt = np.clip(lengths.prompt_tokens[:count] // 8, SHORTEST, LONGEST_PROMPT)
    output = np.clip(lengths.output_tokens[:count] // 4, SHORTEST, LONGEST_OUTPUT)
    rng = np.random.default_rng(0)
    # tokens 0, 1 and 2 are special
    prompts = [rng.integers(3, VOCAB, length).tolist() for length in prompt]
    work = Work(
        prompts, output.tolist(), STATIC_ROWS * (LONGEST_PROMPT + LONGEST_OUTPUT), threads, sample
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "work.json").write_text(json.dumps(asdict(work)), encoding="utf-8")
    save_llama(folder / "model", MODEL)
    return work
