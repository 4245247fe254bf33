"""How the weights of a family of models are laid out, by the `model_type` of its config.json.

data/families.yaml has one row per family. A new family is one row and one config in the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from toolkit.catalogue.tables import read_table

ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class Family:
    """What the weights of a family have beyond the sizes in its config.

    A condition is '' (never), 'always', or a key of the config that must be there and true.

    Attributes:
        name: for readers.
        types: transformers' `model_type` of the text part.
        norms: vectors of hidden size of a layer with two parts; one with one part has half.
        qkv_bias, out_bias, mlp_bias: conditions.
        qk_norm: norms of queries and keys: '', 'head' (one for all heads) or 'all' (a value each).
        qk_norm_if: their condition.
        sinks: layers with a value per head that takes part in the softmax: '', 'all' or 'window'.
        gate: '' or 'query' (each head of queries has a gate as wide), or 'head' (one value a head).
        matrices: of an MLP: 3 with a gate, 2 without.
        tied: whether the output shares the table of the input where the config does not say.
        parts: names of a layer's parts in the checkpoint: attention, states, mlp, experts.
        expert_names: of an expert's matrices in the checkpoint; the last leads back.
        router_bias, expert_bias: conditions: a value per expert in the router, biases in experts.
        shared: how many shared experts (a key, or a number), and the key of their inner size.
        shared_name: of a shared expert in the checkpoint.
        shared_gate: whether a gate of hidden size weighs it.
        expert_inner, dense_inner: keys of inner sizes.
        states: mixers with a state per request that its layers may have.
        sparse: whether its layers may have sparse attention.
        experts: whether each of its models has them.
        laws: what operators do not know of its layers, in words; '': they know all.
    """

    name: str
    types: tuple[str, ...]
    norms: int = 2
    qkv_bias: str = ""
    out_bias: str = ""
    mlp_bias: str = ""
    qk_norm: str = ""
    qk_norm_if: str = ALWAYS
    sinks: str = ""
    gate: str = ""
    matrices: int = 3
    tied: bool = False
    parts: Mapping[str, str] = field(default_factory=dict)
    expert_names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    router_bias: str = ""
    expert_bias: str = ""
    shared: tuple[str | int, str] = (0, "")
    shared_name: str = "shared_experts"
    shared_gate: bool = False
    expert_inner: str = "moe_intermediate_size"
    dense_inner: str = "intermediate_size"
    states: tuple[str, ...] = ()
    sparse: bool = False
    experts: bool = False
    laws: str = ""

    def part(self, name: str) -> str:
        """Return the name of a part of a layer in the checkpoint."""
        return self.parts.get(name, PARTS[name])


PARTS = {
    "attention": "self_attn",
    "linear": "linear_attn",
    "mamba": "mixer",
    "conv": "conv",
    "kda": "self_attn",
    "mlp": "mlp",
    "experts": "mlp",
}


def _read() -> dict[str, Family]:
    found: dict[str, Family] = {}
    for row in read_table("families"):
        for key, value in row.items():
            if isinstance(value, list):
                row[key] = tuple(value)
        family = Family(**row)
        found |= dict.fromkeys(family.types, family)
    return found


FAMILIES = _read()


def always_has_experts(model_type: str) -> bool:
    """Return whether each model of a type has experts, whatever its config says."""
    family = FAMILIES.get(model_type)
    return "moe" in model_type or (family is not None and family.experts)
