"""vLLM's scheduler, or ours inside it, that counts its passes.

The flag is `--scheduler-cls toolkit.backends.vllm.counts.counted_scheduler`. It decides nothing more
than they do. The laws are those of LLMCTL_VLLM_PLAN. vLLM's /metrics shows the sums where
PROMETHEUS_MULTIPROC_DIR names an empty folder: then its processes share their metrics through files
there.
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
from toolkit.backends.vllm.pass_counts import PassCounts
from toolkit.backends.vllm.scheduler import LlmctlScheduler
from toolkit.backends.vllm.setup import one_line
from toolkit.errors import InputError
from toolkit.estimators.steps import StepLaw, law_of_steps
from toolkit.files.io import read_file
from toolkit.files.plan import Plan
from toolkit.sched.iterations import LoggedPass

PLAN = "LLMCTL_VLLM_PLAN"


class PassSeries:
    """`toolkit.backends.vllm.pass_counts.Sums` as Prometheus' series, named as llmctl's own server names
    them.
    """

    def __init__(self) -> None:
        self._took = Counter("llmctl_batch_seconds", "Time of passes.")
        self._predicted = Counter(
            "llmctl_predicted_batch_seconds", "What the laws say of the same."
        )
        self._ttft = Summary("llmctl_ttft_seconds", "Arrival to first token.")
        self._e2e = Summary("llmctl_e2e_seconds", "Arrival to last token.")

    def batch(self, took_s: float, predicted_s: float) -> None:
        self._took.inc(took_s)
        self._predicted.inc(predicted_s)

    def ttft(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def e2e(self, seconds: float) -> None:
        self._e2e.observe(seconds)


class Counted(PassLoggingMixin):
    """A mix-in over any of vLLM's schedulers, or ours. `InputError` where the plan has no law of
    passes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        with one_line():
            self._counts = PassCounts(_law(), PassSeries())

    def add_request(self, request: VllmRequest) -> None:
        if request.request_id not in self.requests:
            self._counts.arrived(request.request_id, time.monotonic())
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

    def _passed(self, one: LoggedPass) -> None:
        super()._passed(one)
        self._counts.passed(one)


class CountedScheduler(Counted):
    """Over the scheduler that vLLM has without async scheduling."""


class CountedAsyncScheduler(Counted, AsyncScheduler):  # type: ignore[misc]
    """Over the one that it has with it."""


class CountedLlmctlScheduler(Counted, LlmctlScheduler):
    """Over ours."""


def counted_scheduler(*args: Any, **kwargs: Any) -> Counted:
    """The one that the plan and the configuration ask for."""
    config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    with one_line():
        ours = _plan().policy.name != POLICY
    if ours:
        return CountedLlmctlScheduler(*args, **kwargs)
    kind = CountedAsyncScheduler if config.scheduler_config.async_scheduling else CountedScheduler
    return kind(*args, **kwargs)


def _plan() -> Plan:
    path = os.environ.get(PLAN, "")
    if not path:
        raise InputError(
            f"{PLAN} is not set", "it names the plan.json whose laws the passes are held against"
        )
    return read_file(Plan, path)


def _law() -> StepLaw:
    fit = _plan().fit.steps
    if fit is None:
        raise InputError(
            f"{PLAN}: its fit has no law of passes",
            "profile engine vllm again; then: llmctl fit, render",
        )
    return law_of_steps(fit)
