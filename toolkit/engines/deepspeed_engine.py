"""DeepSpeed's `init_inference` on the model that transformers builds; slices run as in the
`transformers` engine.

The result of DeepSpeed depends on the device, the model and the versions, and it may silently leave
a model unchanged. So this engine tries it and inspects the result, and `EngineFacts.deepspeed`
records it. Tensor parallelism with DeepSpeed is not supported.

`python -m toolkit.engines.deepspeed_engine < task.json` tests whether DeepSpeed's kernels can serve
slices of a model. A model of one layer with random weights runs a prefill and a decode step of a
padded batch, before and after injection. The logits must agree, and keys and values must be in the
cache of the slice. If not, the process exits with 1 and one line on stderr.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from toolkit.engines.loading import DTYPES, load_config
from toolkit.engines.slab import PaddedBatch, SlabCache
from toolkit.engines.transformers_engine import TransformersEngine
from toolkit.errors import EngineError
from toolkit.files.recipe import EngineSpec, HardwareSpec, ModelSpec

INSTALL = "pip install 'deepspeed>=0.19,<0.20', on a CPU with -c constraints.txt"
INJECTED = "kernel injection"
PASS_THROUGH = "pass-through"
PROBE_COMMAND = (sys.executable, "-m", "toolkit.engines.deepspeed_engine")
PROBE_LIMIT_S = 1800.0  # DeepSpeed compiles its kernels the first time
# A batch may grow to its longest input plus its longest output, each almost max_model_len.
LENGTHS_PER_BATCH = 2
PROBE_ROWS = ((1, 2, 3, 4, 5), (6, 7))
LOGITS_TOLERANCE = 0.05  # of the logits' standard deviation: more than rounding in kernels


class DeepSpeedEngine(TransformersEngine):
    """See `TransformersEngine`. Raises `EngineError` also if DeepSpeed cannot run the recipe."""

    name = "deepspeed"
    has_arena = False  # its kernels are not captured

    def _prepare(
        self, spec: ModelSpec, engine: EngineSpec, hardware: HardwareSpec
    ) -> Callable[..., Any]:
        deepspeed = import_deepspeed(hardware)
        why_not = _why_not_injected(deepspeed, spec, engine, hardware)
        before = modules_of(self._model)
        network = wrap(deepspeed, self._model, spec, inject=not why_not)
        self._version = deepspeed.__version__
        unchanged = modules_of(self._model) == before
        self._deepspeed = f"{PASS_THROUGH}: {why_not}" if unchanged else INJECTED
        return network


def import_deepspeed(hardware: HardwareSpec) -> ModuleType:
    """The package, imported for the recipe's device.

    DeepSpeed chooses its device on import, by default the best that it finds.
    """
    chosen = os.environ.get("DS_ACCELERATOR")
    os.environ["DS_ACCELERATOR"] = hardware.device
    try:
        with quiet():
            import deepspeed
    except ImportError as error:
        raise EngineError(
            f"engine.name is deepspeed, which cannot be imported: {error}", INSTALL
        ) from None
    finally:
        os.environ.pop("DS_ACCELERATOR")
        if chosen is not None:
            os.environ["DS_ACCELERATOR"] = chosen
    logging.getLogger("DeepSpeed").setLevel(logging.CRITICAL)  # real errors are raised
    return deepspeed  # type: ignore[no-any-return]


def wrap(
    deepspeed: ModuleType, model: torch.nn.Module, spec: ModelSpec, *, inject: bool
) -> torch.nn.Module:
    """Apply `init_inference` to `model`, in place. Raises `EngineError` for a dtype that the device
    does not support.
    """
    try:
        with quiet():
            wrapped: torch.nn.Module = deepspeed.init_inference(
                model,
                dtype=DTYPES[spec.dtype],
                tensor_parallel={"tp_size": 1},
                replace_with_kernel_inject=inject,
                # DeepSpeed's default is 1,024 for every model.
                max_out_tokens=LENGTHS_PER_BATCH * spec.max_model_len,
            )
    except ValueError as error:
        raise EngineError(f"DeepSpeed: {error}", "choose another model.dtype") from None
    return wrapped


def modules_of(model: torch.nn.Module) -> list[type]:
    """The classes of a model's modules, which injection replaces."""
    return [type(module) for module in model.modules()]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence DeepSpeed, which prints to stdout: that belongs to the user or carries frames."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _why_not_injected(
    deepspeed: ModuleType, spec: ModelSpec, engine: EngineSpec, hardware: HardwareSpec
) -> str:
    """Why the model keeps its own kernels, or '' if DeepSpeed can inject its kernels.

    Raises `EngineError` if it cannot and the recipe requires it.
    """
    if engine.kernel_injection is False:
        return "engine.kernel_injection is false"
    builder = deepspeed.accelerator.get_accelerator().get_op_builder("InferenceBuilder")
    if builder is None or builder.__name__ == "NotImplementedBuilder":
        why_not = f"DeepSpeed has no inference kernels for {hardware.device}"
    else:
        why_not = probe_injection(spec, hardware)
    if why_not and engine.kernel_injection:
        raise EngineError(
            f"engine.kernel_injection is true: {why_not}", "set it to false, or leave it out"
        )
    return why_not


