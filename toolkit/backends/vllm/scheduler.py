"""vLLM's scheduler with llmctl's policies: `--scheduler-cls
toolkit.backends.vllm.scheduler.LlmctlScheduler`.

`toolkit.sched.scheduler.Scheduler`, which `llmctl simulate` and `llmctl serve` run too, decides
which waiting requests are admitted, in which order, and which running ones are preempted.
Everything else is vLLM's own and unchanged: blocks, chunked prefill, token budgets, prefix caching,
sampling, streaming. docs/how-to/vllm.md says what was tested and what was not.

`refuse_untried` comes first, then the scheduler: vLLM's interface, then the private steps behind
it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs
from vllm.v1.request import Request as VllmRequest

from toolkit.backends.vllm.setup import Setup, make_worker, one_line, read_setup, warm_up
from toolkit.backends.vllm.steps import AdmissionGate, CountedBlocks, Steps
from toolkit.backends.vllm.touched import Installed, refuse_missing
from toolkit.errors import InputError
from toolkit.files.io import LineLog
from toolkit.sched.eventlog import (
    FORMAT,
    Event,
    EventLogHeader,
    RecordingScheduler,
    StartedPass,
    to_line,
)
from toolkit.sched.policies.parameters import parameters
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Request

MAX_LOG_BYTES = 1 << 30

with one_line():
    _folder = Path(vllm.__file__).parent
    refuse_missing(Installed(vllm.__version__.partition("+")[0], _folder), "inside")


def refuse_untried(config: Any, kv_cache_config: Any, policy: str) -> None:
    """Raises `InputError`, with the feature's name, for features of vLLM with which the scheduler
    was not tested or would count memory wrongly, and for a policy that cannot run with these.
    """
    untried = {
        "speculative decoding": config.speculative_config is not None,
        "pipeline parallelism": config.parallel_config.pipeline_parallel_size > 1,
        "data parallelism": config.parallel_config.data_parallel_size > 1,
        "a KV connector": config.kv_transfer_config is not None,
        "an encoder of its own": config.ec_transfer_config is not None,
        "a model that generates nothing": config.model_config.runner_type != "generate",
        # it yields several tokens per pass, out of order
        "a diffusion model": config.model_config.is_diffusion,
        "a model with caches of several kinds": len(kv_cache_config.kv_cache_groups) != 1,
    }
    refused = [feature for feature, is_used in untried.items() if is_used]
    if not refused:
        # In full attention each token takes its share of blocks and keeps it; sliding windows give
        # blocks back.
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        several = isinstance(spec, UniformTypeKVCacheSpecs)
        specs = spec.kv_cache_specs.values() if several else [spec]
        if not all(isinstance(one, FullAttentionSpec) for one in specs):
            refused = ["a model with a cache that does not grow with its tokens"]
    if refused:
        raise InputError(
            f"llmctl's scheduler cannot run together with {refused[0]}", "leave out --scheduler-cls"
        )
    if policy == "mlfq" and config.scheduler_config.async_scheduling:
        raise InputError(
            "policy 'mlfq' pauses requests between steps, and vLLM schedules a step ahead",
            "start vLLM with --no-async-scheduling",
        )


class LlmctlScheduler(AsyncScheduler):  # type: ignore[misc]  # vLLM is absent during type checks
    """Runs the policy that the environment names (`toolkit.backends.vllm.setup`).

    Raises `InputError` if the policy cannot run, or cannot run inside this vLLM. Requests that the
    scheduler cannot hold (longer than the whole cache, or sessions with streamed input) are
    admitted at once, as without a policy.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        usable_blocks = self.cache_config.num_gpu_blocks - 1  # vLLM never hands out one block
        self.capacity_tokens = usable_blocks * self.block_size
        # vLLM's limit of running requests; before 0.31 the model runner's slots alone
        is_apart = hasattr(self, "max_num_active_reqs")
        self._limit = "max_num_active_reqs" if is_apart else "max_num_running_reqs"
        self._closing = ExitStack()
        with one_line():
            setup = read_setup(os.environ)
            refuse_untried(self.vllm_config, self.kv_cache_config, setup.policy.name)
            self.steps = Steps(self._make_scheduler(setup))
        warm_up(setup)
        self.running: list[VllmRequest]
        self.waiting = AdmissionGate()
        self._ours: set[str] = set()
        self._counted = CountedBlocks()
        self._paused: set[str] = set()
        self._leaving = False
        self.made_way = 0  # preemptions by the policy
        self.ran_out = 0  # preemptions by vLLM itself, for lack of a block
        self.deciding_s = 0.0  # seconds spent in this class so far, over `current_step` steps

    def add_request(self, request: VllmRequest) -> None:
        is_new = request.request_id not in self.requests
        if is_new and (request.resumable or not self._submit(request)):
            self.waiting.open((request.request_id,))
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        start_s = time.perf_counter()
        uncounted = self._counted.uncounted * self.hash_block_size
        self.steps.resize(self.capacity_tokens - uncounted)
        orders = self.steps.plan(time.monotonic())
        if orders is not None:
            self._apply(orders)
        self.deciding_s += time.perf_counter() - start_s
        if not self._paused:
            return super().schedule(throttle_prefills)
        # Paused requests keep their blocks and their rows: vLLM's newer model runner holds a row
        # for each request that was not preempted, in a pass or not, up to --max-num-seqs of them.
        paused = [request for request in self.running if request.request_id in self._paused]
        self.running = [one for one in self.running if one.request_id not in self._paused]
        most = getattr(self, self._limit)
        setattr(self, self._limit, most - len(paused))
        output = super().schedule(throttle_prefills)
        setattr(self, self._limit, most)
        if paused and not output.total_num_scheduled_tokens:
            # The paused requests hold the memory that all others lack.
            self._preempt_request(paused.pop(), time.monotonic())
        self.running += paused
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: Any
    ) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        start_s = time.perf_counter()
        tokens: set[str] = set()
        ended: list[str] = []
        for one in outputs.values():
            for output in one.outputs:
                if output.new_token_ids and output.request_id in self._ours:
                    tokens.add(output.request_id)
                # A session with streamed input goes on after its finish reason.
                if output.finish_reason is not None and output.request_id not in self.requests:
                    ended.append(output.request_id)
        ours = [request_id for request_id in ended if request_id in self._ours]
        self.steps.stepped(tokens, ours, time.monotonic())
        self._forget(ended)
        self.deciding_s += time.perf_counter() - start_s
        return outputs

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: Any
    ) -> list[VllmRequest]:
        finished: list[VllmRequest] = super().finish_requests(request_ids, finished_status)
        gone = [request.request_id for request in finished]
        for request_id in gone:
            if request_id in self._ours:
                self.steps.cancel(request_id, time.monotonic())
        self._forget(gone)
        return finished

    def shutdown(self) -> None:
        self._closing.close()
        super().shutdown()

    def _preempt_request(
        self, request: VllmRequest, timestamp: float, drop_stale_output: bool = False
    ) -> None:
        """Preempt a request; vLLM also calls this to make room. A token that is being computed is
        sampled again: the policy's scheduler never counted it.
        """
        request_id = request.request_id
        if request_id in self._ours:
            drop_stale_output = True
            self.waiting.close(request_id)
            self._paused.discard(request_id)
            self._counted.stop(request_id)
            if not self._leaving:
                self.ran_out += 1
                self.steps.drop(request_id)
        super()._preempt_request(request, timestamp, drop_stale_output)

    def _submit(self, request: VllmRequest) -> bool:
        """Submit a request to the policy's scheduler. False if it does not fit there.

        Each row's last block is half empty on average; this rounding is added to its prompt. The
        blocks of its prompt that are counted with other requests are subtracted.
        """
        now_s = time.monotonic()
        prompt_tokens = request.num_prompt_tokens
        waited_s = max(time.time() - request.arrival_time, 0.0)
        max_new = min(request.max_tokens, self.max_model_len - prompt_tokens)
        rounding = min(self.block_size // 2, self.capacity_tokens - prompt_tokens - max_new)
        prompt_tokens += max(rounding, 0)
        if prompt_tokens + max_new <= self.capacity_tokens:  # else it does not fit alone
            prompt_tokens -= self._shared_tokens(request)
        submitted = Request(
            request.request_id, now_s - waited_s, prompt_tokens, max_new, request.priority
        )
        if not self.steps.submit(submitted, now_s):
            self._counted.leave(request.request_id)
            return False
        self._ours.add(request.request_id)
        return True

    def _shared_tokens(self, request: VllmRequest) -> int:
        """Tokens of a prompt in blocks that other requests in the engine have as well. The last
        token is always computed, so its block is not shared.
        """
        if not self.cache_config.enable_prefix_caching:
            return 0
        size: int = self.hash_block_size
        blocks = request.block_hashes[: (request.num_prompt_tokens - 1) // size]
        block_size: int = self.block_size
        shared: int = self._counted.enter(request.request_id, blocks) * size
        return shared - shared % block_size

    def _apply(self, orders: StartedPass) -> None:
        """Preempt, pause, resume and admit requests as the policy ordered."""
        leaving = {*orders.evicted, *orders.released}
        for request_id in (*orders.evicted, *orders.released):
            self.waiting.close(request_id)
            self._counted.stop(request_id)
        self._paused -= leaving
        victims = [request for request in self.running if request.request_id in leaving]
        if victims:
            self.running = [one for one in self.running if one.request_id not in leaving]
            self._leaving = True
            for request in reversed(victims):
                self._preempt_request(request, time.monotonic())
            self._leaving = False
            self.made_way += len(victims)
        self._paused.update(orders.paused)
        self._paused.difference_update(orders.resumed)
        self.waiting.open(orders.entered)
        for request_id in orders.entered:
            self._counted.run(request_id)

    def _forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._ours.discard(request_id)
            self._counted.leave(request_id)
            self._paused.discard(request_id)
            self.waiting.close(request_id)

    def _make_scheduler(self, setup: Setup) -> Scheduler:
        slots = min(self.max_num_running_reqs, getattr(self, self._limit))
        worker = make_worker(setup, self.capacity_tokens, slots)
        if setup.event_log is None:
            return Scheduler(setup.policy, [worker])
        # Each line of the log is written at once, in one piece: without --shutdown-timeout vLLM
        # kills this process, and no line may be lost then.
        log = LineLog(setup.event_log, MAX_LOG_BYTES)
        self._closing.callback(log.close)

        def sink(event: Event) -> None:
            log.write(to_line(event))

        capacity = self.capacity_tokens
        values = parameters(setup.policy)
        name = setup.policy.name
        sink(EventLogHeader(FORMAT, name, values, 1, capacity_tokens=capacity, slots=slots))
        return RecordingScheduler(setup.policy, [worker], sink)
