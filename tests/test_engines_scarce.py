"""Memory that runs out at any allocation of a round: rows that had room keep their caches, and
nobody's tokens change.

An allocation is what a ledger is asked for and every tensor that torch makes, in the model's passes
too. It fails once, so that a second try helps, or with all that follow in its round, so that rows
have to go. After each round `Desk` holds the engine's rows against what the round wanted and what
it says was dropped. Passes that fail once they have been made are made again, whole and then in
parts. `test_engines_machine.py` has any rounds in any order.
"""

import functools
import os
from typing import Any

import pytest
import torch
from rounds import FREE, PAUSED, RUNS, SWAPPED, WAITS, Desk, Scarce, free_row, rebatch_engine

from toolkit.engines.protocol import Row, SamplingParams
from toolkit.engines.rebatch_engine import RebatchEngine

STRIDE = int(os.environ.get("LLMCTL_TEST_STRIDE", "61"))  # 1: every allocation, which takes minutes
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(repetition_penalty=1.4),
    SamplingParams(temperature=1.0, seed=5),
    FREE,
)
ROWS = [
    Row(f"r{k}", tuple((7 * k + j) % 256 for j in range(length)), 0, new, SAMPLINGS[k % 4])
    for k, (length, new) in enumerate([(5, 14), (30, 9), (8, 12), (40, 6), (3, 30)])
]
CROWD = [free_row(length, 12, first=length) for length in (5, 30, 8, 40)]
LAYOUTS: dict[str, dict[str, str]] = {
    "slab": {},
    "rows": {"kv_layout": "rows"},
    "shape": {"joining": "shape"},
}
CASES = [("slab", 0), ("slab", 9), ("rows", 0), ("rows", 9), ("shape", 0)]


@functools.cache
def alone() -> list[tuple[int, ...]]:
    return [Desk(rebatch_engine(), [row]).finish()[0] for row in ROWS]


def make_desk(layout: str, chunk_tokens: int) -> Desk:
    return Desk(rebatch_engine(**LAYOUTS[layout]), ROWS, chunk_tokens=chunk_tokens)


def cached(desk: Desk) -> list[int]:
    """Those who run and have their caches."""
    return [number for number in desk.having(RUNS) if number in desk.engine._batch]


class FailingPasses:
    """Within it, the first passes have been computed when memory runs out, or all of more than so
    many rows.
    """

    def __init__(self, engine: RebatchEngine, failures: int = 0, *, most_rows: int = 0) -> None:
        self.engine, self.failures, self.most_rows = engine, failures, most_rows
        self.network = engine._network
        self.rows: list[int] = []  # of each pass
        self.columns: list[int] = []

    def __enter__(self) -> "FailingPasses":
        self.engine._network = self.call
        return self

    def __exit__(self, *error: object) -> None:
        self.engine._network = self.network

    def call(self, **inputs: Any) -> Any:
        rows, columns = inputs["input_ids"].shape
        self.rows.append(rows)
        self.columns.append(columns)
        output = self.network(**inputs)
        if len(self.rows) <= self.failures or 0 < self.most_rows < rows:
            raise torch.OutOfMemoryError("injected")
        return output


def play(desk: Desk, scarce: Scarce) -> None:
    """Rounds with all that there is in one, each move made of whoever is there for it."""
    with scarce:
        for round_ in (
            lambda: desk.run(3, enter=desk.having(WAITS)[:2]),
            lambda: desk.run(2, enter=desk.having(WAITS)[:2], pause=tuple(cached(desk)[:1])),
            lambda: desk.run(
                2, swap_out=tuple(cached(desk)[:1]), resume=tuple(desk.having(PAUSED))
            ),
            lambda: desk.run(
                2, enter=desk.having(WAITS)[:1], swap_in=tuple(desk.having(SWAPPED)), overlap=True
            ),
            lambda: desk.run(
                2, resume=tuple(desk.having(PAUSED)), evict=tuple(desk.having(RUNS)[-1:])
            ),
        ):
            round_()
            scarce.relent()


