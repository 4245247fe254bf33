"""Who runs the tasks of a search: this process, several that it starts, or the machines of a cluster.

A process gets one window of a task over its own pipe and sends back what it saw; it ends when the pipe does, so none is
left behind when this one is killed. The keyboard's interrupt is for the parent alone, which then ends its processes.
Results are the same whoever computes them; only the order in which they come is not.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Protocol

from toolkit.errors import LlmctlError
from toolkit.tuning.evaluate import Evaluation, Seen, Task


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


@dataclass(slots=True, frozen=True)
class Piece:
    """One window of a task: tasks differ in length, and smaller pieces keep all processes busy to the end."""

    index: int
    window: int
    task: Task  # on this window alone


class Pieces:
    """Tasks cut into pieces, and put together again from what was seen of them, in whatever order."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks
        self._seen: list[dict[int, Seen]] = [{} for _ in tasks]

    def __iter__(self) -> Iterator[Piece]:
        for index, task in enumerate(self._tasks):
            for window in range(len(task.bench.windows)):
                yield Piece(index, window, task.on(window))

    def __len__(self) -> int:
        return sum(len(task.bench.windows) for task in self._tasks)

    def add(self, piece: Piece, seen: Seen) -> Iterator[tuple[int, Evaluation]]:
        """The task's index and evaluation, where this was its last piece."""
        task, windows = self._tasks[piece.index], self._seen[piece.index]
        windows[piece.window] = seen
        if len(windows) == len(task.bench.windows):
            yield piece.index, task.sum_up([windows[window] for window in range(len(windows))])
            windows.clear()


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
        self._end()

    def _end(self) -> None:
        for process, pipe in self._members:
            pipe.close()
            process.terminate()
        for process, _pipe in self._members:
            process.join()
        self._members = []

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Evaluation]]:
        pieces = Pieces(tasks)
        waiting = iter(pieces)
        running: dict[Connection, Piece] = {}
        try:
            for _, pipe in self._start(len(pieces)):
                _hand_out(pipe, waiting, running)
            while running:
                for pipe in _ready(running):
                    piece = running.pop(pipe)
                    seen = _receive(pipe)
                    _hand_out(pipe, waiting, running)
                    yield from pieces.add(piece, seen)
        finally:
            if running:  # left in the middle: their answers must not be taken for the next tasks'
                self._end()

    def _start(self, wanted: int) -> list[tuple[multiprocessing.process.BaseProcess, Connection]]:
        context = multiprocessing.get_context("spawn")  # a fork would copy locks that other threads hold
        while len(self._members) < min(self.jobs, wanted):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))
        return self._members[:wanted]


class Spread:
    """Runs tasks on the cluster that this process has joined, at most `jobs` pieces at once. Errors are as a crew's."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Evaluation]]:
        from toolkit.cluster.tasks import spread

        pieces = Pieces(tasks)
        for piece, result in spread(_simulate, pieces, self.jobs):
            yield from pieces.add(piece, _seen(result))


class _Failure:
    """A user's error on its way to the parent: exceptions lose their hint between processes."""

    def __init__(self, error: LlmctlError) -> None:
        self.kind, self.message, self.hint = type(error), error.message, error.hint


def _simulate(piece: Piece) -> Seen | _Failure:
    """What a process or a machine does with a piece."""
    try:
        return piece.task.simulate(0)
    except LlmctlError as error:
        return _Failure(error)


def _seen(result: object) -> Seen:
    if isinstance(result, _Failure):
        raise result.kind(result.message, result.hint)
    assert isinstance(result, Seen)
    return result


def _ready(running: Mapping[Connection, Piece]) -> list[Connection]:
    ready = set(wait(list(running)))
    return [pipe for pipe in running if pipe in ready]


def _hand_out(pipe: Connection, waiting: Iterator[Piece], running: dict[Connection, Piece]) -> None:
    for piece in waiting:
        pipe.send(piece)
        running[pipe] = piece
        return


def _receive(pipe: Connection) -> Seen:
    try:
        result = pipe.recv()
    except (EOFError, OSError):
        raise RuntimeError("a process of the search died") from None
    return _seen(result)


def _work(pipe: Connection) -> None:
    """What a process does until its pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            piece = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            pipe.send(_simulate(piece))
        except OSError:
            return
