"""Laws of time and memory: closed forms equal their definitions, and reproduce the papers'
figures.
"""

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.scls_figures import DEEPSPEED_RULES
from toolkit.errors import InputError
from toolkit.estimators.laws import DECODE_TERMS, PREFILL_TERMS, LinearLaw
from toolkit.estimators.memory import RuleMemory, ZetaMemory
from toolkit.laws.features import StepShape, chunk_attended
from toolkit.laws.passes import PassLaw

FLAT = PassLaw({"pass": 1.0})

coefficient = st.floats(0.0, 0.1)


def law_with(*terms: str) -> st.SearchStrategy[PassLaw]:
    return st.builds(PassLaw, st.fixed_dictionaries(dict.fromkeys(terms, coefficient)))


laws = st.builds(LinearLaw, law_with(*PREFILL_TERMS), law_with(*DECODE_TERMS), st.booleans())
batches = st.tuples(st.integers(1, 40), st.integers(1, 2000), st.integers(0, 150))


@pytest.mark.slow
@given(laws, batches)
def test_prefill_is_equation_3_with_a_square(law, batch):
    size, length, _ = batch
    s = law.prefill.terms
    expected = s["token"] * size * length + s["row"] * size + s["length"] * length + s["pass"]
    expected += s["attended"] * size * length**2 / 2
    assert law.prefill_s(size, length) == pytest.approx(expected)
    shape = StepShape(0, 0, size, size * length, size * chunk_attended(0, length))
    assert law.prefill.forward_s(shape) == pytest.approx(expected), "the law of passes agrees"


@given(laws, batches)
def test_decode_in_closed_form_equals_the_sum_over_steps(law, batch):
    size, length, steps = batch
    expected = math.fsum(
        law.decode.forward_s(StepShape(size, size * (length + i))) for i in range(1, steps + 1)
    )
    assert law.decode_s(size, length, steps) == pytest.approx(expected)


@given(laws, batches)
def test_the_table_equals_the_scalar_law(law, batch):
    size, length, tokens = batch
    steps = tokens - law.prefill_emits_token if tokens else 0
    table = law.serve_table(40, tokens)
    expected = law.prefill_s(size, length) + law.decode_s(size, length, steps)
    assert table[:, size] @ [1, length, length**2] == pytest.approx(expected)
    assert law.serve_s(size, length, tokens) == pytest.approx(expected)


def flat_to(law: LinearLaw, flat: float) -> LinearLaw:
    """The law with decode steps that take at least `flat` seconds."""
    return replace(law, decode=replace(law.decode, flat_s=flat))


@given(laws, batches, st.floats(1e-6, 20))
def test_flat_then_linear_decode_is_at_most_the_sum_over_steps(law, batch, flat):
    """It is the sum, unless a slice begins flat and ends linear."""
    size, length, steps = batch
    found = flat_to(law, flat)
    expected = math.fsum(max(flat, law.decode_s(size, length + i, 1)) for i in range(steps))
    own = found.decode_s(size, length, steps)
    assert own <= expected * (1 + 1e-9)
    ends = [law.decode_s(size, length + i, 1) for i in (0, max(steps - 1, 0))]
    if flat >= max(ends) or flat <= min(ends):
        assert own == pytest.approx(expected)
    assert pickle.loads(pickle.dumps(found)).decode_s(size, length, steps) == own


@given(laws, batches, st.floats(1e-6, 20), st.floats(0, 1), st.floats(0.5, 2))
def test_a_flat_law_s_table_equals_the_law(law, batch, flat, batch_s, stretch):
    size, length, tokens = batch
    found = flat_to(law, flat)
    for each, exact in (
        (found, found.serve_s(size, length, tokens)),
        (
            replace(found.times(stretch), batch_s=batch_s),
            batch_s + stretch * found.serve_s(size, length, tokens),
        ),
    ):
        table = each.serve_table(40, tokens)[:, size]
        assert len(table) == 5
        linear = table[:3] @ [1, length, length**2]
        flat_s = table[[3, 4, 2]] @ [1, length, length**2]
        assert max(linear, flat_s) == pytest.approx(exact)


@given(laws, batches, st.floats(0, 1), st.floats(0.5, 2))
def test_overhead_adds_once_per_batch_and_stretches_the_rest(law, batch, batch_s, stretch):
    size, length, tokens = batch
    slower = replace(law.times(stretch), batch_s=batch_s)
    expected = batch_s + stretch * law.serve_s(size, length, tokens)
    assert slower.prefill_s(size, length) + slower.decode_s(
        size, length, law.iterations(tokens)
    ) == pytest.approx(expected)
    assert slower.serve_table(40, tokens)[:, size] @ [1, length, length**2] == pytest.approx(
        expected
    )
    assert slower.prefill_emits_token == law.prefill_emits_token


def test_a_law_of_batches_has_terms_of_batches():
    with pytest.raises(InputError, match=r"decode: .*attended"):
        LinearLaw(FLAT, FLAT.with_terms({"attended": 1e-9}), True)


def test_zeta_memory_is_equation_9():
    lengths = np.array([100, 1000, 1024, 5000])
    assert ZetaMemory(10_000, 0.9).max_batch(lengths, 128, 0.0).tolist() == [39, 7, 7, 1]
    assert ZetaMemory(10_000, 0.9).max_batch(lengths, 128, 0.5).tolist() == [19, 3, 3, 0]


@given(
    st.integers(1, 500),
    st.integers(1, 300),
    st.integers(1, 200),
    st.sampled_from([0.0, 0.05, 0.1, 0.3]),
)
def test_a_row_is_not_lost_to_rounding(rows, length, steps, reserve):
    capacity = rows * (length + steps)
    zeta = 1.0 / (1.0 - reserve)
    assert ZetaMemory(capacity, zeta).max_batch(np.array([length]), steps, reserve).tolist() == [
        rows
    ]


def test_algorithm_2_as_the_paper_prints_it():
    law = RuleMemory(DEEPSPEED_RULES)
    totals = np.array([1, 512, 513, 1024, 1025, 2048])
    assert law.max_batch(totals - 1, 1, 0.0).tolist() == [28, 28, 22, 22, 12, 12]
    assert law.max_batch(np.array([100]), 28, 0.1).tolist() == [25], "less its reserve"
