"""Tasks in child processes: same results, errors of the user come back, and no process is left."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from concurrent.futures import wait
from dataclasses import replace
from multiprocessing.connection import wait as wait_for_ends
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
import samples
from test_tuning import trace

from toolkit.errors import InputError, LlmctlError
from toolkit.tuning import executor
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


def test_child_processes_give_the_same_evaluations(crew: ProcessPool, bench: EvaluationSetup):
    several = replace(bench, windows=[trace(40, seed) for seed in range(3)])
    tasks = [Task(bench, "slice", {"slice_tokens": tokens}) for tokens in (8, 16, 32, 64, 128)]
    tasks += [Task(several, "slice"), Task(several, "sequence")]
    ticks = []
    assert collect(crew, tasks, lambda: ticks.append(1)) == collect(InProcessRunner(), tasks)
    assert len(ticks) == 7


def test_a_user_s_error_in_a_child_keeps_its_message_and_hint(
    crew: ProcessPool, bench: EvaluationSetup
):
    with pytest.raises(InputError) as caught:
        collect(crew, [Task(bench, "slice", {"slice_tokens": 0})])
    with pytest.raises(InputError) as here:
        collect(InProcessRunner(), [Task(bench, "slice", {"slice_tokens": 0})])
    assert (caught.value.message, caught.value.hint) == (here.value.message, here.value.hint)


def test_results_of_abandoned_tasks_are_not_taken_for_later_tasks(
    crew: ProcessPool, bench: EvaluationSetup
):
    left = crew.run([Task(bench, "sequence")] * 3)
    next(left)
    left.close()
    tasks = [Task(bench, "slice")]
    assert collect(crew, tasks) == collect(InProcessRunner(), tasks)


def test_ctrl_c_waits_while_locks_of_futures_may_be_held(bench: EvaluationSetup, monkeypatch):
    """Interrupted inside `wait`, this thread would keep the lock that the pool's thread needs."""
    completed = []

    def interrupted_wait(*args: object) -> object:
        signal.raise_signal(signal.SIGINT)
        ended = wait(*args)
        completed.append(True)
        return ended

    monkeypatch.setattr(executor, "wait", interrupted_wait)
    with pytest.raises(KeyboardInterrupt), ProcessPool(1) as crew:
        collect(crew, [Task(bench, "slice"), Task(bench, "sequence")])
    assert completed == [True]


class EndsItsProcess(dict[str, int]):
    """Parameters that end the process that unpickles them."""

    def __reduce__(self):
        return os._exit, (1,)


def test_a_process_that_dies_is_an_error_instead_of_an_endless_wait(bench: EvaluationSetup):
    with ProcessPool(1) as crew, pytest.raises(LlmctlError) as caught:
        collect(crew, [Task(bench, "slice"), Task(bench, "slice", EndsItsProcess())])
    assert caught.value.exit_code == 1
    assert "--jobs" in caught.value.hint


def test_ctrl_c_in_the_parent_ends_its_processes(bench: EvaluationSetup):
    others = set(multiprocessing.active_children())
    children: set[BaseProcess] = set()

    def interrupted() -> None:
        with ProcessPool(1) as crew:
            collect(crew, [Task(bench, "slice")])
            children.update(set(multiprocessing.active_children()) - others)
            [child] = children
            os.kill(child.pid, signal.SIGINT)  # as a terminal does: it is for the parent
            collect(crew, [Task(bench, "slice")])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    [child] = children
    assert wait_for_ends([child.sentinel], 60)


def test_a_child_ends_with_its_killed_parent(bench: EvaluationSetup, tmp_path: Path):
    (tmp_path / "tasks").write_bytes(pickle.dumps([Task(bench, "slice")]))
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
