"""What of vLLM our scheduler was not tried beside, or whose memory its books would get wrong: refused by name."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

from toolkit.errors import InputError


def refuse_untried(config: Any, kv_cache_config: Any, policy: str) -> None:
    """`InputError` for a `VllmConfig`, its caches, or a policy under it, that cannot be."""
    untried = {
        "speculative decoding": config.speculative_config is not None,
        "pipeline parallelism": config.parallel_config.pipeline_parallel_size > 1,
        "data parallelism": config.parallel_config.data_parallel_size > 1,
        "a KV connector": config.kv_transfer_config is not None,
        "an encoder of its own": config.ec_transfer_config is not None,
        "a model that generates nothing": config.model_config.runner_type != "generate",
        "a diffusion model": config.model_config.is_diffusion,  # several tokens of a pass, not in their order
        "a model with caches of several kinds": len(kv_cache_config.kv_cache_groups) != 1,
    }
    for what, there in untried.items():
        if there:
            _refuse(what)
    if not _grows(kv_cache_config.kv_cache_groups[0].kv_cache_spec):
        _refuse("a model whose cache does not grow with its tokens")
    if policy == "mlfq" and config.scheduler_config.async_scheduling:
        raise InputError(
            "policy 'mlfq' pauses requests between steps, and vLLM schedules a step ahead",
            "start vLLM with --no-async-scheduling",
        )


def _refuse(what: str) -> None:
    raise InputError(f"our scheduler cannot run beside {what}", "leave out --scheduler-cls")


def _grows(spec: Any) -> bool:
    """Whether each token takes its share of blocks and keeps it, as full attention's do: sliding windows give back."""
    specs = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    return all(isinstance(one, FullAttentionSpec) for one in specs)
