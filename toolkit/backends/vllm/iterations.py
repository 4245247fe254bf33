"""Schedulers inside vLLM that report each pass, and change no decision: to a log, or as counts in
vLLM's own /metrics.

--scheduler-cls toolkit.backends.vllm.iterations.logged_scheduler
    vLLM's own scheduler, with a line for each pass in the file that LLMCTL_VLLM_ITERATIONS names;
    docs/explanation/vllm.md describes a line
--scheduler-cls toolkit.backends.vllm.iterations.counted_scheduler
    vLLM's scheduler, or ours inside it, with sums of the passes' times and of the times that the
    laws of LLMCTL_VLLM_PLAN predict; /metrics shows the sums if PROMETHEUS_MULTIPROC_DIR names an
    empty folder, through which vLLM's processes share their metrics; with LLMCTL_VLLM_ITERATIONS
    it writes the same log, too

With LLMCTL_VLLM_CONTROL_KEY their settings change while they run (`toolkit.backends.vllm.control`).

`PassLoggingMixin` collects the passes for both. `PassSeries` holds the sums, `PassCounts` computes
them from the passes, and `Counted` feeds it from inside a scheduler.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import vllm
from prometheus_client import Counter
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request as VllmRequest

from toolkit.backends.vllm import control
from toolkit.backends.vllm.command import POLICY
from toolkit.backends.vllm.control import EngineControl
from toolkit.backends.vllm.knobs import LiveSettings
from toolkit.backends.vllm.overlap import Following, OverlappingPasses
from toolkit.backends.vllm.resolved import rank_of, refuse_unlike, resolved_of
from toolkit.backends.vllm.scheduler import LlmctlScheduler
from toolkit.backends.vllm.setup import (
    CONTROL_VARIABLE,
    ITERATIONS_VARIABLE,
    PLAN_VARIABLE,
    log_of_rank,
    one_line,
)
from toolkit.errors import InputError
from toolkit.files.io import read_file
from toolkit.files.iterations import (
    IterationLogHeader,
    LoggedPass,
    LoggedRow,
    shape_of_rows,
    to_line,
)
from toolkit.files.plan import Plan
from toolkit.laws.passes import PassLaw
from toolkit.sched.types import Request


class PassLoggingMixin(Scheduler):  # type: ignore[misc]  # vLLM is absent during type checks
    """A mix-in for any of vLLM's schedulers that reports each pass to `_passed`.

    Attributes:
        control: of its settings; None: they stay as they are.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._under_way: deque[LoggedPass] = deque()  # without what is known at their ends
        self._settled = False  # a pass has ended since the last one was planned
        self._preempted: list[str] = []  # since the last pass was planned
        self._gone: list[str] = []  # aborted since the last pass ended
        self._arrived: list[Request] = []  # since the last pass was planned
        self.control: EngineControl | None = None
        if os.environ.get(CONTROL_VARIABLE):
            control.install()
            self.control = EngineControl(LiveSettings(self))

    def _passed(self, logged: LoggedPass) -> None:
        """A pass has ended."""

    def _following(self) -> Following | None:
        """The pass that is under way and computes something, if there is one."""
        for one in self._under_way:
            if one.rows:
                return Following(one.start_s, one.rows, one.launched_s)
        return None

    def _header(self) -> IterationLogHeader:
        config = self.vllm_config
        cache = self.cache_config
        resolved = resolved_of(self)
        return IterationLogHeader(
            max_num_seqs=self.scheduler_config.max_num_seqs,
            max_num_batched_tokens=self.scheduler_config.max_num_batched_tokens,
            block_tokens=self.block_size,
            blocks=resolved.blocks,
            enable_chunked_prefill=bool(self.scheduler_config.enable_chunked_prefill),
            prefix_caching=bool(cache.enable_prefix_caching),
            async_scheduling=bool(self.scheduler_config.async_scheduling),
            policy=resolved.policy,
            version=vllm.__version__,
            model_type=config.model_config.hf_config.model_type,
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            device=str(config.device_config.device_type),
            max_model_len=self.max_model_len,
            vocab_size=config.model_config.get_vocab_size(),
            kv_bytes_per_token=resolved.bytes_per_block // self.block_size,
            graph_sizes=sorted(config.compilation_config.cudagraph_capture_sizes or []),
            graph_mode=getattr(config.compilation_config.cudagraph_mode, "name", ""),
            executor=str(config.parallel_config.distributed_executor_backend or ""),
            resolved=resolved,
        )

    def add_request(self, request: VllmRequest) -> None:
        if self.control is not None and request.request_id not in self.requests:
            arrival_s = time.monotonic() - (time.time() - request.arrival_time)
            lengths = request.num_prompt_tokens, request.max_tokens
            self._arrived.append(Request(request.request_id, arrival_s, *lengths))
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        start_s = time.monotonic()
        if self.control is not None:
            self.control.expire()
        output = super().schedule(throttle_prefills)
        rows = []
        for request_id, new in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            computed = request.num_computed_tokens - new  # which already includes this pass
            drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            prompt = request.num_prompt_tokens
            is_chunk = request.is_prefill_chunk
            rows.append(LoggedRow(request_id, computed, new, prompt, drafts, is_chunk))
        _running, waiting = self.get_request_counts()
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        changed = self.control.take() if self.control is not None else {}
        self._under_way.append(
            LoggedPass(
                step=self.current_step,
                start_s=start_s,
                end_s=0.0,
                rows=rows,
                preempted=self._preempted,
                ended=[],
                waiting=waiting,
                free_blocks=free,
                changed=changed,
                arrived=self._arrived,
            )
        )
        self._settled = False
        self._preempted = []
        self._arrived = []
        return output

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> Any:
        # vLLM asks for it directly after `execute_model` has returned (core.py, `step` and
        # `step_with_batch_queue`), so when all kernels but the sampler's are launched. Where
        # sampling waits for the tokens of the pass before, it asks only after those: then the end
        # of the launch is not known.
        if self._under_way and not self._settled:
            self._under_way[-1].launched_s = time.monotonic()
        return super().get_grammar_bitmask(scheduler_output)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: Any
    ) -> Any:
        ready_s = time.monotonic()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        done = self._under_way.popleft()
        self._settled = True
        ended = [
            output.request_id
            for client in outputs.values()
            for output in client.outputs
            if output.finish_reason is not None
        ]
        shown = done.rows or done.preempted or done.changed or done.arrived
        if shown or ended or self._gone:
            done.step = self.current_step - len(self._under_way)
            done.end_s = time.monotonic()
            done.ended = [*self._gone, *ended]
            done.ready_s = ready_s
            done.accepted = accepted_drafts(done.rows, model_runner_output)
            self._gone = []
            self._passed(done)
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


