"""Counts the passes of vLLM's scheduler, or of ours inside it, for vLLM's own /metrics.

The flag is `--scheduler-cls toolkit.backends.vllm.counts.counted_scheduler`. The counting changes
no decision. The laws are those of LLMCTL_VLLM_PLAN. vLLM's /metrics shows the sums if
PROMETHEUS_MULTIPROC_DIR names an empty folder: vLLM's processes then share their metrics through
files there.

`PassSeries` holds the sums, `PassCounts` computes them from the passes, and `Counted` feeds it from
inside a scheduler.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

from prometheus_client import Counter, Summary
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request as VllmRequest

from toolkit.backends.vllm.command import POLICY
from toolkit.backends.vllm.iterations import PassLoggingMixin
from toolkit.backends.vllm.scheduler import LlmctlScheduler
from toolkit.backends.vllm.setup import PLAN_VARIABLE, one_line
from toolkit.errors import InputError
from toolkit.estimators.steps import StepLaw, law_of_steps, shape_of_rows
from toolkit.files.io import read_file
from toolkit.files.plan import Plan
from toolkit.sched.iterations import LoggedPass


class PassSeries:
    """The sums as Prometheus series, in seconds, under the names of llmctl's own server.

    A dashboard or an alert for one server therefore works for the other.
    """

    def __init__(self) -> None:
        self._took = Counter("llmctl_batch_seconds", "Time of passes.")
        self._predicted = Counter(
            "llmctl_predicted_batch_seconds", "Time of the same passes as the laws predict it."
        )
        self._ttft = Summary("llmctl_ttft_seconds", "Arrival to first token.")
        self._e2e = Summary("llmctl_e2e_seconds", "Arrival to last token.")

    def batch(self, took_s: float, predicted_s: float) -> None:
        """Add a pass, with the gap before it."""
        self._took.inc(took_s)
        self._predicted.inc(predicted_s)

    def ttft(self, seconds: float) -> None:
        """Add the time from a request's arrival to its first token."""
        self._ttft.observe(seconds)

    def e2e(self, seconds: float) -> None:
        """Add the time from a request's arrival to its last token."""
        self._e2e.observe(seconds)


class PassCounts:
    """Computes the sums from what a scheduler sees. All times are seconds of one clock.

    A pass counts from its start to its end, plus the gap since the previous pass if requests were
    there during all of that gap.

    The engine sees a request that arrives during a pass only after that pass, however long it was
    there. Its arrival is then the time at which the front made it, later by what this takes to
    reach an idle engine. The middle of the pass would be wrong for bursts, which arrive as a pass
    begins. HTTP and tokenizing before that, and everything after the end of a pass, belong to the
    front and are not counted.
    """

    def __init__(self, law: StepLaw, series: PassSeries) -> None:
        self._law, self._series = law, series
        self._arrived_s: dict[str, float] = {}  # requests that have not ended
        self._without_token: set[str] = set()  # a subset of them
        # The last time the engine looked for requests, and the end of the last pass. None if no
        # request has been there since.
        self._looked_s: float | None = None
        self._ended_s: float | None = None
        self._rows = 0  # of the last pass
        self._hops_s, self._hops = 0.0, 0  # from the front to an idle engine: the sum, the number

    def arrived(self, request_id: str, now_s: float, made_s: float) -> None:
        """The engine sees a new request, which the front made at `made_s`."""
        if self._looked_s is None:
            self._hops_s += max(now_s - made_s, 0.0)
            self._hops += 1
            arrived_s = now_s
        else:  # the clocks of several machines may disagree
            hop_s = self._hops_s / self._hops if self._hops else 0.0
            arrived_s = min(max(made_s + hop_s, self._looked_s), now_s)
        self._arrived_s[request_id] = arrived_s
        self._without_token.add(request_id)

    def looked(self, now_s: float) -> None:
        """The engine has taken in all new requests and plans a pass."""
        if self._arrived_s:
            self._looked_s = now_s

    def gone(self, request_id: str) -> None:
        """A request was aborted."""
        self._without_token.discard(request_id)
        if self._arrived_s.pop(request_id, None) is not None:
            self._reset_if_idle()

    def passed(self, logged: LoggedPass) -> None:
        """A pass has ended, and its tokens exist."""
        if logged.rows:
            shape = shape_of_rows(logged.rows)
            start_s, predicted_s = logged.start_s, self._law.forward_s(shape)
            if self._ended_s is not None:
                start_s = self._ended_s
                predicted_s += self._law.after_s(self._rows)
            self._series.batch(logged.end_s - start_s, predicted_s)
            self._ended_s, self._rows = logged.end_s, shape.rows
        for row in logged.rows:
            ends_prompt = row.computed + row.new >= row.prompt_tokens
            if row.request_id in self._without_token and ends_prompt:
                self._without_token.discard(row.request_id)
                self._series.ttft(logged.end_s - self._arrived_s[row.request_id])
        for request_id in logged.ended:
            arrived_s = self._arrived_s.pop(request_id, None)
            if arrived_s is not None:
                self._series.e2e(logged.end_s - arrived_s)
        self._reset_if_idle()

    def _reset_if_idle(self) -> None:
        if not self._arrived_s:
            self._looked_s = self._ended_s = None


class Counted(PassLoggingMixin):
    """A mix-in that counts passes, for vLLM's schedulers and for ours.

    Raises `InputError` if the plan has no law of passes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        with one_line():
            fit = _plan().fit.steps
            if fit is None:
                raise InputError(
                    f"{PLAN_VARIABLE}: its fit has no law of passes",
                    "profile engine vllm again; then: llmctl fit, render",
                )
            self._counts = PassCounts(law_of_steps(fit), PassSeries())

    def add_request(self, request: VllmRequest) -> None:
        if request.request_id not in self.requests:
            now_s, age_s = time.monotonic(), time.time() - request.arrival_time
            self._counts.arrived(request.request_id, now_s, now_s - age_s)
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._counts.looked(time.monotonic())
        return super().schedule(throttle_prefills)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: Any
    ) -> list[VllmRequest]:
        finished = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self._counts.gone(request.request_id)
        return finished

    def _passed(self, logged: LoggedPass) -> None:
        super()._passed(logged)
        self._counts.passed(logged)


class CountedScheduler(Counted):
    """Counts vLLM's scheduler without async scheduling."""


class CountedAsyncScheduler(Counted, AsyncScheduler):  # type: ignore[misc]
    """Counts vLLM's scheduler with async scheduling."""


class CountedLlmctlScheduler(Counted, LlmctlScheduler):
    """Counts our scheduler."""


def counted_scheduler(*args: Any, **kwargs: Any) -> Counted:
    """Make the counted scheduler that the plan and vLLM's configuration ask for."""
    config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    with one_line():
        is_ours = _plan().policy.name != POLICY
    if is_ours:
        return CountedLlmctlScheduler(*args, **kwargs)
    kind = CountedAsyncScheduler if config.scheduler_config.async_scheduling else CountedScheduler
    return kind(*args, **kwargs)


def _plan() -> Plan:
    path = os.environ.get(PLAN_VARIABLE, "")
    if not path:
        raise InputError(
            f"{PLAN_VARIABLE} is not set",
            "it names the plan.json with the laws that the passes are compared with",
        )
    return read_file(Plan, path)
