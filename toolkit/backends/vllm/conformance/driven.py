"""vLLM's own schedulers on one workload, without an engine: runs in vLLM's Python.

`Driven` stands in for the model: it gives tokens, and computes nothing. What a workload has besides
`workloads.Case`: `retention` (prefix_cache_retention_interval), `flags` (more of EngineArgs),
`drafts` {"method", "tokens", "accepts": [of each request: drafts accepted in its verify passes]},
`policy` (one of ours, inside), `changes` {pass: {live setting: value}}, `deep` (blocks held by each
group, and cached keys, in each pass).
"""

from __future__ import annotations

import os
from collections import deque
from math import gcd, lcm
from typing import Any

from toolkit.backends.vllm.conformance.workloads import (
    Case,
    CaseArrivals,
    Pass,
    token_of,
    tokens_of,
)

MOST_PASSES = 20_000


class Driven:
    """One of vLLM's schedulers on one workload. `model` is a folder with a config.json."""

    def __init__(self, model: str, case: Case) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
        from vllm.v1.kv_cache_interface import KVCacheConfig
        from vllm.v1.structured_output import StructuredOutputManager

        init_none_hash(sha256)
        groups = groups_of(case)
        drafts = case.get("drafts")
        more: dict[str, Any] = dict(case.get("flags", {}))
        if drafts:
            more["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": drafts["tokens"],
                "prompt_lookup_max": 3,
                "prompt_lookup_min": 2,
            }
        else:
            more["async_scheduling"] = case["ahead"]
        flags = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "watermark")
        config = EngineArgs(
            model=model,
            skip_tokenizer_init=True,
            dtype="float32",
            block_size=min(group["block"] for group in groups),
            enable_prefix_caching=case["prefix_caching"],
            enforce_eager=True,
            enable_chunked_prefill=case.get("chunked_prefill", True),
            scheduler_reserve_full_isl=case.get("reserve_full_isl", True),
            **{flag: case[flag] for flag in flags},
            **more,
        ).create_engine_config()
        config.scheduler_config.async_scheduling = case["ahead"]
        if drafts:  # after the checks, which want the drafter's model
            config.speculative_config.method = drafts["method"]
        blocks = config.cache_config.num_gpu_blocks = case["blocks"] + 1
        states = [group for group in groups if group["kind"] == "state"]
        if states:
            config.cache_config.mamba_cache_mode = states[0]["mode"]
        kind = AsyncScheduler if case["ahead"] else Scheduler
        if "policy" in case:
            from toolkit.backends.vllm.scheduler import LlmctlScheduler

            os.environ["LLMCTL_VLLM_POLICY"] = case["policy"]
            kind = LlmctlScheduler
        register_all_kvcache_specs(config)
        retention = case.get("retention")
        kept = {} if retention is None else {"prefix_cache_retention_interval": retention}
        block, hashed = block_sizes(case)
        self.scheduler: Any = kind(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks,
                kv_cache_tensors=[],
                kv_cache_groups=_specs(
                    groups, drafts["tokens"] if drafts else 0, config.model_config.dtype
                ),
                **kept,
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=block,
            hash_block_size=hashed,
            log_stats=True,
        )
        ahead_of_hash = getattr(config, "num_hash_lookahead_tokens", None)  # since 0.33
        more_hashed = () if ahead_of_hash is None else (ahead_of_hash,)
        self.hasher = get_request_block_hasher(hashed, sha256, *more_hashed)
        self.case = case
        self.prompts = tokens_of(case)
        self.passes: list[Pass] = []
        self.requests: dict[str, Any] = {}
        # scheduled passes, and the rows that sample: whether each was new or resumed
        self.under_way: deque[tuple[Any, dict[str, bool]]] = deque()
        self.preempted: list[int] = []
        if "changes" in case:
            from toolkit.backends.vllm.knobs import LiveSettings

            self._live = LiveSettings(self.scheduler)
        self._verified: dict[str, int] = {}  # passes with drafts of each request so far
        preempt = self.scheduler._preempt_request

        def record_preemption(request: Any, *args: Any, **kwargs: Any) -> None:
            self.preempted.append(int(request.request_id))
            preempt(request, *args, **kwargs)

        self.scheduler._preempt_request = record_preemption

    def run(self) -> list[Pass]:
        """The passes of the workload; the last one is {"stuck": ...} where it does not end."""
        arrivals = CaseArrivals(self.case)
        while len(self.passes) < MOST_PASSES:
            for number in arrivals.due(len(self.passes)):
                self.add(number)
            before = set(self.scheduler.requests)
            settings = self.case.get("changes", {}).get(str(len(self.passes)))
            if settings:
                self._live.apply(settings)
            if self.schedule():
                if not self.case["ahead"] or len(self.under_way) == 2:
                    self.update()
            elif self.under_way:
                self.update()
            elif not arrivals.skip(len(self.passes)) and not self.preempted:
                break
            for name in sorted(before - set(self.scheduler.requests), key=int):
                arrivals.ended(int(name), len(self.passes))
        if self.scheduler.requests:
            self.passes.append({"stuck": sorted(map(int, self.scheduler.requests))})
        return self.passes

    def add(self, number: int) -> None:
        """A request arrives."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        *_, output, limit = self.case["requests"][number]
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=limit,
            stop_token_ids=[token_of(number, output)],
            detokenize=False,
        )
        request = Request(
            str(number),
            self.prompts[number],
            sampling,
            None,
            arrival_time=float(len(self.requests)),
            block_hasher=self.hasher,
        )
        self.requests[str(number)] = request
        self.scheduler.add_request(request)

    def schedule(self) -> bool:
        """Plan a pass; False where there is nothing to compute."""
        scheduler = self.scheduler
        self.preempted = []
        output = scheduler.schedule()
        stats = scheduler.kv_cache_manager.make_prefix_cache_stats()
        new = {one.req_id for one in output.scheduled_new_reqs}
        new |= set(output.scheduled_cached_reqs.resumed_req_ids)
        rows: list[list[int]] = []
        samples: dict[str, bool] = {}
        for name, count in output.num_scheduled_tokens.items():
            request = self.requests[name]
            row = [int(name), request.num_computed_tokens - count, count]
            if "drafts" in self.case:
                row.append(len(output.scheduled_spec_decode_tokens.get(name, ())))
            rows.append(row)
            if not request.is_prefill_chunk:
                samples[name] = name in new
        if rows or self.preempted:
            planned: Pass = {
                "rows": rows,
                "preempted": self.preempted,
                "free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
                "waiting": len(scheduler.waiting),
            }
            if "ids" in self.case:
                before = stats.preempted_queries, stats.preempted_hits
                planned["found"] = [stats.queries, stats.hits, *before]
            if "policy" in self.case:
                planned["blocks"] = self._blocks_of_prompts()
            if self.case.get("deep"):
                planned |= self._held(output.num_scheduled_tokens)
            self.passes.append(planned)
        if rows:
            self.under_way.append((output, samples))
        return bool(rows)

    def update(self) -> None:
        """The oldest pass ends with its tokens."""
        from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

        output, samples = self.under_way.popleft()
        names = list(output.num_scheduled_tokens)
        given = [self._tokens(name, output, samples) for name in names]
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: k for k, name in enumerate(names)},
            sampled_token_ids=given,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        self.scheduler.update_from_output(output, result)
        if "drafts" in self.case and not self.case["ahead"]:
            sampled = [name for name in names if name in samples]
            count = self.case["drafts"]["tokens"]
            planned = output.num_spec_tokens_to_schedule
            if planned is not None:
                count = min(count, planned)
            drafted = DraftTokenIds(sampled, [[1] * count for _ in sampled])
            self.scheduler.update_draft_token_ids(drafted)

    def _tokens(self, name: str, output: Any, samples: dict[str, bool]) -> list[int]:
        """What a row samples: one token, and the drafts that are accepted before it."""
        if name not in samples:
            return []
        number = int(name)
        accepted = 0
        drafts = output.scheduled_spec_decode_tokens.get(name, ())
        if drafts and not samples[name]:  # a new row's drafts are empty
            verified = self._verified.get(name, 0)
            self._verified[name] = verified + 1
            plan = self.case["drafts"]["accepts"][number]
            accepted = min(plan[verified % len(plan)], len(drafts))
        first = self.requests[name].num_output_tokens + 1
        return [token_of(number, first + k) for k in range(1 + accepted)]

    def _held(self, names: Any) -> Pass:
        """The blocks that each group holds for each row, and how many keys are cached."""
        manager = self.scheduler.kv_cache_manager
        held = {
            name: [
                sum(not block.is_null for block in group.req_to_blocks.get(name, ()))
                for group in manager.coordinator.single_type_managers
            ]
            for name in names
        }
        return {"held": held, "cached": len(manager.block_pool.cached_block_hash_to_block)}

    def _blocks_of_prompts(self) -> list[int]:
        """The full blocks of prompts that the running requests hold: by vLLM's block manager; as
        our scheduler inside vLLM counts them with the requests; and those that it counts with none.
        """
        scheduler = self.scheduler
        held = set()
        counted = 0
        size = self.case["block_tokens"]
        for job in scheduler.steps.scheduler.workers[0].running.jobs:
            request = self.requests[job.request_id]
            (blocks,) = scheduler.kv_cache_manager.get_block_ids(job.request_id)
            held.update(blocks[: request.num_prompt_tokens // size])
            counted += (job.prompt_tokens - size // 2) // size
        return [len(held), counted, scheduler._counted.uncounted]


def groups_of(case: Case) -> list[dict[str, Any]]:
    """The groups of caches of a workload."""
    return case.get("groups") or [{"kind": "full", "block": case["block_tokens"]}]


def block_sizes(case: Case) -> tuple[int, int]:
    """The scheduler's block and the tokens of a hash, as vLLM chooses them."""
    groups = groups_of(case)
    sizes = [group["block"] for group in groups]
    whole = lcm(*sizes)
    if len(groups) == 1:
        return whole, whole
    apart = any(group["kind"] == "state" and group["mode"] != "align" for group in groups)
    if not case["prefix_caching"] or apart:
        return whole, whole
    return whole, case.get("match_unit") or gcd(*sizes)


