"""Container images: pinned, and said which. None moves under a running deployment."""

from __future__ import annotations

import toolkit
from toolkit.deploy.names import check_image
from toolkit.deploy.order import Order, Reckoned


def llmctl_image(order: Order) -> Reckoned[str]:
    """The image with llmctl in it; `InputError` where the one that was asked for is not pinned."""
    if order.options.image:
        return Reckoned(check_image(order.options.image), "--image")
    name = f"llmctl:{toolkit.__version__}"
    return Reckoned(name, f"this llmctl's version; build it in a checkout: docker build -t {name} .")
