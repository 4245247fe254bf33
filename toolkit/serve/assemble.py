"""Build what serves a plan: the scheduler, its counters, and the front's settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from toolkit.engine_traits import traits_of
from toolkit.errors import InputError
from toolkit.estimators.load import laws_from_fit
from toolkit.files.plan import Plan
from toolkit.routing.admission import UNLIMITED, LatencyLimits
from toolkit.sched.eventlog import FORMAT, Event, EventLogHeader, RecordingScheduler
from toolkit.sched.policies import make_policy, refuse_unservable
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Worker
from toolkit.serve.stats import Stats

MAX_BODY_BYTES = 8 << 20


@dataclass(slots=True, frozen=True)
class FrontSettings:
    """A front's names and limits. Lengths are in tokens, times in seconds.

    Attributes:
        model: the name by which clients call it; '': before replicas, any.
        max_new_tokens: that one request may ask for; before replicas, assumed for a request that
            names no limit.
        max_waiting: requests; with more, new ones get 503.
        max_model_len, vocab_size: of workers of our own, prompt and output together.
        wait_up_s: an accepted request waits this long for a replica to be up.
    """

    model: str = ""
    max_new_tokens: int = 256
    max_waiting: int = 4096
    max_model_len: int = 0
    vocab_size: int = 0
    open_metrics: bool = False  # /metrics needs no key
    allow_end_after: bool = False  # requests may set `llmctl_end_after`
    status_page: bool = False
    local_hosts_only: bool = False  # a Host header with a name other than localhost gets 403
    max_body_bytes: int = MAX_BODY_BYTES
    keepalive_s: float = 10.0  # an idle stream gets a comment after this long
    # The deadline of requests that set none, and the longest that a request may set.
    request_timeout_s: float = math.inf
    wait_up_s: float = 60.0


def make_scheduler(plan: Plan, event_sink: Callable[[Event], None] | None = None) -> Scheduler:
    """The plan's scheduler in its first state, for a server or for the replay of a server's log.

    `event_sink` gets every call and decision of the scheduler. Raises `InputError` for a plan that
    cannot be served.
    """
    policy = make_policy(plan.settings.policy, plan.settings.parameters)
    engine = plan.recipe.engine
    if not traits_of(engine.name).started:
        raise InputError(
            f"engine '{engine.name}' is a server already, at {engine.url}; "
            "there is nothing to start",
            f"put a front before it with --replica {engine.url}; or replay a trace against it: "
            f"llmctl bench --plan plan.json --url {engine.url}",
        )
    refuse_unservable(policy, engine.name)
    laws = laws_from_fit(plan.fit)
    workers = [
        Worker(
            index,
            laws.rounds if policy.continuous else laws.latency,
            laws.round_memory if policy.continuous else laws.memory,
            swap=laws.swap,
            host_tokens=laws.host_tokens,
            joining=laws.joining,
            slots=laws.slots,
        )
        for index in range(plan.workers)
    ]
    if event_sink is None:
        return Scheduler(policy, workers)
    chosen = plan.settings
    event_sink(EventLogHeader(FORMAT, chosen.policy, dict(chosen.parameters), plan.workers))
    return RecordingScheduler(policy, workers, event_sink)


def make_stats(plan: Plan) -> Stats:
    """Counters that know the range in which the laws of the plan's workers were measured."""
    return Stats(plan.fit.prefill.valid.both(plan.fit.decode.valid), plan.recipe.sla)


def model_name(plan: Plan) -> str:
    """The default name by which clients call the model."""
    recipe = plan.recipe
    return recipe.serve.served_model_name or (
        recipe.name if recipe.model.source == "random" else recipe.model.source
    )


def make_limits(plan: Plan, admission: str | None, *, replays: bool) -> LatencyLimits:
    """The limits that admission compares the forecast with.

    `admission` is "targets" or "queue"; None takes the recipe's choice. A server for `replays`
    defaults to "queue", so that it refuses no request of a trace by a forecast.
    """
    admission = admission or ("queue" if replays else plan.recipe.serve.admission)
    return LatencyLimits.of(plan.recipe.sla) if admission == "targets" else UNLIMITED


def make_settings(plan: Plan, *, model: str = "", **others: bool) -> FrontSettings:
    """The front's settings: limits from the plan, `others` by the names of `FrontSettings`."""
    serve = plan.recipe.serve
    engine = plan.fit.engine
    return FrontSettings(
        model=model or model_name(plan),
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        max_new_tokens=serve.max_new_tokens,
        max_waiting=serve.max_waiting,
        request_timeout_s=serve.request_timeout_s or math.inf,
        **others,
    )
