"""Running tasks in this process, in child processes or on a cluster, and keeping their results.

A child process gets one window of a task at a time and sends back the result. It ends with its
parent, also where that is killed. All runners give the same results, in different orders.

`Remembering` keeps evaluations in a journal, so that an interrupted search can be resumed: the
search is deterministic, so it needs the same evaluations again.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from toolkit.errors import LlmctlError
from toolkit.files.tuning import Evaluation
from toolkit.interrupts import held
from toolkit.tuning.evaluate import SimulatedWindow, Task

if TYPE_CHECKING:  # processes that simulate do not import Optuna
    from toolkit.tuning.journal import EvaluationJournal

POLL_S = 0.2  # how long Ctrl-C may wait for a window's end

Evaluate = Callable[[Sequence[Task]], list[Evaluation]]  # `collect`, with a runner and a tick


class Runner(Protocol):
    """Runs tasks in any order."""

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Evaluation]]:
        """Yield the index and the evaluation of each task when it is done."""
        ...


def collect(
    runner: Runner, tasks: Sequence[Task], tick: Callable[[], None] = lambda: None
) -> list[Evaluation]:
    """All evaluations in the order of the tasks; `tick` is called after each."""
    found: dict[int, Evaluation] = {}
    for index, evaluation in runner.run(tasks):
        found[index] = evaluation
        tick()
    return [found[index] for index in range(len(tasks))]


class InProcessRunner:
    """Runs tasks in this process, one after another."""

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Evaluation]]:
        return ((index, task.run()) for index, task in enumerate(tasks))


@dataclass(slots=True, frozen=True)
class Piece:
    """One window of a task. Tasks differ in length, so small pieces keep all processes busy."""

    index: int
    window: int
    task: Task  # on this window only


class Pieces:
    """Tasks cut into pieces, and assembled from the results of the pieces in any order."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks
        self._results: list[dict[int, SimulatedWindow]] = [{} for _ in tasks]

    def __iter__(self) -> Iterator[Piece]:
        """Yield the pieces, task by task."""
        for index, task in enumerate(self._tasks):
            for window in range(len(task.windows)):
                yield Piece(index, window, task.on(window))

    def add(self, piece: Piece, result: SimulatedWindow) -> Iterator[tuple[int, Evaluation]]:
        """Yield the task's index and evaluation if this piece was its last one."""
        task = self._tasks[piece.index]
        results = self._results[piece.index]
        results[piece.window] = result
        if len(results) == len(task.windows):
            yield piece.index, task.sum_up([results[window] for window in sorted(results)])
            results.clear()


class ProcessPool:
    """Runs tasks in `jobs` processes, started when tasks need them. Its `with` block ends them.

    An error in a task is raised here. `LlmctlError` is raised where a process dies.
    """

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self._pool: ProcessPoolExecutor | None = None
        self._others = set(multiprocessing.active_children())

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._pool is None:
            return
        for child in set(multiprocessing.active_children()) - self._others:
            child.kill()  # also in the middle of a window, which may take minutes
        self._pool.shutdown(wait=error is None, cancel_futures=True)

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Evaluation]]:
        pieces = Pieces(tasks)
        waiting = iter(pieces)
        running: dict[Future[SimulatedWindow | _Failure], Piece] = {}

        def submit(most: int) -> None:
            for piece in islice(waiting, most):
                if self._pool is None:  # a fork would copy locks of other threads
                    context = multiprocessing.get_context("spawn")
                    self._pool = ProcessPoolExecutor(self.jobs, context, _tie_to_parent)
                with _no_interrupts():  # the child inherits that, and Ctrl-C is for the parent
                    running[self._pool.submit(_simulate, piece)] = piece

        try:
            submit(self.jobs)
            while running:
                for future in _ended(running):
                    piece = running.pop(future)
                    with held():
                        result = _unwrap(future.result())
                    submit(1)
                    yield from pieces.add(piece, result)
        except BrokenProcessPool:
            raise LlmctlError(
                "a process that simulates was killed",
                "repeat the command, with fewer --jobs where memory is short; `tune` continues",
            ) from None
        finally:
            with held():
                for future in running:
                    future.cancel()


def _ended(running: Iterable[Future[Any]]) -> list[Future[Any]]:
    """Those that have ended, in their order: at least one, unless `POLL_S` pass.

    A future has a lock. Ctrl-C waits while this thread may hold one: interrupted there, it would
    keep the lock for ever, and the executor's own thread would wait for it.
    """
    with held():
        ended, _ = wait(running, POLL_S, FIRST_COMPLETED)
    return [future for future in running if future in ended]


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Block Ctrl-C in this thread until the block ends."""
    with held():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _tie_to_parent() -> None:
    """In a child process: end at once where the parent ends."""

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


class ClusterRunner:
    """Runs tasks on the cluster that this process has joined, at most `jobs` pieces at once.

    Errors are those of `ProcessPool`.
    """

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Evaluation]]:
        from toolkit.cluster.connect import spread

        pieces = Pieces(tasks)
        for piece, result in spread(_simulate, pieces, self.jobs):
            yield from pieces.add(piece, _unwrap(result))


class _Failure:
    """A user's error, sent to the parent. Exceptions would lose their hint between processes."""

    def __init__(self, error: LlmctlError) -> None:
        self.kind = type(error)
        self.message = error.message
        self.hint = error.hint


def _simulate(piece: Piece) -> SimulatedWindow | _Failure:
    """Simulate a piece, in a child process or on a machine of a cluster."""
    try:
        return piece.task.simulate(0)
    except LlmctlError as error:
        return _Failure(error)


def _unwrap(result: object) -> SimulatedWindow:
    """The result of a piece. Raises the user's error where it failed."""
    if isinstance(result, _Failure):
        raise result.kind(result.message, result.hint)
    assert isinstance(result, SimulatedWindow)
    return result


class Remembering:
    """A runner that keeps every evaluation and runs only tasks without a kept one."""

    def __init__(self, runner: Runner, journal: EvaluationJournal) -> None:
        self._runner = runner
        self._journal = journal
        self._known = dict(journal.known)
        self.remembered = len(self._known)

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Evaluation]]:
        """As `Runner.run`; equal tasks run once."""
        wanted: defaultdict[str, list[int]] = defaultdict(list)
        for index, task in enumerate(tasks):
            wanted[_key(task)].append(index)
        new = [key for key in wanted if key not in self._known]
        for key, indexes in wanted.items():
            if key in self._known:
                yield from ((index, self._known[key]) for index in indexes)
        fresh = [tasks[wanted[key][0]] for key in new]
        for number, evaluation in self._runner.run(fresh):
            self._journal.keep(new[number], evaluation)
            self._known[new[number]] = evaluation
            yield from ((index, evaluation) for index in wanted[new[number]])


def _key(task: Task) -> str:
    return json.dumps([task.label, task.settings.model_dump()], sort_keys=True)
