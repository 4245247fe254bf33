"""This machine, in the foreground: a script that starts what `llmctl serve` runs."""

from __future__ import annotations

from toolkit.deploy.order import Order, Rendered, fill, told
from toolkit.deploy.reckon import drain_s


def render(order: Order) -> Rendered:
    """serve.sh."""
    drain = drain_s(order)
    flags = [("--shutdown-timeout", drain.value)]
    return Rendered(
        {
            "serve.sh": fill(
                "serve.sh", comment=order.comment(), flags=flags, allowances=order.allowances
            )
        },
        [told("serve.sh --shutdown-timeout", drain, f"{drain.value} s")],
        "`./serve.sh` starts it, `llmctl status` shows it, Ctrl-C or `llmctl stop` drains and ends it.",
    )
