"""What vLLM resolved, read from its scheduler: here from objects with the same attributes."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from toolkit.backends.vllm.resolved import rank_of, refuse_unlike, resolved_of
from toolkit.backends.vllm.setup import log_of_rank
from toolkit.catalogue.resolved import IDLE_CONNECTOR
from toolkit.errors import ForeignError, InputError


@dataclass
class FullAttentionSpec:
    block_size: int = 16
    page_size_bytes: int = 1024
    sliding_window: int | None = None
    attention_chunk_size: int | None = None


@dataclass
class SlidingWindowSpec:
    block_size: int = 16
    page_size_bytes: int = 1024
    sliding_window: int = 128


@dataclass
class MambaSpec:
    block_size: int = 1056
    page_size_bytes: int = 4096
    mamba_cache_mode: str = "align"
    num_speculative_blocks: int = 3
    num_prefill_checkpoint_blocks: int = 1


class RSWASpec(FullAttentionSpec):
    """A subclass with other rules."""


class UniformTypeKVCacheSpecs:
    block_size = 16

    def __init__(self, *specs: Any) -> None:
        self.kv_cache_specs = {f"layer{k}": one for k, one in enumerate(specs)}


def group(spec: Any, layers: int = 2, **more: Any) -> Any:
    names = [f"layer{k}" for k in range(layers)]
    return SimpleNamespace(kv_cache_spec=spec, layer_names=names, **more)


def scheduler(*groups: Any, tensors: Any = (), **config: Any) -> Any:
    """A scheduler as 0.28 has it: it lacks what came later."""
    parallel = SimpleNamespace(
        tensor_parallel_size=1, data_parallel_size=1, pipeline_parallel_size=1
    )
    text = SimpleNamespace(num_experts=64, num_experts_per_tok=6)
    cache = SimpleNamespace(num_gpu_blocks=101, cache_dtype="fp8")
    vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(policy="fcfs"),
        parallel_config=parallel,
        model_config=SimpleNamespace(hf_config=text, quantization="fp8", runner_type="generate"),
        cache_config=cache,
        speculative_config=None,
    )
    vars(vllm_config).update(config)
    return SimpleNamespace(
        vllm_config=vllm_config,
        cache_config=cache,
        kv_cache_config=SimpleNamespace(
            kv_cache_groups=list(groups), kv_cache_tensors=list(tensors), num_blocks=101
        ),
    )


def test_what_a_version_lacks_keeps_its_default() -> None:
    resolved = resolved_of(scheduler(group(FullAttentionSpec())))
    assert (resolved.blocks, resolved.bytes_per_block, resolved.experts) == (100, 2048, [64, 6])
    assert (resolved.quantization, resolved.kv_cache_dtype) == ("fp8", "fp8")
    assert resolved.prefill_schedule_interval == 1
    assert resolved.retention is None


def test_groups_have_their_kind_and_sizes() -> None:
    window = group(SlidingWindowSpec())
    groups = resolved_of(scheduler(window, group(MambaSpec(), 3))).groups
    assert (groups[0].kind, groups[0].window) == ("window", 128)
    state = groups[1]
    assert (state.kind, state.mode, state.drafts, state.checkpoints) == ("state", "align", 3, 1)
    assert (state.block, state.layers, state.page_bytes) == (1056, 3, 4096)


def test_a_subclass_and_a_mixture_are_unknown_caches() -> None:
    mixture = UniformTypeKVCacheSpecs(FullAttentionSpec(), RSWASpec())
    of_one_kind = UniformTypeKVCacheSpecs(FullAttentionSpec(), FullAttentionSpec())
    found = resolved_of(scheduler(group(RSWASpec()), group(mixture), group(of_one_kind))).groups
    assert [one.kind for one in found] == ["", "", "full"]
    assert "RSWASpec" in found[1].spec


@pytest.mark.parametrize(
    ("tensors", "size"),
    [
        ([SimpleNamespace(size=101 * 500, block_stride=1)] * 3, 500),  # one allocation
        ([SimpleNamespace(size=101 * 500, shared_by=["layer0"])] * 3, 1500),  # one for each
    ],
)
def test_bytes_of_a_block_are_those_that_were_allocated(tensors: Any, size: int) -> None:
    found = resolved_of(scheduler(group(FullAttentionSpec()), tensors=tensors))
    assert found.bytes_per_block == size


def test_drafts_and_connectors_are_read() -> None:
    spec = SimpleNamespace(
        method="mtp",
        num_speculative_tokens=3,
        num_speculative_tokens_per_batch_size=[(1, 8, 3)],
        rejection_sample_method="synthetic",
    )
    resolved = resolved_of(
        scheduler(group(FullAttentionSpec()), speculative_config=spec, kv_transfer_config=object())
    )
    assert resolved.drafts is not None
    assert (resolved.drafts.method, resolved.drafts.schedule) == ("mtp", [[1, 8, 3]])
    assert resolved.drafts.synthetic == "synthetic"
    assert resolved.connectors == ["kv_transfer_config"]


def test_a_connector_is_named_with_its_role() -> None:
    nixl = SimpleNamespace(kv_connector="NixlConnector", kv_role="kv_both")
    found = resolved_of(scheduler(group(FullAttentionSpec()), kv_transfer_config=nixl))
    assert found.connectors == [IDLE_CONNECTOR]


def test_each_engine_of_data_parallelism_has_its_own_log() -> None:
    config = scheduler(group(FullAttentionSpec())).vllm_config
    assert rank_of(config) == 0
    config.parallel_config.data_parallel_index = 3
    assert rank_of(config) == 3
    assert len({log_of_rank("passes.jsonl", rank) for rank in range(4)}) == 4
    assert str(log_of_rank("passes.jsonl", 0)) == "passes.jsonl"


def test_a_server_unlike_the_measured_one_is_refused() -> None:
    here = resolved_of(scheduler(group(FullAttentionSpec())))
    refuse_unlike(here, None)
    refuse_unlike(here, replace(here, blocks=7))
    for change in ({"quantization": ""}, {"kv_cache_dtype": "auto"}, {"tp": 2}, {"groups": []}):
        with pytest.raises(ForeignError):
            refuse_unlike(here, replace(here, **change))
    with pytest.raises(InputError):
        refuse_unlike(replace(here, lora=True), None)
