"""What a deployment claims, and how to check it: EXPLAIN.md and bench.sh."""

from __future__ import annotations

import math

import toolkit
from toolkit.deploy.explain import LIMITS, PREDICTED
from toolkit.deploy.order import Order, Rendered, Told
from toolkit.deploy.templating import fill
from toolkit.files.limits import breaks, broken
from toolkit.files.plan import Plan
from toolkit.files.validation import Validation
from toolkit.traces.shipped import FOLDER

KEPT = {True: "yes", False: "NO", None: "-"}
FOREIGN = ("vllm", "sglang")  # targets whose server is not ours
SHOWN = ("goodput_rps", "throughput_rps", "output_tokens_per_s", "sla_attainment_percent")
USUAL_ERROR, LEAST_ERROR = 25, 10  # percent; what a replay may be off before bench.sh complains


def explanation(target: str, order: Order, rendered: Rendered) -> str:
    """EXPLAIN.md: every value of the files and of the plan, and the predictions with their errors."""
    plan = order.plan
    planned = [Told(key, one.value, one.source) for key, one in plan.explained.items() if not key.startswith(PREDICTED)]
    return fill(
        "explain.md",
        title=plan.recipe.name,
        version=toolkit.__version__,
        target=target,
        stamp=order.stamp(),
        basis=_basis(order),
        start=rendered.start,
        limits=[(one.name, one.allowed(), one.told(), KEPT[one.kept]) for one in plan.limits],
        limits_said=_limits_said(plan),
        broken=bool(broken(plan.limits)),
        told=[*rendered.told, *_allowances(target, order)],
        planned=planned,
        predicted=_predicted(order),
        predicted_on=_predicted_on(plan),
    )


def bench_script(order: Order, plan_file: str, url: str = "") -> str:
    """bench.sh: replays the traffic that the plan was tuned for, measured beside predicted.

    Against `url`, or where the recipe has its server listen.
    """
    plan = order.plan
    return fill(
        "bench.sh",
        comment=order.comment(),
        plan_file=plan_file,
        trace=shipped_trace(plan),
        rate=f"{plan.workload.request_rate_rps:g}" if plan.workload else "",
        url=url or plan.recipe.engine.url or f"http://127.0.0.1:{plan.recipe.serve.port or 8000}",
        max_error=max_error(order.validation),
        claims=[f"{key}: {plan.predicted[key]:.4g} predicted" for key in SHOWN if key in plan.predicted],
    )


def max_error(validation: Validation | None) -> int:
    """Percent that a replay may be off: the worst that was seen in validation, and a usual value without one."""
    if validation is None:
        return USUAL_ERROR
    worst = max((abs(each.worst_percent) for each in validation.metrics), default=0.0)
    return max(math.ceil(worst), LEAST_ERROR)


def shipped_trace(plan: Plan) -> str:
    """The trace that the plan was tuned on, where it ships with the package."""
    stem = plan.workload.trace.removesuffix(".jsonl") if plan.workload else ""
    return stem if (FOLDER / f"{stem}.jsonl").is_file() and stem else ""


def _basis(order: Order) -> str:
    """What the predictions rest on, in a sentence or two."""
    engine = order.plan.fit.engine
    measured = f"The laws were measured on {engine.device} with engine {engine.engine} {engine.engine_version}."
    if engine.analytic:
        measured = f"Nothing of this was measured: {engine.analytic}."
    if order.validation is None:
        return f"{measured} Nobody has validated predictions of this fit yet: `llmctl validate`."
    return f"{measured} {order.validation.summary().capitalize()}."


def _limits_said(plan: Plan) -> str:
    """Whether the plan keeps its limits, in a sentence or two."""
    source = plan.explained[LIMITS].source if LIMITS in plan.explained else ""
    if broken(plan.limits):
        return f"The plan is predicted to {breaks(plan.limits)}. It was rendered all the same."
    if any(one.kept is None for one in plan.limits):
        return f"Not predicted: {source}." if source else "Not predicted."
    return f"All are predicted to be kept. {_predicted_on(plan)}."


def _allowances(target: str, order: Order) -> list[Told]:
    """The options that a server needs to start a plan which breaks limits, where `target` starts one of ours."""
    if target in FOREIGN:
        return []
    because = "the plan is predicted to break limits, and was rendered all the same"
    return [Told(f"serve {option}", "given", because) for option in order.allowances]


def _predicted(order: Order) -> list[tuple[str, str, str]]:
    """Metric, value, and the prediction's error; rates before the rest. Targets stand among the limits."""
    plan, errors = order.plan, {}
    if order.validation:
        errors = {each.metric: f"{each.error_percent:+.1f} %" for each in order.validation.metrics}
    wanted = [*SHOWN, *errors]
    return [
        (name, f"{plan.predicted[name]:.4g}", errors.get(name, "not validated"))
        for name in dict.fromkeys(wanted)
        if name in plan.predicted
    ]


def _predicted_on(plan: Plan) -> str:
    source = next((one.source for key, one in plan.explained.items() if key.startswith(PREDICTED)), "")
    if plan.workload is None:
        return source.capitalize()
    return f"{source.capitalize()} {plan.workload.trace}, at {plan.workload.request_rate_rps:.4g} requests/s"
