"""vLLM's own scheduler, which logs each pass: `--scheduler-cls
toolkit.backends.vllm.iterations.logged_scheduler`.

The logging changes no decision. LLMCTL_VLLM_ITERATIONS names the log file; docs/how-to/vllm.md
describes its content. `PassLoggingMixin` collects the passes, for this log and for other readers.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request as VllmRequest

from toolkit.backends.vllm.command import check_version
from toolkit.backends.vllm.setup import ITERATIONS_VARIABLE, one_line
from toolkit.errors import InputError
from toolkit.sched.iterations import IterationLogHeader, LoggedPass, LoggedRow, to_line

with one_line():
    check_version(vllm.__version__)


class PassLoggingMixin(Scheduler):  # type: ignore[misc]  # vLLM is absent during type checks
    """A mix-in for any of vLLM's schedulers that reports each pass to `_passed`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._under_way: deque[tuple[float, list[LoggedRow], list[str], int, int]] = deque()
        self._preempted: list[str] = []
        self._gone: list[str] = []

    def _passed(self, logged: LoggedPass) -> None:
        """A pass has ended."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        start_s = time.monotonic()
        output = super().schedule(throttle_prefills)
        rows = []
        for request_id, new in output.num_scheduled_tokens.items():
            request = self.requests[request_id]  # its computed tokens already include this pass
            rows.append(
                LoggedRow(
                    request_id, request.num_computed_tokens - new, new, request.num_prompt_tokens
                )
            )
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        self._under_way.append((start_s, rows, self._preempted, self.get_request_counts()[1], free))
        self._preempted = []
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: Any
    ) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        start_s, rows, preempted, waiting, free = self._under_way.popleft()
        ended = [
            output.request_id
            for client in outputs.values()
            for output in client.outputs
            if output.finish_reason is not None
        ]
        if rows or preempted or ended or self._gone:
            logged = LoggedPass(
                step=self.current_step - len(self._under_way),
                start_s=start_s,
                end_s=time.monotonic(),
                rows=rows,
                preempted=preempted,
                ended=[*self._gone, *ended],
                waiting=waiting,
                free_blocks=free,
            )
            self._gone = []
            self._passed(logged)
        return outputs

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: Any
    ) -> list[VllmRequest]:
        finished: list[VllmRequest] = super().finish_requests(request_ids, finished_status)
        self._gone += [request.request_id for request in finished]
        return finished

    def _preempt_request(
        self, request: VllmRequest, timestamp: float, drop_stale_output: bool = False
    ) -> None:
        self._preempted.append(request.request_id)
        super()._preempt_request(request, timestamp, drop_stale_output)


class Logged(PassLoggingMixin):
    """Writes the passes to the log. Raises `InputError` if the log is not named or not writable."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        with one_line():
            path = os.environ.get(ITERATIONS_VARIABLE, "")
            if not path:
                raise InputError(
                    f"{ITERATIONS_VARIABLE} is not set",
                    "it names the file for the log of passes",
                )
            try:
                self._log = open(path, "wb", buffering=0)  # noqa: SIM115  (closed by `shutdown`)
            except OSError as error:
                raise InputError(f"{path}: cannot be written: {error.strerror}") from None
        self._log.write(to_line(self._header()))

    def shutdown(self) -> None:
        self._log.close()
        super().shutdown()

    def _passed(self, logged: LoggedPass) -> None:
        self._log.write(to_line(logged))

    def _header(self) -> IterationLogHeader:
        config, cache = self.vllm_config, self.cache_config
        spec = self.kv_cache_config.kv_cache_groups[0].kv_cache_spec
        groups = self.kv_cache_config.kv_cache_groups
        layers = sum(len(group.layer_names) for group in groups)
        return IterationLogHeader(
            max_num_seqs=self.scheduler_config.max_num_seqs,
            max_num_batched_tokens=self.scheduler_config.max_num_batched_tokens,
            block_tokens=self.block_size,
            blocks=cache.num_gpu_blocks - 1,
            enable_chunked_prefill=bool(self.scheduler_config.enable_chunked_prefill),
            prefix_caching=bool(cache.enable_prefix_caching),
            async_scheduling=bool(self.scheduler_config.async_scheduling),
            policy=str(self.scheduler_config.policy),
            version=vllm.__version__,
            model_type=config.model_config.hf_config.model_type,
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            device=str(config.device_config.device_type),
            max_model_len=self.max_model_len,
            vocab_size=config.model_config.get_vocab_size(),
            kv_bytes_per_token=layers * spec.page_size_bytes // spec.block_size,
        )


class LoggedScheduler(Logged):
    """Logs vLLM's scheduler without async scheduling."""


class LoggedAsyncScheduler(Logged, AsyncScheduler):  # type: ignore[misc]
    """Logs vLLM's scheduler with async scheduling."""


def logged_scheduler(*args: Any, **kwargs: Any) -> Logged:
    """Make the logged form of the scheduler that vLLM would choose under this configuration."""
    config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    kind = LoggedAsyncScheduler if config.scheduler_config.async_scheduling else LoggedScheduler
    return kind(*args, **kwargs)
