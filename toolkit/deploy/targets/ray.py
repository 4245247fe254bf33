"""A Ray cluster that exists: a script that starts the front on one of its machines; workers are
actors on all.
"""

from __future__ import annotations

from toolkit.cluster.workers import MachineShare, node_labels
from toolkit.deploy.order import ExplainedValue, Order, Rendered, fill, told
from toolkit.deploy.reckon import cpus, drain_s, gpus

START = """\
On a machine of the cluster: `./serve.sh` starts it, `llmctl status` shows it, `llmctl stop` drains and ends it.
The cluster's token comes from RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH. Another cluster: `./serve.sh --ray HOST:6379`."""


def render(order: Order) -> Rendered:
    """serve.sh. `InputError` for a fleet whose kinds of machines have no labels to tell them apart."""
    drain = drain_s(order)
    flags = [("--ray", "auto"), ("--shutdown-timeout", drain.value)]
    script = fill("serve.sh", comment=order.comment(), flags=flags, allowances=order.allowances)
    lines = [
        ExplainedValue(
            "serve.sh --ray", "auto", "RAY_ADDRESS, or the cluster that the machine belongs to"
        ),
        told("serve.sh --shutdown-timeout", drain, f"{drain.value} s"),
        *(_of_kinds(order) if order.plan.others else _of_one_kind(order)),
    ]
    return Rendered({"serve.sh": script}, lines, START)


def _of_one_kind(order: Order) -> list[ExplainedValue]:
    recipe = order.plan.recipe
    return [
        ExplainedValue(
            "actors", str(order.plan.workers), "plan: workers, spread over the machines"
        ),
        told("GPUs of all actors", gpus(recipe)),
        told("CPUs of actors and front", cpus(recipe)),
    ]


def _of_kinds(order: Order) -> list[ExplainedValue]:
    """Of each kind how many actors, what each takes, and on which nodes."""
    lines = []
    for kind, labels in zip(order.plan.kinds, node_labels(order.plan.kinds), strict=True):
        share = MachineShare.of(kind.recipe.engine, kind.recipe.hardware)
        where = ", ".join(f"{key}={value}" for key, value in labels.items())
        actors = f"{kind.workers}, of {share} each"
        lines.append(
            ExplainedValue(
                f"actors of {kind.recipe.name}", actors, f"fleet; on nodes of Ray with {where}"
            )
        )
    return lines
