"""A plan as the files of a target: the target's own, and what every target has: the plan, EXPLAIN.md, bench.sh;
alert rules and a dashboard where its metrics are known.

The same order gives the same files, to the byte.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from toolkit.deploy.alerts import job, rules, series
from toolkit.deploy.claims import bench_script, explanation
from toolkit.deploy.grafana import Names, dashboard
from toolkit.deploy.order import Order, Reckoned, Rendered, Told, told
from toolkit.deploy.targets import compose, kuberay, kubernetes, local, ray, sglang, systemd, vllm
from toolkit.deploy.targets.objects import DASHBOARD
from toolkit.deploy.threshold import waiting_threshold
from toolkit.errors import InputError, nearest
from toolkit.files.yaml_text import dump_yaml

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
OURS = ("local", "systemd", "compose", "ray")  # whose metrics are llmctl's, with no operator to read rules from objects
MONITORED = ("kubernetes", "kuberay")  # by Prometheus' operator
BOARDS: dict[str, Names] = {
    **dict[str, Names].fromkeys([*OURS, *MONITORED], "llmctl"),
    "vllm": "vllm",  # its own metrics
}
FLAGS = ("vllm", "sglang")  # whose flags may come from a server that was measured from outside
FLAGS_RUN = "render its flags, for 'vllm' or 'sglang'"
VLLMS_RUN = "render it for 'local', or for 'vllm': its flags, for wherever vLLM's own server is started"
NOT_OURS = {  # why a target cannot start vLLM's own server
    "systemd": "it does not tell systemd when it is ready",
    "compose": "it has no /ready to ask",
    "kubernetes": "it has no /ready to ask",
    "kuberay": "it has no workers that Ray could run",
    "ray": "it has no workers that Ray could run",
}
FLEETS_RUN = "render it for 'local', 'ray' or 'kuberay', where one front serves all kinds of workers"
ONE_KIND = {  # why a target has no place for workers of several kinds
    "systemd": "the unit's sandbox is made for one kind of device",
    "compose": "the service reserves one kind of device",
    "kubernetes": "pods of one Deployment are alike, and one Deployment for each kind would need a router before them",
    "vllm": "it starts one engine of one kind",
    "sglang": "it starts one engine of one kind",
}


def render_target(target: str, order: Order) -> dict[str, str]:
    """All files of `target` by name, in the order in which they are best read. `InputError` for an unknown target,
    and for a plan that the target cannot hold."""
    if target not in TARGETS:
        raise InputError(f"there is no target '{target}'", nearest(target, TARGETS))
    if order.plan.others and target in ONE_KIND:
        raise InputError(f"a fleet cannot be rendered for '{target}': {ONE_KIND[target]}", FLEETS_RUN)
    if order.plan.recipe.engine.name == "openai" and target not in FLAGS:
        url = order.plan.recipe.engine.url
        raise InputError(f"engine 'openai' is a server already, at {url}: '{target}' has nothing to start", FLAGS_RUN)
    if order.plan.recipe.engine.name == "vllm" and target in NOT_OURS:
        raise InputError(f"engine 'vllm' cannot be rendered for '{target}': {NOT_OURS[target]}", VLLMS_RUN)
    rendered = TARGETS[target](order)
    files = dict(sorted(rendered.files.items()))
    plan_file = next((name for name in files if name.endswith("plan.json")), "plan.json")
    files[plan_file] = order.text
    names: Names | None = "vllm" if order.plan.recipe.engine.name == "vllm" else BOARDS.get(target)
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


def _alerts_told(order: Order, threshold: Reckoned[int | None]) -> list[Told]:
    """What is to be known of alerts.yaml."""
    name = job(order, monitored=False)
    return [
        Told("alerts.yaml: job", name, "the job_name that Prometheus' scrape configuration gives this server"),
        told("alerts.yaml: LlmctlQueue", threshold, "none" if threshold.value is None else None),
    ]
