"""vLLM's own schedulers, driven without an engine: runs in vLLM's Python.

`DrivenScheduler` is one of them under given settings. Its caller stands in for the engine and for
the model: it says when requests come, when a pass is planned and when its tokens exist, and how
many drafts each row accepts. It computes nothing, and no weights are read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import gcd, lcm
from typing import Any

from toolkit.backends.vllm.messages import GroupSettings, PlannedPass, SchedulerSettings

FILLER = 1  # a token behind a request's output, which vLLM drops


class DrivenScheduler:
    """One of vLLM's schedulers, without an engine. Requests are known by their numbers."""

    def __init__(self, model: str, settings: SchedulerSettings) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
        from vllm.v1.kv_cache_interface import KVCacheConfig
        from vllm.v1.structured_output import StructuredOutputManager

        init_none_hash(sha256)
        groups = settings.groups or [GroupSettings(kind="full", block=settings.block_tokens)]
        drafts = settings.drafts
        more: dict[str, Any] = dict(settings.flags)
        if drafts is None:
            more["async_scheduling"] = settings.ahead
        else:  # other methods need a model of drafts, which nothing here computes
            more["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": drafts.tokens,
                "prompt_lookup_max": 3,
                "prompt_lookup_min": 2,
            }
        config = EngineArgs(
            model=model,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            block_size=min(group.block for group in groups),
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            watermark=settings.watermark,
            enable_prefix_caching=settings.prefix_caching,
            enable_chunked_prefill=settings.chunked_prefill,
            scheduler_reserve_full_isl=settings.reserve_full_isl,
            **more,
        ).create_engine_config()
        config.scheduler_config.async_scheduling = settings.ahead
        if drafts is not None:
            config.speculative_config.method = drafts.method
        config.cache_config.num_gpu_blocks = settings.blocks + 1  # one is never given out
        states = [group for group in groups if group.kind == "state"]
        if states:
            config.cache_config.mamba_cache_mode = states[0].mode
        block, hashed = _block_sizes(groups, settings)
        retention: dict[str, int] = {}
        if settings.retention is not None:
            retention["prefix_cache_retention_interval"] = settings.retention
        register_all_kvcache_specs(config)
        structured = StructuredOutputManager(config)
        self.settings = settings
        self.scheduler: Any = self.kind()(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=settings.blocks + 1,
                kv_cache_tensors=[],
                kv_cache_groups=_groups_of(groups, config, drafts.tokens if drafts else 0),
                **retention,
            ),
            structured_output_manager=structured,
            block_size=block,
            hash_block_size=hashed,
            log_stats=True,
        )
        lookahead = getattr(config, "num_hash_lookahead_tokens", None)  # from 0.33 on
        hashing = (hashed, sha256) if lookahead is None else (hashed, sha256, lookahead)
        self._hasher = get_request_block_hasher(*hashing)
        self.requests: dict[str, Any] = {}
        self.preempted: list[int] = []  # by the last plan
        self._outputs: dict[str, list[int]] = {}
        # passes that are planned and have no tokens yet: of each row that gets a token, whether its
        # drafts are real
        self.under_way: deque[tuple[Any, dict[str, bool]]] = deque()
        self._came = 0
        preempt = self.scheduler._preempt_request

        def record(request: Any, *args: Any, **kwargs: Any) -> None:
            self.preempted.append(int(request.request_id))
            preempt(request, *args, **kwargs)

        self.scheduler._preempt_request = record

    def kind(self) -> Any:
        """The class of the scheduler."""
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler

        return AsyncScheduler if self.settings.ahead else Scheduler

    @property
    def free(self) -> int:
        """Blocks that no request holds."""
        free: int = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return free

    def enter(self, number: int, prompt: list[int], outputs: list[int], limit: int) -> None:
        """A request comes, with its prompt and, hidden from the scheduler, its output; tokens must
        be unique within the output.
        """
        self.scheduler.add_request(self.request(number, prompt, outputs, limit))

    def request(self, number: int, prompt: list[int], outputs: list[int], limit: int) -> Any:
        """vLLM's own request, which the scheduler does not know yet."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(
            temperature=0.0, max_tokens=limit, stop_token_ids=[outputs[-1]], detokenize=False
        )
        name = str(number)
        self._came += 1  # those that have ended are counted, too: priorities follow arrivals
        came = float(self._came)
        hasher = self._hasher
        request = Request(name, prompt, sampling, None, arrival_time=came, block_hasher=hasher)
        self.requests[name] = request
        self._outputs[name] = outputs
        return request

    def plan(self) -> PlannedPass:
        """Plan a pass; without rows there is nothing to compute, and it is not made."""
        self.preempted = []
        return self.planned(self.scheduler.schedule())

    def planned(self, output: Any) -> PlannedPass:
        """The pass that the scheduler has just planned."""
        scheduler = self.scheduler
        stats = scheduler.kv_cache_manager.make_prefix_cache_stats()
        drafts = output.scheduled_spec_decode_tokens
        new = {one.req_id for one in output.scheduled_new_reqs}
        new |= set(output.scheduled_cached_reqs.resumed_req_ids)
        rows = []
        gives: dict[str, bool] = {}
        for name, count in output.num_scheduled_tokens.items():
            request = self.requests[name]
            computed = request.num_computed_tokens - count
            samples = not request.is_prefill_chunk
            rows.append((int(name), computed, count, len(drafts.get(name, ())), samples))
            if samples:
                # a row that was admitted has none, though it may be padded with drafts
                gives[name] = name in drafts and name not in new
        if rows:
            self.under_way.append((output, gives))
        return PlannedPass(
            rows=rows,
            preempted=self.preempted,
            free=self.free,
            waiting=len(scheduler.waiting),
            found=(stats.queries, stats.hits, stats.preempted_queries, stats.preempted_hits),
        )

    def give(
        self, accepted: Mapping[int, int], offered: Mapping[int, int] | None = None
    ) -> list[int]:
        """The tokens of the oldest pass that is under way exist; `accepted` drafts by request, 0
        where it has none, and drafts that are proposed next, as many as can be where it has none.
        The requests that ended with it.
        """
        from vllm.v1.outputs import DraftTokenIds

        output, gives = self.under_way.popleft()
        names = list(output.num_scheduled_tokens)
        before = set(self.scheduler.requests)
        self.scheduler.update_from_output(output, self.computed(output, gives, accepted))
        drafts = self.settings.drafts
        if drafts is not None and not self.settings.ahead:
            most = getattr(output, "num_spec_tokens_to_schedule", drafts.tokens)
            count = min(drafts.tokens, most)
            sampled = [name for name in names if name in gives]
            counts = [min((offered or {}).get(int(name), count), count) for name in sampled]
            drafted_next = DraftTokenIds(sampled, [[FILLER] * each for each in counts])
            self.scheduler.update_draft_token_ids(drafted_next)
        return self.forget(before)

    def forget(self, before: set[str]) -> list[int]:
        """Forget the requests that ended since `before` were there; their numbers."""
        ended = before - set(self.scheduler.requests)
        for name in ended:
            del self.requests[name]
            del self._outputs[name]
        return sorted(map(int, ended))

    def computed(self, output: Any, gives: Mapping[str, bool], accepted: Mapping[int, int]) -> Any:
        """What a model gives for a pass, as vLLM's `ModelRunnerOutput`."""
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(output.num_scheduled_tokens)
        before = self.scheduler.requests
        tokens: list[list[int]] = []
        for name in names:
            tokens.append([])
            if name in gives:
                count = 1
                if gives[name]:
                    drafted = len(output.scheduled_spec_decode_tokens[name])
                    count += min(accepted.get(int(name), 0), drafted)
                if name in before:  # else it has ended, and vLLM drops what this pass gives
                    first = self.requests[name].num_output_tokens
                    tokens[-1] = self._outputs[name][first : first + count]
                tokens[-1] += [FILLER] * (count - len(tokens[-1]))
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: k for k, name in enumerate(names)},
            sampled_token_ids=tokens,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    def held(self) -> dict[str, list[int]]:
        """The blocks that each request in the last plan holds, of each group of caches."""
        coordinator = self.scheduler.kv_cache_manager.coordinator
        output, _ = self.under_way[-1]
        return {
            name: [
                sum(not block.is_null for block in manager.req_to_blocks.get(name, ()))
                for manager in coordinator.single_type_managers
            ]
            for name in output.num_scheduled_tokens
        }


