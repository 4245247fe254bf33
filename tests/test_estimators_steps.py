"""The law of a forward pass that mixes chunks of prompts with decodes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import InputError
from toolkit.estimators.steps import StepLaw, StepShape, chunk_attended

LAW = StepLaw(
    base_s=4.0, row_s=0.5, prefill_s=2.0, cached_s=0.25, attended_s=0.125, token_s=(1.0, 0.5),
    knots=(0, 16),
    host_s=3.0, host_row_s=0.25,
)  # fmt: skip

shapes = st.builds(
    StepShape,
    decodes=st.integers(0, 300),
    decode_cached=st.integers(0, 100_000),
    prefills=st.integers(0, 20),
    prefill_tokens=st.integers(0, 8192),
    prefill_attended=st.floats(0, 1e8),
)
coefficients = st.lists(st.floats(0, 1e-2), min_size=9, max_size=9)


def test_decodes_pay_base_rows_tokens_and_what_they_read():
    shape = StepShape(decodes=8, decode_cached=100)
    assert LAW.forward_s(shape) == 4.0 + 8 * 0.5 + 8 * 1.0 + 100 * 0.25
    assert LAW.step_s(shape) == LAW.forward_s(shape) + 3.0 + 8 * 0.25, "and the host's time"


def test_decodes_beside_a_chunk_have_their_own_reading_cost():
    law = replace(LAW, beside_s=0.75)
    alone = StepShape(8, 100)
    mixed = StepShape(8, 100, prefills=1, prefill_tokens=2)
    assert law.forward_s(alone) == LAW.forward_s(alone)
    assert law.forward_s(mixed) == LAW.forward_s(mixed) + 100 * (0.75 - 0.25)
    assert StepLaw.of(law.coefficients, law.knots, law.host_s, law.host_row_s) == law
    assert law.times(2.0).forward_s(mixed) == 2.0 * law.forward_s(mixed)


def test_a_chunk_pays_for_tokens_and_attention():
    shape = StepShape(0, 0, 1, 20, chunk_attended(cached=30, new=20))
    assert LAW.forward_s(shape) == 4.0 + 0.5 + 2.0 + (16 * 1.0 + 4 * 0.5) + 0.125 * 20 * (30 + 10)


@given(shape=shapes, values=coefficients, more=st.integers(1, 100))
def test_more_work_never_takes_less_time(shape, values, more):
    law = StepLaw.of(values, (0, 128))
    longer = StepShape(
        shape.decodes + more,
        shape.decode_cached + more,
        shape.prefills,
        shape.prefill_tokens + more,
    )
    less = StepShape(shape.decodes, shape.decode_cached, shape.prefills, shape.prefill_tokens)
    assert law.step_s(longer) >= law.step_s(less)


@pytest.mark.parametrize("knots", [(), (1,), (0, 0), (0, 8, 4), (0, 8)])
def test_knots_that_do_not_begin_at_0_and_ascend_are_refused(knots):
    slopes = (1.0,) * (3 if len(knots) == 2 else len(knots))
    with pytest.raises(InputError, match=r"steps: knots.*0"):
        StepLaw(0.0, 0.0, 0.0, 0.0, 0.0, token_s=slopes, knots=knots)


@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf")])
def test_a_negative_or_infinite_coefficient_is_refused(value):
    with pytest.raises(InputError, match=f"steps: .*{value:g}.*>= 0"):
        StepLaw(0.0, value, 0.0, 0.0, 0.0, token_s=(1.0,))
