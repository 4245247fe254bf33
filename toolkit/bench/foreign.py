"""Whether a plan's predictions are of the engine that serves, as far as a server tells who it is."""

from __future__ import annotations

from toolkit.bench.costs import counts_or_none
from toolkit.endpoints.scrape import scrape
from toolkit.endpoints.target import Target, version
from toolkit.files.identity import Identity, OnForeign, refuse_foreign
from toolkit.files.plan import Plan
from toolkit.sched.policies import ELSEWHERE

ENGINE_INFO = "llmctl_engine_info"
PREDICTED = "llmctl_predicted_batch_seconds_total"


def check_server(plan: Plan, target: Target, on_foreign: OnForeign | None = None) -> None:
    """`ForeignError` where the plan's fit is of another engine, model or device than `target`'s; see `refuse_foreign`.

    llmctl's own servers say all of it in /metrics; of others /version and the model's name are compared.
    """
    refuse_foreign(plan.fit.engine, [_served(plan, target)], on_foreign)


def tells_of_its_laws(plan: Plan, target: Target) -> bool:
    """Whether the server's predicted batch times are by the plan's laws: not where it was fitted from outside.

    vLLM's tells of them where llmctl started it.
    """
    if plan.fit.engine.engine == ELSEWHERE:
        return False
    return target.own or PREDICTED in counts_or_none(target)


def _served(plan: Plan, target: Target) -> Identity:
    engine = plan.fit.engine.engine
    if engine == ELSEWHERE:  # whatever it is: it was asked the same two questions when it was profiled
        return {"engine": f"{engine} {version(target)}".strip(), "model": target.model}
    if not target.own:
        return {"engine": f"{engine} {version(target)}".strip()}
    return next((labels for name, labels, _ in scrape(target) if name == ENGINE_INFO), {})
