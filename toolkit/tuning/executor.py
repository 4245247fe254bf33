"""Running tasks in this process, in child processes or on a cluster, and keeping their results.

A child process gets one window of a task at a time and sends back the result. It ends with its
parent, also where that is killed. All runners give the same results, in different orders.

`Remembering` keeps evaluations in a journal, so that an interrupted search can be resumed: the
search is deterministic, so it needs the same evaluations again.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from time import process_time
from typing import TYPE_CHECKING, Any, Protocol

from toolkit.errors import LlmctlError
from toolkit.files.tuning import Evaluation
from toolkit.interrupts import held
from toolkit.processes.lifeline import end_with_parent
from toolkit.tuning.evaluate import SimulatedWindow, Task

if TYPE_CHECKING:  # processes that simulate do not import Optuna
    from toolkit.tuning.journal import EvaluationJournal

POLL_S = 0.2  # how long Ctrl-C may wait for a window's end
START_S = 10.0  # tasks that take longer are worth the start of processes, also on busy processors

Evaluate = Callable[[Sequence[Task]], list[Evaluation]]  # `collect`, with a runner and a tick


class Runner(Protocol):
    """Runs tasks in any order."""

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Evaluation]]:
        """Yield the index and the evaluation of each task when it is done."""


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


def pieces_of(tasks: Sequence[Task]) -> Iterator[Piece]:
    """Yield the windows of the tasks, task by task."""
    for index, task in enumerate(tasks):
        for window in range(len(task.windows)):
            yield Piece(index, window, task.on(window))


def assembled(
    tasks: Sequence[Task], results: Iterable[tuple[Piece, SimulatedWindow]]
) -> Iterator[tuple[int, Evaluation]]:
    """Yield the index and the evaluation of each task with the last result of its pieces, which
    come in any order.
    """
    of_tasks: list[dict[int, SimulatedWindow]] = [{} for _ in tasks]
    for piece, result in results:
        own = of_tasks[piece.index]
        own[piece.window] = result
        if len(own) == len(tasks[piece.index].windows):
            yield piece.index, tasks[piece.index].sum_up([own[k] for k in sorted(own)])
            own.clear()


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
        return assembled(tasks, self._simulated(pieces_of(tasks)))

    def _simulated(self, waiting: Iterator[Piece]) -> Iterator[tuple[Piece, SimulatedWindow]]:
        """Yield the pieces with their results, as these come."""
        running: dict[Future[SimulatedWindow], Piece] = {}

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
                        result = future.result()
                    submit(1)
                    yield piece, result
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
    parent = multiprocessing.parent_process()
    assert parent is not None
    end_with_parent(parent.sentinel)


class QuickestRunner:
    """Runs tasks in this process while they are short, and in a pool where the rest of them is
    expected to take longer than `START_S`, by the time that requests took before.
    """

    def __init__(self, pool: ProcessPool) -> None:
        self._pool = pool
        self._s_per_request: float | None = None  # of the last task here; None: there was none

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Evaluation]]:
        for index, task in enumerate(tasks):
            rest = tasks[index:]
            expected_s = (self._s_per_request or 0.0) * _requests(rest)
            if self._pool.jobs > 1 and len(rest) > 1 and expected_s > START_S:
                for place, evaluation in self._pool.run(rest):
                    yield index + place, evaluation
                return
            begin_s = process_time()
            evaluation = task.run()
            took_s = process_time() - begin_s
            # the first task imports libraries, which says nothing of the next ones
            is_first = self._s_per_request is None
            self._s_per_request = 0.0 if is_first else took_s / max(_requests([task]), 1)
            yield index, evaluation


def _requests(tasks: Sequence[Task]) -> int:
    """Return how many requests the tasks simulate."""
    return sum(len(window.trace) for task in tasks for window in task.windows)


class ClusterRunner:
    """Runs tasks on the cluster that this process has joined, at most `jobs` pieces at once.

    It raises what `ProcessPool` raises.
    """

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Evaluation]]:
        from toolkit.cluster.connect import spread

        return assembled(tasks, spread(_simulate, pieces_of(tasks), self.jobs))


def _simulate(piece: Piece) -> SimulatedWindow:
    """Simulate a piece, in a child process or on a machine of a cluster."""
    return piece.task.simulate(0)


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