@pytest.mark.slow
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "for the rest of the round"])
@pytest.mark.parametrize(("layout", "chunk_tokens"), CASES)
def test_no_allocation_that_fails_costs_a_token(
    layout: str, chunk_tokens: int, lasting: bool
) -> None:
    desk = make_desk(layout, chunk_tokens)
    calm = Scarce(desk.engine)
    play(desk, calm)
    assert desk.finish() == alone()
    first = 1 + 17 * CASES.index((layout, chunk_tokens)) % STRIDE
    for fails_at in range(first, calm.count + 1, STRIDE):
        desk = make_desk(layout, chunk_tokens)
        scarce = Scarce(desk.engine, fails_at, lasting=lasting)
        play(desk, scarce)
        assert scarce.failures, fails_at
        assert desk.finish() == alone(), fails_at
        assert desk.engine.ledger.used_bytes == desk.engine.host_ledger.used_bytes == 0, fails_at


@pytest.mark.slow
def test_an_allocation_that_fails_once_in_a_step_costs_no_row() -> None:
    """Whatever it is: the step is made again."""
    desk = make_desk("slab", 0)
    desk.run(2, enter=(0, 1, 4))
    with Scarce(desk.engine) as calm:
        desk.run(1)
    for fails_at in range(1, calm.count + 1, 7):
        desk = make_desk("slab", 0)
        desk.run(2, enter=(0, 1, 4))
        with Scarce(desk.engine, fails_at):
            output = desk.run(1)
        assert (output.steps, output.dropped) == (1, ())
        assert desk.finish() == alone()


def test_newcomers_who_fail_cost_those_who_run_nothing() -> None:
    desk = make_desk("slab", 0)
    desk.run(2, enter=(0, 1))
    with Scarce(desk.engine, 1, lasting=True):
        output = desk.run(2, enter=(2, 3))
    assert (output.steps, output.dropped) == (0, (3, 2))
    assert desk.run(2).steps == 2


def test_a_step_that_has_no_room_costs_the_last_row_that_came() -> None:
    desk = make_desk("slab", 0)
    desk.run(2, enter=(0, 1, 4))
    with Scarce(desk.engine, 1, lasting=True):
        output = desk.run(2)
    assert (output.steps, output.dropped) == (0, (4,))
    assert sorted(desk.having(RUNS)) == [0, 1]


@pytest.mark.parametrize("layout", ["slab", "rows"])
@pytest.mark.parametrize("failures", [1, 2, 3])
def test_a_step_whose_passes_fail_is_made_in_parts_and_the_round_goes_on(
    layout: str, failures: int
) -> None:
    desk = Desk(rebatch_engine(**LAYOUTS[layout]), CROWD)
    desk.run(2, enter=range(4))
    with FailingPasses(desk.engine, failures) as passes:
        output = desk.run(3)
    assert (output.steps, output.dropped, output.ran_out) == (3, (), failures - 1)
    assert (
        passes.rows
        == {1: [4, 4, 4, 4], 2: [4, 4, 2, 2, 4, 4], 3: [4, 4, 2, 1, 1, 1, 1, 2, 2, 4]}[failures]
    )
    assert desk.finish() == Desk(rebatch_engine(), CROWD).finish()


def test_where_memory_stays_short_not_every_step_fails_twice() -> None:
    """Passes of more than two rows have no room."""
    desk = Desk(rebatch_engine(), CROWD)
    desk.run(2, enter=range(4))
    with FailingPasses(desk.engine, most_rows=2) as passes:
        output = desk.run(3)
    assert (output.steps, output.dropped) == (3, ())
    assert passes.rows == [4, 4, 2, 2, 4, 2, 2, 4, 2, 2]
    assert desk.finish() == Desk(rebatch_engine(), CROWD).finish()


@pytest.mark.parametrize(("layout", "chunk_tokens"), CASES)
@pytest.mark.parametrize("failures", [1, 2, 4])
def test_a_prefill_that_fails_is_made_in_parts_and_joins_all_the_same(
    layout: str, chunk_tokens: int, failures: int
) -> None:
    desk = make_desk(layout, chunk_tokens)
    with FailingPasses(desk.engine, failures):
        output = desk.run(2, enter=(0, 1, 3))
    assert not output.dropped
    assert desk.finish() == alone()


def test_what_no_parts_help_costs_whom_it_was_for() -> None:
    desk = make_desk("slab", 0)
    desk.run(2, enter=(0, 1, 4))
    with FailingPasses(desk.engine, 100) as passes:
        output = desk.run(2)
    assert (output.steps, output.dropped) == (0, (4,))
    assert passes.rows == [3, 3, 2, 1]
    with FailingPasses(desk.engine, 100) as passes:
        output = desk.run(2, enter=(3,))
    assert (output.steps, output.dropped) == (0, (3,))
    assert passes.columns == [40, 40, 20, 10, 5]