def accepted_drafts(rows: Sequence[LoggedRow], model_runner_output: Any) -> list[int]:
    """How many drafts of each row with drafts became tokens, by what the model gave."""
    drafting = [row.request_id for row in rows if row.drafts]
    if not drafting or not model_runner_output.sampled_token_ids:
        return []
    places = model_runner_output.req_id_to_index
    tokens = model_runner_output.sampled_token_ids
    return [max(len(tokens[places[name]]) - 1, 0) for name in drafting]


class PassLog:
    """The log of passes of an engine; of data-parallel ones, each has its own (`log_of_rank`).
    Raises `InputError` if it is not named or not writable.
    """

    def __init__(self, header: IterationLogHeader, rank: int) -> None:
        with one_line():
            named = _path_in(ITERATIONS_VARIABLE, "the file for the log of passes")
            path = log_of_rank(named, rank)
            try:
                # appended, so that a reader may cut off what it has read
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
                self._file = open(os.open(path, flags, 0o666), "wb", buffering=0)  # noqa: SIM115
            except OSError as error:
                raise InputError(f"{path}: cannot be written: {error.strerror}") from None
        self._file.write(to_line(header))

    def write(self, logged: LoggedPass) -> None:
        self._file.write(to_line(logged))

    def close(self) -> None:
        self._file.close()


class Logged(PassLoggingMixin):
    """Writes the passes to the log. Raises `InputError` if the log is not named or not writable."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._log = PassLog(self._header(), rank_of(self.vllm_config))

    def shutdown(self) -> None:
        self._log.close()
        super().shutdown()

    def _passed(self, logged: LoggedPass) -> None:
        self._log.write(logged)


class LoggedAsyncScheduler(Logged, AsyncScheduler):  # type: ignore[misc]
    """Logs vLLM's scheduler with async scheduling."""


def logged_scheduler(*args: Any, **kwargs: Any) -> Logged:
    """Make the logged form of the scheduler that vLLM would choose under this configuration."""
    config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    kind = LoggedAsyncScheduler if config.scheduler_config.async_scheduling else Logged
    return kind(*args, **kwargs)


