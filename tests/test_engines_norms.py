"""Norms as one kernel: they compute what the model's own norms compute, and others stay."""

import pytest
import tiny
import torch

from toolkit.engines.loading import load_model
from toolkit.engines.norms import fuse_norms

pytestmark = pytest.mark.slow


class Shifted(torch.nn.Module):
    """A norm that multiplies by one more than its weight, as Gemma's does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((16,), 0.1))
        self.variance_epsilon = 1e-6

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return states * scale * (1.0 + self.weight)


@pytest.mark.parametrize(("kind", "norms"), [("llama", 5), ("qwen3", 9), ("gpt2", 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fused_norms_compute_the_same(kind: str, norms: int, dtype: str) -> None:
    """Two layers with two norms each, and one at the end; Qwen3 also norms queries and keys."""
    model, own = (load_model(tiny.model_spec(kind, dtype=dtype), tiny.CPU) for _ in range(2))
    assert fuse_norms(model) == norms
    tokens = torch.arange(40).reshape(2, 20)
    with torch.inference_mode():
        found, expected = (each(tokens).logits.float() for each in (model, own))
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    assert (found - expected).norm() / expected.norm() < tolerance


def test_a_fused_norm_reads_the_weights_that_the_model_has_now() -> None:
    model, other = (load_model(tiny.model_spec(seed=seed), tiny.CPU) for seed in (1, 2))
    fuse_norms(model)
    with torch.no_grad():
        other.model.norm.weight.mul_(3.0)
    model.load_state_dict(other.state_dict())
    tokens = torch.arange(20)[None]
    with torch.inference_mode():
        assert torch.allclose(model(tokens).logits, other(tokens).logits, atol=1e-5)


def test_another_norm_stays() -> None:
    norm = Shifted()
    assert fuse_norms(norm) == 0
    assert norm(torch.ones(16)).mean().item() == pytest.approx(1.1, abs=1e-4)
