"""Sequences of rounds: their draws, their records, and workers that fail meanwhile."""

from functools import partial

import pytest
from llmctl_fake import FakeEngine
from synthetic_profiles import FACTS
from test_profiling_run import InMemory, recorded_by

from toolkit.files.profile import FailedPoint, RoundSequence
from toolkit.files.recipe import ProfileSpec
from toolkit.profiling.grid import GridPoint, part_points
from toolkit.profiling.measure import probe_admission
from toolkit.profiling.process import LocalTimedEngine
from toolkit.profiling.worker_runs import ROUNDS, Feed, Ranges, RowsOfSequence

SPEC = ProfileSpec(
    batch_sizes=[1, 4, 16],
    input_lengths=[16, 64, 128],
    cached_lengths=[16, 64, 511, 512],
    memory_lengths=[64, 511],
    slice_tokens=[8, 16],
)
RANGES = Ranges(SPEC, FACTS, tokens_max=4000.0)


def drive(number: int, engine: FakeEngine | None = None):
    """A whole sequence on a fake engine, and the largest rows x longest at the end of a round."""
    rows = RowsOfSequence(RANGES, number, 0, ())
    engine = engine or FakeEngine(FACTS)
    padded = 0
    for _ in range(ROUNDS):
        plan = rows.plan()
        output = engine.run(plan, lambda _: True)
        rows.finish(output, 0.5)
        point = rows.points[-1]
        padded = max(padded, point.rows * (point.cached_length + point.steps))
    return rows.points, padded


@pytest.mark.parametrize("number", range(3))
def test_a_sequence_has_rounds_of_all_kinds_within_memory(number):
    points, padded = drive(number)
    assert len(points) == ROUNDS
    assert padded <= RANGES.tokens_max
    assert points[0].groups
    assert all(sum(rows for rows, _ in point.groups) <= point.rows for point in points)
    assert all(1 <= point.steps <= 16 for point in points if point.rows)


def test_remaining_rows_are_dropped_with_the_next_sequence():
    engine = FakeEngine(FACTS)
    first = RowsOfSequence(RANGES, 0, 0, ())
    engine.run(first.plan(), lambda _: True)
    second = RowsOfSequence(RANGES, 1, first.next_row, range(first.next_row))
    output = engine.run(second.plan(), lambda _: True)
    second.finish(output, 0.5)
    assert second.points[0].left == first.next_row + len(output.ended)
    assert output.tokens <= second.points[0].rows * (
        second.points[0].cached_length + output.steps + 1
    )


def run_all(workers: InMemory):
    return recorded_by(
        workers, lambda record: Feed(workers, range(6), partial(RowsOfSequence, RANGES), record)
    )


def test_each_sequence_is_recorded_once_and_whole():
    recorded = run_all(InMemory(2))
    assert sorted(recorded) == list(range(6))
    for result in recorded.values():
        assert isinstance(result, RoundSequence)
        assert len(result.rounds) == ROUNDS
        assert all(point.seconds > 0.0 for point in result.rounds)


@pytest.mark.parametrize("failure", ["oom", "crashed"])
def test_a_failed_sequence_is_recorded_and_the_others_run(failure):
    recorded = run_all(InMemory(2, fate=lambda pass_id, rows: failure if pass_id == 40 else ""))
    failed = [result for result in recorded.values() if isinstance(result, FailedPoint)]
    assert sorted(recorded) == list(range(6))
    assert [(point.kind, point.reason) for point in failed] == [("rounds", failure)]


def test_rows_enter_until_the_next_has_no_room():
    bench = LocalTimedEngine(FakeEngine(FACTS), "wall")
    probe = probe_admission(bench, 127)
    assert (probe.largest_ok, probe.smallest_oom) == (64, 65)
    assert bench.admit(127, 10) == (10, False)
    assert bench.admit(127, 10) == (10, False)  # they have left


def test_parts_are_measured_where_they_fit():
    points = part_points(SPEC, FACTS)
    assert GridPoint("join", 16, 64, 15) in points
    assert {point.length for point in points} == {16, 64, 511}
    assert all(point.tokens <= FACTS.capacity_tokens for point in points)
