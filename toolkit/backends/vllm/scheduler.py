"""vLLM's scheduler with our policy at its gate: `--scheduler-cls
toolkit.backends.vllm.scheduler.LlmctlScheduler`.

Who of those who wait may run, in which order, who makes way for whom: that is
`toolkit.sched.scheduler.Scheduler`, the same that `llmctl simulate` and `llmctl serve` run.
Everything else is vLLM's own and untouched: blocks, chunked prefill, token budgets, prefix caching,
sampling, streaming. docs/vllm.md says what was tried and what was not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs
from vllm.v1.request import Request as VllmRequest

from toolkit.backends.vllm.command import check_version
from toolkit.backends.vllm.rounds import AdmissionGate, StepOrders, Steps
from toolkit.backends.vllm.setup import Setup, make_worker, one_line, read_setup, warm_up
from toolkit.errors import InputError
from toolkit.files.lines import LineLog
from toolkit.sched.eventlog import Event, EventLogHeader, RecordingScheduler, lost_line, to_line
from toolkit.sched.policies.parameters import parameters
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Request

# What of vLLM our scheduler was not tried beside, or whose memory its books would get wrong:
# refused by name.


def refuse_untried(config: Any, kv_cache_config: Any, policy: str) -> None:
    """`InputError` for a `VllmConfig`, its caches, or a policy under it, that cannot be."""
    untried = {
        "speculative decoding": config.speculative_config is not None,
        "pipeline parallelism": config.parallel_config.pipeline_parallel_size > 1,
        "data parallelism": config.parallel_config.data_parallel_size > 1,
        "a KV connector": config.kv_transfer_config is not None,
        "an encoder of its own": config.ec_transfer_config is not None,
        "a model that generates nothing": config.model_config.runner_type != "generate",
        # several tokens of a pass, not in their order
        "a diffusion model": config.model_config.is_diffusion,
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
    """Whether each token takes its share of blocks and keeps it, as full attention's do: sliding
    windows give back.
    """
    specs = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    return all(isinstance(one, FullAttentionSpec) for one in specs)


MAX_LOG_BYTES = 1 << 30

with one_line():
    check_version(vllm.__version__)


class LlmctlScheduler(AsyncScheduler):  # type: ignore[misc]  # vLLM is not there when this is checked
    """What it runs is in the environment (`toolkit.backends.vllm.setup`). `InputError` for what it cannot
    run, or run inside.

    Requests that our books cannot hold (longer than all of the cache, sessions with streamed input)
    pass the gate at once, as if it were not there.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.capacity_tokens = (
            self.cache_config.num_gpu_blocks - 1
        ) * self.block_size  # one is never given out
        self._closing = ExitStack()
        with one_line():
            setup = read_setup(os.environ)
            refuse_untried(self.vllm_config, self.kv_cache_config, setup.policy.name)
            self.steps = Steps(self._make_scheduler(setup))
        warm_up(setup)
        self.running: list[VllmRequest]
        self.waiting: AdmissionGate[VllmRequest] = AdmissionGate()
        self._ours: set[str] = set()
        self._paused: set[str] = set()
        self._leaving = False
        self.made_way = 0  # preemptions that the policy asked for
        self.ran_out = 0  # and those that vLLM did by itself, since a block was missing
        self.deciding_s = 0.0  # seconds spent in our code so far, of `current_step` steps

    def add_request(self, request: VllmRequest) -> None:
        is_new = request.request_id not in self.requests
        if is_new and (request.resumable or not self._submit(request)):
            self.waiting.open((request.request_id,))
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        start_s = time.perf_counter()
        orders = self.steps.plan(time.monotonic())
        if orders is not None:
            self._obey(orders)
        self.deciding_s += time.perf_counter() - start_s
        if not self._paused:
            return super().schedule(throttle_prefills)
        return self._schedule_others(throttle_prefills)

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
                if (
                    output.finish_reason is not None and output.request_id not in self.requests
                ):  # a session goes on
                    ended.append(output.request_id)
        self.steps.stepped(tokens, [name for name in ended if name in self._ours], time.monotonic())
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
        """Also vLLM's own way to make room. A token that is under way is sampled again: the books
        never saw it.
        """
        request_id = request.request_id
        if request_id in self._ours:
            drop_stale_output = True
            self.waiting.close(request_id)
            self._paused.discard(request_id)
            if not self._leaving:
                self.ran_out += 1
                self.steps.drop(request_id)
        super()._preempt_request(request, timestamp, drop_stale_output)

    def _schedule_others(self, throttle_prefills: bool) -> SchedulerOutput:
        """vLLM's own `schedule`, which does not see who is paused.

        They keep their blocks, and their rows: vLLM's newer model runner has one for each request
        that was not preempted, in a pass or not, and --max-num-seqs of them.
        """
        paused = [request for request in self.running if request.request_id in self._paused]
        self.running = [
            request for request in self.running if request.request_id not in self._paused
        ]
        self.max_num_active_reqs -= len(paused)
        output = super().schedule(throttle_prefills)
        self.max_num_active_reqs += len(paused)
        if (
            paused and not output.total_num_scheduled_tokens
        ):  # who is paused holds what all others lack
            self._preempt_request(paused.pop(), time.monotonic())
        self.running += paused
        return output

    def _submit(self, request: VllmRequest) -> bool:
        """The request for our books. Each row's last block is half empty on average, which the
        prompt is to answer for.

        False where it does not fit them.
        """
        now_s = time.monotonic()
        waited_s = max(time.time() - request.arrival_time, 0.0)
        most_new = min(request.max_tokens, self.max_model_len - request.num_prompt_tokens)
        rounding = min(
            self.block_size // 2, self.capacity_tokens - request.num_prompt_tokens - most_new
        )
        prompt_tokens = request.num_prompt_tokens + max(rounding, 0)
        asked = Request(
            request.request_id, now_s - waited_s, prompt_tokens, most_new, request.priority
        )
        if not self.steps.submit(asked, now_s):
            return False
        self._ours.add(request.request_id)
        return True

    def _obey(self, orders: StepOrders) -> None:
        leaving = set(orders.leave)
        for request_id in orders.leave:
            self.waiting.close(request_id)
        self._paused -= leaving
        victims = [request for request in self.running if request.request_id in leaving]
        if victims:
            self.running = [
                request for request in self.running if request.request_id not in leaving
            ]
            self._leaving = True
            for request in reversed(victims):
                self._preempt_request(request, time.monotonic())
            self._leaving = False
            self.made_way += len(victims)
        self._paused.update(orders.pause)
        self._paused.difference_update(orders.resume)
        self.waiting.open(orders.enter)

    def _forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._ours.discard(request_id)
            self._paused.discard(request_id)
            self.waiting.close(request_id)

    def _make_scheduler(self, setup: Setup) -> Scheduler:
        slots = min(self.max_num_running_reqs, self.max_num_active_reqs)
        worker = make_worker(setup, self.capacity_tokens, slots)
        if setup.event_log is None:
            return Scheduler(setup.policy, [worker])
        sink = self._open_log(setup)
        sink(
            EventLogHeader(
                setup.policy.name,
                parameters(setup.policy),
                1,
                capacity_tokens=self.capacity_tokens,
                slots=slots,
            )
        )
        return RecordingScheduler(setup.policy, [worker], sink)

    def _open_log(self, setup: Setup) -> Callable[[Event], None]:
        """Whole lines at once: without --shutdown-timeout vLLM kills this process, and no line may
        be lost with it.
        """
        assert setup.event_log is not None
        log = LineLog(setup.event_log, MAX_LOG_BYTES, lost_line)
        self._closing.callback(log.close)

        def write(event: Event) -> None:
            log.write(to_line(event))

        return write
