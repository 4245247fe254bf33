"""The side of `vllm_passes` that runs in vLLM's Python: its schedulers, without an engine.

    VLLM-PYTHON -m benchmarks.engines.vllm_passes_child CASES.json PASSES.json MODEL-FOLDER

Started by `vllm_passes`.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.command import read_words
from benchmarks.engines.vllm_alone import ENVIRONMENT

if TYPE_CHECKING:
    from toolkit.estimators.steps import StepShape

# Nothing is computed, so a prompt may be longer than the model allows.
os.environ |= ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
OUTPUTS = 1_000_000_000  # from here on tokens are outputs; each request has 10,000 of its own
OWN = 100_000_000  # from here on tokens belong to one prompt; each has 10,000 of its own


class Arrivals:
    """When the requests of a workload arrive, counted in passes. In a closed loop, a turn arrives
    a given number of passes after the turn before it has ended.
    """

    def __init__(self, case: Mapping[str, Any]) -> None:
        self._follows: dict[int, list[int]] = {}
        self._coming: list[tuple[int, int]] = []
        self._after = [at for at, *_ in case["requests"]]
        for number, at in enumerate(self._after):
            before = case["previous"][number] if case.get("closed") else -1
            if before >= 0:
                self._follows.setdefault(before, []).append(number)
            else:
                heappush(self._coming, (at, number))

    def due(self, passes: int) -> list[int]:
        """The requests that arrive before the next pass, when `passes` have been planned."""
        found = []
        while self._coming and self._coming[0][0] <= passes:
            found.append(heappop(self._coming)[1])
        return found

    def ended(self, number: int, passes: int) -> None:
        """A request has ended after `passes`: its next turn will arrive."""
        for later in self._follows.pop(number, ()):
            heappush(self._coming, (passes + self._after[later], later))

    def skip(self, passes: int) -> bool:
        """Let the next request arrive now, since nothing runs. False if none is left."""
        if not self._coming:
            return False
        at, number = heappop(self._coming)
        heappush(self._coming, (min(at, passes), number))
        return True


def tokens_of(case: Mapping[str, Any]) -> list[list[int]]:
    """The prompts of a workload as tokens. Turns of a session and shared blocks have tokens in
    common; all other tokens are unique.
    """
    size = case.get("shared_tokens", 1)
    blocks: dict[int, list[int]] = {}  # by id; the longest so far of a partial one
    prompts: list[list[int]] = []
    for number, (_, prompt, *_) in enumerate(case["requests"]):
        before = case["previous"][number] if "previous" in case else -1
        tokens: list[int] = []
        if before >= 0:
            tokens = [*prompts[before], *outputs_of(case, before)][:prompt]
        for at, one in enumerate(case["ids"][number] if "ids" in case else ()):
            start = at * size
            stop = min((at + 1) * size, prompt)
            known = blocks.get(one, [])
            for k in range(max(len(tokens), start), stop):
                there = known[k - start] if k - start < len(known) else one * size + k - start
                tokens.append(there)
            if stop - start > len(known):
                blocks[one] = tokens[start:stop]
        tokens += range(OWN + number * 10_000 + len(tokens), OWN + number * 10_000 + prompt)
        prompts.append(tokens)
    return prompts


def outputs_of(case: Mapping[str, Any], number: int) -> list[int]:
    """The tokens that a request generates, none of which any other has."""
    return [token_of(number, which) for which in range(1, case["requests"][number][2] + 1)]


def token_of(number: int, which: int) -> int:
    """The token number `which`, from 1, of a request's output."""
    return OUTPUTS + number * 10_000 + which


