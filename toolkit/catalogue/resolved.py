"""What an engine resolved from its model and its flags: cache groups, drafts, parallelism, limits.

vLLM's scheduler knows all of it. `toolkit.backends.vllm.resolved` reads it there, the header of the
log of passes carries it, and profile and fit keep it. `toolkit.catalogue.classes` says what of it
is not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

IDLE_CONNECTOR = "NixlConnector kv_both"  # a connector and its role: without pools it moves nothing


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one table of blocks per request.

    Attributes:
        kind: full, mla, window, chunk, state or ring; '': another, which `spec` names.
        spec: vLLM's class of the cache.
        block: tokens of a block.
        layers: how many.
        page_bytes: of a block in one layer, padding included.
        window: tokens: of a sliding window, or of a chunk of local attention; 0: neither.
        mode: of states: align or none; '': no states.
        drafts: of states: blocks for drafts.
        checkpoints: of states: blocks for checkpoints inside a prefill.
        replay: tokens that are computed again after a hit.
    """

    kind: str
    spec: str
    block: int
    layers: int
    page_bytes: int
    window: int = 0
    mode: str = ""
    drafts: int = 0
    checkpoints: int = 0
    replay: int = 0


@dataclass(frozen=True, slots=True)
class Drafts:
    """Speculative decoding.

    Attributes:
        method: vLLM's name, such as mtp, eagle or ngram.
        tokens: drafts per step, at most.
        schedule: [rows from, rows to, drafts] by the rows of a pass; empty: always `tokens`.
        lookahead: slots beyond a row's tokens that the drafter writes to.
        hash_lookahead: tokens behind a block that its hash covers, too.
        synthetic: how acceptance is made up, such as 'synthetic'; '': drafts are verified.
        padded: another method than one drafter after another (`parallel_drafting`).
    """

    method: str
    tokens: int
    schedule: list[list[int]] = field(default_factory=list)
    lookahead: int = 0
    hash_lookahead: int = 0
    synthetic: str = ""
    padded: bool = False


def of_scheduler(default: Any) -> Any:
    """Return a field of `Resolved` that vLLM's `SchedulerConfig` has under the same name."""
    return field(default=default, metadata={"of": "scheduler"})


@dataclass(frozen=True, slots=True)
class Resolved:
    """All of it. What a version of the engine does not have keeps its default.

    Attributes:
        groups: of the KV cache, in the engine's order.
        blocks: that requests can use.
        bytes_per_block: of the widest group, on one device.
        retention: tokens between kept ends of windows and states: 0 keeps known returns only,
            None all.
        fine_hits: prefixes hit at less than a block.
        max_in_flight_tokens: of all passes that may be under way.
        max_num_active_seqs: rows that run at once, by a flag of its own; None: it is not given.
        long_prefill_token_threshold: tokens of a chunk while others are there; 0: no limit.
        prefill_schedule_interval: passes from a prefill to the next.
        reserve_full_isl: a request waits until its whole input fits.
        watermark: share of blocks that admission leaves free.
        tp, dp, dp_rank, pp, cp: sizes of parallelism: tensor, data, pipeline, context.
        quantization: vLLM's name of the weights' scheme; '': as model.dtype.
        kv_cache_dtype: 'auto': as model.dtype.
        experts: [of a layer, chosen per token]; empty: none.
        index_topk: cached tokens that sparse attention reads; 0: all.
        connectors: what moves caches in or out of the engine.
        media: it takes images, audio or video.
        encoder: it has an encoder beside the decoder.
        runner: vLLM's runner_type; 'generate' gives tokens.
        diffusion: it gives tokens out of order.
        lora: it serves adapters.
        policy: of the waiting queue: fcfs or priority.
        balanced_experts: experts move between devices, or devices come and go.
        dual_batch: two halves of a batch overlap.
    """

    groups: list[CacheGroup]
    blocks: int
    bytes_per_block: int
    retention: int | None = None
    fine_hits: bool = False
    max_in_flight_tokens: int = 0
    max_num_active_seqs: int | None = of_scheduler(None)
    long_prefill_token_threshold: int = of_scheduler(0)
    long_prefill_token_threshold_adaptive: bool = of_scheduler(False)
    prefill_schedule_interval: int = of_scheduler(1)
    reserve_full_isl: bool = True
    watermark: float = of_scheduler(0.0)
    drafts: Drafts | None = None
    tp: int = 1
    dp: int = 1
    dp_rank: int = 0
    pp: int = 1
    cp: int = 1
    quantization: str = ""
    kv_cache_dtype: str = "auto"
    experts: list[int] = field(default_factory=list)
    index_topk: int = 0
    connectors: list[str] = field(default_factory=list)
    media: bool = False
    encoder: bool = False
    runner: str = "generate"
    diffusion: bool = False
    lora: bool = False
    policy: str = "fcfs"
    balanced_experts: bool = False
    dual_batch: bool = False

    @property
    def adaptive_threshold(self) -> int:
        """The least tokens of a chunk while others are there, of a threshold that follows the load;
        0: it does not.
        """
        return self.long_prefill_token_threshold * self.long_prefill_token_threshold_adaptive

    def words(self, dtype: str) -> str:
        """The weights and the caches, for readers; `dtype`: of the model."""
        weights = self.quantization or dtype
        cache = dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype
        parts = [f"{weights} weights", f"{cache} KV cache"]
        if self.tp > 1:
            parts.append(f"tensor parallelism {self.tp}")
        kinds = [
            f"{one.kind or one.spec} in {one.layers} layers, blocks of {one.block:,} tokens"
            for one in self.groups
        ]
        return f"{', '.join(parts)}; caches: {'; '.join(kinds)}"


SCHEDULER_FIELDS: dict[str, Any] = {
    one.name: one.default for one in fields(Resolved) if one.metadata
}
