"""The side of `family_sizes` that runs in vLLM's Python: its own classes, without weights.

    VLLM-PYTHON -m benchmarks.engines.family_sizes_child ANSWERS.json FILE...

Started by `family_sizes`. Parameters are counted without the quantization, bytes with it. Where
vLLM has no kernel for a CPU, it is told that there is one, since no weight depends on it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "CRITICAL", "VLLM_PLUGINS": "", "HF_HUB_OFFLINE": "1"}
SPARSE = "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"
STORE = "tcp://127.0.0.1:29517"
CLASSES = {"MiniMaxM3ForCausalLM": "MiniMaxM3SparseForCausalLM"}  # names that vLLM does not have


class Kernel:
    """A kernel that does nothing, whatever it is asked."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def without_kernels() -> None:
    """Let vLLM build layers for which a CPU has no kernel."""
    import torch
    from vllm.model_executor.layers.fused_moe import config
    from vllm.model_executor.layers.fused_moe.oracle import unquantized
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
    from vllm.model_executor.layers.quantization import fp8, modelopt, mxfp4
    from vllm.platforms import current_platform
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.workspace import init_workspace_manager

    of_cpu = CpuPlatform.get_attn_backend_cls.__func__
    chosen = unquantized.select_unquantized_moe_backend

    def backend(cls: Any, selected_backend: Any, attn_selector_config: Any, /, **more: Any) -> Any:
        if attn_selector_config.use_sparse:
            return SPARSE
        return of_cpu(cls, selected_backend, attn_selector_config, **more)

    def experts(*values: Any, **more: Any) -> Any:
        try:
            return chosen(*values, **more)
        except NotImplementedError:
            triton = unquantized.UnquantizedMoeBackend.TRITON
            return triton, unquantized.backend_to_kernel_cls(triton)[0]

    class Platform:
        def __getattr__(self, name: str) -> Any:
            return getattr(current_platform, name)

        def is_cuda_alike(self) -> bool:
            return True

    replaced: Any = CpuPlatform
    replaced.get_attn_backend_cls = classmethod(backend)
    config.current_platform = Platform()
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method  # noqa: F401

    for module in list(sys.modules.values()):
        if getattr(module, "select_unquantized_moe_backend", None) is chosen:
            setattr(module, "select_unquantized_moe_backend", experts)  # noqa: B010
    for module in (fp8, modelopt):
        for name in [one for one in dir(module) if one.startswith("init_")]:
            setattr(module, name, Kernel)
        module.select_fp8_moe_backend = lambda *_, **__: (Fp8MoeBackend.TRITON, None)
    modelopt.select_nvfp4_moe_backend = lambda *_, **__: (next(iter(NvFp4MoeBackend)), None)
    mxfp4.select_mxfp4_moe_backend = lambda *_, **__: (Mxfp4MoeBackend.TRITON, None)
    for owner, name in ((torch.cuda, "Event"), (torch.cuda, "Stream"), (torch, "Event")):
        setattr(owner, name, Kernel)
    torch.accelerator.empty_cache = lambda: None
    init_workspace_manager(torch.device("cpu"))


def as_names(value: object) -> object:
    """Return nested dicts with attributes."""
    if isinstance(value, dict):
        return types.SimpleNamespace(**{key: as_names(one) for key, one in value.items()})
    return [as_names(one) for one in value] if isinstance(value, list) else value


def register(kind: str) -> None:
    """Make a config class for a type that has its own in the checkpoint."""
    from transformers import AutoConfig, PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    class Config(PretrainedConfig):  # type: ignore[misc]
        model_type = kind
        max_position_embeddings = 131072

        def __init__(self, block_configs: object = None, **more: Any) -> None:
            super().__init__(**more)
            self.block_configs = as_names(block_configs or [])

        def to_json_string(self, *_: object, **__: object) -> str:
            return "{}"

    if kind not in CONFIG_MAPPING and kind not in _CONFIG_REGISTRY:
        AutoConfig.register(kind, Config)


def built(config: dict[str, Any], text: bool | None, gpus: int) -> tuple[int, int]:
    """Return the parameters that one of a group's GPUs holds, and their bytes; `text`: of the text
    part alone.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        init_distributed_environment,
        initialize_model_parallel,
        parallel_state,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        more = {} if text is None else {"language_model_only": text}
        made = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            max_model_len=4096,
            enforce_eager=True,
            enable_prefix_caching=True,
            **more,
        ).create_engine_config()
        with set_current_vllm_config(made):
            parallel_state.destroy_model_parallel()
            if not torch.distributed.is_initialized():
                init_distributed_environment(1, 0, STORE, 0, backend="gloo")
            initialize_model_parallel(1, 1)
            parallel_state.get_tp_group().world_size = gpus  # layers ask it for their part
            with torch.device("meta"), set_default_torch_dtype(made.model_config.dtype):
                model = initialize_model(vllm_config=made)
            parallel_state.get_tp_group().world_size = 1
    weights = list(model.parameters())
    parameters = sum(one.numel() for one in weights)
    return parameters, sum(one.numel() * one.element_size() for one in weights)


def sizes(file: Path) -> dict[str, Any]:
    """Return the parameters of a config's text part, whole and on one of two GPUs, and of what it
    sees with; of a quantized one also the bytes.
    """
    stored = config_of(file)
    config = json.loads(json.dumps(stored))
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part.pop("quantization_config", None)
    register(config["model_type"])
    sees = config["architectures"][0].endswith("ForConditionalGeneration")
    text = True if sees else None
    try:
        found: dict[str, Any] = {
            "parameters": built(config, text, 1)[0],
            "on_two": built(config, text, 2)[0],
        }
    except Exception as error:  # noqa: BLE001  (vLLM raises what it likes; the table shows it)
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"}
    for name, wanted, of, text_alone in (
        ("tower", sees, config, False),
        ("bytes", stored != config, stored, text),
    ):
        try:
            if wanted:
                found[name] = built(of, text_alone, 1)[name == "bytes"]
        except Exception as error:  # noqa: BLE001
            print(f"{file.name}: {name}: {error!r}", file=sys.stderr)
    if "tower" in found:
        found["tower"] -= found["parameters"]
    return found


def config_of(file: Path) -> dict[str, Any]:
    """Return a config with the quantization that ModelOpt writes beside it."""
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    config.pop("auto_map", None)
    config["architectures"] = [CLASSES.get(one, one) for one in config["architectures"]]
    beside = file.with_name(file.name.replace("_config.json", "_hf_quant_config.json"))
    if "quantization_config" not in config and beside.is_file():
        given = json.loads(beside.read_text(encoding="utf-8"))
        config["quantization_config"] = {"quant_method": "modelopt", **given}
    return config


def main() -> None:
    answers, *files = sys.argv[1:]
    without_kernels()
    found = {Path(file).name: sizes(Path(file)) for file in files}
    Path(answers).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