class Driven:
    """One of vLLM's schedulers on one workload. This class stands in for the model: it gives
    tokens, and computes nothing.
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
            enable_chunked_prefill=case.get("chunked_prefill", True),
            scheduler_reserve_full_isl=case.get("reserve_full_isl", True),
            **{flag: case[flag] for flag in flags},
        ).create_engine_config()
        blocks = config.cache_config.num_gpu_blocks = case["blocks"] + 1
        spec = FullAttentionSpec(
            block_size=case["block_tokens"], num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        kind = AsyncScheduler if case["ahead"] else Scheduler
        if "policy" in case:
            from toolkit.backends.vllm.scheduler import LlmctlScheduler

            os.environ["LLMCTL_VLLM_POLICY"] = case["policy"]
            kind = LlmctlScheduler
        self.scheduler: Any = kind(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=case["block_tokens"],
            log_stats=True,
        )
        if "changes" in case:
            from toolkit.backends.vllm.knobs import LiveSettings

            self.live = LiveSettings(self.scheduler)
        self.hasher = get_request_block_hasher(case["block_tokens"], sha256)
        self.case = case
        self.prompts = tokens_of(case)
        self.passes: list[Any] = []
        self.requests: dict[str, Any] = {}
        self.under_way: deque[tuple[Any, dict[str, int]]] = deque()
        self.preempted: list[int] = []
        preempt = self.scheduler._preempt_request

        def record_preemption(request: Any, *args: Any, **kwargs: Any) -> None:
            self.preempted.append(int(request.request_id))
            preempt(request, *args, **kwargs)

        self.scheduler._preempt_request = record_preemption

    def run(self) -> list[dict[str, Any]]:
        """The passes of the workload."""
        arrivals = Arrivals(self.case)
        while True:
            for number in arrivals.due(len(self.passes)):
                self._add(number)
            before = set(self.scheduler.requests)
            self._change(len(self.passes))
            if self._schedule():
                if not self.case["ahead"] or len(self.under_way) == 2:
                    self._update()
            elif self.under_way:
                self._update()
            elif not arrivals.skip(len(self.passes)):
                assert not self.scheduler.requests
                return self.passes
            for name in sorted(before - set(self.scheduler.requests), key=int):
                arrivals.ended(int(name), len(self.passes))

    def times(self) -> list[list[float]]:
        """The times of all tokens of each request, as vLLM's loop hands them out: statement by
        statement `EngineCore.step_with_batch_queue`, with a clock that launches, plans without rows
        and waits for the GPU move on, by the law and the arrivals in the case.
        """
        from toolkit.estimators.pipeline import GraphSettings, PipelineLaw
        from toolkit.estimators.steps import StepShape

        case = self.case
        coefficients = dict(case["law"])
        mode, sizes, apart = coefficients.pop("graphs")
        coefficients["spread"] = tuple(coefficients["spread"])
        law = PipelineLaw(GraphSettings(mode, tuple(sizes), apart), **coefficients)
        arrivals: list[float] = case["arrival_s"]
        tokens: list[list[float]] = [[] for _ in arrivals]
        inputs = [prompt for _, prompt, *_ in case["requests"]]  # to compute before the next token
        generated = [0] * len(arrivals)  # also by passes that are under way
        depth = 2 if case["ahead"] else 1
        queue: deque[float | None] = deque()  # when the GPU has computed each; None: no rows
        now_s = gpu_s = launched_s = -math.inf
        arrived = launches = 0
        while True:
            if not queue and not self.scheduler.has_requests():
                if arrived == len(arrivals):
                    return tokens
                now_s = max(now_s, arrivals[arrived])
            while arrived < len(arrivals) and arrivals[arrived] <= now_s:
                self._add(arrived)
                arrived += 1
            if self.scheduler.has_requests():
                executed = self._schedule()
                for number in self.preempted:
                    inputs[number] = case["requests"][number][1] + generated[number]
                if executed:
                    shape = _shape(self.passes[-1]["rows"], inputs)
                    for name, which in self.under_way[-1][1].items():
                        generated[int(name)] = which
                    launch_s = law.launch_s(shape)
                    if depth > 1:
                        launch_s = law.drawn_launch_s(shape, launches)
                    launches += not law.waits_for_launch(shape)
                    begins_s = max(launched_s, now_s) if apart else now_s
                    launched_s = begins_s + launch_s
                    starts_s = launched_s if law.waits_for_launch(shape) else begins_s
                    gpu_s = max(max(gpu_s, starts_s) + law.gpu_s(shape), launched_s)
                    if not apart:
                        now_s = launched_s
                    queue.appendleft(gpu_s)
                else:
                    # what a last plan costs an engine that is idle is left out
                    if any(one is not None for one in queue):
                        now_s += min(case["empty_s"], law.launch_s(StepShape(1, 1)))
                    queue.appendleft(None)
                if len(queue) < depth and (executed or self.scheduler.has_requests()):
                    continue
            ready_s = queue.pop()
            if ready_s is None:
                continue
            now_s = max(now_s, ready_s)
            for name, which in self.under_way[0][1].items():
                if which <= case["requests"][int(name)][2]:
                    tokens[int(name)].append(now_s)
            self._update()

    def _add(self, number: int) -> None:
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

    def _change(self, passes: int) -> None:
        """Give the scheduler the settings that it has from this pass on."""
        settings = self.case.get("changes", {}).get(str(passes))
        if settings:
            self.live.apply(settings)

    def _schedule(self) -> bool:
        """Plan a pass; False where there is nothing to compute."""
        scheduler = self.scheduler
        self.preempted = []
        output = scheduler.schedule()
        stats = scheduler.kv_cache_manager.make_prefix_cache_stats()
        rows: list[list[int]] = []
        gives: dict[str, int] = {}  # the number of the token that a row gets in this pass, from 1
        for name, new in output.num_scheduled_tokens.items():
            request = self.requests[name]
            rows.append([int(name), request.num_computed_tokens - new, new])
            if request.num_computed_tokens >= request.num_tokens:
                gives[name] = request.num_computed_tokens - request.num_prompt_tokens + 1
        if rows or self.preempted:
            planned: dict[str, Any] = {
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
            self.passes.append(planned)
        if rows:
            self.under_way.append((output, gives))
        return bool(rows)

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
        return [] if which is None else [token_of(int(name), which)]


def _shape(rows: Sequence[Sequence[int]], inputs: Sequence[int]) -> StepShape:
    """What a pass computes, of rows of request, tokens computed before and new tokens."""
    from toolkit.estimators.steps import StepShape, chunk_attended

    chunks = [row for row in rows if row[1] < inputs[row[0]]]
    decodes = [row for row in rows if row[1] >= inputs[row[0]]]
    return StepShape(
        len(decodes),
        sum(row[1] for row in decodes),
        len(chunks),
        sum(row[2] for row in chunks),
        sum(chunk_attended(row[1], row[2]) for row in chunks),
        sum(row[1] for row in chunks),
    )


def main() -> None:
    cases, passes, model = read_words(__doc__, "CASES.json", "PASSES.json", "MODEL-FOLDER")
    found: list[Any] = []
    for case in json.loads(Path(cases).read_text(encoding="utf-8")):
        driven = Driven(model, case)
        found.append(driven.times() if "law" in case else driven.run())
    Path(passes).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
