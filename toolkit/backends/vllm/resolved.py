"""Reads what vLLM resolved (`toolkit.catalogue.resolved`) from its scheduler.

What a version does not have keeps its default: 0.28 to 0.33 name these attributes alike, and
`toolkit.backends.vllm.touched` lists the attributes that came or went. This module imports nothing
of vLLM.
"""

from __future__ import annotations

from typing import Any

from toolkit.catalogue.classes import of_resolved, refuse
from toolkit.catalogue.layers import experts_of
from toolkit.catalogue.resolved import SCHEDULER_FIELDS, CacheGroup, Drafts, Resolved
from toolkit.errors import ForeignError

# vLLM's classes of caches with known rules. A subclass is another cache, with its own name.
KINDS = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "mla",
    "SlidingWindowSpec": "window",
    "SlidingWindowMLASpec": "window",
    "ChunkedLocalAttentionSpec": "chunk",
    "MambaSpec": "state",
    "CircularBufferSpec": "ring",
}


def resolved_of(scheduler: Any) -> Resolved:
    """What one of vLLM's schedulers was given."""
    config = scheduler.vllm_config
    limits = config.scheduler_config
    parallel = config.parallel_config
    cache = scheduler.cache_config
    model = config.model_config
    caches = scheduler.kv_cache_config
    groups = [_group(group) for group in caches.kv_cache_groups]
    text = _text_config(model)
    return Resolved(
        groups=groups,
        blocks=cache.num_gpu_blocks - 1,  # vLLM never gives out one of them
        bytes_per_block=_bytes_per_block(caches, groups),
        retention=getattr(caches, "prefix_cache_retention_interval", None),
        fine_hits=_fine_hits(scheduler),
        max_in_flight_tokens=int(getattr(config, "max_in_flight_tokens", 0)),
        reserve_full_isl=bool(getattr(limits, "scheduler_reserve_full_isl", True)),
        **{name: getattr(limits, name, usual) for name, usual in SCHEDULER_FIELDS.items()},
        drafts=_drafts(config),
        tp=parallel.tensor_parallel_size,
        dp=parallel.data_parallel_size,
        dp_rank=rank_of(config),
        pp=parallel.pipeline_parallel_size,
        cp=int(getattr(parallel, "decode_context_parallel_size", 1))
        * int(getattr(parallel, "prefill_context_parallel_size", 1)),
        quantization=str(getattr(model, "quantization", None) or ""),
        kv_cache_dtype=str(getattr(cache, "cache_dtype", "auto")),
        experts=_experts(text),
        index_topk=int(getattr(text, "index_topk", None) or 0),
        connectors=_connectors(config),
        media=bool(getattr(model, "supports_multimodal_inputs", False)),
        encoder=bool(getattr(model, "is_encoder_decoder", False)),
        runner=str(getattr(model, "runner_type", "generate")),
        diffusion=bool(getattr(model, "is_diffusion", False)),
        lora=getattr(config, "lora_config", None) is not None,
        policy=str(getattr(limits.policy, "value", limits.policy)),
        balanced_experts=bool(
            getattr(parallel, "enable_eplb", False) or getattr(parallel, "enable_elastic_ep", False)
        ),
        dual_batch=bool(getattr(parallel, "enable_dbo", False)),
    )


def refuse_unlike(here: Resolved, measured: Resolved | None) -> None:
    """Raise `InputError` for a server that is not modelled, and for one with passes that take other
    times than the `measured` server's; None: what that was is not known.
    """
    refuse("this vLLM server", of_resolved(here))
    if measured is None:
        return
    for what, now, then in (
        ("quantization", here.quantization, measured.quantization),
        ("kv_cache_dtype", here.kv_cache_dtype, measured.kv_cache_dtype),
        ("tensor_parallel_size", str(here.tp), str(measured.tp)),
        ("groups of caches", _shown(here), _shown(measured)),
    ):
        if now != then:
            raise ForeignError(
                f"this vLLM server has {what} {now or 'none'}, and its fit was measured with "
                f"{then or 'none'}",
                "start it with the plan's own flags, or profile it again",
            )


