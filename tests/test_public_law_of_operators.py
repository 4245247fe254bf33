"""A law made of operators: tables of times, their sums, and the law that is fitted to them."""

from itertools import product

import pytest

from benchmarks.public.law_of_operators import Attention, Operator, law_of_passes, pass_times
from toolkit.errors import InputError
from toolkit.estimators.steps import StepLaw, StepShape, chunk_attended

LAYERS = 4
# in seconds, of one layer or of the whole model
LINEAR_S = 2e-4
LINEAR_TOKEN_S = 1e-6
LINEAR_LATE_S = 3e-6
HEAD_S = 1e-3
HEAD_ROW_S = 2e-6
CACHED_S = 1e-8
BESIDE_S = 2e-8
ATTENDED_S = 1e-9
BEHIND_S = 5e-8


def linear_s(tokens: int) -> float:
    late = max(0, tokens - 64)
    return LINEAR_S + LINEAR_TOKEN_S * (tokens - late) + LINEAR_LATE_S * late


def attention_s(shape: StepShape) -> float:
    cached_s = BESIDE_S if shape.prefills else CACHED_S
    return (
        cached_s * shape.decode_cached
        + ATTENDED_S * shape.prefill_attended
        + BEHIND_S * shape.prefill_cached
    )


def passes() -> tuple[StepShape, ...]:
    alone = [StepShape(n, n * cached) for n, cached in product((1, 4, 32, 90), (16, 512, 2048))]
    mixed = [
        StepShape(n, n * cached, 1, new, chunk_attended(behind, new), behind)
        for n, cached, new, behind in product((0, 1, 32), (16, 512), (16, 64, 400), (0, 700))
    ]
    return (*alone, *mixed)


SHAPES = passes()
SIZES = (1, 64, 512)
LINEAR = Operator("linear", "tokens", LAYERS, SIZES, tuple(linear_s(size) for size in SIZES))
HEAD = Operator("head", "rows", 1, (1, 128), (HEAD_S + HEAD_ROW_S, HEAD_S + 128 * HEAD_ROW_S))
ATTENTION = Attention(LAYERS, SHAPES, tuple(attention_s(shape) for shape in SHAPES))
LAW = StepLaw(
    base_s=LAYERS * LINEAR_S + HEAD_S,
    row_s=HEAD_ROW_S,
    prefill_s=0.0,
    cached_s=LAYERS * CACHED_S,
    attended_s=LAYERS * ATTENDED_S,
    token_s=(LAYERS * LINEAR_TOKEN_S, LAYERS * LINEAR_LATE_S),
    knots=(0, 64),
    behind_s=LAYERS * BEHIND_S,
    beside_s=LAYERS * BESIDE_S,
)


def test_a_pass_is_the_sum_of_its_operators():
    shape = StepShape(2, 3000, 1, 62, chunk_attended(0, 62))
    attention = Attention(LAYERS, (shape,), (0.25,))
    expected = LAYERS * (0.25 + linear_s(64)) + HEAD_S + 3 * HEAD_ROW_S
    assert pass_times([LINEAR, HEAD], attention) == pytest.approx([expected])


def test_the_law_behind_the_tables_is_found():
    fitted = law_of_passes(SHAPES, pass_times([LINEAR, HEAD], ATTENTION), (0, 64))
    assert fitted.law.coefficients == pytest.approx(LAW.coefficients, rel=1e-6, abs=1e-15)
    assert fitted.alone.worst_percent < 1e-6
    assert fitted.mixed.worst_percent < 1e-6
    assert fitted.alone.points == sum(not shape.prefills for shape in SHAPES)


@pytest.mark.parametrize("shape", [StepShape(600, 0), StepShape(0, 0, 1, 513, 0.0)])
def test_a_size_that_was_not_measured_is_refused(shape: StepShape):
    with pytest.raises(InputError, match="linear"):
        LINEAR.pass_seconds([shape])
