"""Evaluations that outlive an interrupted search: since the search is deterministic, it finds them again in order."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from toolkit.errors import InputError
from toolkit.files.tuning import Outcome
from toolkit.tuning.crew import Runner
from toolkit.tuning.evaluate import Evaluation, Task


class Memory(Protocol):
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

    def __init__(self, runner: Runner, memory: Memory) -> None:
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
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self._path = path
        self.known = _read(path, fingerprint)
        if not self.known:
            path.write_text(json.dumps(fingerprint) + "\n")
        else:
            _drop_torn_line(path)

    def keep(self, key: str, task: Task, evaluation: Evaluation) -> None:
        """See `Memory.keep`."""
        with self._path.open("a") as lines:
            lines.write(json.dumps([key, evaluation.outcome.model_dump(mode="json"), evaluation.ratios]) + "\n")
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
    lines = path.read_bytes().splitlines(keepends=True)
    if not lines or lines[0] != json.dumps(fingerprint).encode() + b"\n":
        return {}
    try:
        whole = [json.loads(line) for line in lines[1:] if line.endswith(b"\n")]  # a kill tears the last line
        return {key: Evaluation(Outcome(**outcome), ratios) for key, outcome, ratios in whole}
    except (ValueError, TypeError, RecursionError):
        raise InputError(f"{path.name}: a line of it is damaged", "delete it; tune then begins anew") from None


def _drop_torn_line(path: Path) -> None:
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(path, end)
