"""Numbers that are kept per worker, against computing all of them at every query."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.estimators.laws import unit_step
from toolkit.estimators.memory import ZetaMemory
from toolkit.sched.types import Worker
from toolkit.sched.view import WorkerFigure


def workers(count: int) -> list[Worker]:
    return [Worker(k, unit_step(), ZetaMemory(100)) for k in range(count)]


@pytest.mark.slow
@given(st.integers(0, 10**6), st.integers(1, 9))
def test_the_least_figure_equals_that_of_computing_all(seed, count):
    rng = random.Random(seed)
    rows = [[rng.randint(0, 30) for _ in range(rng.randint(0, 4))] for _ in range(count)]
    all_workers = workers(count)

    def amount(worker, expected):
        return sum(max(expected - done, 1) for done in rows[worker.index])

    def more(worker):
        return amount(worker, expected) + worker.index % 3

    figure = WorkerFigure(all_workers, amount)
    for _ in range(12):
        expected = rng.randint(1, 40)
        index = rng.randrange(count)
        rows[index] = [rng.randint(0, 30) for _ in range(rng.randint(0, 4))]
        figure.forget(index)
        alive = [worker for worker in all_workers if worker.index == index or rng.random() < 0.7]
        least = min(alive, key=lambda worker: amount(worker, expected))
        assert figure.least(alive, expected) == least.index
        assert figure.least_by(alive, expected, more) == min(alive, key=more).index