def _shown(resolved: Resolved) -> str:
    """The groups of caches, in words."""
    return ", ".join(
        f"{one.kind or one.spec} of {one.layers} layers, blocks of {one.block}"
        for one in resolved.groups
    )


def rank_of(config: Any) -> int:
    """The engine's place among data-parallel ones. Engines of dense models count as alone, and
    keep only this number.
    """
    return int(getattr(config.parallel_config, "data_parallel_index", 0) or 0)


def _group(group: Any) -> CacheGroup:
    """The group; its layers of one type may have caches of several kinds."""
    spec = group.kv_cache_spec
    inner = getattr(spec, "kv_cache_specs", None)  # of UniformTypeKVCacheSpecs
    specs = list(inner.values()) if inner else [spec]
    kinds = {type(one).__name__: one for one in specs}
    name, first = next(iter(kinds.items()))
    known = KINDS.get(name, "") if len(kinds) == 1 else ""
    window = getattr(first, "sliding_window", None)
    chunk = getattr(first, "attention_chunk_size", None)
    return CacheGroup(
        kind=known,
        spec=" and ".join(kinds),
        block=spec.block_size,
        layers=len(group.layer_names),
        page_bytes=first.page_size_bytes,
        window=int(window or chunk or 0),
        mode=str(getattr(first, "mamba_cache_mode", "")),
        drafts=int(getattr(first, "num_speculative_blocks", 0)),
        checkpoints=int(getattr(first, "num_prefill_checkpoint_blocks", 0)),
        replay=int(getattr(spec, "prefix_replay_tokens", 0)),
    )


def _bytes_per_block(caches: Any, groups: list[CacheGroup]) -> int:
    """Bytes that a block takes on one device. A group's layers may have pages of several sizes, so
    what was allocated counts.
    """
    tensors = [one for one in caches.kv_cache_tensors if not getattr(one, "host_resident", False)]
    if tensors and hasattr(tensors[0], "block_stride"):  # all lie in one allocation of that size
        return int(tensors[0].size // caches.num_blocks)
    if tensors:
        return int(sum(one.size for one in tensors) // caches.num_blocks)
    return max((group.layers * group.page_bytes for group in groups), default=0)


def _fine_hits(scheduler: Any) -> bool:
    manager = getattr(scheduler, "kv_cache_manager", None)
    coordinator = getattr(manager, "coordinator", None)
    return bool(getattr(coordinator, "enable_partial_hash_hits", False))


def _drafts(config: Any) -> Drafts | None:
    spec = config.speculative_config
    if spec is None:
        return None
    made_up = str(getattr(spec, "rejection_sample_method", "") or "")
    return Drafts(
        method=str(spec.method),
        tokens=int(spec.num_speculative_tokens or 0),
        schedule=[
            list(one) for one in getattr(spec, "num_speculative_tokens_per_batch_size", None) or []
        ],
        lookahead=int(getattr(config, "num_lookahead_tokens", 0)),
        hash_lookahead=int(getattr(config, "num_hash_lookahead_tokens", 0)),
        synthetic=made_up if made_up.startswith("synthetic") else "",
        padded=bool(getattr(spec, "parallel_drafting", False)),
    )


def _connectors(config: Any) -> list[str]:
    """What moves caches: a connector with its role, others by the names of vLLM's settings."""
    found = []
    if (transfer := getattr(config, "kv_transfer_config", None)) is not None:
        connector = getattr(transfer, "kv_connector", None)
        role = getattr(transfer, "kv_role", None)
        found.append(f"{connector} {role}" if connector else "kv_transfer_config")
    if getattr(config, "ec_transfer_config", None) is not None:
        found.append("ec_transfer_config")
    if getattr(config.cache_config, "kv_offloading_size", None):
        found.append("kv_offloading_size")
    return found


def _text_config(model: Any) -> Any:
    return getattr(model, "hf_text_config", None) or model.hf_config


def _experts(text: Any) -> list[int]:
    count, chosen = experts_of(vars(text))
    return [count, chosen] if count else []
