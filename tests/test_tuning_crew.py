"""Tasks in child processes: same results, errors of the user come back, and no process is left."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from concurrent.futures import wait
from multiprocessing.connection import wait as wait_for_ends
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
import samples
from test_tuning import trace

from toolkit.errors import InputError, LlmctlError
from toolkit.files.tuning import Settings
from toolkit.tuning import executor
from toolkit.tuning.evaluate import Task
from toolkit.tuning.executor import InProcessRunner, ProcessPool, QuickestRunner, collect

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bench() -> Task:
    """The defaults of slice-level scheduling."""
    return samples.task(trace(60), settings=samples.chosen("slice"))


def slices(bench: Task, tokens: int) -> Task:
    return bench.under(samples.chosen("slice", slice_tokens=tokens))


@pytest.fixture(scope="module")
def crew():
    with ProcessPool(2) as crew:
        yield crew


def test_child_processes_give_the_same_evaluations(crew: ProcessPool, bench: Task):
    several = samples.task(*(trace(40, seed) for seed in range(3)))
    tasks = [slices(bench, tokens) for tokens in (8, 16, 32, 64, 128)]
    tasks += [several, several.under(samples.chosen("sequence"))]
    ticks = []
    assert collect(crew, tasks, lambda: ticks.append(1)) == collect(InProcessRunner(), tasks)
    assert len(ticks) == 7


class RecordingPool(ProcessPool):
    """Runs in this process what it is given, and keeps it."""

    given: list[Task]

    def run(self, tasks):
        self.given = [*tasks]
        return InProcessRunner().run(tasks)


@pytest.mark.parametrize(("jobs", "start_s", "pooled"), [(2, 0.0, 3), (2, 1e9, 0), (1, 0.0, 0)])
def test_tasks_go_to_processes_where_the_rest_takes_long(
    bench: Task, monkeypatch, jobs: int, start_s: float, pooled: int
) -> None:
    """The first task says nothing of the others, the second one does."""
    monkeypatch.setattr(executor, "START_S", start_s)
    pool = RecordingPool(jobs)
    pool.given = []
    tasks = [slices(bench, tokens) for tokens in (8, 16, 32, 64, 128)]
    assert collect(QuickestRunner(pool), tasks) == collect(InProcessRunner(), tasks)
    assert pool.given == tasks[5 - pooled :]


def test_a_user_s_error_in_a_child_keeps_its_message_and_hint(crew: ProcessPool, bench: Task):
    with pytest.raises(InputError) as caught:
        collect(crew, [slices(bench, 0)])
    with pytest.raises(InputError) as here:
        collect(InProcessRunner(), [slices(bench, 0)])
    assert (caught.value.message, caught.value.hint) == (here.value.message, here.value.hint)


def test_results_of_abandoned_tasks_are_not_taken_for_later_tasks(crew: ProcessPool, bench: Task):
    left = crew.run([bench.under(samples.chosen("sequence"))] * 3)
    next(left)
    left.close()
    tasks = [bench]
    assert collect(crew, tasks) == collect(InProcessRunner(), tasks)


def test_ctrl_c_waits_while_locks_of_futures_may_be_held(bench: Task, monkeypatch):
    """Interrupted inside `wait`, this thread would keep the lock that the pool's thread needs."""
    completed = []

    def interrupted_wait(*args: object) -> object:
        signal.raise_signal(signal.SIGINT)
        ended = wait(*args)
        completed.append(True)
        return ended

    monkeypatch.setattr(executor, "wait", interrupted_wait)
    with pytest.raises(KeyboardInterrupt), ProcessPool(1) as crew:
        collect(crew, [bench, bench])
    assert completed == [True]


class EndsItsProcess(dict[str, int]):
    """Parameters that end the process that unpickles them."""

    def __reduce__(self):
        return os._exit, (1,)


def test_a_process_that_dies_is_an_error_instead_of_an_endless_wait(bench: Task):
    ends = Settings.model_construct(policy="slice", parameters=EndsItsProcess())
    with ProcessPool(1) as crew, pytest.raises(LlmctlError) as caught:
        collect(crew, [bench, bench.under(ends)])
    assert caught.value.exit_code == 1
    assert "--jobs" in caught.value.hint


def test_ctrl_c_in_the_parent_ends_its_processes(bench: Task):
    others = set(multiprocessing.active_children())
    children: set[BaseProcess] = set()

    def interrupted() -> None:
        with ProcessPool(1) as crew:
            collect(crew, [bench])
            children.update(set(multiprocessing.active_children()) - others)
            [child] = children
            os.kill(child.pid, signal.SIGINT)  # as a terminal does: it is for the parent
            collect(crew, [bench])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    [child] = children
    assert wait_for_ends([child.sentinel], 60)


def test_a_child_ends_with_its_killed_parent(bench: Task, tmp_path: Path):
    (tmp_path / "tasks").write_bytes(pickle.dumps([bench]))
    code = (
        "import multiprocessing, pathlib, pickle, sys; from toolkit.tuning.executor import *; "
        "tasks = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes()); pool = ProcessPool(1); "
        "collect(pool, tasks); print(multiprocessing.active_children()[0].pid, flush=True); "
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "tasks")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        assert psutil.wait_procs([child], timeout=60)[0] == [child]
