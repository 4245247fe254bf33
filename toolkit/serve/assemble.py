"""From a plan to the objects that serve it: the scheduler as planned, and the front's settings."""

from __future__ import annotations

import math
from collections.abc import Callable

from toolkit.engine_traits import traits_of
from toolkit.errors import InputError
from toolkit.estimators.load import laws_from_fit
from toolkit.files.keys import ApiKey
from toolkit.files.plan import Kind, Plan
from toolkit.sched.eventlog import Event, EventLogHeader, RecordingScheduler
from toolkit.sched.policies import make_policy, refuse_unservable
from toolkit.sched.protocols import Policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Worker
from toolkit.serve.forecast import UNLIMITED, LatencyLimits
from toolkit.serve.settings import FrontSettings
from toolkit.serve.stats import Stats


def make_scheduler(plan: Plan, event_sink: Callable[[Event], None] | None = None) -> Scheduler:
    """The plan's scheduler in its first state: for a server, or for the replay of a server's log."""
    policy = make_policy(plan.policy.name, plan.policy.parameters)
    engine = plan.recipe.engine
    if not traits_of(engine.name).started:
        hint = "replay a trace against it with: llmctl bench --plan plan.json --url " + str(
            engine.url
        )
        raise InputError(
            f"engine '{engine.name}' is a server already, at {engine.url}; there is nothing to start",
            hint,
        )
    workers: list[Worker] = []
    for kind in plan.kinds:
        refuse_unservable(policy, kind.recipe.engine.name)
        workers += _workers(kind, policy, first=len(workers))
    if event_sink is None:
        return Scheduler(policy, workers)
    event_sink(EventLogHeader(plan.policy.name, dict(plan.policy.parameters), plan.workers))
    return RecordingScheduler(policy, workers, event_sink)


def _workers(kind: Kind, policy: Policy, first: int) -> list[Worker]:
    """The workers of a kind, as the scheduler knows them, numbered from `first`."""
    laws = laws_from_fit(kind.fit)
    latency, memory = (
        (laws.rounds, laws.round_memory) if policy.continuous else (laws.latency, laws.memory)
    )
    return [
        Worker(
            index,
            latency,
            memory,
            swap=laws.swap,
            host_tokens=laws.host_tokens,
            joining=laws.joining,
            slots=laws.slots,
        )
        for index in range(first, first + kind.workers)
    ]


def make_stats(plan: Plan) -> Stats:
    """Counters that know how far the plan's laws were measured; of several kinds of workers the
    least far.
    """
    valid = [one for kind in plan.kinds for one in (kind.fit.prefill.valid, kind.fit.decode.valid)]
    return Stats(
        min(one.batch_size_max for one in valid),
        min(one.length_max for one in valid),
        plan.recipe.sla,
    )


def model_name(plan: Plan) -> str:
    """What clients call the model, where nobody said otherwise."""
    recipe = plan.recipe
    return recipe.serve.served_model_name or (
        recipe.name if recipe.model.source == "random" else recipe.model.source
    )


def make_limits(plan: Plan, admission: str | None, *, replays: bool) -> LatencyLimits:
    """What admission holds the forecast against: the recipe's targets where it says so, unless
    traces are replayed.

    `admission` is the recipe's where it is None; a server for `replays` turns nobody away by a
    forecast unless asked.
    """
    admission = admission or ("queue" if replays else plan.recipe.serve.admission)
    return LatencyLimits.of(plan.recipe.sla) if admission == "targets" else UNLIMITED


def make_settings(
    plan: Plan,
    *,
    model: str = "",
    api_key: str = "",
    keys: tuple[ApiKey, ...] = (),
    request_timeout_s: float | None = None,
    **others: bool,
) -> FrontSettings:
    """The front's settings: limits from the plan, the rest as given (`FrontSettings` has the names)."""
    serve, engine = plan.recipe.serve, plan.fit.engine
    return FrontSettings(
        model=model or model_name(plan),
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        max_new_tokens=serve.max_new_tokens,
        max_waiting=serve.max_waiting,
        api_key=api_key,
        keys=keys,
        request_timeout_s=request_timeout_s or serve.request_timeout_s or math.inf,
        **others,
    )
