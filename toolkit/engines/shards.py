"""A model's share for one process of several: tensor parallelism by the model's own `tp_plan` (Megatron-LM).

transformers names for each model the linear layers to cut by their outputs ("colwise": attention heads, the MLP's inner
width) and by their inputs ("rowwise"), so that a layer needs two sums over all processes. What is cut stays a plain
linear layer with a collective behind it: through DTensor, torch's own `parallelize_module` took 5 times as long for a
decode step (docs/decisions.md). Embeddings and norms are kept whole; so are logits, which are gathered.
"""

from __future__ import annotations

import datetime
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from toolkit.errors import EngineError

BY_OUTPUT, BY_INPUT = ("colwise", "colwise_gather_output", "colwise_rep"), ("rowwise",)
GATHERED = BY_OUTPUT[1:]
WHOLE = ("embedding_rowwise", "replicated_with_grad_allreduce", "replicate")  # at inference the same on every rank
PATIENCE = datetime.timedelta(minutes=30)  # for a rank that still loads; one that has died is noticed at once

Hook = Callable[[nn.Module, Any, torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class Share:
    """Which process of a group this is, and where the group meets: a file that nobody else can read.

    `on_join` is called before the others are waited for; `parameters` are the whole model's, once it is cut.
    """

    rank: int
    size: int
    rendezvous: str
    on_join: Callable[[], None] = lambda: None
    parameters: int = 0

    def join(self, device: torch.device) -> None:
        """Meet the others; returns when all are there. Collectives go over loopback or the GPUs' own links."""
        self.on_join()
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, init_method=f"file://{self.rendezvous}", rank=self.rank, world_size=self.size, timeout=PATIENCE
        )

    def least(self, value: int, device: torch.device) -> int:
        """The smallest of all ranks' values."""
        every = torch.tensor([value], dtype=torch.int64, device=device)
        dist.all_reduce(every, op=dist.ReduceOp.MIN)
        return int(every.item())


def loopback() -> str:
    """The name of the loopback interface: 'lo', 'lo0'."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def check_shares(config: Any, size: int) -> None:
    """`EngineError` where heads cannot be dealt evenly."""
    text = config.get_text_config(decoder=True)
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, key, None)
        if heads and heads % size:
            raise EngineError(
                f"engine.tensor_parallel_size is {size}, which does not divide the model's {key}, {heads}",
                "choose a divisor of both numbers of heads",
            )


def cut(model: Any, share: Share) -> None:
    """Keep this rank's share of `model`'s weights, and put collectives behind what was cut.

    All ranks must have loaded the same weights. `EngineError` for a model whose plan is missing, or has layers that are
    cut in ways which are not known here (experts, fused projections).
    """
    check_shares(model.config, share.size)
    share.parameters = sum(weight.numel() for weight in model.parameters())
    plan: dict[str, str] = dict(model.tp_plan or {})
    kind = model.config.model_type
    if not any(style in BY_INPUT for style in plan.values()):
        raise EngineError(f"model_type '{kind}' has no tp_plan in transformers", "use tensor_parallel_size 1")
    modules = [(name, module) for name, module in model.named_modules() if _pattern(name) in plan]
    for name, module in modules:
        style = plan[_pattern(name)]
        if style in WHOLE:
            continue
        if style not in (*BY_OUTPUT, *BY_INPUT) or not isinstance(module, nn.Linear):
            what = f"'{style}' of a {type(module).__name__}"
            raise EngineError(f"model_type '{kind}' cannot be shared: its plan for {name} is {what}", "use size 1")
        _cut_linear(module, style, share)


def _pattern(name: str) -> str:
    """A module's name as plans have it: layers by '*'."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _cut_linear(module: nn.Linear, style: str, share: Share) -> None:
    by_output = style in BY_OUTPUT
    module.weight = _part(module.weight, 0 if by_output else 1, share)
    if module.bias is not None and by_output:
        module.bias = _part(module.bias, 0, share)
    elif module.bias is not None and share.rank:  # it is summed, so one rank adds it
        module.register_parameter("bias", None)
    hook = _gather(share.size) if style in GATHERED else None if by_output else _sum
    if hook is not None:
        module.register_forward_hook(hook)


def _part(weight: torch.Tensor, dim: int, share: Share) -> nn.Parameter:
    if weight.shape[dim] % share.size:
        raise EngineError(f"engine.tensor_parallel_size is {share.size}, and a weight has {weight.shape[dim]} rows")
    return nn.Parameter(weight.detach().chunk(share.size, dim)[share.rank].clone(), requires_grad=False)


def _sum(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(output)
    return output


def _gather(size: int) -> Hook:
    def hook(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(output) for _ in range(size)]
        dist.all_gather(parts, output.contiguous())
        return torch.cat(parts, dim=-1)

    return hook
