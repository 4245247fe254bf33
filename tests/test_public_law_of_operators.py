"""A law made of operators: tables of times, their sums, and the law that is fitted to them."""

from dataclasses import replace
from itertools import product

import numpy as np
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


def test_times_between_measured_sizes_are_linear():
    operator = Operator("norm", "tokens", 3, (10, 20), (1.0, 2.0))
    assert operator.pass_seconds([StepShape(15, 0)]) == pytest.approx([4.5])


def test_the_law_behind_the_tables_is_found():
    fitted = law_of_passes(SHAPES, pass_times([LINEAR, HEAD], ATTENTION), (0, 64))
    assert fitted.law.coefficients == pytest.approx(LAW.coefficients, rel=1e-6, abs=1e-15)
    assert fitted.alone.worst_percent < 1e-6
    assert fitted.mixed.worst_percent < 1e-6
    assert fitted.alone.points == sum(not shape.prefills for shape in SHAPES)


def test_one_cost_of_cached_tokens_fits_worse_than_two():
    seconds = pass_times([LINEAR, HEAD], ATTENTION)
    fitted = law_of_passes(SHAPES, seconds, (0, 64), beside=False)
    assert fitted.law.beside_s is None
    assert LAW.cached_s < fitted.law.cached_s < LAYERS * BESIDE_S
    assert max(fitted.alone.worst_percent, fitted.mixed.worst_percent) > 1.0


def test_a_pass_s_cost_is_no_cost_of_each_chunk():
    """It would be counted again for each further chunk of a pass, which no table has."""
    extra = np.array([1e-3 if shape.prefills else 0.0 for shape in SHAPES])
    seconds = pass_times([LINEAR, HEAD], ATTENTION) + extra
    assert law_of_passes(SHAPES, seconds, (0, 64)).law.prefill_s == 0.0


def test_passes_of_several_chunks_tell_what_a_chunk_costs():
    several = tuple(
        StepShape(n, 100 * n, chunks, 32 * chunks, chunks * chunk_attended(0, 32))
        for n, chunks in product((0, 3, 30), (1, 2, 5))
    )
    law = replace(LAW, prefill_s=1e-4)
    shapes = (*SHAPES, *several)
    seconds = np.array([law.forward_s(shape) for shape in shapes])
    fitted = law_of_passes(shapes, seconds, (0, 64))
    assert fitted.law.coefficients == pytest.approx(law.coefficients, rel=1e-6, abs=1e-15)


@pytest.mark.parametrize("shape", [StepShape(600, 0), StepShape(0, 0, 1, 513, 0.0)])
def test_a_size_that_was_not_measured_is_refused(shape: StepShape):
    with pytest.raises(InputError, match="linear"):
        LINEAR.pass_seconds([shape])


@pytest.mark.parametrize(
    ("sizes", "seconds"), [((), ()), ((2, 1), (1.0, 1.0)), ((1, 1), (1.0, 1.0)), ((1, 2), (1.0,))]
)
def test_a_table_that_is_no_table_is_refused(
    sizes: tuple[int, ...], seconds: tuple[float, ...]
) -> None:
    with pytest.raises(InputError, match="norm"):
        Operator("norm", "tokens", 1, sizes, seconds)


@pytest.mark.parametrize("chunks", [False, True])
def test_a_law_needs_passes_without_and_with_chunks(chunks: bool):
    shapes = [shape for shape in SHAPES if bool(shape.prefills) == chunks]
    with pytest.raises(InputError, match="chunks"):
        law_of_passes(shapes, np.ones(len(shapes)))


def test_a_pass_that_takes_no_time_is_refused():
    seconds = np.ones(len(SHAPES))
    seconds[3] = 0.0
    with pytest.raises(InputError, match="> 0"):
        law_of_passes(SHAPES, seconds)


def test_a_law_of_windows_has_what_is_inside_them() -> None:
    law = replace(LAW, window=64, inside_s=3e-8, attended_inside_s=2e-9)
    shapes = []
    for shape in SHAPES:
        each = shape.decode_cached // max(shape.decodes, 1)
        inside = shape.decodes * min(each, 63)
        attended = min(shape.prefill_attended, 64.0 * shape.prefill_tokens)
        fields = shape.decodes, shape.decode_cached, shape.prefills, shape.prefill_tokens
        rest = shape.prefill_attended, shape.prefill_cached, inside, attended
        shapes.append(StepShape(*fields, *rest))
    seconds = np.array([law.forward_s(shape) for shape in shapes])
    found = law_of_passes(shapes, seconds, (0, 64), window=64)
    assert found.law.window == 64
    assert found.law.inside_s == pytest.approx(law.inside_s, rel=0.01)
    assert found.mixed.worst_percent < 0.1
    assert law_of_passes(shapes, seconds, (0, 64)).alone.worst_percent > 1.0
