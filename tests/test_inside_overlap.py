"""Passes that overlap, counted beside their law, from an engine with the times of the law."""

import math
from dataclasses import replace
from itertools import pairwise

import fake_vllm
import msgspec
import pytest
from overlapping_server import ends_of
from pass_logs import one_pass

from toolkit.backends.vllm.overlap import Following, OverlappingPasses, sampler_s
from toolkit.files.iterations import LoggedPass, LoggedRow, shape_of_rows
from toolkit.files.profile import StepPoint
from toolkit.laws.passes import GraphSettings, PassLaw
from toolkit.profiling.run import with_sampler

LAW = PassLaw(
    {
        "pass_read": 5e-3,
        "token_alone": 1e-5,
        "cached_alone": 3e-8,
        "token_arithmetic": 2e-5,
        "attended": 1e-9,
        "cached_beside": 5e-8,
        "graph": 3e-3,
        "graph_row": 3e-5,
        "eager": 2.5e-2,
        "eager_chunk": 4e-4,
    },
    graphs=GraphSettings("FULL_DECODE_ONLY", tuple(range(8, 513, 8))),
)
SAMPLER_S = 5e-4  # of each launch, after its stamp


def passes() -> list[list[LoggedRow]]:
    """Decodes of eight rows with prompts of many lengths between them."""
    found = []
    for number in range(300):
        rows = [LoggedRow(f"d{k}", 256 + number, 1, 256) for k in range(8)]
        if number % 9 == 4:
            tokens = (16, 500, 2000, 6000)[number // 9 % 4]
            rows.append(LoggedRow(f"p{number}", 0, tokens, tokens))
        found.append(rows)
    return found


def served(law: PassLaw, *, stamps: bool = True) -> list[tuple[LoggedPass, Following | None]]:
    """The log of an engine that follows the law, with the pass behind each as it ends."""
    rows_of_passes = passes()
    shapes = [shape_of_rows(rows) for rows in rows_of_passes]
    launches = [law.launch_s(shape) for shape in shapes]
    launched_s = 0.0
    logged = []
    for number, (start_s, end_s) in enumerate(ends_of(law, shapes, launches)):
        begins_s = max(start_s, launched_s) if law.graphs.apart else start_s
        launched_s = begins_s + launches[number]
        stamped = {"launched_s": launched_s - SAMPLER_S, "ready_s": end_s} if stamps else {}
        logged.append(one_pass(start_s, end_s, rows_of_passes[number], step=number, **stamped))
    behind = [Following(one.start_s, one.rows, one.launched_s) for one in logged[1:]]
    return list(zip(logged, [*behind, None], strict=True))


def counted(law: PassLaw, log: list[tuple[LoggedPass, Following | None]]) -> tuple[float, float]:
    """Return measured and predicted seconds of a log, without its first quarter."""
    follower = OverlappingPasses(law)
    found = [follower.ended(*each) for each in log][len(log) // 4 :]
    return sum(took_s for took_s, _ in found), sum(predicted_s for _, predicted_s in found)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "NONE", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize(("apart", "stamps"), [(False, True), (True, True), (False, False)])
def test_passes_that_follow_the_law_take_as_long_as_it_predicts(
    mode: str, apart: bool, stamps: bool
):
    graphs = replace(LAW.graphs, mode=mode, apart=apart)
    law = replace(LAW.with_terms({"piece": 6e-3}), graphs=graphs)
    took_s, predicted_s = counted(law, served(law, stamps=stamps))
    assert took_s == pytest.approx(predicted_s)


def test_a_slower_machine_takes_as_many_times_as_long():
    took_s, predicted_s = counted(LAW, served(LAW.times(1.2)))
    assert took_s / predicted_s == pytest.approx(1.2, rel=0.03)


def test_each_pass_is_predicted_behind_the_measured_ones():
    """One pass that another program disturbed is wrong alone."""
    log = served(LAW)
    late = log[150][0]
    moved = []
    for one, behind in log:
        shift_s = 1.0 if one.step >= 150 else 0.0
        start_s = one.start_s + (1.0 if one.step > 151 else 0.0)
        changed = {
            "start_s": start_s,
            "end_s": one.end_s + shift_s,
            "ready_s": one.ready_s + shift_s,
            "launched_s": start_s + (one.launched_s - one.start_s),
        }
        moved.append((msgspec.structs.replace(one, **changed), behind))
    moved = [
        (one, Following(later.start_s, later.rows, later.launched_s))
        for (one, _), (later, _) in pairwise(moved)
    ]
    follower = OverlappingPasses(LAW)
    errors = []
    for one, behind in moved:
        took_s, predicted_s = follower.ended(one, behind)
        errors.append(abs(took_s - predicted_s))
    assert late.step == 150
    assert sum(error > 0.5 for error in errors) == 1
    assert math.isclose(sum(errors[160:]), 0.0, abs_tol=0.02)


def test_a_server_counts_its_passes():
    inside = fake_vllm.imported("toolkit.backends.vllm.iterations")
    sums = fake_vllm.pass_series()
    counts = inside.PassCounts(LAW, sums)
    for one, behind in served(LAW.times(1.25)):
        counts.passed(one, behind)
    assert sum(sums.took) / sum(sums.predicted) == pytest.approx(1.25, rel=0.05)


def test_a_launch_after_its_stamp_is_bounded_on_both_sides():
    """By the tokens of the pass before, and, from idle, by the schedule of the following pass."""
    (first, behind), (second, later) = served(LAW)[:2]
    assert behind is not None
    assert later is not None
    assert sampler_s(first, behind, from_idle=True) == pytest.approx(SAMPLER_S)
    assert sampler_s(second, later, from_idle=False) >= SAMPLER_S - 1e-9
    unknown = Following(behind.start_s, behind.rows, 0.0)
    assert sampler_s(first, unknown, from_idle=False) == math.inf


def test_a_profile_has_whole_launches():
    point = StepPoint(
        decodes=1,
        decode_cached=9.0,
        prefills=0,
        prefill_tokens=0,
        prefill_attended=0.0,
        seconds=[0.01, 0.01],
        host_s=[],
        launch_s=[0.003, 0.004],
    )
    assert with_sampler(point, 5e-4).launch_s == pytest.approx([0.0035, 0.0045])
    unknown = point.model_copy(update={"launch_s": []})
    assert with_sampler(unknown, 5e-4) == unknown