class PassSeries:
    """The sums as Prometheus series, in seconds. They have the names of llmctl's own server, so a
    dashboard or an alert for one server works for the other.
    """

    def __init__(self) -> None:
        self.took = Counter("llmctl_batch_seconds", "Time of passes.")
        self.predicted = Counter(
            "llmctl_predicted_batch_seconds", "Time of the same passes as the laws predict it."
        )


class PassCounts:
    """Sums the times of passes, and what the law says of them. All times are seconds of one clock.

    A pass counts from its start to its end, plus the gap since the previous pass if requests were
    there during all of that gap. Where passes overlap it counts from the end of the previous pass
    (`toolkit.backends.vllm.overlap`).
    """

    def __init__(self, law: PassLaw, series: PassSeries) -> None:
        self._law = law
        self._series = series
        self._overlapping = OverlappingPasses(law) if law.graphs is not None else None
        self._ended_s: float | None = None  # the last pass; None: no request was left since
        self._rows = 0  # of the last pass

    def rest(self) -> None:
        """No request is left."""
        self._ended_s = None

    def passed(self, logged: LoggedPass, following: Following | None = None) -> None:
        """A pass has ended, and its tokens exist; `following` was scheduled behind it meanwhile."""
        if not logged.rows:
            return
        if self._overlapping is not None:
            took_s, predicted_s = self._overlapping.ended(logged, following)
        else:
            shape = shape_of_rows(logged.rows, self._law.window)
            start_s = logged.start_s
            predicted_s = self._law.forward_s(shape)
            if self._ended_s is not None:
                start_s = self._ended_s
                predicted_s += self._law.after_s(self._rows)
            took_s = logged.end_s - start_s
            self._ended_s = logged.end_s
            self._rows = shape.rows
        self._series.took.inc(took_s)
        self._series.predicted.inc(predicted_s)


class Counted(PassLoggingMixin):
    """Counts passes, of vLLM's schedulers or ours, and logs them where a log is named. `InputError`
    if the plan has no such law.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        header = self._header()
        self._log: PassLog | None = None
        if os.environ.get(ITERATIONS_VARIABLE):
            self._log = PassLog(header, rank_of(self.vllm_config))
        with one_line():
            plan = _plan()
            # vLLM was started with wider bounds than the plan's
            if self.control is not None and plan.settings.policy == POLICY:
                self.control.begin(plan.settings.parameters)
            fit = plan.fit.steps
            assert header.resolved is not None
            refuse_unlike(header.resolved, fit.resolved if fit else None)
            if fit is None:
                raise InputError(
                    f"{PLAN_VARIABLE}: its fit has no law of passes",
                    "profile engine vllm again; then: llmctl fit, render",
                )
            self._counts = PassCounts(fit.law, PassSeries())

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: Any
    ) -> list[VllmRequest]:
        finished = super().finish_requests(request_ids, finished_status)
        if not self.requests:
            self._counts.rest()
        return finished

    def shutdown(self) -> None:
        if self._log is not None:
            self._log.close()
        super().shutdown()

    def _passed(self, logged: LoggedPass) -> None:
        super()._passed(logged)
        if self._log is not None:
            self._log.write(logged)
        self._counts.passed(logged, self._following())
        if not self.requests:
            self._counts.rest()


class CountedAsyncScheduler(Counted, AsyncScheduler):  # type: ignore[misc]
    """Counts vLLM's scheduler with async scheduling."""


class CountedLlmctlScheduler(Counted, LlmctlScheduler):
    """Counts our scheduler."""


def counted_scheduler(*args: Any, **kwargs: Any) -> Counted:
    """Make the counted scheduler that the plan and vLLM's configuration ask for."""
    config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    with one_line():
        is_ours = _plan().settings.policy != POLICY
    vllms = CountedAsyncScheduler if config.scheduler_config.async_scheduling else Counted
    return (CountedLlmctlScheduler if is_ours else vllms)(*args, **kwargs)


def _plan() -> Plan:
    what = "the plan.json with the laws that the passes are compared with"
    return read_file(Plan, _path_in(PLAN_VARIABLE, what))


def _path_in(variable: str, what: str) -> str:
    """The path in a variable of the environment. Raises `InputError` if it is not set."""
    if path := os.environ.get(variable):
        return path
    raise InputError(f"{variable} is not set", f"it names {what}")
