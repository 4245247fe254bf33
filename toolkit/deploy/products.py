"""What nodes call their GPUs: the label `nvidia.com/gpu.product`, which NVIDIA's GPU feature discovery writes.

Its value is the device's name with hyphens for spaces, as in NVIDIA-H200 or NVIDIA-A100-SXM4-80GB. Where a GPU is
time-sliced between pods, "-SHARED" follows; where it is cut up and one size is all there is, "-MIG-3g.40gb" and the
like: NVIDIA/k8s-device-plugin, docs/gpu-feature-discovery/README.md and internal/lm/resource.go (productLabel). Neither
of those is the whole GPU that laws are about, so they are matched only where `--gpu-product` names them.
"""

from __future__ import annotations

import re

from toolkit.deploy.order import Order, Reckoned
from toolkit.files.plan import Kind

LABEL = "nvidia.com/gpu.product"
OPTION = "--gpu-product"
PRODUCTS = (
    *("NVIDIA-A10", "NVIDIA-A10G", "NVIDIA-A30", "NVIDIA-A40"),
    *("NVIDIA-A100-PCIE-40GB", "NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-80GB-PCIe", "NVIDIA-A100-SXM4-80GB"),
    *("NVIDIA-L4", "NVIDIA-L40", "NVIDIA-L40S"),
    *("NVIDIA-H100-PCIe", "NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-NVL", "NVIDIA-H200", "NVIDIA-H200-NVL"),
    *("NVIDIA-B200",),
)


def products(order: Order, kind: Kind) -> Reckoned[list[str]]:
    """The label's values that a kind's workers belong on.

    Those of the option, or the GPU that was measured. Nothing was measured for an analytic fit: then all whose names
    have every word of the recipe's hardware.name ('A100-80GB' is 'A100-SXM4-80GB' and 'A100-80GB-PCIe').
    """
    if order.options.gpu_products:
        return Reckoned(list(order.options.gpu_products), OPTION)
    if not kind.fit.engine.analytic:
        return Reckoned([kind.fit.engine.device.replace(" ", "-")], "fit: the GPU that was measured")
    name = kind.recipe.hardware.name
    found = [product for product in PRODUCTS if _words(name) <= _words(product)]
    if found:
        return Reckoned(found, f"every GPU called {name}, as the fit is no measurement; say otherwise with {OPTION}")
    guessed = "-".join(["NVIDIA", *name.removeprefix("NVIDIA").replace("-", " ").split()])
    return Reckoned([guessed], f"guessed from hardware.name; compare `kubectl get nodes -L {LABEL}`, and say {OPTION}")


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))
