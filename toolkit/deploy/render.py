"""A plan as the files of a target: the target's own, and what every target has: the plan,
EXPLAIN.md, bench.sh; alert rules and a dashboard where its metrics are known.

The same order gives the same files, to the byte.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import toolkit
from toolkit.deploy.monitoring import Names, dashboard, job, rules, series
from toolkit.deploy.order import ExplainedValue, Order, Reckoned, Rendered, fill, told
from toolkit.deploy.plan import LIMITS, PREDICTED
from toolkit.deploy.reckon import waiting_threshold
from toolkit.deploy.targets import compose, kuberay, kubernetes, local, ray, sglang, systemd, vllm
from toolkit.deploy.targets.objects import DASHBOARD
from toolkit.engine_traits import traits_of
from toolkit.errors import InputError, nearest
from toolkit.files.bench import Validation
from toolkit.files.plan import Plan
from toolkit.files.strict import dump_yaml
from toolkit.files.tuning import breaks, broken
from toolkit.traces.types import FOLDER

# What a deployment claims, and how to check it: EXPLAIN.md and bench.sh.

KEPT = {True: "yes", False: "NO", None: "-"}
FOREIGN = ("vllm", "sglang")  # targets whose server is not ours
SHOWN = ("goodput_rps", "throughput_rps", "output_tokens_per_s", "sla_attainment_percent")
USUAL_ERROR, LEAST_ERROR = 25, 10  # percent; what a replay may be off before bench.sh complains


def explanation(target: str, order: Order, rendered: Rendered) -> str:
    """EXPLAIN.md: every value of the files and of the plan, and the predictions with their errors."""
    plan = order.plan
    planned = [
        ExplainedValue(key, one.value, one.source)
        for key, one in plan.explained.items()
        if not key.startswith(PREDICTED)
    ]
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
        claims=[
            f"{key}: {plan.predicted[key]:.4g} predicted" for key in SHOWN if key in plan.predicted
        ],
    )


def max_error(validation: Validation | None) -> int:
    """Percent that a replay may be off: the worst that was seen in validation, and a usual value
    without one.
    """
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


def _allowances(target: str, order: Order) -> list[ExplainedValue]:
    """The options that a server needs to start a plan which breaks limits, where `target` starts
    one of ours.
    """
    if target in FOREIGN:
        return []
    because = "the plan is predicted to break limits, and was rendered all the same"
    return [ExplainedValue(f"serve {option}", "given", because) for option in order.allowances]


def _predicted(order: Order) -> list[tuple[str, str, str]]:
    """Metric, value, and the prediction's error; rates before the rest. Targets stand among the
    limits.
    """
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
    source = next(
        (one.source for key, one in plan.explained.items() if key.startswith(PREDICTED)), ""
    )
    if plan.workload is None:
        return source.capitalize()
    return f"{source.capitalize()} {plan.workload.trace}, at {plan.workload.request_rate_rps:.4g} requests/s"


TARGETS: dict[str, Callable[[Order], Rendered]] = {
    "local": local.render,
    "systemd": systemd.render,
    "compose": compose.render,
    "kubernetes": kubernetes.render,
    "kuberay": kuberay.render,
    "ray": ray.render,
    "vllm": vllm.render,
    "sglang": sglang.render,
}
OURS = (
    "local",
    "systemd",
    "compose",
    "ray",
)  # whose metrics are llmctl's, with no operator to read rules from objects
MONITORED = ("kubernetes", "kuberay")  # by Prometheus' operator
BOARDS: dict[str, Names] = {
    **dict[str, Names].fromkeys([*OURS, *MONITORED], "llmctl"),
    "vllm": "vllm",  # its own metrics
}
FLAGS = ("vllm", "sglang")  # whose flags may come from a server that was measured from outside
FLAGS_RUN = "render its flags, for 'vllm' or 'sglang'"
VLLMS_RUN = (
    "render it for 'local', or for 'vllm': its flags, for wherever vLLM's own server is started"
)
NOT_OURS = {  # why a target cannot start vLLM's own server
    "systemd": "it does not tell systemd when it is ready",
    "compose": "it has no /ready to ask",
    "kubernetes": "it has no /ready to ask",
    "kuberay": "it has no workers that Ray could run",
    "ray": "it has no workers that Ray could run",
}
FLEETS_RUN = (
    "render it for 'local', 'ray' or 'kuberay', where one front serves all kinds of workers"
)
ONE_KIND = {  # why a target has no place for workers of several kinds
    "systemd": "the unit's sandbox is made for one kind of device",
    "compose": "the service reserves one kind of device",
    "kubernetes": "pods of one Deployment are alike, and one Deployment for each kind would need a router before them",
    "vllm": "it starts one engine of one kind",
    "sglang": "it starts one engine of one kind",
}


def render_target(target: str, order: Order) -> dict[str, str]:
    """All files of `target` by name, in the order in which they are best read. `InputError` for an
    unknown target, and for a plan that the target cannot hold.
    """
    if target not in TARGETS:
        raise InputError(f"there is no target '{target}'", nearest(target, TARGETS))
    if order.plan.others and target in ONE_KIND:
        raise InputError(
            f"a fleet cannot be rendered for '{target}': {ONE_KIND[target]}", FLEETS_RUN
        )
    engine = order.plan.recipe.engine
    traits = traits_of(engine.name)
    if not traits.started and target not in FLAGS:
        raise InputError(
            f"engine '{engine.name}' is a server already, at {engine.url}: "
            f"'{target}' has nothing to start",
            FLAGS_RUN,
        )
    if traits.started and traits.server and target in NOT_OURS:
        raise InputError(
            f"engine '{engine.name}' cannot be rendered for '{target}': {NOT_OURS[target]}",
            VLLMS_RUN,
        )
    rendered = TARGETS[target](order)
    files = dict(sorted(rendered.files.items()))
    plan_file = next((name for name in files if name.endswith("plan.json")), "plan.json")
    files[plan_file] = order.text
    names: Names | None = traits.metrics if traits.started and traits.server else BOARDS.get(target)
    if target in OURS and names == "llmctl":
        threshold = waiting_threshold(order.plan, order.trace)
        alerts = rules(order, series(order, monitored=False), threshold)
        files["alerts.yaml"] = dump_yaml([alerts], order.comment())
        rendered = replace(rendered, told=[*rendered.told, *_alerts_told(order, threshold)])
    if names is not None:
        label = job(order, monitored=target in MONITORED) if names == "llmctl" else ""
        board = dashboard(order.plan.recipe.sla, names, order.name, order.comment(), label)
        files[DASHBOARD] = json.dumps(board, indent=1) + "\n"
    files["bench.sh"] = bench_script(order, plan_file, rendered.url)
    return {"EXPLAIN.md": explanation(target, order, rendered)} | files


def _alerts_told(order: Order, threshold: Reckoned[int | None]) -> list[ExplainedValue]:
    """What is to be known of alerts.yaml."""
    name = job(order, monitored=False)
    return [
        ExplainedValue(
            "alerts.yaml: job",
            name,
            "the job_name that Prometheus' scrape configuration gives this server",
        ),
        told("alerts.yaml: LlmctlQueue", threshold, "none" if threshold.value is None else None),
    ]
