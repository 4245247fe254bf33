"""DeepSpeed's `init_inference` around the model that transformers builds; slices are the
`transformers` engine's.

What DeepSpeed makes of a model depends on the device, the model and the versions, and it may leave
it as it is without a word. So it is tried and looked at, and `EngineFacts.deepspeed` says what came
of it. Tensor parallelism is not here.
"""

from __future__ import annotations

import contextlib
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

from toolkit.engines.loading import DTYPES
from toolkit.engines.transformers_engine import TransformersEngine
from toolkit.errors import EngineError
from toolkit.files.recipe import EngineSpec, HardwareSpec, ModelSpec

INSTALL = "pip install 'deepspeed>=0.19,<0.20', on a CPU with -c constraints.txt"
INJECTED, PASS_THROUGH = "kernel injection", "pass-through"
PROBE = (sys.executable, "-m", "toolkit.engines.deepspeed_probe")
PROBE_LIMIT_S = 1800.0  # the first time, DeepSpeed compiles its kernels
WIDER = 2  # a batch may grow to its longest input and its longest output, each nearly max_model_len


class DeepSpeedEngine(TransformersEngine):
    """See `TransformersEngine`. `EngineError` also where DeepSpeed is missing or cannot do what the
    recipe asks for.
    """

    name = "deepspeed"

    def _prepare(
        self, spec: ModelSpec, engine: EngineSpec, hardware: HardwareSpec
    ) -> Callable[..., Any]:
        deepspeed = import_deepspeed(hardware)
        why_not = _why_not_injected(deepspeed, spec, engine, hardware)
        before = modules_of(self._model)
        network = wrap(deepspeed, self._model, spec, inject=not why_not)
        self._version = deepspeed.__version__
        self._made = f"{PASS_THROUGH}: {why_not}" if modules_of(self._model) == before else INJECTED
        return network


def import_deepspeed(hardware: HardwareSpec) -> ModuleType:
    """The package, which chooses its device when it is imported: the recipe's, not the best that it
    finds.
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
    logging.getLogger("DeepSpeed").setLevel(logging.CRITICAL)  # what matters is raised
    return deepspeed  # type: ignore[no-any-return]


def wrap(
    deepspeed: ModuleType, model: torch.nn.Module, spec: ModelSpec, *, inject: bool
) -> torch.nn.Module:
    """What `init_inference` makes of `model`, in place. `EngineError` for a dtype that the device
    does not have.
    """
    try:
        with quiet():
            wrapped: torch.nn.Module = deepspeed.init_inference(
                model,
                dtype=DTYPES[spec.dtype],
                tensor_parallel={"tp_size": 1},
                replace_with_kernel_inject=inject,
                max_out_tokens=WIDER
                * spec.max_model_len,  # its own limit is 1,024, whatever the model takes
            )
    except ValueError as error:
        raise EngineError(f"DeepSpeed: {error}", "choose another model.dtype") from None
    return wrapped


def modules_of(model: torch.nn.Module) -> list[type]:
    """The classes of a model's modules, which injection replaces."""
    return [type(module) for module in model.modules()]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """DeepSpeed logs and prints to stdout, which is the user's, or a stream of frames."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _why_not_injected(
    deepspeed: ModuleType, spec: ModelSpec, engine: EngineSpec, hardware: HardwareSpec
) -> str:
    """Why the model keeps its own kernels; '' where it gets DeepSpeed's. `EngineError` where the
    recipe needs those.
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
    """'' where kernel injection serves slices of such a model, else why not. In a process of its
    own: it may crash.
    """
    task = json.dumps(
        {"model": spec.model_dump(mode="json"), "hardware": hardware.model_dump(mode="json")}
    )
    try:
        child = subprocess.run(
            PROBE, input=task.encode(), capture_output=True, timeout=PROBE_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"kernel injection was not done after {PROBE_LIMIT_S:.0f} s"
    if child.returncode < 0:
        return f"kernel injection ended the process that tried it with signal {-child.returncode}"
    last_line = (child.stderr.decode(errors="replace").strip().splitlines() or [""])[-1][:300]
    return last_line if child.returncode else ""
