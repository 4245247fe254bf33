"""Decode steps of fixed shapes: which shapes there are, and when they are captured.

That their tokens are right is held with all other ways to serve, in test_engines_rebatch.py,
test_engines_machine.py, test_engines_scarce.py and test_engines_contract.py. There is no GPU here,
so a stand-in takes the place of a graph.
"""

import random

import pytest
import torch
from rounds import (
    DONE,
    WAITS,
    Replay,
    RoundDriver,
    alone,
    free_row,
    go_on,
    random_rows,
    rebatch_engine,
    replayed,
)
from slices import run_slice, slice_bytes

from toolkit.engines import fixed_step
from toolkit.engines.fixed_step import FixedShape, FixedSteps, shape_for
from toolkit.engines.protocol import EnginePass
from toolkit.engines.rebatch_engine import RebatchEngine
from toolkit.errors import InputError

pytestmark = pytest.mark.slow

ROWS = random_rows(0, 24)


def fixed_engine(**changes: object) -> RebatchEngine:
    return rebatch_engine(cuda_graphs=True, **changes)


def steps_of(engine: RebatchEngine) -> FixedSteps:
    steps = engine._batch.fixed
    assert steps is not None
    return steps


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Replay]:
    """The graphs that engines have captured."""
    return replayed(monkeypatch)


def capturing(engine: RebatchEngine) -> RebatchEngine:
    steps_of(engine).captures = True
    return engine


def test_a_captured_step_gives_the_tokens_of_an_eager_one(graphs: list[Replay]) -> None:
    engine = capturing(fixed_engine())
    eager = rebatch_engine()
    driver = RoundDriver(engine, ROWS)
    rng = random.Random(3)
    for _ in range(25):
        driver.at_random(rng)
    assert driver.finish() == alone(eager, ROWS)
    assert sum(graph.replays for graph in graphs) > 20


def test_a_shape_is_captured_once_for_many_steps(
    graphs: list[Replay],
) -> None:
    engine = capturing(fixed_engine())
    driver = RoundDriver(engine, [free_row(3, 40), free_row(9, 40)])
    driver.run(1, enter=(0, 1))
    assert not graphs
    driver.run(20)
    assert [graph.shape for graph in graphs] == [FixedShape(2, 128)]
    assert graphs[0].replays == 20


def test_new_slabs_end_the_graphs_of_the_old_ones(graphs: list[Replay]) -> None:
    engine = capturing(fixed_engine())
    driver = RoundDriver(engine, [free_row(3, 40), *[free_row(60, 30) for _ in range(6)]])
    driver.run(6, enter=(0,))
    before = len(graphs)
    driver.run(6, enter=driver.having(WAITS))  # too many rows and columns for the slabs
    assert len(graphs) > before
    assert len(steps_of(engine).graphs) == len(graphs) - before


def test_slabs_stay_until_their_room_is_needed(
    graphs: list[Replay],
) -> None:
    needed = slice_bytes(fixed_engine(), 5, 40, 8)
    engine = capturing(fixed_engine(budget_mib=(needed + 1000) / 2**20))
    driver = RoundDriver(engine, [free_row(3, 12), free_row(3, 12)])
    driver.run(20, enter=(0,))
    captured = len(graphs)
    assert captured
    assert engine.ledger.used_bytes > 0
    driver.run(20, enter=(1,))
    assert len(graphs) == captured  # the same shape, on the same slabs
    assert engine.ledger.free_bytes < needed
    run_slice(engine, [free_row(40, 8)] * 5, 8, go_on)
    assert engine.ledger.used_bytes == 0


def test_where_a_capture_fails_steps_run_eagerly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def capture(steps: FixedSteps, shape: FixedShape) -> Replay:
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    monkeypatch.setattr(FixedSteps, "_capture", capture)
    engine = capturing(fixed_engine())
    driver = RoundDriver(engine, ROWS[:4])
    for _ in range(4):
        driver.run(4, enter=driver.having(WAITS)[:1])
    eager = rebatch_engine()
    assert driver.finish() == alone(eager, ROWS[:4])
    (record,) = caplog.records
    assert record.getMessage().endswith("operation not permitted when stream is capturing")
    assert not steps_of(engine).captures


def test_graphs_of_unused_shapes_are_dropped_first(
    graphs: list[Replay], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fixed_step, "GRAPHS_MAX", 2)
    engine = capturing(fixed_engine())
    engine.run(EnginePass(0, tuple(free_row(3, 90) for _ in range(8)), tuple(range(8))), go_on)
    for rows in (8, 4, 2):
        engine.run(EnginePass(0, evict=tuple(range(rows, 8))), go_on) if rows < 8 else None
        engine.run(EnginePass(4), go_on)
        for number in range(rows // 2, rows):
            engine.run(EnginePass(0, evict=(number,)), go_on)
    assert [graph.shape.rows for graph in graphs] == [8, 4, 2]
    assert [shape.rows for shape in steps_of(engine).graphs] == [4, 2]


def test_timed_steps_are_captured_before_they_are_timed(graphs: list[Replay]) -> None:
    engine = capturing(fixed_engine())
    during: list[int] = []

    def clock() -> float:
        during.append(len(graphs))
        return 0.0

    engine.time_decode(4, 66, clock)
    assert during[0] == during[1] > 0


@pytest.mark.parametrize(
    ("rows", "width", "expected"),
    [
        (1, 30, FixedShape(1, 128)),
        (5, 127, FixedShape(6, 128)),
        (5, 128, FixedShape(6, 256)),
        (5, 1500, FixedShape(6, 2048)),
        (9, 2048, FixedShape(10, 4096)),  # as many rows as the cache has
    ],
)
def test_shapes_have_room_for_the_rows_and_little_more(
    rows: int, width: int, expected: FixedShape
) -> None:
    assert shape_for(rows, width, 10) == expected


@pytest.mark.parametrize("poisoned", [0, 1])
def test_an_overflow_does_not_reach_the_next_row(poisoned: int) -> None:
    """Zero times infinity is no number, and a row of few tokens reads up to its shape's bound."""
    engine = fixed_engine()
    driver = RoundDriver(engine, [free_row(40, 30), free_row(41, 30), free_row(4, 25)])
    driver.run(3, enter=(0, 1))
    index = engine._batch.numbers.index(poisoned)
    with torch.inference_mode():
        for layer in engine._batch.cache.layers:
            layer.key_slab[index] = torch.nan
            layer.value_slab[index] = torch.inf
    driver.run(0, evict=(poisoned,))
    driver.state[poisoned] = DONE
    driver.run(5, enter=(2,))
    eager = rebatch_engine()
    got = driver.finish()
    for number in {0, 1, 2} - {poisoned}:
        assert [got[number]] == alone(eager, [driver.rows[number]])


def test_what_has_no_fixed_shape_is_refused() -> None:
    with pytest.raises(InputError, match=r"engine.cuda_graphs.*engine.joining .*shape"):
        fixed_engine(joining="shape")
