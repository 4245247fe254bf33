"""What the code inside vLLM reads from its environment: the policy, the laws of time, the log.

LLMCTL_VLLM_POLICY
    a policy and its parameters, "past-future reserve=0.1 window=500"; the default is past-future
LLMCTL_VLLM_FIT
    fit.json: the laws of time, for policies that need them
LLMCTL_VLLM_PLAN
    plan.json: policy and laws in one file, in the place of the two above
LLMCTL_VLLM_EVENT_LOG
    a file for every call and decision of the scheduler
LLMCTL_VLLM_ITERATIONS
    a file with a line for each pass (`toolkit.backends.vllm.iterations`); not read here. Engines of
    data parallelism write one each (`log_of_rank`)
LLMCTL_VLLM_CONTROL_KEY
    the key of the control of its settings (`toolkit.backends.vllm.control`); without it there is no
    control
LLMCTL_VLLM_PYTHON
    the Python that has vLLM, for `llmctl profile` and `llmctl serve`; not read inside vLLM

This module imports nothing of vLLM and no heavy library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import InputError, nearest
from toolkit.estimators.load import laws_from_fit
from toolkit.estimators.memory import ZetaMemory
from toolkit.files.fit import Fit
from toolkit.files.io import read_file
from toolkit.files.plan import Plan
from toolkit.sched.policies import make_policy, refuse_oracle
from toolkit.sched.policies.base import Policy
from toolkit.sched.policies.parameters import from_words
from toolkit.sched.policies.past_future import PastFuturePolicy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import LatencyLaw, PassResult, Request, Worker

PREFIX = "LLMCTL_VLLM_"
POLICY_VARIABLE = "LLMCTL_VLLM_POLICY"
FIT_VARIABLE = "LLMCTL_VLLM_FIT"
PLAN_VARIABLE = "LLMCTL_VLLM_PLAN"
EVENT_LOG_VARIABLE = "LLMCTL_VLLM_EVENT_LOG"
ITERATIONS_VARIABLE = "LLMCTL_VLLM_ITERATIONS"
CONTROL_VARIABLE = "LLMCTL_VLLM_CONTROL_KEY"
PYTHON_VARIABLE = "LLMCTL_VLLM_PYTHON"
VARIABLES = (POLICY_VARIABLE, FIT_VARIABLE, PLAN_VARIABLE, EVENT_LOG_VARIABLE)
OTHERS = (ITERATIONS_VARIABLE, CONTROL_VARIABLE, PYTHON_VARIABLE)
TIMED = ("past-future-sla", "mlfq")  # they need the time of a step or of a prefill
UNFIT_POLICIES = {
    "baton": "it keeps its rows in one padded slab, and this engine pages its KV cache",
    "sequence": "its batches are static, and this engine runs a continuous batch",
    "slice": "its batches are static, and this engine runs a continuous batch",
}


class Untimed(LatencyLaw):
    """The law of an engine that was not measured: it knows the tokens of a step, not its time."""

    def __init__(self) -> None:
        self.prefill_emits_token = False  # the first token comes from a prefill's last step
        self.padded = False
        self.round_s = 0.0


@dataclass(slots=True, frozen=True)
class Setup:
    """What to run inside vLLM."""

    policy: Policy
    latency: LatencyLaw
    event_log: Path | None = None


def read_setup(environ: Mapping[str, str]) -> Setup:
    """Read the setup from the environment. Raises `InputError` for variables that contradict."""
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
        policy = make_policy(plan.settings.policy, plan.settings.parameters)
        fit = plan.fit
    else:
        name, *parameters = words.split() or [PastFuturePolicy.name]
        policy = make_policy(name, from_words(parameters))
        fit = read_file(Fit, fit_path) if fit_path else None
    refuse_inside(policy, timed=fit is not None)
    latency = laws_from_fit(fit).rounds if fit else Untimed()
    return Setup(policy, latency, Path(log) if log else None)


def make_worker(setup: Setup, capacity_tokens: int, slots: int) -> Worker:
    """The engine as the scheduler's worker, with `capacity_tokens` of KV cache and `slots` rows."""
    return Worker(0, setup.latency, ZetaMemory(capacity_tokens), slots=slots)


def warm_up(setup: Setup) -> None:
    """Compile what the policy needs before the first request arrives."""
    worker = make_worker(setup, 2048, 8)
    scheduler = Scheduler(setup.policy, [worker])
    for number in range(32):
        now_s = float(number)
        scheduler.submit(Request(str(number), now_s, 8, 512), now_s)
        for batch in scheduler.tick(now_s):
            ended = tuple(job.request_id for job in worker.running.jobs)[: number % 4 == 3]
            result = PassResult(batch.pass_id, 0, min(batch.steps, 64), ended)
            scheduler.complete(result, now_s)


def refuse_inside(policy: Policy, *, timed: bool) -> None:
    """Raises `InputError` if `policy` cannot run inside vLLM; `timed`: there are laws of time."""
    refuse_oracle(policy.name)
    if policy.name in UNFIT_POLICIES:
        raise InputError(
            f"policy '{policy.name}' cannot run inside this engine: {UNFIT_POLICIES[policy.name]}",
            "choose a continuous one; see docs/how-to/vllm.md",
        )
    if policy.name in TIMED and not timed:
        raise InputError(
            f"policy '{policy.name}' needs the times of steps, and no fit was given",
            "set LLMCTL_VLLM_FIT to the fit.json of this engine; "
            "docs/how-to/vllm.md says how to make one",
        )


def log_of_rank(path: str | Path, rank: int) -> Path:
    """The log of passes of an engine of data parallelism, where the first one's is `path`."""
    return Path(f"{path}.rank{rank}") if rank else Path(path)


@contextmanager
def one_line() -> Iterator[None]:
    """Join message and hint of an `InputError`: vLLM prints an exception's message only."""
    try:
        yield
    except InputError as error:
        raise InputError(": ".join(filter(None, (error.message, error.hint)))) from None
