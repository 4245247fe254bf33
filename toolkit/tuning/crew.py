"""Who runs the tasks of a search: this process, or several that it starts.

A process gets a task over its own pipe and sends the evaluation back; it ends when the pipe does, so none is left
behind when this one is killed. The keyboard's interrupt is for the parent alone, which then ends its processes. Results
are the same whoever computes them; only the order in which they come is not.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Protocol

from toolkit.errors import LlmctlError
from toolkit.tuning.evaluate import Evaluation, Task


class Runner(Protocol):
    """Runs tasks, in whatever order."""

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Evaluation]]:
        """Each task's index and evaluation, as they are done."""
        ...


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def collect(runner: Runner, tasks: Sequence[Task], tick: Callable[[], None] = lambda: None) -> list[Evaluation]:
    """All evaluations in the tasks' order; `tick` is called after each."""
    found: dict[int, Evaluation] = {}
    for index, evaluation in runner.run(tasks):
        found[index] = evaluation
        tick()
    return [found[index] for index in range(len(tasks))]


class Alone:
    """Runs tasks in this process, one after the other."""

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Evaluation]]:
        return ((index, task.run()) for index, task in enumerate(tasks))


class Crew:
    """Runs tasks in `jobs` processes, started with the first tasks. Leave its `with` block to end them.

    A task that a user can mend raises its error here. A process that dies otherwise has shown its traceback.
    """

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self._members: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for process, pipe in self._members:
            pipe.close()
            process.terminate()
        for process, _pipe in self._members:
            process.join()
        self._members = []

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Evaluation]]:
        waiting = iter(enumerate(tasks))
        running: dict[Connection, int] = {}
        for _, pipe in self._start(len(tasks)):
            _hand_out(pipe, waiting, running)
        while running:
            for pipe in _ready(running):
                index = running.pop(pipe)
                evaluation = self._receive(pipe)
                _hand_out(pipe, waiting, running)
                yield index, evaluation

    def _start(self, wanted: int) -> list[tuple[multiprocessing.process.BaseProcess, Connection]]:
        context = multiprocessing.get_context("spawn")  # a fork would copy locks that other threads hold
        while len(self._members) < min(self.jobs, wanted):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))
        return self._members[:wanted]

    def _receive(self, pipe: Connection) -> Evaluation:
        try:
            result = pipe.recv()
        except (EOFError, OSError):
            raise RuntimeError("a process of the search died") from None
        if isinstance(result, _Failure):
            raise result.kind(result.message, result.hint)
        assert isinstance(result, Evaluation)
        return result


class _Failure:
    """A user's error on its way to the parent: exceptions lose their hint between processes."""

    def __init__(self, error: LlmctlError) -> None:
        self.kind, self.message, self.hint = type(error), error.message, error.hint


def _ready(running: Mapping[Connection, int]) -> list[Connection]:
    ready = set(wait(list(running)))
    return [pipe for pipe in running if pipe in ready]


def _hand_out(pipe: Connection, waiting: Iterator[tuple[int, Task]], running: dict[Connection, int]) -> None:
    for index, task in waiting:
        pipe.send(task)
        running[pipe] = index
        return


def _work(pipe: Connection) -> None:
    """What a process does until its pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            result: Evaluation | _Failure = task.run()
        except LlmctlError as error:
            result = _Failure(error)
        try:
            pipe.send(result)
        except OSError:
            return
