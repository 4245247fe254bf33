"""What an engine that we run inside of is told by its environment: the policy, the laws of time,
the log.

LLMCTL_VLLM_POLICY     a policy, and its parameters: "past-future reserve=0.1 window=500"; the default is past-future
LLMCTL_VLLM_FIT        fit.json: the laws of time, for policies that ask for them
LLMCTL_VLLM_PLAN       plan.json: policy and laws in one, instead of these two
LLMCTL_VLLM_EVENT_LOG  a file that gets every call and decision of the scheduler
LLMCTL_VLLM_ITERATIONS a file that gets a line for each pass (`toolkit.backends.vllm.iterations`);
nothing to this one
LLMCTL_VLLM_PYTHON     the Python that has vLLM, for `llmctl profile` and `llmctl serve`; nothing to an engine
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import InputError, nearest
from toolkit.estimators.load import laws_from_fit
from toolkit.estimators.memory import ZetaMemory
from toolkit.files.fit import Fit
from toolkit.files.io import read_file
from toolkit.files.plan import Plan
from toolkit.sched.policies import make_policy, refuse_oracle
from toolkit.sched.policies.parameters import from_words
from toolkit.sched.policies.past_future import PastFuturePolicy
from toolkit.sched.protocols import LatencyLaw, Policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Request, RoundResult, Worker

PREFIX = "LLMCTL_VLLM_"
POLICY_VARIABLE = "LLMCTL_VLLM_POLICY"
FIT_VARIABLE = "LLMCTL_VLLM_FIT"
PLAN_VARIABLE = "LLMCTL_VLLM_PLAN"
EVENT_LOG_VARIABLE = "LLMCTL_VLLM_EVENT_LOG"
ITERATIONS_VARIABLE = "LLMCTL_VLLM_ITERATIONS"
PYTHON_VARIABLE = "LLMCTL_VLLM_PYTHON"
VARIABLES = (POLICY_VARIABLE, FIT_VARIABLE, PLAN_VARIABLE, EVENT_LOG_VARIABLE)
OTHERS = (ITERATIONS_VARIABLE, PYTHON_VARIABLE)
TIMED = ("past-future-sla", "mlfq")  # they ask what a step or a prefill takes
ELSEWHERE = {
    "baton": "it lays rows out in one padded slab, and this engine pages its memory",
    "sequence": "its batches are static, and this engine's never end",
    "slice": "its batches are static, and this engine's never end",
}


@dataclass(slots=True, frozen=True)
class Untimed:
    """The law of an engine that nobody has measured: it says what steps give, not what they take."""

    prefill_emits_token: bool = False  # a prefill's last step is the first token's
    padded: bool = False
    round_s: float = 0.0

    def prefill_s(self, batch_size: int, input_length: float) -> float:
        raise NotImplementedError("no law of time was given")

    def pass_s(self, batch_size: int, start: float, end: float) -> float:
        raise NotImplementedError("no law of time was given")

    def decode_s(self, batch_size: int, input_length: float, steps: int) -> float:
        raise NotImplementedError("no law of time was given")

    def leave_s(self, length: float) -> float:
        return 0.0

    def serve_table(self, max_batch_size: int, steps: int) -> NDArray[np.float64]:
        raise NotImplementedError("no law of time was given")


@dataclass(slots=True, frozen=True)
class Setup:
    """What to run inside an engine."""

    policy: Policy
    latency: LatencyLaw
    event_log: Path | None = None


def read_setup(environ: Mapping[str, str]) -> Setup:
    """The setup that the environment asks for. `InputError` where it cannot be."""
    for name in environ:
        if name.startswith(PREFIX) and name not in VARIABLES + OTHERS:
            raise InputError(f"there is no variable {name}", nearest(name, VARIABLES))
    words, fit_path, plan_path, log = (environ.get(name, "") for name in VARIABLES)
    if plan_path and (words or fit_path):
        other = POLICY_VARIABLE if words else FIT_VARIABLE
        raise InputError(
            f"{PLAN_VARIABLE} and {other} are both set",
            "a plan has its policy and its laws; set one only",
        )
    fit: Fit | None = None
    if plan_path:
        plan = read_file(Plan, plan_path)
        policy, fit = make_policy(plan.policy.name, plan.policy.parameters), plan.fit
    else:
        name, *parameters = words.split() or [PastFuturePolicy.name]
        policy = make_policy(name, from_words(parameters))
        fit = read_file(Fit, fit_path) if fit_path else None
    refuse_inside(policy, timed=fit is not None)
    latency = laws_from_fit(fit).rounds if fit else Untimed()
    return Setup(policy, latency, Path(log) if log else None)


def make_worker(setup: Setup, capacity_tokens: int, slots: int) -> Worker:
    """The engine as the scheduler's worker: it holds so many tokens of KV cache in so many rows."""
    return Worker(0, setup.latency, ZetaMemory(capacity_tokens), slots=slots)


def warm_up(setup: Setup) -> None:
    """Have compiled what the policy needs, so that no request waits for it."""
    worker = make_worker(setup, 2048, 8)
    scheduler = Scheduler(setup.policy, [worker])
    for number in range(32):
        now_s = float(number)
        scheduler.submit(Request(str(number), now_s, 8, 512), now_s)
        for batch in scheduler.tick(now_s):
            ended = [job.request_id for job in worker.residents.jobs][: number % 4 == 3]
            scheduler.complete(
                RoundResult(batch.batch_id, 0, min(batch.steps, 64), tuple(ended)), now_s
            )


def refuse_inside(policy: Policy, *, timed: bool) -> None:
    """`InputError` where `policy` cannot run inside such an engine; `timed` says whether there are
    laws of time.
    """
    refuse_oracle(policy.name)
    if policy.name in ELSEWHERE:
        raise InputError(
            f"policy '{policy.name}' cannot run inside this engine: {ELSEWHERE[policy.name]}",
            "choose a continuous one; see docs/vllm.md",
        )
    if policy.name in TIMED and not timed:
        raise InputError(
            f"policy '{policy.name}' asks how long steps take, and no fit was given",
            "set LLMCTL_VLLM_FIT to the fit.json of this engine; docs/vllm.md says how to make one",
        )


# Errors as an engine that we run inside of prints them: it shows what an exception says, and
# knows of no hints.


@contextmanager
def one_line() -> Iterator[None]:
    """Message and hint in one line."""
    try:
        yield
    except InputError as error:
        raise InputError(
            f"{error.message}: {error.hint}" if error.hint else error.message
        ) from None
