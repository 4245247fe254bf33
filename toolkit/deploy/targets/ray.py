"""A Ray cluster that exists: a script that starts the front on one of its machines; workers are actors on all."""

from __future__ import annotations

from toolkit.deploy.order import Order, Rendered, Told, told
from toolkit.deploy.reckon import cpus, drain_s, gpus
from toolkit.deploy.templating import fill

START = """\
On a machine of the cluster: `./serve.sh` starts it, `llmctl status` shows it, `llmctl stop` drains and ends it.
The cluster's token comes from RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH. Another cluster: `./serve.sh --ray HOST:6379`."""


def render(order: Order) -> Rendered:
    """serve.sh."""
    drain, recipe = drain_s(order), order.plan.recipe
    script = fill("serve.sh", comment=order.comment(), flags=[("--ray", "auto"), ("--shutdown-timeout", drain.value)])
    lines = [
        Told("serve.sh --ray", "auto", "RAY_ADDRESS, or the cluster that the machine belongs to"),
        told("serve.sh --shutdown-timeout", drain, f"{drain.value} s"),
        Told("actors", str(order.plan.workers), "plan: workers, spread over the machines"),
        told("GPUs of all actors", gpus(recipe)),
        told("CPUs of actors and front", cpus(recipe)),
    ]
    return Rendered({"serve.sh": script}, lines, START)
