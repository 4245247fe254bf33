"""Target `ray`: a script that starts the front on a machine of an existing Ray cluster.

The workers are actors, spread over the cluster's machines.
"""

from __future__ import annotations

from toolkit.cluster.workers import MachineShare, node_labels
from toolkit.deploy.order import ExplainedValue, Order, Rendered, explain_value, fill
from toolkit.deploy.reckon import cpus, drain_s, gpus

START = """\
On a machine of the cluster: `./serve.sh` starts it, `llmctl status` shows it, `llmctl stop` drains
and ends it. The cluster's token comes from RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH. For another
cluster: `./serve.sh --ray HOST:6379`."""


def render(order: Order) -> Rendered:
    """Render serve.sh. `InputError` if two kinds of machines in a fleet have the same labels."""
    drain = drain_s(order)
    flags = [("--ray", "auto"), ("--shutdown-timeout", drain.value)]
    script = fill("serve.sh", comment=order.comment(), flags=flags, allowances=order.allowances)
    lines = [
        ExplainedValue(
            "serve.sh --ray", "auto", "RAY_ADDRESS, or the cluster that the machine belongs to"
        ),
        explain_value("serve.sh --shutdown-timeout", drain, f"{drain.value} s"),
    ]
    plan = order.plan
    if not plan.others:
        workers = str(plan.workers)
        lines += [
            ExplainedValue("actors", workers, "plan: workers, spread over the machines"),
            explain_value("GPUs of all actors", gpus(plan.recipe)),
            explain_value("CPUs of actors and front", cpus(plan.recipe)),
        ]
        return Rendered({"serve.sh": script}, lines, START)
    for kind, labels in zip(plan.kinds, node_labels(plan.kinds), strict=True):
        share = MachineShare.of(kind.recipe.engine, kind.recipe.hardware)
        nodes = ", ".join(f"{key}={value}" for key, value in labels.items())
        actors = f"{kind.workers}, each with {share}"
        source = f"fleet; on nodes of Ray with {nodes}"
        lines.append(ExplainedValue(f"actors of {kind.recipe.name}", actors, source))
    return Rendered({"serve.sh": script}, lines, START)
