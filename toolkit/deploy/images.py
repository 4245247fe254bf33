"""Container images: pinned, and said which. None moves under a running deployment."""

from __future__ import annotations

import toolkit
from toolkit.deploy.names import check_image
from toolkit.deploy.order import Order, Reckoned

IN_EXTRAS = {"deepspeed", "vllm"}  # engines that are extras of the package of the same name


def llmctl_image(order: Order, *extras: str) -> Reckoned[str]:
    """The image with llmctl in it, with what the recipe's engine needs, and what `extras` of the package install.

    `InputError` where the one that was asked for is not pinned.
    """
    if order.options.image:
        return Reckoned(check_image(order.options.image), "--image")
    engines = {kind.recipe.engine.name for kind in order.plan.kinds}
    wanted = sorted({*extras, *(engines & IN_EXTRAS)})
    name = "-".join([f"llmctl:{toolkit.__version__}", *wanted])
    built = f"docker build -t {name}" + (f" --build-arg 'EXTRAS=[{','.join(wanted)}]'" if wanted else "") + " ."
    return Reckoned(name, f"this llmctl's version; build it in a checkout: {built}")
