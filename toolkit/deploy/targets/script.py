"""Targets `local` and `ray`: a script that runs `llmctl serve` in the foreground of a machine.

For `ray` the machine belongs to a Ray cluster, and the workers are actors on the cluster's
machines, or actors there start the servers of an engine's own.
"""

from __future__ import annotations

from collections.abc import Mapping

from toolkit.cluster.places import MachineShare, node_labels
from toolkit.deploy.order import SECONDS, ExplainedValue, Order, Rendered, Sourced, explain_value
from toolkit.deploy.reckon import cpus, drain_s, gpus
from toolkit.deploy.replicas import Replication
from toolkit.files.plan import Kind

RAY = ("--ray", "auto")
JOINED = ExplainedValue(
    "serve.sh --ray", "auto", "RAY_ADDRESS, or the cluster that the machine belongs to"
)

START = (
    "`./serve.sh` starts it, `llmctl status` shows it, Ctrl-C or `llmctl stop` drains and ends it."
)
START_RAY = """\
On a machine of the cluster: `./serve.sh` starts it, `llmctl status` shows it, `llmctl stop` drains
and ends it. The cluster's token comes from RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH. For another
cluster: `./serve.sh --ray HOST:6379`."""


def render_local(order: Order) -> Rendered:
    """Render serve.sh for one machine."""
    script, drain = _script(order, drain_s(order))
    return Rendered({"serve.sh": script}, [drain], START)


def render_ray(order: Order) -> Rendered:
    """Render serve.sh for a Ray cluster. `InputError` for kinds of machines with equal labels."""
    script, drain = _script(order, drain_s(order), RAY)
    lines = [JOINED, drain]
    plan = order.plan
    if plan.others:
        for kind, labels in zip(plan.kinds, node_labels(plan.kinds), strict=True):
            lines.append(_actors(kind, labels, kind.workers))
    else:
        spread = "plan: workers, spread over the machines"
        lines += [
            ExplainedValue("actors", str(plan.workers), spread),
            explain_value("GPUs of all actors", gpus(plan.recipe)),
            explain_value("CPUs of actors and front", cpus(plan.recipe)),
        ]
    return Rendered({"serve.sh": script}, lines, START_RAY)


def render_ray_replicas(order: Order) -> Rendered:
    """Render serve.sh for a front with servers on a Ray cluster. Raises as `render_ray`."""
    replicas = Replication(order)
    kinds = order.plan.kinds
    labels = node_labels(kinds)
    counts = [kind.count.value for kind in replicas.kinds]
    number = [("--workers", counts[0])] if sum(counts) != order.plan.workers else []
    script, drain = _script(order, replicas.drain, RAY, *number)
    lines = [JOINED, *replicas.explained_on_ray(), drain]
    lines += map(_actors, kinds, labels, counts)
    python = "the Python that has the engine there; not llmctl's own, which Ray's actors run"
    for name in {kind.server.python_variable for kind in replicas.kinds} - {""}:
        lines.append(ExplainedValue(f"{name} where Ray is started", "on each machine", python))
    return Rendered({"serve.sh": script}, lines, START_RAY)


def _actors(kind: Kind, labels: Mapping[str, str], count: int) -> ExplainedValue:
    """The line about a kind's actors: how many, with what, and where."""
    share = MachineShare.of(kind.recipe)
    nodes = ", ".join(f"{key}={value}" for key, value in labels.items())
    source = f"fleet; on nodes of Ray with {nodes}" if nodes else "spread over the machines"
    return ExplainedValue(f"actors of {kind.recipe.name}", f"{count}, each with {share}", source)


def _script(
    order: Order, drain: Sourced[int], *flags: tuple[str, object]
) -> tuple[str, ExplainedValue]:
    """The text of serve.sh, and its --shutdown-timeout."""
    flags = (*flags, ("--shutdown-timeout", drain.value))
    script = order.fill("serve.sh", flags=flags, allowances=order.allowances)
    return script, explain_value("serve.sh --shutdown-timeout", drain, SECONDS)
