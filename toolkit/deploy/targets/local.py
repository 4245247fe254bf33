"""Target `local`: a script that runs `llmctl serve` in the foreground of this machine."""

from __future__ import annotations

from toolkit.deploy.order import Order, Rendered, explain_value, fill
from toolkit.deploy.reckon import drain_s


def render(order: Order) -> Rendered:
    """Render serve.sh."""
    drain = drain_s(order)
    flags = [("--shutdown-timeout", drain.value)]
    script = fill("serve.sh", comment=order.comment(), flags=flags, allowances=order.allowances)
    return Rendered(
        {"serve.sh": script},
        [explain_value("serve.sh --shutdown-timeout", drain, f"{drain.value} s")],
        "`./serve.sh` starts it, `llmctl status` shows it, Ctrl-C or `llmctl stop` drains and ends "
        "it.",
    )
