"""Memory that runs out at any allocation of a round: rows that had room keep their caches, and no
row's tokens change.

An allocation is a charge to a ledger or a tensor that torch makes, also in the model's passes.
Failed passes are repeated, whole and then in parts. `test_engines_machine.py` lets any allocation
of any rounds fail, once or for the rest of a round.
"""

import functools
from typing import Any

import pytest
import torch
from rounds import (
    FREE,
    RUNS,
    FailingAllocations,
    RoundDriver,
    free_row,
    rebatch_engine,
)

from toolkit.engines.protocol import Row, SamplingParams
from toolkit.engines.rebatch_engine import RebatchEngine

pytestmark = pytest.mark.slow

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
