"""The side of `recipe_sizes` that runs in vLLM's Python: what it says of models' sizes.

    VLLM-PYTHON -m benchmarks.engines.recipe_sizes_child CASES.json ANSWERS.json

Started by `recipe_sizes`. Each model is built on torch's meta device, in vLLM's own classes, as one
GPU of a group holds it: no memory is taken and no weight is read. A case has folder (of a
config.json), gpus, max_model_len, budget (bytes that vLLM may take on each GPU) and port. Its
answer has `error` where vLLM does not build the model on a CPU.
"""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path
from typing import Any

from benchmarks.common.command import read_words
from benchmarks.engines.vllm_alone import ENVIRONMENT

os.environ |= ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "ERROR"}
BLOCK = 16  # tokens


def without_kernels() -> None:
    """vLLM looks for a kernel as it makes a quantized layer. A CPU has none for these; the sizes of
    the weights do not depend on it.
    """
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
    from vllm.model_executor.layers.quantization import fp8, mxfp4

    fp8.init_fp8_linear_kernel = lambda **_: object()
    fp8.select_fp8_moe_backend = lambda **_: (Fp8MoeBackend.TRITON, None)
    mxfp4.select_mxfp4_moe_backend = lambda *_, **__: (Mxfp4MoeBackend.TRITON, None)


def sizes(case: dict[str, Any]) -> dict[str, Any]:
    """Bytes of weights and of a token's cache on one GPU, groups of caches, tokens of cache."""
    import torch
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
    from vllm.distributed import (
        init_distributed_environment,
        initialize_model_parallel,
        parallel_state,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.core import kv_cache_utils

    config = EngineArgs(
        model=case["folder"],
        skip_tokenizer_init=True,
        load_format="dummy",
        max_model_len=case["max_model_len"],
        enforce_eager=True,
        block_size=BLOCK,
    ).create_engine_config()
    with set_current_vllm_config(config):
        parallel_state.destroy_model_parallel()
        if not torch.distributed.is_initialized():
            address = f"tcp://127.0.0.1:{case['port']}"
            init_distributed_environment(1, 0, address, 0, backend="gloo")
        initialize_model_parallel(1, 1)
        parallel_state.get_tp_group().world_size = case["gpus"]  # layers ask it for their part
        with torch.device("meta"), set_default_torch_dtype(config.model_config.dtype):
            model = initialize_model(vllm_config=config)
        parallel_state.get_tp_group().world_size = 1
        layers = get_layers_from_vllm_config(config, AttentionLayerBase)
        specs = {
            name: spec
            for name, layer in layers.items()
            if (spec := layer.get_kv_cache_spec(config)) is not None
        }
    config.cache_config.kv_cache_layout = "LBNHC"
    weights = list(model.parameters())
    weight_bytes = sum(one.numel() * one.element_size() for one in weights)
    kv_bytes = sum(spec.page_size_bytes / spec.block_size for spec in specs.values())
    left = case["budget"] - weight_bytes
    made = kv_cache_utils.get_kv_cache_configs(config, [specs], [left])[0]
    return {
        "parameters": sum(one.numel() for one in weights),
        "weight_bytes": weight_bytes,
        "kv_bytes_per_token": kv_bytes,
        "groups": len(made.kv_cache_groups),
        "tokens": made.num_blocks * BLOCK,
    }


def main() -> None:
    cases, answers = read_words(__doc__, "CASES.json", "ANSWERS.json")
    without_kernels()
    found = []
    for case in json.loads(Path(cases).read_text(encoding="utf-8")):
        try:
            found.append(sizes(case))
        except Exception as error:  # noqa: BLE001  (vLLM raises what it likes; the table shows it)
            traceback.print_exc()
            found.append({"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"})
    Path(answers).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
