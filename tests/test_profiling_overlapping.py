"""The points of a profile of passes that overlap, and how long they take."""

from collections import Counter
from pathlib import Path

import fake_vllm_server
import numpy as np
import pytest
import samples
from synthetic_profiles import FACTS, steps_profile
from test_profiling_vllm import profiled, recipe_for

from toolkit.backends.vllm.profile import TimedPass, pace_of
from toolkit.estimators.fitting import POINTS_MIN, fit_profile
from toolkit.files.profile import StepsProfile
from toolkit.files.recipe import PolicySpec
from toolkit.laws.features import StepShape
from toolkit.laws.passes import GraphSettings, PassLaw
from toolkit.profiling.grid import APART, STEPS, GridPoint
from toolkit.profiling.overlapping import chunk_tokens, grid, in_rounds, other_points, visits_of

SPEC = samples.recipe().profile


def steps(budget: int = 8192, largest: int = 512) -> StepsProfile:
    return steps_profile(
        [],
        max_num_batched_tokens=budget,
        async_scheduling=True,
        graph_sizes=[size for size in (1, 2, 4, 8, 16, 32, 64, 256, 512) if size <= largest],
        graph_mode="FULL_AND_PIECEWISE",
    )


def facts(context: int = 8192, rows: int | None = 1024, capacity: int = 880_000):
    changed = {"max_model_len": context, "max_rows": rows, "capacity_tokens": capacity}
    return FACTS.model_copy(update=changed | {"engine": "vllm"})


def test_prompts_lie_around_the_sizes_of_graphs():
    lengths = [16, 64, 120, 136, 248, 264, 504, 520, 1024, 2048, 4096, 8064]
    assert chunk_tokens(steps()) == lengths
    points = grid(facts(), steps())
    rows = {point.batch_size for point in points if point.kind == "decode"}
    assert rows == {1, 8, 32, 96, 256, 520}
    lone = {point for point in other_points(facts(), steps()) if point.kind == "lone"}
    assert {point.length for point in lone} == set(lengths)
    assert {point.batch_size for point in lone} == {0, 1, 32, 128}


@pytest.mark.parametrize(
    ("context", "rows", "capacity", "budget", "largest"),
    [
        (8192, 1024, 880_000, 8192, 512),
        (128, 8, 4_096, 2048, 64),
        (4096, 4, 8_192, 256, 512),
        (1024, None, 10_000, 1024, 16),
    ],
)
def test_all_points_fit_the_engine_and_are_enough_for_the_laws(
    context: int, rows: int | None, capacity: int, budget: int, largest: int
):
    engine = facts(context, rows, capacity)
    limits = steps(budget, largest)
    points = grid(engine, limits)
    for kind in ("prefill", "decode"):
        its = [point for point in points if point.kind == kind]
        assert len(its) >= POINTS_MIN
        assert len({point.batch_size for point in its}) > 1
        assert len({point.length for point in its}) > 1
        for point in its:
            assert point.batch_size * (point.length + 1) <= capacity
            assert point.length < context
    others = other_points(engine, limits)
    kinds = {"lone", "load"} | ({"burst"} if rows != 4 else set())
    assert kinds <= {point.kind for point in others}
    for point in others:
        at_once = point.batch_size + (point.others if point.kind in ("lone", "burst") else 0)
        assert at_once <= (rows or at_once)
        assert point.length < context
        if point.kind in ("lone", "burst"):
            assert point.others * point.length <= capacity
        elif point.kind == "hit":
            assert point.length + point.others < min(context, capacity)


def test_visits_to_a_point_are_apart():
    points = [*grid(facts(), steps()), *other_points(facts(), steps())]
    visits = list(in_rounds(points, SPEC))
    assert Counter(point for _, point in visits) == {one: visits_of(one) for one in points}
    long = GridPoint("decode", 520, 1024)
    assert [number for number, point in visits if point == long] == [0]
    short = [place for place, (_, point) in enumerate(visits) if point == points[0]]
    assert min(np.diff(short)) > len(points) / 20


def test_the_pace_follows_from_four_runs():
    def run(point: GridPoint) -> list[TimedPass]:
        tokens = point.batch_size * point.length
        shape = StepShape(0, 0, 1, tokens)
        passes = [TimedPass(shape, 0.0, 0.01 + 1e-4 * tokens, 0.0, True, None)]
        if point.kind == "decode":
            for _ in range(3):
                start_s = passes[-1].end_s
                step_s = 0.005 + 1e-3 * point.batch_size
                shape = StepShape(point.batch_size, 0)
                passes.append(TimedPass(shape, start_s, start_s + step_s, None, False, None))
        return passes

    points = [GridPoint("prefill", 1, length) for length in (64, 256, 2048)]
    points += [GridPoint("decode", rows, 256) for rows in (1, 8, 32, 96)]
    pace = pace_of(points, run)
    assert pace.steps_s(32) == pytest.approx(0.037)
    assert pace.token_s == pytest.approx(1e-4)


@pytest.mark.slow
def test_a_server_with_overlapping_passes_is_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("toolkit.backends.vllm.profile.LOAD_S", 0.5)
    monkeypatch.setattr("toolkit.profiling.overlapping.visits_of", lambda point: 1)
    recipe = recipe_for(fake_vllm_server.install(tmp_path), "overlaps")
    flags = PolicySpec(name="vllm", parameters={"max_num_seqs": 16, "max_num_batched_tokens": 512})
    found = profiled(recipe.model_copy(update={"policy": flags}), tmp_path)
    assert not found.failed
    measured = found.steps
    assert measured is not None
    assert measured.async_scheduling
    assert measured.graph_sizes == fake_vllm_server.GRAPH_SIZES
    sizes = tuple(measured.graph_sizes)
    law = PassLaw(fake_vllm_server.LAW, graphs=GraphSettings(measured.graph_mode, sizes))
    ratios = [
        launch_s / law.launch_s(StepShape(one.decodes, 0, one.prefills, one.prefill_tokens))
        for one in measured.points
        for launch_s in one.launch_s
    ]
    assert np.median(ratios) == pytest.approx(1.0, abs=0.05)
    assert all(not point.host_s for point in measured.points if not point.idle)
    assert any(point.rows == 1 for point in measured.front)
    # between two prompts that come one at a time, rows decode alone
    alone = [
        len(point.seconds)
        for point, before in zip(measured.points[1:], measured.points, strict=False)
        if before.prefills == 1 and before.decodes == 1 and not point.prefills
    ]
    assert np.median(alone) >= APART
    assert max(len(point.seconds) for point in measured.points) >= STEPS - 4
    assert fit_profile(found, samples.HEAD).steps is not None
