"""RMS norms as one kernel each.

transformers writes a norm as eight operations, so that a step of an 8B model launches 520 kernels
for its norms, two in five of all. PyTorch's `rms_norm` is one on CUDA.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.functional import rms_norm

# How far results may be apart, as a share: half precision rounds the product once, not twice.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@torch.inference_mode()
def fuse_norms(model: torch.nn.Module) -> int:
    """Replace the forward functions of RMS norms in `model`. Returns how many.

    A module is one if it has the attributes of transformers' Llama norm, and computes the same.
    """
    fused = 0
    for module in model.modules():
        weight = getattr(module, "weight", None)
        epsilon = getattr(module, "variance_epsilon", None)
        if not isinstance(weight, torch.Tensor) or epsilon is None or weight.ndim != 1:
            continue
        forward = partial(rms_norm, normalized_shape=weight.shape, weight=weight, eps=epsilon)
        states = torch.randn(4, len(weight), dtype=torch.float32).to(weight) * 3
        expected = module(states)
        off = (forward(states) - expected).float().norm() / expected.float().norm()
        if off < TOLERANCES.get(weight.dtype, 0.0):
            module.forward = forward
            fused += 1
    return fused
