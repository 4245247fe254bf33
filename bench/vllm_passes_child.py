"""The side of bench/vllm_passes.py that runs in vLLM's Python: its schedulers, and nothing behind
them that computes.

VLLM-PYTHON bench/vllm_passes_child.py CASES.json PASSES.json MODEL-FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from pathlib import Path
from typing import Any

from vllm_alone import ENVIRONMENT

os.environ |= ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "ERROR"}
END = 7  # the token that ends a request before its limit


class Driven:
    """One of vLLM's schedulers on one workload, its model's part taken by us: tokens, but no
    computing.
    """

    def __init__(self, model: str, case: dict[str, Any]) -> None:
        import torch
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        init_none_hash(sha256)
        flags = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "watermark")
        config = EngineArgs(
            model=model,
            skip_tokenizer_init=True,
            dtype="float32",
            block_size=case["block_tokens"],
            enable_prefix_caching=case["prefix_caching"],
            enforce_eager=True,
            **{flag: case[flag] for flag in flags},
        ).create_engine_config()
        blocks = config.cache_config.num_gpu_blocks = case["blocks"] + 1
        spec = FullAttentionSpec(
            block_size=case["block_tokens"], num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        self.scheduler: Any = (AsyncScheduler if case["ahead"] else Scheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=case["block_tokens"],
            log_stats=False,
        )
        self.hasher = get_request_block_hasher(case["block_tokens"], sha256)
        self.case = case
        self.passes: list[Any] = []
        self.requests: list[Any] = []
        self.under_way: deque[tuple[Any, dict[str, int]]] = deque()
        self.preempted: list[int] = []
        preempt = self.scheduler._preempt_request

        def noted(request: Any, *args: Any, **kwargs: Any) -> None:
            self.preempted.append(int(request.request_id))
            preempt(request, *args, **kwargs)

        self.scheduler._preempt_request = noted

    def run(self) -> list[dict[str, Any]]:
        """Its passes."""
        due = [at for at, *_ in self.case["requests"]]
        while len(self.requests) < len(due) or self.scheduler.requests or self.under_way:
            while len(self.requests) < len(due) and due[len(self.requests)] <= len(self.passes):
                self._add()
            if self._schedule():
                if not self.case["ahead"] or len(self.under_way) == 2:
                    self._update()
            elif self.under_way:
                self._update()
            elif len(self.requests) < len(due):
                due[len(self.requests)] = len(self.passes)
        return self.passes

    def _add(self) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        number = len(self.requests)
        _, prompt, _, limit = self.case["requests"][number]
        sampling = SamplingParams(
            temperature=0.0, max_tokens=limit, stop_token_ids=[END], detokenize=False
        )
        tokens = [
            10_000 + number,
            *(1000 + (number * 7919 + k * 13) % 5000 for k in range(1, prompt)),
        ]
        request = Request(
            str(number),
            tokens,
            sampling,
            None,
            arrival_time=float(number),
            block_hasher=self.hasher,
        )
        self.requests.append(request)
        self.scheduler.add_request(request)

    def _schedule(self) -> bool:
        """Plan a pass; false where there is nothing to compute."""
        scheduler = self.scheduler
        self.preempted = []
        output = scheduler.schedule()
        rows: list[list[int]] = []
        gives: dict[str, int] = {}  # which of its tokens a row will have of this pass, from 1
        for name, new in output.num_scheduled_tokens.items():
            request = self.requests[int(name)]
            rows.append([int(name), request.num_computed_tokens - new, new])
            if request.num_computed_tokens >= request.num_tokens:
                gives[name] = request.num_computed_tokens - request.num_prompt_tokens + 1
        if rows or self.preempted:
            self.passes.append(
                {
                    "rows": rows,
                    "preempted": self.preempted,
                    "free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
                    "waiting": len(scheduler.waiting),
                }
            )
        if rows:
            self.under_way.append((output, gives))
        return bool(rows)

    def _update(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        output, gives = self.under_way.popleft()
        names = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: k for k, name in enumerate(names)},
            sampled_token_ids=[self._token(name, gives.get(name)) for name in names],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        self.scheduler.update_from_output(output, result)

    def _token(self, name: str, which: int | None) -> list[int]:
        _, _, length, limit = self.case["requests"][int(name)]
        if which is None:
            return []
        return [END if which == length < limit else 100 + which % 50]


def main() -> None:
    cases, passes, model = sys.argv[1:]
    found = [
        Driven(model, case).run() for case in json.loads(Path(cases).read_text(encoding="utf-8"))
    ]
    Path(passes).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
