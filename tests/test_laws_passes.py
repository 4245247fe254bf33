"""The law of a forward pass: its terms over one list of features, in files and in evaluation."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import samples
from hypothesis import given
from hypothesis import strategies as st
from said import says
from synthetic_profiles import steps_profile

from toolkit.errors import InputError
from toolkit.estimators import part_fits
from toolkit.files.fit import Fit
from toolkit.files.io import read_file, write_file
from toolkit.laws.features import FEATURES, Feature, StepShape, chunk_attended
from toolkit.laws.passes import PassLaw, PassRange
from toolkit.sim.flight import grown_shape

LAW = PassLaw(
    {
        "pass": 4.0,
        "row": 0.5,
        "chunk": 2.0,
        "cached": 0.25,
        "attended": 0.125,
        "host": 3.0,
        "host_row": 0.25,
    },
    token_s=(1.0, 0.5),
    knots=(0, 16),
)

shapes = st.builds(
    StepShape,
    decodes=st.integers(0, 300),
    decode_cached=st.integers(0, 100_000),
    prefills=st.integers(0, 20),
    prefill_tokens=st.integers(0, 8192),
    prefill_attended=st.floats(0, 1e8),
)
seconds = st.floats(0, 1e-2)


def test_decodes_pay_base_rows_tokens_and_what_they_read():
    shape = StepShape(decodes=8, decode_cached=100)
    assert LAW.forward_s(shape) == 4.0 + 8 * 0.5 + 8 * 1.0 + 100 * 0.25
    assert LAW.step_s(shape) == LAW.forward_s(shape) + 3.0 + 8 * 0.25, "and the host's time"


def test_decodes_beside_a_chunk_have_their_own_reading_cost():
    terms = {name: value for name, value in LAW.terms.items() if name != "cached"}
    law = replace(LAW, terms=terms | {"cached_alone": 0.25, "cached_beside": 0.75})
    alone = StepShape(8, 100)
    mixed = StepShape(8, 100, prefills=1, prefill_tokens=2)
    assert law.forward_s(alone) == LAW.forward_s(alone)
    assert law.forward_s(mixed) == LAW.forward_s(mixed) + 100 * (0.75 - 0.25)
    assert law.growth_s(alone) == 8 * 0.25
    assert law.times(2.0).forward_s(mixed) == 2.0 * law.forward_s(mixed)


def test_a_chunk_pays_for_tokens_and_attention():
    shape = StepShape(0, 0, 1, 20, chunk_attended(cached=30, new=20))
    assert LAW.forward_s(shape) == 4.0 + 0.5 + 2.0 + (16 * 1.0 + 4 * 0.5) + 0.125 * 20 * (30 + 10)


def test_the_shortest_passes_take_what_their_launches_take():
    law = replace(LAW, least_s=1000.0, flat_s=500.0)
    assert law.forward_s(StepShape(1, 0)) == 500.0
    assert law.forward_s(StepShape(1, 0, 1, 1)) == 1000.0
    assert law.forward_s(StepShape(1, 10_000)) == LAW.forward_s(StepShape(1, 10_000))


@given(
    shape=shapes,
    values=st.fixed_dictionaries(dict.fromkeys(LAW.terms, seconds)),
    token_s=st.tuples(seconds, seconds),
    more=st.integers(1, 100),
)
def test_more_work_never_takes_less_time(shape, values, token_s, more):
    law = PassLaw(values, token_s, (0, 128))
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
    slopes = (1.0,) * (3 if len(knots) == 2 else len(knots) or 1)
    with pytest.raises(InputError, match="knots"):
        PassLaw({}, token_s=slopes, knots=knots)


@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf")])
def test_a_negative_or_infinite_term_is_refused_by_name(value):
    with pytest.raises(InputError) as caught:
        PassLaw({"row": value})
    assert says(caught.value.message, "row", f"{value:g}", ">= 0")


def test_equal_laws_are_equal_and_survive_a_process():
    same = PassLaw(dict(reversed(LAW.terms.items())), LAW.token_s, LAW.knots)
    assert same == LAW
    assert hash(same) == hash(LAW)
    law = replace(LAW, valid=PassRange(rows_max=3), error=samples.ERROR)
    again = pickle.loads(pickle.dumps(law))
    assert again == law
    assert again.forward_s(StepShape(3, 9)) == law.forward_s(StepShape(3, 9))


def test_a_file_holds_the_law_itself(tmp_path: Path):
    law = replace(LAW, valid=PassRange(rows_max=3, tokens_max=64), error=samples.ERROR)
    fit = samples.paged_fit()
    steps = fit.steps.model_copy(update={"law": law})
    write_file(fit.model_copy(update={"steps": steps}), tmp_path / "fit.json")
    assert read_file(Fit, tmp_path / "fit.json").steps.law == law
    found = json.loads((tmp_path / "fit.json").read_text())["steps"]["law"]
    assert found["terms"] == law.terms
    assert found["valid"] == {"rows_max": 3, "tokens_max": 64}, "what is not bounded is left out"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"terms": {"rov": 1.0}}, ("steps.law", "rov")),
        ({"terms": {"row": -1.0}}, ("steps.law", "row", "-1.0")),
        ({"terms": {"row": "1"}}, ("steps.law.terms.row",)),
        ({"knotz": [0]}, ("steps.law.knotz",)),
        ({"knots": [0, 4, 2]}, ("steps.law", "knots")),
    ],
)
def test_a_file_with_another_law_is_refused_by_key(tmp_path: Path, change, named):
    path = tmp_path / "fit.json"
    write_file(samples.paged_fit(), path)
    content = json.loads(path.read_text())
    content["steps"]["law"] |= change
    path.write_text(json.dumps(content))
    with pytest.raises(InputError) as caught:
        read_file(Fit, path)
    assert says(caught.value.message, "fit.json", *named)


def test_a_new_term_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A made-up feature, the longest row of decodes alone: it is listed, and with that it is
    fitted, stored, read, evaluated, and grows from pass to pass.
    """
    monkeypatch.setitem(FEATURES, "longest", Feature("alone", "length", "the longest row"))
    law = PassLaw({"pass": 5e-3, "row": 1e-4, "longest": 2e-6}, (2e-5,), (0,))
    points = []
    for rows in range(1, 65):
        for cached in (16, 256, 1024):
            shape = StepShape(rows, rows * cached)
            mixed = StepShape(rows, rows * cached, 1, 64, chunk_attended(0, 64))
            points += [part_fits.point_of(one, law.forward_s(one)) for one in (shape, mixed)]
    monkeypatch.setattr(part_fits, "TERMS", (*part_fits.TERMS, "longest"))
    steps = part_fits.fit_steps(steps_profile(points), 0)
    write_file(samples.paged_fit().model_copy(update={"steps": steps}), tmp_path / "fit.json")
    found = read_file(Fit, tmp_path / "fit.json").steps.law
    assert found.terms["longest"] == pytest.approx(2e-6, rel=1e-3)
    shape = StepShape(10, 3000)
    assert found.forward_s(shape) == pytest.approx(law.forward_s(shape), rel=1e-3)
    grown_s = law.forward_s(grown_shape(shape, 8)) - law.forward_s(shape)
    assert 7 * law.growth_s(shape) == pytest.approx(grown_s)
    assert law.times(2.0).terms["longest"] == 4e-6


def test_a_range_says_where_a_law_was_measured():
    valid = PassRange(rows_max=4, tokens_max=64, cached_max=100)
    assert valid.holds(StepShape(4, 100))
    assert not valid.holds(StepShape(5, 100))
    assert not valid.holds(StepShape(4, 101))
    assert not valid.holds(StepShape(2, 10, 1, 63))
    assert PassRange().holds(StepShape(10**6, 10**9))
    assert says(str(valid), "4", "64", "100")
    batches = PassRange(rows_max=4, length_max=100)
    assert batches.holds_batch(4, 100.0)
    assert not batches.holds_batch(4, 100.5)
    both = batches.both(PassRange(rows_max=8, tokens_max=64, length_max=50))
    assert both == PassRange(rows_max=4, tokens_max=64, length_max=50)