def probe_injection(spec: ModelSpec, hardware: HardwareSpec) -> str:
    """Why kernel injection cannot serve slices of such a model, or ''. It is tried in a separate
    process, because it may crash.
    """
    task = json.dumps(
        {"model": spec.model_dump(mode="json"), "hardware": hardware.model_dump(mode="json")}
    )
    try:
        child = subprocess.run(
            PROBE_COMMAND,
            input=task.encode(),
            capture_output=True,
            timeout=PROBE_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"kernel injection had not ended after {PROBE_LIMIT_S:.0f} s"
    if child.returncode < 0:
        return f"kernel injection ended its test process with signal {-child.returncode}"
    last_line = (child.stderr.decode(errors="replace").strip().splitlines() or [""])[-1][:300]
    return last_line if child.returncode else ""


def main() -> None:
    """Test the model that stdin describes."""
    task = json.load(sys.stdin)
    try:
        problem = injection_problem(
            ModelSpec.model_validate(task["model"]), HardwareSpec.model_validate(task["hardware"])
        )
    except Exception as error:  # noqa: BLE001  (any error of DeepSpeed's is the result of the test)
        message = (str(error).strip().splitlines() or [""])[0]
        problem = f"kernel injection fails: {type(error).__name__}: {message}"
    if problem:
        sys.exit(problem)


def injection_problem(spec: ModelSpec, hardware: HardwareSpec) -> str:
    """Why injection cannot serve slices, or ''. Errors of DeepSpeed propagate."""
    config = copy.deepcopy(load_config(spec))
    config.get_text_config(decoder=True).num_hidden_layers = 1
    with torch.device(hardware.device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config, dtype=DTYPES[spec.dtype], trust_remote_code=spec.trust_remote_code
        ).eval()
    expected, _ = _passes(model, model.device)
    before = modules_of(model)
    network = wrap(import_deepspeed(hardware), model, spec, inject=True)
    if modules_of(model) == before:
        return f"kernel injection replaces nothing in a {model.config.model_type}"
    injected, cache = _passes(network, model.device)
    if cache.get_seq_length() != len(PROBE_ROWS[0]) + 1:
        return "injected kernels keep their own cache, which slices cannot pad, crop or drop"
    if (injected - expected).abs().max() > LOGITS_TOLERANCE * expected.std():
        return "injected kernels give other logits"
    return ""


@torch.inference_mode()
def _passes(network: Callable[..., Any], device: torch.device) -> tuple[torch.Tensor, SlabCache]:
    """Logits [2, N, V] of the token after the prompts and of the next one, and the cache."""
    width = len(PROBE_ROWS[0])
    batch = PaddedBatch(PROBE_ROWS, width + 1, width, 1, device)
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
