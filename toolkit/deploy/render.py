"""A plan as the files of a target.

Every file is a template of `templates/`, or of a user's folder, filled with `Values`; the reason of
each value stands beside it as a comment. Besides a target's own files, every target has the plan
and bench.sh, and alert rules and a dashboard where its metrics are known. The same order gives the
same files, to the byte. A new target is a line in `TARGETS` and its templates. The last part writes
the folder, and keeps what was edited by hand.

A missing value is an error, never an empty string. Each value is quoted for its place by a filter:
`sh` for a shell, `unit` for a word of a command in a unit, `setting` for a whole value in a unit,
`q` for YAML, `compose` for Compose's YAML, `line` for a comment.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Literal

import jinja2

import toolkit
from toolkit.deploy.dashboard import Names, dashboard
from toolkit.deploy.flags import check_servable_elsewhere, vllm_start
from toolkit.deploy.order import KEY_FOLDER, Order, digest, inside
from toolkit.deploy.reckon import margin_percent
from toolkit.deploy.values import Values
from toolkit.engine_traits import traits_of
from toolkit.errors import InputError, nearest
from toolkit.files.io import write_file, write_text
from toolkit.files.plan import Plan
from toolkit.files.shipped import shipped_templates
from toolkit.files.strict import Strict, documents, read_bytes, validate
from toolkit.scaling.hpa import HpaRule
from toolkit.scaling.static import StaticRule
from toolkit.traces.types import FOLDER

SHOWN = ("goodput_rps", "throughput_rps", "output_tokens_per_s", "sla_attainment_percent")
MODELS = "/models"  # where a pod has the volume of models
# Of llmctl, and of the engine's Python, on a machine that runs units.
PROGRAM = "/opt/llmctl/bin/llmctl"
REPLICA_PYTHON = "/opt/vllm/bin/python"
RUNBOOKS = "https://example.org/llmctl/docs/how-to/alerts.html"  # a section for each alert
WHAT = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "gap between tokens",
    "mtpot": "longest gap in a request",
    "e2e": "time of a whole request",
}


def render_target(name: str, order: Order) -> dict[str, str]:
    """Return all files of the target `name`, by their names. The head of the first one says how to
    start it.

    Raises `InputError` for an unknown target, and for a plan that the target cannot serve.
    """
    if name not in TARGETS:
        raise InputError(f"there is no target '{name}'", nearest(name, TARGETS))
    plan = order.plan
    engine = plan.recipe.engine
    traits = traits_of(engine.name)
    own_server = traits.started and traits.server
    foreign = name == "vllm"
    if not traits.started and not foreign:
        raise InputError(
            f"engine '{engine.name}' is a server already, at {engine.url}: '{name}' has nothing "
            "to start",
            "render its flags, for 'vllm'",
        )
    cluster = name == "kubernetes"
    front = own_server and name in ("systemd", "compose", "kubernetes")
    rule = plan.settings.scaling
    if front and not cluster and rule is not None and rule.rule != StaticRule.name:
        raise InputError(
            f"'{name}' starts a fixed number of replicas, and the plan has a rule for them",
            "render it for kubernetes, or make a plan with --rule static",
        )
    values = Values(order, front=front, cluster=cluster)
    files = TARGETS[name](values)
    plan_file = "base/plan.json" if cluster else "plan.json"
    files[plan_file] = order.text
    metrics: Names = "vllm" if foreign else traits.metrics if own_server else "llmctl"
    labelled = front or metrics == "llmctl"  # its series have known labels
    if labelled and not cluster:
        files["alerts.yaml"] = fill("alerts.yaml", values)
    job = values.job(values.replica if front else values.name) if labelled else ""
    behind = values.job(values.name) if front else ""
    about = order.name, order.comment(), job, behind
    board = dashboard(plan.recipe.sla, metrics, *about)
    board_file = "monitoring/dashboard.json" if cluster else "dashboard.json"
    files[board_file] = json.dumps(board, indent=1) + "\n"
    told = plan.outcome.metrics
    files["bench.sh"] = fill(
        "bench.sh",
        values,
        plan_file=plan_file,
        trace=shipped_trace(plan),
        rate=f"{plan.workload.request_rate_rps:g}" if plan.workload else "",
        # A cluster's server is reached through kubectl port-forward.
        url=engine.url or f"http://127.0.0.1:{8000 if cluster else values.port}",
        max_error=margin_percent(order),
        claims=[f"{key}: {told[key]:.4g} predicted" for key in SHOWN if key in told],
    )
    return files


def _local(values: Values) -> dict[str, str]:
    return {"serve.sh": fill("local/serve.sh", values)}


def _vllm(values: Values) -> dict[str, str]:
    return {"serve.sh": fill("vllm/serve.sh", values, **vllm_start(values))}


def _systemd(values: Values) -> dict[str, str]:
    """Return a unit; behind a front, a template unit of the replicas and a target of all, too."""
    name = values.name
    files = {f"{name}.service": fill("systemd/server.service", values)}
    if values.front:
        files[f"{name}.target"] = fill("systemd/replicas.target", values)
        files[f"{values.replica}@.service"] = fill("systemd/replica.service", values)
        for number in range(values.count.value):
            env = fill("systemd/replica.env", values, number=number)
            files[f"replica-{number}.env"] = env
    return files | {"nginx.conf": fill("nginx.conf", values)}


def _compose(values: Values) -> dict[str, str]:
    """Return compose.yaml, with a service for each replica behind a front."""
    if values.front:
        check_servable_elsewhere(values.recipe, values.recipe.engine.name)
    files = {"compose.yaml": fill("compose/compose.yaml", values)}
    if values.front:
        files["alive.py"] = values.command.alive
    return files | {"nginx.conf": fill("nginx.conf", values)}


def _kubernetes(values: Values) -> dict[str, str]:
    """Return base/, the overlay monitoring/, over it autoscaling/ where something scales, and
    gateway/ beside them where a Gateway is named.
    """
    options = values.options
    if values.model.startswith(("/", ".", "~")) and not values.model.startswith(f"{MODELS}/"):
        raise InputError(
            f"model.source {values.model} is a folder of this machine, which a pod does not have",
            f"put it on a volume and set {MODELS}/NAME, with --model-claim; or set a hub id",
        )
    if options.fronts > 1 and not values.front:
        raise InputError(
            f"--fronts {options.fronts}: each pod is a whole server here, without a front",
            "add pods with --replicas",
        )
    pods = values.replica if values.front else values.name
    base: dict[str, dict[str, str]] = {
        "deployment.yaml": {},
        "service.yaml": {},
        "networkpolicy.yaml": {},
        "poddisruptionbudget.yaml": {"pods": pods},
    }
    monitoring: dict[str, dict[str, str]] = {
        "podmonitor.yaml": {"pods": values.name},
        "prometheusrule.yaml": {},
    }
    if values.front:
        check_servable_elsewhere(values.recipe, values.recipe.engine.name)
        base |= {"statefulset.yaml": {}, "service-replicas.yaml": {}}
        base |= {"networkpolicy-replicas.yaml": {}}
        monitoring["podmonitor-replicas.yaml"] = {"pods": values.replica}
    if options.fronts > 1:
        base["front-poddisruptionbudget.yaml"] = {"pods": values.name}
    files = _overlay("base", values, base) | _overlay("monitoring", values, monitoring)
    if values.front:
        files["base/alive.py"] = values.command.alive
    # Its file is in no kustomization, so that deleting the deployment keeps the models.
    if options.model_claim and values.models_gib:
        files["base/models-claim.yaml"] = fill("kubernetes/base/models-claim.yaml", values)
    if values.scaling.needs:
        scaler = "hpa.yaml" if values.scaling.rule == HpaRule.name else "scaledobject.yaml"
        files |= _overlay("autoscaling", values, {scaler: {}})
    if options.gateway:
        files |= _overlay("gateway", values, {"httproute.yaml": {}, "networkpolicy.yaml": {}})
    return files


# Of files that are rendered twice, for other pods, the second one's template.
SAME = {
    "front-poddisruptionbudget.yaml": "poddisruptionbudget.yaml",
    "podmonitor-replicas.yaml": "podmonitor.yaml",
}


def _overlay(
    folder: str, values: Values, objects: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    """Return the files of a folder of Kubernetes, with a kustomization.yaml of all `objects`."""
    files = {
        f"{folder}/{file}": fill(f"kubernetes/{folder}/{SAME.get(file, file)}", values, **more)
        for file, more in objects.items()
    }
    template = f"kubernetes/{folder}/kustomization.yaml"
    kustomization = fill(template, values, resources=sorted(objects))
    return {f"{folder}/kustomization.yaml": kustomization} | files


TARGETS: dict[str, Callable[[Values], dict[str, str]]] = {
    "local": _local,
    "systemd": _systemd,
    "compose": _compose,
    "kubernetes": _kubernetes,
    "vllm": _vllm,
}


def shipped_trace(plan: Plan) -> str:
    """Return the name of the trace that the plan was tuned on if it ships, else ''."""
    stem = plan.workload.trace.removesuffix(".jsonl") if plan.workload else ""
    return stem if (FOLDER / f"{stem}.jsonl").is_file() and stem else ""


def fill(template: str, values: Values, /, **more: object) -> str:
    """Fill a template with the values and `more`. Raises `InputError` for one of the user that
    cannot be read or filled, or does not make YAML where it should.
    """
    order = values.order
    given = {
        "v": values,
        "plan": values.plan,
        "recipe": values.recipe,
        "stamp": order.stamp(),
        "head": "\n".join(f"# {line(one)}" for one in order.comment().splitlines()),
        "replicas": values.count.value if values.front else 0,
        "key_folder": KEY_FOLDER,
        "program": PROGRAM,
        "replica_python": REPLICA_PYTHON,
        "runbooks": RUNBOOKS,
        "what": WHAT,
    }
    own = values.options.templates
    try:
        text = environment(own).get_template(f"{template}.j2").render(given | more)
        if template.endswith(".yaml"):  # blocks that are left out leave empty lines
            text = re.sub(r"\n{2,}", "\n", text).lstrip()
            if own:
                documents(text, f"{template} by --templates", "look at the template's indentation")
    except InputError:
        raise
    except Exception as error:  # whatever an expression of the user's template raises
        if own is None:
            raise
        raise _in_template(error, own, template) from None
    return text


def _in_template(error: Exception, own: Path, template: str) -> InputError:
    """Return the error of a template of the folder `own`, with the line that raised it."""
    place = f"{template}.j2"
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.startswith(str(own)):
            place = f"{frame.filename}:{frame.lineno}"
    problem = " ".join(str(error).split())
    return InputError(f"{place}: {problem}", f"the shipped ones are in {shipped_templates()}")


def unknown_templates(own: Path, target: str) -> list[str]:
    """Return the names in the folder `own` that no shipped template of the target has: nothing but
    another template can read them. Raises `InputError` for a folder that is not there.
    """
    shipped = shipped_templates()
    if not own.is_dir():
        copied = shlex.join(["cp", "-r", str(shipped / target), str(own)])
        raise InputError(f"--templates {own}: no such folder", f"copy the shipped ones: {copied}")
    names = (str(path.relative_to(own)) for path in sorted(own.rglob("*.j2")))
    return [
        name
        for name in names
        if not ((shipped / target / name).is_file() or (shipped / name).is_file())
    ]


@cache
def environment(own: Path | None) -> jinja2.Environment:
    """Return what finds a template: in the user's folder `own`, a copy of `templates/TARGET`, else
    the shipped one.
    """
    shipped = jinja2.FileSystemLoader(shipped_templates())
    changed = jinja2.FileSystemLoader(own) if own else shipped
    copies = jinja2.PrefixLoader(dict.fromkeys(TARGETS, changed))
    found = jinja2.Environment(
        loader=jinja2.ChoiceLoader([copies, changed, shipped]) if own else shipped,
        cache_size=0 if own else 400,  # a user's folder may change
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # nothing here is HTML; every value has its own filter
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    found.filters |= {
        "sh": lambda value: shlex.quote(str(value)),
        "unit": unit_word,
        "setting": unit_setting,
        "q": quoted,
        "compose": lambda value: quoted(str(value).replace("$", "$$")),
        "line": line,
    }
    return found


def unit_setting(value: object) -> str:
    """Quote a whole value of a unit file (systemd.unit): specifiers are doubled.

    Raises `InputError` for control characters and for a backslash at the end.
    """
    text = str(value)
    control = any(ord(character) < 32 or ord(character) == 127 for character in text)
    if control or text.endswith("\\"):
        raise InputError(f"{text!r} cannot stand in a unit file", "choose another path or name")
    return text.replace("%", "%%")


def unit_word(value: object) -> str:
    """Quote a word of a command in a unit file (systemd.service): `$` is doubled too."""
    doubled = unit_setting(value).replace("$", "$$")
    if re.fullmatch(r"[\w@%+=:,./$-]+", doubled, re.ASCII):
        return doubled
    return '"' + doubled.replace("\\", "\\\\").replace('"', '\\"') + '"'


def quoted(value: object) -> str:
    """Quote a text for YAML, in double quotes; only printable ASCII stands for itself."""
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + re.sub(r"[^ -~]", lambda found: f"\\U{ord(found[0]):08x}", escaped) + '"'


def line(value: object) -> str:
    """Return text for one line of a comment."""
    return "".join(character if character.isprintable() else " " for character in str(value))


# A folder of rendered files: writing it without losing edits, and comparing it with new files.
#
# `rendered.json` in it lists the rendered files with their sha256. A file with content that is
# neither the recorded nor the new one was changed by hand: it is kept, and the error names it.

MANIFEST = "rendered.json"


class Manifest(Strict):
    """rendered.json."""

    schema_version: Literal[1] = 1
    tool_version: str
    target: str
    files: dict[str, str]


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of `folder`; None where nothing was rendered to it."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    return validate(Manifest, read_bytes(path), path, "render to another folder")


def write(files: Mapping[str, str], folder: Path, target: str, *, force: bool) -> Manifest:
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
        names = ", ".join(str(folder / name) for name in edited)
        raise InputError(
            f"changed by hand since they were rendered: {names}",
            "render to another folder to see what differs; --force writes over them",
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
    digests = {name: digest(content.encode()) for name, content in files.items()}
    manifest = Manifest(tool_version=toolkit.__version__, target=target, files=digests)
    write_file(manifest, folder / MANIFEST)
    return manifest
