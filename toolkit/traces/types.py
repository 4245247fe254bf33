"""A trace in memory (arrival times and lengths of requests), and the traces that ship.

docs/reference/traces.md has the commands that made the shipped traces.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import InputError, nearest
from toolkit.files.recipe import NAME_PATTERN
from toolkit.files.tuning import Scaling

FOLDER = Path(__file__).parent / "data"  # of the shipped traces

Rows = NDArray[np.int64] | slice


@dataclass(slots=True, frozen=True)
class Trace:
    """Requests as parallel arrays, sorted by arrival: times and lengths, no text.

    `max_tokens` is the limit that the client set (0: none). `output_tokens` is what was generated;
    only a simulated worker or a replaying client may know it, never the scheduler.
    """

    arrival_s: NDArray[np.float64]  # seconds since the first request
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    max_tokens: NDArray[np.int64]
    source: str = ""  # file name, or how it was generated
    notes: tuple[str, ...] = ()  # changes since it was read: rows dropped, lengths scaled, ...
    priority: NDArray[np.int64] | None = None  # smaller is more urgent; None: all are equal
    scaling: Scaling | None = None  # how the lengths were scaled; None: they are as read

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def priorities(self) -> list[int]:
        """The priority of each request; 0 where the trace has none."""
        return [0] * len(self) if self.priority is None else self.priority.tolist()

    def rows(self) -> Iterator[tuple[float, int, int, int, int]]:
        """Arrival, prompt, output, limit and priority of each request, as plain numbers."""
        columns = (self.arrival_s, self.prompt_tokens, self.output_tokens, self.max_tokens)
        return zip(*(column.tolist() for column in columns), self.priorities, strict=True)

    def priorities_of(self, rows: Rows) -> NDArray[np.int64] | None:
        """The priorities of a part of the trace; None where the trace has none."""
        return None if self.priority is None else self.priority[rows]


def trace_path(trace: str | os.PathLike[str]) -> Path:
    """The file of a trace, given as a path or as the bare name of a shipped trace.

    Raises `InputError` where neither exists.
    """
    path = Path(trace)
    if path.is_file():
        return path
    text = os.fspath(trace)
    if path.is_dir():
        raise InputError(f"{text}: a folder, not a trace", "name a file in it")
    shipped = FOLDER / f"{text}.jsonl"
    if re.fullmatch(NAME_PATTERN, text) and shipped.is_file():
        return shipped
    hint = nearest(path.stem, shipped_traces())
    raise InputError(f"{text}: no such file, and no shipped trace has that name", hint)


def shipped_traces() -> list[str]:
    """The names of the traces that ship."""
    return sorted(file.stem for file in FOLDER.glob("*.jsonl"))
