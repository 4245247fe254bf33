"""Whether DeepSpeed's kernels can serve slices of a model: `python -m
toolkit.engines.deepspeed_probe < task.json`.

A model of one layer with random weights goes through a prefill and a decode step of a padded batch,
before injection and after it. The logits must agree, and keys and values must be where slices put
them. Exits with 1 and one line on stderr where that is not so.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from toolkit.engines.deepspeed_engine import import_deepspeed, modules_of, wrap
from toolkit.engines.loading import DTYPES, load_config
from toolkit.engines.slab import PaddedBatch, SlabCache
from toolkit.files.recipe import HardwareSpec, ModelSpec

ROWS = ((1, 2, 3, 4, 5), (6, 7))
AGREE = 0.05  # of the logits' standard deviation: kernels round, but not more


def main() -> None:
    """Probe what stdin describes."""
    task = json.load(sys.stdin)
    try:
        problem = injection_problem(
            ModelSpec.model_validate(task["model"]), HardwareSpec.model_validate(task["hardware"])
        )
    except Exception as error:  # noqa: BLE001  (whatever DeepSpeed raises is the answer to what was asked)
        message = (str(error).strip().splitlines() or [""])[0]
        problem = f"kernel injection fails: {type(error).__name__}: {message}"
    if problem:
        sys.exit(problem)


def injection_problem(spec: ModelSpec, hardware: HardwareSpec) -> str:
    """Why injection cannot serve, or ''. Raises what DeepSpeed raises."""
    model = _one_layer(spec, hardware)
    expected, _ = _passes(model, model.device)
    before = modules_of(model)
    network = wrap(import_deepspeed(hardware), model, spec, inject=True)
    if modules_of(model) == before:
        return f"kernel injection replaces nothing in a {model.config.model_type}"
    found, cache = _passes(network, model.device)
    if cache.get_seq_length() != len(ROWS[0]) + 1:
        return "injected kernels keep their own cache, which slices cannot pad, crop or drop"
    if (found - expected).abs().max() > AGREE * expected.std():
        return "injected kernels give other logits"
    return ""


def _one_layer(spec: ModelSpec, hardware: HardwareSpec) -> Any:
    config = copy.deepcopy(load_config(spec))
    config.get_text_config(decoder=True).num_hidden_layers = 1
    with torch.device(hardware.device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config, dtype=DTYPES[spec.dtype], trust_remote_code=spec.trust_remote_code
        )
    return model.eval()


@torch.inference_mode()
def _passes(network: Callable[..., Any], device: torch.device) -> tuple[torch.Tensor, SlabCache]:
    """Logits [2, N, V] of the token after the prompts, and of the one after that."""
    width = len(ROWS[0])
    batch = PaddedBatch(ROWS, width + 1, width, SlabCache(1, width + 1), device)
    logits = []
    for columns, tokens in (
        (slice(0, width), batch.input_ids),
        (slice(width, None), batch.input_ids[:, -1:]),
    ):
        output = network(
            input_ids=tokens,
            attention_mask=batch.mask[:, : columns.stop],
            position_ids=batch.positions[:, columns],
            past_key_values=batch.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits.append(output.logits[:, -1].float())
    return torch.stack(logits), batch.cache


if __name__ == "__main__":
    main()
