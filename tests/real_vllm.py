"""A real vLLM for tests, with a random model of two layers. The tests skip where vLLM is missing.

VLLM_PYTHON names the Python of an environment that has vLLM, if the tests' own has none.
"""

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import samples

from toolkit.backends.vllm.setup import make_worker, read_setup
from toolkit.sched.eventlog import EventLogHeader, from_lines, replay
from toolkit.sched.policies import make_policy
from toolkit.sched.scheduler import Scheduler

PYTHON = os.environ.get("VLLM_PYTHON") or (
    sys.executable if importlib.util.find_spec("vllm") else ""
)
needed = pytest.mark.skipif(
    not PYTHON, reason="vLLM is not installed, and VLLM_PYTHON names no Python that has it"
)
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}


def recipe():
    """A recipe with 384 tokens of cache: so few that requests are preempted."""
    return samples.recipe(
        engine={
            "name": "vllm",
            "threads": 1,
            "kv_cache_memory_mib": 1,
            "vllm": {
                "python": PYTHON,
                "block_size": 32,
                "enforce_eager": True,
                "num_gpu_blocks_override": 13,
            },
        },
        model={
            "source": "random",
            "config": CONFIG,
            "max_model_len": 256,
            "dtype": "float32",
            "tokenizer": "bytes",
        },
        workers=1,
        policy={"name": "vllm"},
    )


def differences(log: Path, environ: Mapping[str, str]) -> list[str]:
    """Where a fresh scheduler decides otherwise than the log of one that ran inside vLLM.

    `environ` is the environment of that run.
    """
    header, *events = from_lines(log.read_bytes().splitlines(keepends=True))
    assert isinstance(header, EventLogHeader)
    assert events
    worker = make_worker(read_setup(environ), header.capacity_tokens, header.slots)
    return list(replay(events, Scheduler(make_policy(header.policy, header.parameters), [worker])))