def _specs(groups: list[dict[str, Any]], drafts: int, dtype: Any) -> list[Any]:
    """The groups as vLLM's. Their layers are tiny: only blocks count."""
    from vllm.v1 import kv_cache_interface as caches

    found = []
    for number, group in enumerate(groups):
        plain: dict[str, Any] = {
            "block_size": group["block"],
            "num_kv_heads": 1,
            "head_size": 1,
            "dtype": dtype,
        }
        match group["kind"]:
            case "full":
                spec = caches.FullAttentionSpec(**plain)
            case "window":
                spec = caches.SlidingWindowSpec(**plain, sliding_window=group["window"])
            case "chunk":
                spec = caches.ChunkedLocalAttentionSpec(
                    **plain, attention_chunk_size=group["window"]
                )
            case "state":
                state: dict[str, Any] = {
                    "block_size": group["block"],
                    "shapes": ((1,),),
                    "dtypes": (dtype,),
                    "mamba_cache_mode": group["mode"],
                    "num_speculative_blocks": drafts,
                }
                if group.get("checkpoint"):  # since 0.29
                    state["num_prefill_checkpoint_blocks"] = group["checkpoint"]
                    state["prefill_checkpoint_alignment"] = 1
                spec = caches.MambaSpec(**state)
            case other:
                raise ValueError(f"there is no kind of cache '{other}'")
        draft = {"is_eagle_group": True} if group.get("draft") else {}
        found.append(caches.KVCacheGroupSpec([f"layer{number}"], spec, **draft))
    return found
