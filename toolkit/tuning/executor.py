"""Who runs the tasks of a search: this process, several that it starts, or the machines of a
cluster.

A process gets one window of a task over its own pipe and sends back what it saw; it ends when the
pipe does, so none is left behind when this one is killed. The keyboard's interrupt is for the
parent alone, which then ends its processes. Results are the same whoever computes them; only the
order in which they come is not.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Protocol
from urllib.parse import quote, quote_plus, unquote

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from pydantic import TypeAdapter
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from toolkit.errors import InputError, LlmctlError
from toolkit.files.tuning import Outcome
from toolkit.tuning.evaluate import Evaluation, Seen, Task


class Runner(Protocol):
    """Runs tasks, in whatever order."""

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Evaluation]]:
        """Each task's index and evaluation, as they are done."""
        ...


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def collect(
    runner: Runner, tasks: Sequence[Task], tick: Callable[[], None] = lambda: None
) -> list[Evaluation]:
    """All evaluations in the tasks' order; `tick` is called after each."""
    found: dict[int, Evaluation] = {}
    for index, evaluation in runner.run(tasks):
        found[index] = evaluation
        tick()
    return [found[index] for index in range(len(tasks))]


class InProcessRunner:
    """Runs tasks in this process, one after the other."""

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Evaluation]]:
        return ((index, task.run()) for index, task in enumerate(tasks))


@dataclass(slots=True, frozen=True)
class Piece:
    """One window of a task: tasks differ in length, and smaller pieces keep all processes busy to
    the end.
    """

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


class ProcessPool:
    """Runs tasks in `jobs` processes, started with the first tasks. Leave its `with` block to end
    them.

    A task that a user can mend raises its error here. A process that dies otherwise has shown its
    traceback.
    """

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self._members: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
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
        context = multiprocessing.get_context(
            "spawn"
        )  # a fork would copy locks that other threads hold
        while len(self._members) < min(self.jobs, wanted):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))
        return self._members[:wanted]


class ClusterRunner:
    """Runs tasks on the cluster that this process has joined, at most `jobs` pieces at once. Errors
    are as a crew's.
    """

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Evaluation]]:
        from toolkit.cluster.connect import spread

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


# Evaluations that outlive an interrupted search: since the search is deterministic, it finds them
# again in order.

_FIRST = TypeAdapter(str)
_LINE = TypeAdapter(tuple[str, object, object])
_OUTCOME = TypeAdapter(Outcome)
_RATIOS = TypeAdapter(dict[str, float])


class EvaluationStore(Protocol):
    """Where evaluations are kept, by what was evaluated."""

    @property
    def known(self) -> Mapping[str, Evaluation]:
        """What an earlier run of the same search left."""
        ...

    def keep(self, key: str, task: Task, evaluation: Evaluation) -> None:
        """Keep one, and only return when a kill would not lose it."""
        ...

    def forget(self) -> None:
        """The result is written."""
        ...


class Remembering:
    """A runner that keeps every evaluation, and runs none that was kept."""

    def __init__(self, runner: Runner, memory: EvaluationStore) -> None:
        self._runner = runner
        self._memory = memory
        self._known = dict(memory.known)
        self.remembered = len(self._known)

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Evaluation]]:
        """As `Runner.run`; equal tasks are run once."""
        wanted: dict[str, list[int]] = {}
        for index, task in enumerate(tasks):
            wanted.setdefault(_key(task), []).append(index)
        new = [key for key in wanted if key not in self._known]
        for key, indexes in wanted.items():
            if key in self._known:
                yield from ((index, self._known[key]) for index in indexes)
        fresh = [tasks[wanted[key][0]] for key in new]
        for number, evaluation in self._runner.run(fresh):
            self._memory.keep(new[number], fresh[number], evaluation)
            self._known[new[number]] = evaluation
            yield from ((index, evaluation) for index in wanted[new[number]])


