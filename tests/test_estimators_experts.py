"""Laws of passes of a mixture of experts: the weights of those experts that a pass's tokens touch.

The passes are synthetic, by laws with known coefficients.
"""

import itertools

import numpy as np
import pytest
import samples
from overlapping_server import grid, profile_of
from synthetic_profiles import steps_profile

from toolkit.backends.vllm.profile import refuse_unknown_experts
from toolkit.errors import InputError
from toolkit.estimators.gpu_operators import Kernel, experts_s
from toolkit.estimators.part_fits import fit_steps, point_of
from toolkit.files.profile import StepsProfile
from toolkit.laws.features import StepShape, chunk_attended, touched_experts
from toolkit.laws.passes import GraphSettings, PassLaw

EXPERTS = {"experts": 128, "experts_per_token": 8}  # of Qwen3-30B-A3B
PASSES = PassLaw(
    {
        "pass": 2e-3,
        "row": 1e-5,
        "cached_alone": 3e-8,
        "cached_beside": 5e-8,
        "attended": 1e-9,
        "expert": 9e-5,
    },
    (2e-5,),
    (0,),
    **EXPERTS,
)
OVERLAPPING = PassLaw(
    {
        "pass_read": 2e-3,
        "token_alone": 1e-5,
        "cached_alone": 3e-8,
        "expert_read": 9e-5,
        "token_arithmetic": 2.5e-5,
        "attended": 1e-9,
        "cached_beside": 5e-8,
        "graph": 1e-3,
        "piece": 3e-3,
        "eager": 5e-3,
    },
    graphs=GraphSettings("FULL_AND_PIECEWISE", (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)),
    **EXPERTS,
)


def shapes() -> list[StepShape]:
    """Decodes alone, chunks alone, and both."""
    rows = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    found = [StepShape(n, n * cached) for n, cached in itertools.product(rows, (128, 1024, 4096))]
    for tokens, n in itertools.product((16, 64, 256, 1024, 4096), (0, 1, 8, 64)):
        found.append(StepShape(n, 512 * n, 1, tokens, chunk_attended(0, tokens)))
    return found


def one_by_one(**experts: int) -> StepsProfile:
    """The passes of `PASSES`, none of which overlap."""
    points = [point_of(shape, PASSES.forward_s(shape)) for shape in shapes()]
    return steps_profile(points, **experts)


def test_one_token_touches_its_own_experts_and_many_touch_all() -> None:
    assert touched_experts(1, 128, 8) == pytest.approx(8.0)
    assert touched_experts(2, 128, 8) == pytest.approx(16.0 - 8.0 / 16.0)
    assert touched_experts(10_000, 128, 8) == pytest.approx(128.0)
    tokens = np.array([1.0, 7.0, 300.0])
    each = [touched_experts(int(n), 128, 8) for n in tokens]
    read = Kernel({"start_s": 0.0, "expert_s": 1.0, "bytes_per_s": 1e30, "flops_per_s": 1e30})
    assert experts_s(read, tokens, 1, 1.0, 128, 8, 2.0) == pytest.approx(np.array(each))


def test_the_law_of_a_pass_finds_the_seconds_of_an_expert() -> None:
    fit = fit_steps(one_by_one(**EXPERTS), 0)
    assert fit.law.terms["expert"] == pytest.approx(9e-5, rel=0.02)
    assert fit.error.p95_percent < 1.0
    law = fit.law
    for rows in (1, 3, 12, 200):
        shape = StepShape(rows, rows * 700)
        assert law.forward_s(shape) == pytest.approx(PASSES.forward_s(shape), rel=0.01)
    assert law.times(2.0).forward_s(shape) == pytest.approx(2.0 * law.forward_s(shape))
    without = fit_steps(one_by_one(), 0)  # knots bend it, but not as much
    assert "expert" not in without.law.terms
    assert without.error.p95_percent > 3.0 * fit.error.p95_percent


@pytest.mark.slow
def test_the_law_of_overlapping_passes_finds_it_too() -> None:
    passes = profile_of(OVERLAPPING, grid(OVERLAPPING.graphs.sizes), stamps=True)
    fit = fit_steps(passes.model_copy(update=EXPERTS), 0)
    assert fit.law.terms["expert_read"] == pytest.approx(9e-5, rel=0.05)
    law = fit.law
    for rows in (1, 4, 16, 64, 256):
        shape = StepShape(rows, rows * 800)
        assert law.gpu_s(shape) == pytest.approx(OVERLAPPING.gpu_s(shape), rel=0.02)
    dense = fit_steps(passes, 0)
    assert dense.error.p95_percent > 3.0 * fit.error.p95_percent


@pytest.mark.parametrize(
    ("model_type", "config", "refused"),
    [
        ("qwen3_moe", {"num_experts": 128, "num_experts_per_tok": 8}, False),
        ("qwen3_moe", {}, True),
        ("llama", {}, False),
    ],
)
def test_a_server_with_experts_of_unknown_number_is_refused(
    model_type: str, config: dict[str, object], refused: bool
) -> None:
    recipe = samples.recipe()
    model = recipe.model.model_copy(update={"config": config})
    recipe = recipe.model_copy(update={"model": model})
    if not refused:
        refuse_unknown_experts(recipe, model_type)
        return
    with pytest.raises(InputError, match="experts"):
        refuse_unknown_experts(recipe, model_type)
