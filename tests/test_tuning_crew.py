"""Processes that run tasks: what they compute, which errors come back, and that none is left
behind.
"""

import multiprocessing
from dataclasses import replace

import numpy as np
import pytest
import samples
from test_tuning import trace

from toolkit.errors import InputError
from toolkit.tuning.evaluate import EvaluationSetup, Task, make_world
from toolkit.tuning.executor import InProcessRunner, ProcessPool, collect

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bench() -> EvaluationSetup:
    return EvaluationSetup(
        make_world(samples.recipe(), samples.fit()), [trace(60)], {"ttft_p99_s": 2.0}
    )


@pytest.fixture(scope="module")
def crew():
    with ProcessPool(2) as crew:
        yield crew


def test_processes_compute_what_this_one_does(crew: ProcessPool, bench: EvaluationSetup):
    tasks = [Task(bench, "slice", {"slice_tokens": tokens}) for tokens in (8, 16, 32, 64, 128)]
    ticks = []
    assert collect(crew, tasks, lambda: ticks.append(1)) == collect(InProcessRunner(), tasks)
    assert len(ticks) == 5


def test_an_error_of_the_user_comes_back_whole(crew: ProcessPool, bench: EvaluationSetup):
    with pytest.raises(InputError) as caught:
        collect(crew, [Task(bench, "slice", {"slice_tokens": 0})])
    with pytest.raises(InputError) as here:
        collect(InProcessRunner(), [Task(bench, "slice", {"slice_tokens": 0})])
    assert (caught.value.message, caught.value.hint) == (here.value.message, here.value.hint)


def test_no_tasks_need_no_process():
    before = set(multiprocessing.active_children())
    with ProcessPool(2) as crew:
        assert collect(crew, []) == []
        assert set(multiprocessing.active_children()) == before


def test_leaving_ends_the_processes_also_in_the_middle(bench: EvaluationSetup):
    before = set(multiprocessing.active_children())
    with ProcessPool(1) as crew:
        next(crew.run([Task(bench, "slice"), Task(bench, "slice")]))
    assert set(multiprocessing.active_children()) - before == set()


def test_windows_of_a_task_are_put_together_in_order(crew: ProcessPool, bench: EvaluationSetup):
    several = replace(bench, windows=[trace(40, seed) for seed in range(3)])
    tasks = [Task(several, "slice"), Task(several, "sequence")]
    assert collect(crew, tasks) == collect(InProcessRunner(), tasks)


def test_answers_of_tasks_that_were_left_are_not_taken_for_the_next_ones(bench: EvaluationSetup):
    with ProcessPool(2) as crew:
        left = crew.run([Task(bench, "sequence"), Task(bench, "sequence"), Task(bench, "sequence")])
        next(left)
        left.close()
        assert collect(crew, [Task(bench, "slice")]) == collect(
            InProcessRunner(), [Task(bench, "slice")]
        )


def test_a_process_that_dies_is_an_error_and_no_wait_for_ever(bench: EvaluationSetup):
    with ProcessPool(1) as crew, pytest.raises(RuntimeError, match="died"):
        collect(crew, [Task(bench, "slice"), Task(bench, "slice", np.int64)])
