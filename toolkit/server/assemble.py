"""Build what serves a plan: the scheduler, its counters, and its limits."""

from __future__ import annotations

from collections.abc import Callable

from toolkit.engine_traits import traits_of
from toolkit.errors import InputError
from toolkit.estimators.load import laws_from_fit
from toolkit.files.plan import Plan
from toolkit.routing.admission import UNLIMITED, LatencyLimits
from toolkit.sched.eventlog import FORMAT, Event, EventLogHeader, RecordingScheduler
from toolkit.sched.policies import make_policy, refuse_unservable
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Worker
from toolkit.server.options import ServerOptions
from toolkit.server.stats import Stats


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


def make_limits(plan: Plan, options: ServerOptions) -> LatencyLimits:
    """Return the targets with which admission compares the forecast. A server for replays refuses
    no request of a trace by a forecast, unless it is told to.
    """
    default = "queue" if options.allow_end_after else plan.recipe.serve.admission
    admission = options.admission or default
    return LatencyLimits.of(plan.recipe.sla) if admission == "targets" else UNLIMITED
