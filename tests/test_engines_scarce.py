"""Memory that runs out at any allocation of a round: rows that had room keep their caches, and no
row's tokens change.

An allocation is a charge to a ledger or a tensor that torch makes, also in the model's passes.
Either one allocation fails, so that a second try succeeds, or all later ones in the round fail too,
so that rows are dropped. After each round `RoundDriver` compares the engine's rows with the plan
and with the rows that the round reports as dropped. Failed passes are repeated, whole and then in
parts. `test_engines_machine.py` has any rounds in any order.
"""

import functools
import os
from typing import Any

import pytest
import torch
from rounds import (
    FREE,
    PAUSED,
    RUNS,
    SWAPPED,
    WAITS,
    FailingAllocations,
    RoundDriver,
    free_row,
    kept_bytes,
    rebatch_engine,
)

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
LAYOUTS: dict[str, dict[str, object]] = {
    "slab": {},
    "shape": {"joining": "shape"},
    "fixed": {"cuda_graphs": True},
}
CASES = [("slab", 0), ("slab", 9), ("shape", 0), ("fixed", 0)]


@functools.cache
def alone() -> list[tuple[int, ...]]:
    return [RoundDriver(rebatch_engine(), [row]).finish()[0] for row in ROWS]


def make_driver(layout: str, chunk_tokens: int) -> RoundDriver:
    return RoundDriver(rebatch_engine(**LAYOUTS[layout]), ROWS, chunk_tokens=chunk_tokens)


def cached(driver: RoundDriver) -> list[int]:
    """The running rows that have their caches."""
    return [number for number in driver.having(RUNS) if number in driver.engine._batch]


class FailingPasses:
    """In this context, the first `failures` passes run out of memory after they were computed, or
    all passes of more than `most_rows` rows.
    """

    def __init__(self, engine: RebatchEngine, failures: int = 0, *, most_rows: int = 0) -> None:
        self.engine = engine
        self.failures = failures
        self.most_rows = most_rows
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


def play(driver: RoundDriver, failing: FailingAllocations) -> None:
    """Rounds with every kind of move, each of rows that are in the right state."""
    with failing:
        for round_ in (
            lambda: driver.run(3, enter=driver.having(WAITS)[:2]),
            lambda: driver.run(2, enter=driver.having(WAITS)[:2], pause=tuple(cached(driver)[:1])),
            lambda: driver.run(
                2, swap_out=tuple(cached(driver)[:1]), resume=tuple(driver.having(PAUSED))
            ),
            lambda: driver.run(
                2,
                enter=driver.having(WAITS)[:1],
                swap_in=tuple(driver.having(SWAPPED)),
                overlap=True,
            ),
            lambda: driver.run(
                2, resume=tuple(driver.having(PAUSED)), evict=tuple(driver.having(RUNS)[-1:])
            ),
        ):
            round_()
            failing.stop_failing()


@pytest.mark.slow
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "for the rest of the round"])
@pytest.mark.parametrize(("layout", "chunk_tokens"), CASES)
def test_a_failing_allocation_changes_no_tokens(
    layout: str, chunk_tokens: int, lasting: bool
) -> None:
    driver = make_driver(layout, chunk_tokens)
    calm = FailingAllocations(driver.engine)
    play(driver, calm)
    assert driver.finish() == alone()
    first = 1 + 17 * CASES.index((layout, chunk_tokens)) % STRIDE
    for fails_at in range(first, calm.count + 1, STRIDE):
        driver = make_driver(layout, chunk_tokens)
        failing = FailingAllocations(driver.engine, fails_at, lasting=lasting)
        play(driver, failing)
        assert failing.failures, fails_at
        assert driver.finish() == alone(), fails_at
        assert driver.engine.ledger.used_bytes == kept_bytes(driver.engine), fails_at
        assert driver.engine.host_ledger.used_bytes == 0, fails_at


