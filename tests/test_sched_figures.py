"""Figures that are cached per worker, against computing all of them at every query."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.estimators.laws import unit_step
from toolkit.estimators.memory import ZetaMemory
from toolkit.sched.figures import FEW_WORKERS, Loads, WorkerFigure
from toolkit.sched.types import Worker


def workers(count: int) -> list[Worker]:
    return [Worker(k, unit_step(), ZetaMemory(100)) for k in range(count)]


@pytest.mark.slow
@given(st.integers(0, 10**6), st.integers(1, 9))
def test_the_least_figure_equals_that_of_computing_all(seed, count):
    rng = random.Random(seed)
    rows = [[rng.randint(0, 30) for _ in range(rng.randint(0, 4))] for _ in range(count)]

    def amount(worker, expected):
        own = rows[worker.index]
        return sum(max(expected - done, 1) for done in own), len(own)

    figure = WorkerFigure(workers(count), amount)
    able = np.arange(count)
    for _ in range(12):
        expected = rng.randint(1, 40)
        index = rng.randrange(count)
        rows[index] = [rng.randint(0, 30) for _ in range(rng.randint(0, 4))]
        figure.forget(index)
        exact = [amount(worker, expected)[0] for worker in workers(count)]
        assert (figure.bounds(expected) <= exact).all()
        assert figure.least(able, expected) == exact.index(min(exact))
        other = figure.least_by(able, expected, lambda bounds, _: -0.5 + bounds, exact.__getitem__)
        assert other == exact.index(min(exact))


def test_only_stale_figures_are_computed_again():
    computed = []

    def amount(worker, expected):
        computed.append(worker.index)
        return worker.index, 0

    figure = WorkerFigure(workers(50), amount)
    able = np.arange(50)
    assert figure.least(able, 1) == 0
    computed.clear()
    figure.forget(7)
    assert figure.least(able, 1) == 0
    assert computed == [7]


def test_the_bounds_of_all_workers_are_kept_between_requests():
    figure = WorkerFigure(workers(50), lambda worker, expected: (10 + worker.index, 2))
    kept = figure.bounds(5)
    assert figure.bounds(5) is kept  # not worked out again for all 50
    figure.add(0, 100)
    figure.write(1, 6, 20, 3)
    assert figure.bounds(5).tolist() == [110, 20 - 3, *range(12, 60)]
    assert figure.bounds(4).tolist() == [110 - 3, 20 - 6, *range(10, 58)]


@pytest.mark.parametrize("count", [3, FEW_WORKERS + 20])
def test_the_least_loaded_come_first(count):
    rng = random.Random(count)
    found = workers(count)
    loads = Loads(found)
    for step in range(300):
        worker = rng.choice(found)
        worker.load_s = float(rng.randint(0, 3))
        worker.assigned = worker.assigned + rng.randint(0, 1)
        loads.note(worker)
        if step % 40 == 0:
            worker.alive = not worker.alive
            loads.forget()
        wanted = rng.randint(1, 4)
        expected = sorted((w.load_s, w.assigned, w.index) for w in found if w.alive)
        assert sorted(loads.least(wanted))[:wanted] == expected[:wanted]
