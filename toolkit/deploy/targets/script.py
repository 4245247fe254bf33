"""Targets `local` and `ray`: a script that runs `llmctl serve` in the foreground of a machine.

For `ray` the machine belongs to a Ray cluster, and the workers are actors on the cluster's
machines.
"""

from __future__ import annotations

from toolkit.cluster.places import MachineShare, node_labels
from toolkit.deploy.order import ExplainedValue, Order, Rendered, explain_value, fill
from toolkit.deploy.reckon import cpus, drain_s, gpus

START = (
    "`./serve.sh` starts it, `llmctl status` shows it, Ctrl-C or `llmctl stop` drains and ends it."
)
START_RAY = """\
On a machine of the cluster: `./serve.sh` starts it, `llmctl status` shows it, `llmctl stop` drains
and ends it. The cluster's token comes from RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH. For another
cluster: `./serve.sh --ray HOST:6379`."""


def render_local(order: Order) -> Rendered:
    """Render serve.sh for one machine."""
    script, drain = _script(order)
    return Rendered({"serve.sh": script}, [drain], START)


def render_ray(order: Order) -> Rendered:
    """Render serve.sh for a Ray cluster. `InputError` if two kinds of machines in a fleet have the
    same labels.
    """
    script, drain = _script(order, ("--ray", "auto"))
    source = "RAY_ADDRESS, or the cluster that the machine belongs to"
    lines, plan = [ExplainedValue("serve.sh --ray", "auto", source), drain], order.plan
    if not plan.others:
        workers = str(plan.workers)
        lines += [
            ExplainedValue("actors", workers, "plan: workers, spread over the machines"),
            explain_value("GPUs of all actors", gpus(plan.recipe)),
            explain_value("CPUs of actors and front", cpus(plan.recipe)),
        ]
        return Rendered({"serve.sh": script}, lines, START_RAY)
    for kind, labels in zip(plan.kinds, node_labels(plan.kinds), strict=True):
        share = MachineShare.of(kind.recipe.engine, kind.recipe.hardware)
        nodes = ", ".join(f"{key}={value}" for key, value in labels.items())
        actors = f"{kind.workers}, each with {share}"
        source = f"fleet; on nodes of Ray with {nodes}"
        lines.append(ExplainedValue(f"actors of {kind.recipe.name}", actors, source))
    return Rendered({"serve.sh": script}, lines, START_RAY)


def _script(order: Order, *flags: tuple[str, object]) -> tuple[str, ExplainedValue]:
    """The text of serve.sh, and its --shutdown-timeout."""
    drain = drain_s(order)
    flags = (*flags, ("--shutdown-timeout", drain.value))
    script = fill("serve.sh", comment=order.comment(), flags=flags, allowances=order.allowances)
    return script, explain_value("serve.sh --shutdown-timeout", drain, f"{drain.value} s")