@pytest.mark.slow
def test_an_allocation_that_fails_once_in_a_step_costs_no_row() -> None:
    """Whichever allocation it is, the step is repeated."""
    driver = make_driver("slab", 0)
    driver.run(2, enter=(0, 1, 4))
    with FailingAllocations(driver.engine) as calm:
        driver.run(1)
    for fails_at in range(1, calm.count + 1, 7):
        driver = make_driver("slab", 0)
        driver.run(2, enter=(0, 1, 4))
        with FailingAllocations(driver.engine, fails_at):
            output = driver.run(1)
        assert (output.steps, output.dropped) == (1, ())
        assert driver.finish() == alone()


def test_newcomers_that_do_not_fit_do_not_affect_running_rows() -> None:
    driver = make_driver("slab", 0)
    driver.run(2, enter=(0, 1))
    with FailingAllocations(driver.engine, 1, lasting=True):
        output = driver.run(2, enter=(2, 3))
    assert (output.steps, output.dropped) == (0, (3, 2))
    assert driver.run(2).steps == 2


def test_a_step_without_room_drops_the_last_admitted_row() -> None:
    driver = make_driver("slab", 0)
    driver.run(2, enter=(0, 1, 4))
    with FailingAllocations(driver.engine, 1, lasting=True):
        output = driver.run(2)
    assert (output.steps, output.dropped) == (0, (4,))
    assert sorted(driver.having(RUNS)) == [0, 1]


@pytest.mark.parametrize("layout", ["slab", "fixed"])
@pytest.mark.parametrize("failures", [1, 2, 3])
def test_a_failing_step_is_made_in_parts(layout: str, failures: int) -> None:
    driver = RoundDriver(rebatch_engine(**LAYOUTS[layout]), CROWD)
    driver.run(2, enter=range(4))
    with FailingPasses(driver.engine, failures) as passes:
        output = driver.run(3)
    assert (output.steps, output.dropped, output.ran_out) == (3, (), failures - 1)
    assert (
        passes.rows
        == {1: [4, 4, 4, 4], 2: [4, 4, 2, 2, 4, 4], 3: [4, 4, 2, 1, 1, 1, 1, 2, 2, 4]}[failures]
    )
    assert driver.finish() == RoundDriver(rebatch_engine(), CROWD).finish()


def test_while_memory_stays_short_not_every_step_fails_twice() -> None:
    """Passes of more than two rows have no room."""
    driver = RoundDriver(rebatch_engine(), CROWD)
    driver.run(2, enter=range(4))
    with FailingPasses(driver.engine, most_rows=2) as passes:
        output = driver.run(3)
    assert (output.steps, output.dropped) == (3, ())
    assert passes.rows == [4, 4, 2, 2, 4, 2, 2, 4, 2, 2]
    assert driver.finish() == RoundDriver(rebatch_engine(), CROWD).finish()


@pytest.mark.parametrize(("layout", "chunk_tokens"), CASES)
@pytest.mark.parametrize("failures", [1, 2, 4])
def test_a_failing_prefill_is_made_in_parts_and_joins(
    layout: str, chunk_tokens: int, failures: int
) -> None:
    driver = make_driver(layout, chunk_tokens)
    with FailingPasses(driver.engine, failures):
        output = driver.run(2, enter=(0, 1, 3))
    assert not output.dropped
    assert driver.finish() == alone()


def test_a_pass_that_fails_in_parts_too_drops_its_rows() -> None:
    driver = make_driver("slab", 0)
    driver.run(2, enter=(0, 1, 4))
    with FailingPasses(driver.engine, 100) as passes:
        output = driver.run(2)
    assert (output.steps, output.dropped) == (0, (4,))
    assert passes.rows == [3, 3, 2, 1]
    with FailingPasses(driver.engine, 100) as passes:
        output = driver.run(2, enter=(3,))
    assert (output.steps, output.dropped) == (0, (3,))
    assert passes.columns == [40, 40, 20, 10, 5]
