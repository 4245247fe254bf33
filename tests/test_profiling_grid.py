"""The points of a profile, their order, and the runs of one visit."""

from collections import Counter

import pytest
from llmctl_fake import FakeEngine
from synthetic_profiles import FACTS

from toolkit.files.recipe import ProfileSpec
from toolkit.profiling.grid import (
    CHEAP_VISITS,
    GridPoint,
    SliceShape,
    grid,
    in_rounds,
    slice_shapes,
)
from toolkit.profiling.process import LocalTimedEngine, Unmeasurable, slice_rows

SPEC = ProfileSpec(
    batch_sizes=[1, 4, 16, 64],
    input_lengths=[16, 64, 256],
    cached_lengths=[16, 64, 512],
    memory_lengths=[64],
    repeats=4,
    warmups=1,
    slices=40,
)


def test_the_grid_is_every_size_at_every_length_that_fits():
    points, skipped = grid(SPEC, FACTS)
    assert GridPoint("prefill", 16, 256) in points
    assert GridPoint("decode", 64, 64) in points
    assert len(points) + len(skipped) == 4 * 3 + 4 * 3


def test_points_that_do_not_fit_are_skipped_with_a_reason():
    _, skipped = grid(SPEC, FACTS)
    reasons = {(point.kind, point.batch_size, point.length): point.reason for point in skipped}
    assert reasons == {
        ("prefill", 64, 256): "more than the 8192 tokens that the KV cache holds",
        **{("decode", size, 512): "longer than the model's 512 tokens" for size in (1, 4, 16, 64)},
    }


def test_every_round_visits_every_point():
    points, _ = grid(SPEC, FACTS)
    visits = Counter(point for _, point in in_rounds(points, SPEC))
    assert visits.keys() == set(points)
    assert {visits[point] for point in points if point.kind == "decode"} == {4 * CHEAP_VISITS}
    assert visits[GridPoint("prefill", 1, 16)] == 4 * CHEAP_VISITS
    assert visits[GridPoint("prefill", 16, 256)] == 4


def test_slices_stay_within_memory_and_model():
    shapes = slice_shapes(SPEC, 2000, 200).values()
    assert len(shapes) == 40
    assert all(shape.batch_size * (shape.input_length + shape.steps) <= 2000 for shape in shapes)
    assert all(shape.input_length + shape.steps <= 200 for shape in shapes)
    assert {shape.steps for shape in shapes} == {16, 32}


def test_a_slice_depends_on_its_number_only():
    few = SPEC.model_copy(update={"slices": 10})
    all_of_them = slice_shapes(SPEC, 2000, 200)
    assert slice_shapes(few, 2000, 200) == {number: all_of_them[number] for number in range(10)}


def test_slices_have_real_padding_and_all_their_steps():
    rows = slice_rows(SliceShape(5, 100, 16), vocab_size=50)
    assert [len(row.tokens) for row in rows] == [100, 94, 88, 82, 75]
    assert all(row.max_new_tokens == 16 and row.sampling.ignore_eos for row in rows)
    assert max(max(row.tokens) for row in rows) == 49


def test_out_of_memory_makes_a_point_unmeasurable():
    bench = LocalTimedEngine(FakeEngine(FACTS), "wall")
    with pytest.raises(Unmeasurable, match="out of memory"):
        bench.time(GridPoint("prefill", 1000, 64), warmups=0)