def _block_sizes(groups: list[GroupSettings], settings: SchedulerSettings) -> tuple[int, int]:
    """Tokens of the scheduler's block, and of a block with a hash."""
    sizes = [group.block for group in groups]
    block = lcm(*sizes)
    unaligned = any(group.kind == "state" and group.mode != "align" for group in groups)
    if len(sizes) > 1 and (unaligned or not settings.prefix_caching):
        return block, block
    return block, gcd(*sizes)


def _groups_of(groups: list[GroupSettings], config: Any, drafts: int) -> list[Any]:
    """vLLM's own groups, each with one layer of the smallest cache there can be."""
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        KVCacheGroupSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    dtype = config.model_config.dtype
    found = []
    for number, group in enumerate(groups):
        plain = {"block_size": group.block, "num_kv_heads": 1, "head_size": 1, "dtype": dtype}
        if group.kind == "full":
            spec = FullAttentionSpec(**plain)
        elif group.kind == "window":
            spec = SlidingWindowSpec(**plain, sliding_window=group.window)
        elif group.kind == "chunk":
            spec = ChunkedLocalAttentionSpec(**plain, attention_chunk_size=group.window)
        else:
            state: dict[str, Any] = {}
            if group.checkpoint:  # since 0.29
                state["num_prefill_checkpoint_blocks"] = group.checkpoint
                state["prefill_checkpoint_alignment"] = 1
            spec = MambaSpec(
                block_size=group.block,
                shapes=((1,),),
                dtypes=(dtype,),
                mamba_cache_mode=group.mode,
                num_speculative_blocks=drafts,
                **state,
            )
        draft = {"is_eagle_group": True} if group.draft else {}
        found.append(KVCacheGroupSpec([f"layer{number}"], spec, **draft))
    return found
