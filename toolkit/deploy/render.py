"""A plan as the files of a target.

Besides a target's own files, every target has the plan, EXPLAIN.md and bench.sh, and alert rules
and a dashboard where its metrics are known. The same order gives the same files, to the byte. A new
target is a file in `targets/` and a line in `TARGETS`. The last part writes the folder, and keeps
what was edited by hand.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import toolkit
from toolkit.deploy.monitoring import Names, RulesFile, dashboard, job, replica_rules, rules, series
from toolkit.deploy.order import ExplainedValue, Order, Rendered, explain_value, inside
from toolkit.deploy.plan import LIMITS
from toolkit.deploy.reckon import margin_percent, waiting_threshold
from toolkit.deploy.replicas import KindReplicas, Replication
from toolkit.deploy.targets import (
    compose,
    engine_flags,
    kubernetes,
    script,
    statefulset,
    systemd,
)
from toolkit.deploy.targets.objects import DASHBOARD
from toolkit.engine_traits import traits_of
from toolkit.errors import InputError, nearest
from toolkit.files.io import write_file, write_text
from toolkit.files.plan import PREDICTED, Plan
from toolkit.files.strict import Strict, dump_yaml, read_bytes, validate
from toolkit.files.tuning import breaks, broken
from toolkit.traces.types import FOLDER

KEPT = {True: "yes", False: "NO", None: "-"}
SHOWN = ("goodput_rps", "throughput_rps", "output_tokens_per_s", "sla_attainment_percent")


@dataclass(frozen=True, slots=True)
class TargetTraits:
    """How a plan is rendered for one place, and what its metrics are there.

    Args:
        of_replicas: renders an engine that is a server of its own: replicas, and a front before
            them; None: such an engine is rendered as any other.
        metrics: the names of its metrics; None: they are not known.
        operator: Prometheus' operator reads its rules from objects.
        together: Prometheus finds all replicas at the front.
        foreign: it starts another server, and its flags may come from one measured from outside.
        one_kind: why it cannot have workers of several kinds; '': it can.
    """

    render: Callable[[Order], Rendered]
    of_replicas: Callable[[Order], Rendered] | None = None
    metrics: Names | None = "llmctl"
    operator: bool = False
    together: bool = False
    foreign: bool = False
    one_kind: str = ""


ONE_ENGINE = "it starts one engine of one kind"
ONE_DEPLOYMENT = (
    "the pods of a Deployment are alike, and a Deployment for each kind would need a router in "
    "front of them"
)
TARGETS = {
    "local": TargetTraits(script.render_local),
    "systemd": TargetTraits(
        systemd.render,
        systemd.render_replicas,
        one_kind="the unit's sandbox is made for one kind of device",
    ),
    "compose": TargetTraits(
        compose.render, compose.render_replicas, one_kind="the service reserves one kind of device"
    ),
    "kubernetes": TargetTraits(
        kubernetes.render, statefulset.render, operator=True, one_kind=ONE_DEPLOYMENT
    ),
    "ray": TargetTraits(script.render_ray, script.render_ray_replicas, together=True),
    "vllm": TargetTraits(
        engine_flags.render_vllm, metrics="vllm", foreign=True, one_kind=ONE_ENGINE
    ),
    "sglang": TargetTraits(
        engine_flags.render_sglang, metrics=None, foreign=True, one_kind=ONE_ENGINE
    ),
}
# Targets of earlier versions, and what replaces them.
GONE = {
    "kuberay": "for several machines render it for 'ray', and start the cluster with KubeRay "
    "yourself; one pod a replica: 'kubernetes'"
}
RENDER_FLAGS = "render its flags, for 'vllm' or 'sglang'"
RENDER_SERVERS = "render it for 'kubernetes', 'compose', 'systemd' or 'local'"
RENDER_FLEET = "render it for 'local' or 'ray', where one front serves all kinds of workers"


def render_target(name: str, order: Order) -> dict[str, str]:
    """All files of the target `name`, by their names, in the order in which they are best read.

    Raises `InputError` for an unknown target, and for a plan that the target cannot serve.
    """
    engine = order.plan.recipe.engine
    traits = traits_of(engine.name)
    own_server = traits.started and traits.server
    if name in GONE:
        raise InputError(f"there is no target '{name}' any more", GONE[name])
    if name not in TARGETS:
        raise InputError(f"there is no target '{name}'", nearest(name, TARGETS))
    target = TARGETS[name]
    of_replicas = target.of_replicas if own_server else None
    if order.plan.others and target.one_kind and not of_replicas:
        serving = "servers" if own_server else "workers"
        kinds = ", ".join(kind.recipe.name for kind in order.plan.kinds)
        raise InputError(
            f"a fleet of {serving} ({kinds}) cannot be rendered for '{name}': {target.one_kind}",
            RENDER_SERVERS if own_server else RENDER_FLEET,
        )
    if not traits.started and not target.foreign:
        raise InputError(
            f"engine '{engine.name}' is a server already, at {engine.url}: '{name}' has nothing "
            "to start",
            RENDER_FLAGS,
        )
    rendered = (of_replicas or target.render)(order)
    files = dict(sorted(rendered.files.items()))
    lines = [*rendered.explained]
    plan_file = next((file for file in files if Path(file).name == "plan.json"), "plan.json")
    files[plan_file] = order.text
    metrics: Names | None = traits.metrics if own_server else target.metrics
    behind = Replication(order).kinds if of_replicas else []
    labelled = of_replicas is not None or metrics == "llmctl"  # its series have known labels
    if labelled and not target.operator:
        alerts, explained = _alerts(order, behind, apart=not target.together)
        files["alerts.yaml"] = dump_yaml(alerts, order.comment())
        lines += explained
    if metrics is not None:
        # Of a fleet: all jobs, for the dashboard can choose one.
        of = behind[0].name if len(behind) == 1 else ""
        alike = labelled and len(behind) < 2
        label = job(order, monitored=target.operator, of=of) if alike else ""
        front = job(order, monitored=target.operator) if behind else ""
        about = order.name, order.comment(), label, front
        board = dashboard(order.plan.recipe.sla, metrics, *about)
        files[DASHBOARD] = json.dumps(board, indent=1) + "\n"
    files["bench.sh"] = _bench_script(order, plan_file, rendered.url)
    because = "the plan is predicted to break limits and was rendered anyway"
    allowances = [] if target.foreign else order.allowances
    lines += [ExplainedValue(f"serve {option}", "given", because) for option in allowances]
    return {"EXPLAIN.md": _explanation(name, order, lines, rendered.start)} | files


def _alerts(
    order: Order, replicas: Sequence[KindReplicas], *, apart: bool
) -> tuple[RulesFile, list[ExplainedValue]]:
    """The rules for Prometheus without its operator, for a server or for a front with `replicas`,
    and their explanation. Only kinds that are scraped `apart` have an alert about their queue.
    """
    own = series(order, monitored=False)
    why = "the job_name that Prometheus' scrape configuration must give"
    lines = [ExplainedValue("alerts.yaml: job", job(order, monitored=False), f"{why} this server")]
    scraped = replicas if apart or len(replicas) == 1 else []
    for kind in scraped:
        line = ExplainedValue("alerts.yaml: job", kind.name, f"{why} its replicas")
        lines += kind.about([line])
    if replicas:
        queues = [
            (series(order, monitored=False, of=kind.name), kind.threshold) for kind in scraped
        ]
        return replica_rules(order, own, queues), lines
    threshold = waiting_threshold(order.plan, order.trace)
    lines.append(explain_value("alerts.yaml: LlmctlQueue", threshold))
    return rules(order, own, threshold), lines


def _explanation(target: str, order: Order, explained: Sequence[ExplainedValue], start: str) -> str:
    """EXPLAIN.md: every value of the files and the plan, and predictions with their errors."""
    plan = order.plan
    engine = order.plan.fit.engine
    validation = order.validation
    measured = f"with engine {engine.engine} {engine.engine_version}"
    basis = f"The laws were measured on {engine.device} {measured}."
    if engine.analytic:
        basis = f"Nothing here was measured: {engine.analytic}."
    errors: dict[str, str] = {}
    if validation is None:
        basis += " Predictions of this fit are not validated yet: `llmctl validate`."
    else:
        basis += f" {validation.summary().capitalize()}."
        errors = {row.metric: f"{row.error_percent:+.1f} %" for row in validation.metrics}
    predicted = [  # targets are among the limits
        (name, f"{plan.predicted[name]:.4g}", errors.get(name, "not validated"))
        for name in dict.fromkeys([*SHOWN, *errors])
        if name in plan.predicted
    ]
    # What the predictions rest on, as the beginning of a sentence.
    sources = [one.source for key, one in plan.explained.items() if key.startswith(PREDICTED)]
    predicted_on = sources[0].capitalize() if sources else ""
    if plan.workload is not None:
        rate = f"{plan.workload.request_rate_rps:.4g} requests/s"
        predicted_on += f" {plan.workload.trace}, at {rate}"
    verdict = f"All are predicted to be kept. {predicted_on}."
    if broken(plan.limits):
        verdict = f"The plan is predicted to {breaks(plan.limits)}. It was rendered anyway."
    elif any(limit.kept is None for limit in plan.limits):
        source = plan.explained[LIMITS].source if LIMITS in plan.explained else ""
        verdict = f"Not predicted: {source}." if source else "Not predicted."
    planned = [
        ExplainedValue(key, one.value, one.source)
        for key, one in plan.explained.items()
        if not key.startswith(PREDICTED)
    ]
    return order.fill(
        "explain.md",
        title=plan.recipe.name,
        version=toolkit.__version__,
        target=target,
        stamp=order.stamp(),
        basis=basis,
        start=start,
        limits=[
            (limit.name, limit.allowed(), limit.prediction(), KEPT[limit.kept])
            for limit in plan.limits
        ],
        verdict=verdict,
        broken=bool(broken(plan.limits)),
        explained=explained,
        planned=planned,
        predicted=predicted,
        predicted_on=predicted_on,
    )


def _bench_script(order: Order, plan_file: str, url: str) -> str:
    """bench.sh: replays the traffic that the plan was tuned for and compares with the predictions.

    The server is at `url`; if that is '', where the recipe has it listen.
    """
    plan = order.plan
    return order.fill(
        "bench.sh",
        plan_file=plan_file,
        trace=shipped_trace(plan),
        rate=f"{plan.workload.request_rate_rps:g}" if plan.workload else "",
        url=url or plan.recipe.engine.url or f"http://127.0.0.1:{plan.recipe.serve.port or 8000}",
        max_error=margin_percent(order).value,
        claims=[
            f"{key}: {plan.predicted[key]:.4g} predicted" for key in SHOWN if key in plan.predicted
        ],
    )


def shipped_trace(plan: Plan) -> str:
    """The name of the trace that the plan was tuned on, if it ships with the package; else ''."""
    stem = plan.workload.trace.removesuffix(".jsonl") if plan.workload else ""
    return stem if (FOLDER / f"{stem}.jsonl").is_file() and stem else ""


# A folder of rendered files: writing it without losing edits, and comparing it with new files.
#
# `rendered.json` in it lists the rendered files with their sha256. A file with content that is
# neither the recorded nor the new one was changed by hand: it is kept, and the error names it.

MANIFEST = "rendered.json"
MAX_NAMES = 3  # in an error; the other files are counted


class Manifest(Strict):
    """rendered.json."""

    schema_version: Literal[1] = 1
    tool_version: str
    target: str
    name: str
    made_from: dict[str, str]
    files: dict[str, str]


@dataclass(frozen=True, slots=True)
class Change:
    """A file that differs from the one that would be rendered, with a unified diff."""

    file: str
    diff: str


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of `folder`; None where nothing was rendered to it."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    return validate(Manifest, read_bytes(path), path, "render to another folder")


def changes(files: Mapping[str, str], folder: Path) -> list[Change]:
    """The changes that `write` would make, also to files that it would remove."""
    manifest = read_manifest(folder)
    gone = {name: "" for name in manifest.files if name not in files} if manifest else {}
    found = []
    for name, content in (dict(files) | gone).items():
        path = inside(folder, name)
        old = read_bytes(path).decode(errors="replace") if path.exists() else ""
        lines = difflib.unified_diff(
            old.splitlines(keepends=True),
            content.splitlines(keepends=True),
            f"{name} (there)",
            f"{name} (rendered)",
        )
        whole = (ln if ln.endswith("\n") else f"{ln}\n\\ no newline at the end\n" for ln in lines)
        if diff := "".join(whole):
            found.append(Change(name, diff))
    return found


def write(files: Mapping[str, str], folder: Path, manifest: Manifest, *, force: bool) -> None:
    """Write all files, each atomically, then the manifest; remove files of an earlier rendering.

    Unless `force`, files that were changed by hand raise `InputError` before anything is written.
    """
    before = read_manifest(folder)
    known = before.files if before else {}
    edited = []
    for name, content in {**dict.fromkeys(known, ""), **files}.items():
        path = inside(folder, name)
        expected = (known.get(name, ""), digest(content.encode()))
        if path.exists() and digest(read_bytes(path)) not in expected:
            edited.append(name)
    if edited and not force:
        more = f" and {len(edited) - MAX_NAMES} more" if len(edited) > MAX_NAMES else ""
        names = ", ".join(str(folder / name) for name in edited[:MAX_NAMES])
        raise InputError(
            f"changed by hand since they were rendered: {names}{more}",
            "see what differs with --check; --force writes over them",
        )
    mask = os.umask(0o022)  # the mask can only be read by setting it
    os.umask(mask)
    for name, content in files.items():
        path = inside(folder, name)
        write_text(path, content)
        if path.suffix == ".sh":
            path.chmod(path.stat().st_mode | 0o111 & ~mask)
    for name in known.keys() - files.keys():
        inside(folder, name).unlink(missing_ok=True)
    write_file(manifest, folder / MANIFEST)


def manifest_of(
    files: Mapping[str, str], target: str, name: str, made_from: Mapping[str, str]
) -> Manifest:
    """The manifest of `files`."""
    return Manifest(
        tool_version=toolkit.__version__,
        target=target,
        name=name,
        made_from=dict(made_from),
        files={name: digest(content.encode()) for name, content in files.items()},
    )


def digest(content: bytes) -> str:
    """sha256, in hex."""
    return hashlib.sha256(content).hexdigest()