class JournalFile:
    """A file of JSON lines beside the result, which goes when the result is written.

    Args:
        path: the file; its first line is the fingerprint. Lines stand in the order in which tasks were done.
        fingerprint: digests and settings that decide the results. A file with another one is replaced.

    Raises `InputError` for a file with a damaged line, but for a last one without its end, which a
    kill tears.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self._path = path
        self.known = _read(path, fingerprint)
        if not self.known:
            path.write_text(json.dumps(fingerprint) + "\n")
        else:
            _drop_torn_line(path)

    def keep(self, key: str, task: Task, evaluation: Evaluation) -> None:
        """See `EvaluationStore.keep`."""
        with self._path.open("a") as lines:
            lines.write(
                json.dumps([key, evaluation.outcome.model_dump(mode="json"), evaluation.ratios])
                + "\n"
            )
            lines.flush()
            os.fsync(lines.fileno())

    def forget(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


def _key(task: Task) -> str:
    return json.dumps([task.bench.label, task.policy, dict(task.parameters)], sort_keys=True)


def _read(path: Path, fingerprint: str) -> dict[str, Evaluation]:
    if not path.exists():
        return {}
    whole = path.read_bytes().split(b"\n")[:-1]  # a kill tears the last line
    known, number = {}, 1
    try:
        if not whole or _FIRST.validate_python(json.loads(whole[0])) != fingerprint:
            return {}
        for line in whole[1:]:
            number += 1
            key, outcome, ratios = _LINE.validate_python(json.loads(line))
            known[key] = evaluation_of(outcome, ratios)
    except (ValueError, RecursionError):
        raise InputError(
            f"{path.name}: line {number} is damaged, or the file is no journal of tune",
            "move it away; tune then begins anew",
        ) from None
    return known


def evaluation_of(outcome: object, ratios: object) -> Evaluation:
    """An evaluation that was kept. `ValueError` for what is none."""
    found = Evaluation(_OUTCOME.validate_python(outcome), _RATIOS.validate_python(ratios))
    if "goodput_rps" not in found.outcome.metrics:
        raise ValueError("an evaluation without goodput_rps")
    return found


def _drop_torn_line(path: Path) -> None:
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(path, end)


# Evaluations kept in a database, as trials of Optuna studies: `sqlite:///FILE` or
# `postgresql://USER@HOST/DATABASE`.
#
# A search has one study for each bench (search, held out, ...), so that Optuna's dashboard shows
# its trials while it runs and afterwards. The search itself does not read trials from it:
# Optuna's samplers keep their random state in memory, and the same seed shall give the same
# bytes. An interrupted search finds its evaluations again, as from a file. No password of a URL
# is shown, whatever happens.

DRIVERS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}
USAGE = "sqlite:///tuning.db, or postgresql://USER@HOST/DATABASE with the password in PGPASSWORD or ~/.pgpass"
KEY, OUTCOME, RATIOS = "llmctl_key", "llmctl_outcome", "llmctl_ratios"


class Studies:
    """`toolkit.tuning.executor.EvaluationStore` in a database.

    Args:
        url: the database's. `InputError` for one that cannot be used.
        name: of what is tuned.
        fingerprint: digests and settings that decide the results; another one has studies of its own.
    """

    def __init__(self, url: str, name: str, fingerprint: str) -> None:
        self._url = _parse(url)
        self._prefix = f"llmctl {name} {hashlib.sha256(fingerprint.encode()).hexdigest()[:12]} "
        self._studies: dict[str, optuna.Study] = {}
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with self._plainly():
            self._storage = optuna.storages.RDBStorage(
                self._url.render_as_string(hide_password=False),
                engine_kwargs={
                    "poolclass": NullPool
                },  # a search has no end at which a pool would be closed
            )
            self.known = {
                key: evaluation for study in self._left() for key, evaluation in _evaluations(study)
            }

    def keep(self, key: str, task: Task, evaluation: Evaluation) -> None:
        """See `EvaluationStore.keep`. `InputError` where the database is gone."""
        numbers, distributions = _numbers(evaluation.outcome)
        attributes = {
            KEY: key,
            OUTCOME: evaluation.outcome.model_dump(mode="json"),
            RATIOS: evaluation.ratios,
        }
        trial = optuna.trial.create_trial(
            value=evaluation.score,
            params=numbers,
            distributions=distributions,
            user_attrs=attributes,
        )
        with self._plainly():
            self._study(task.bench.label).add_trial(trial)

    def forget(self) -> None:
        """Nothing: the studies are there to be looked at."""

    def _study(self, label: str) -> optuna.Study:
        if label not in self._studies:
            self._studies[label] = optuna.create_study(
                storage=self._storage,
                study_name=self._prefix + label,
                direction="maximize",
                load_if_exists=True,
            )
        return self._studies[label]

    def _left(self) -> Iterator[optuna.Study]:
        """The studies of an earlier run."""
        for name in optuna.get_all_study_names(self._storage):
            if name.startswith(self._prefix):
                yield self._study(name.removeprefix(self._prefix))

    @contextmanager
    def _plainly(self) -> Iterator[None]:
        """What a database's libraries raise, in one line and without the password."""
        shown = self._url.set(query={}).render_as_string(hide_password=True)
        try:
            yield
        except ImportError:
            raise InputError(
                f"storage {shown}: its driver is not installed", "pip install 'llmctl[postgres]'"
            ) from None
        except (SQLAlchemyError, optuna.exceptions.OptunaError, RuntimeError) as error:
            said = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
            raise InputError(f"storage {shown}: {_masked(said[0], self._url)}", USAGE) from None


def _parse(url: str) -> URL:
    """`InputError` for what is no URL of a database that we know; it is not repeated, as it may
    hold a password.
    """
    scheme = url.partition(":")[0]
    if scheme not in DRIVERS:
        raise InputError(
            f"--storage: '{scheme if '://' in url else '...'}' is not a database that can be used",
            USAGE,
        )
    try:
        return make_url(url).set(drivername=DRIVERS[scheme])
    except (SQLAlchemyError, ValueError):
        raise InputError("--storage: it is not a URL", USAGE) from None


def _masked(text: str, url: URL) -> str:
    secrets = [
        str(url.password or ""),
        *(str(value) for key, value in url.query.items() if "pass" in key),
    ]
    for secret in filter(None, secrets):
        for spelling in {secret, quote(secret, safe=""), quote_plus(secret), unquote(secret)}:
            text = text.replace(spelling, "***")
    return text


def _numbers(outcome: Outcome) -> tuple[dict[str, float], dict[str, BaseDistribution]]:
    """The policy's numbers, as Optuna's dashboard plots them; each lies in a range of its own."""
    numbers = {
        f"{outcome.policy}.{name}": value
        for name, value in outcome.parameters.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    ranges = {
        name: IntDistribution(value, value)
        if isinstance(value, int)
        else FloatDistribution(value, value)
        for name, value in numbers.items()
    }
    return numbers, ranges


def _evaluations(study: optuna.Study) -> Iterator[tuple[str, Evaluation]]:
    for trial in study.get_trials(deepcopy=False):
        attributes = trial.user_attrs
        if KEY in attributes:
            try:
                yield (
                    attributes[KEY],
                    evaluation_of(attributes.get(OUTCOME), attributes.get(RATIOS)),
                )
            except ValueError:
                raise InputError(
                    f"--storage: trial {trial.number} of study '{study.study_name}' is damaged",
                    "delete the study, or name another database",
                ) from None
