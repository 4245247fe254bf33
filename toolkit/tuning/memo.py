"""Evaluations that outlive an interrupted search: since the search is deterministic, it finds them again in order."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from toolkit.files.tuning import Outcome, Value
from toolkit.tuning.evaluate import Evaluation
from toolkit.tuning.search import Evaluator


class Remembering:
    """An evaluator that keeps what it evaluated in a file of JSON lines, and reads it when the inputs are the same.

    Args:
        bench: evaluates what is not in the file.
        path: the file; its first line is the fingerprint.
        fingerprint: digests and settings that decide the results. A file with another one is replaced.
    """

    def __init__(self, bench: Evaluator, path: Path, fingerprint: str) -> None:
        self._bench = bench
        self._path = path
        self._known = _read(path, fingerprint)
        self.remembered = len(self._known)
        if not self._known:
            path.write_text(json.dumps(fingerprint) + "\n")

    def evaluate(self, policy: str, given: Mapping[str, Value]) -> Evaluation:
        """The remembered evaluation of the same candidate, or a new one, kept."""
        key = json.dumps([policy, dict(given)], sort_keys=True)
        if key not in self._known:
            self._known[key] = self._bench.evaluate(policy, given)
            with self._path.open("a") as lines:
                lines.write(_line(key, self._known[key]))
                lines.flush()
                os.fsync(lines.fileno())
        return self._known[key]

    def forget(self) -> None:
        """Remove the file: the result is written."""
        self._path.unlink(missing_ok=True)


def _line(key: str, evaluation: Evaluation) -> str:
    outcome = evaluation.outcome.model_dump(mode="json")
    return json.dumps([key, outcome, evaluation.ratios, evaluation.oom_percent]) + "\n"


def _read(path: Path, fingerprint: str) -> dict[str, Evaluation]:
    if not path.exists():
        return {}
    lines = path.read_text().splitlines(keepends=True)
    if not lines or lines[0] != json.dumps(fingerprint) + "\n":
        return {}
    whole = [json.loads(line) for line in lines[1:] if line.endswith("\n")]  # a kill tears the last line
    return {key: Evaluation(Outcome(**outcome), ratios, oom) for key, outcome, ratios, oom in whole}
