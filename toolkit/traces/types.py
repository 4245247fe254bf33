"""What a trace is, once read: when requests arrived and how long they were."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import InputError, nearest
from toolkit.files.recipe import NAME_PATTERN
from toolkit.files.tuning import Scaling

Rows = NDArray[np.int64] | slice


@dataclass(slots=True, frozen=True)
class Trace:
    """A workload: parallel arrays, sorted by arrival. Lengths and times only.

    `max_tokens` is the limit that the client set (0 where the trace has none); `output_tokens` is
    what came out, which only a simulated worker or a replaying client may know.
    """

    arrival_s: NDArray[np.float64]  # seconds since the first request
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    max_tokens: NDArray[np.int64]
    source: str = ""  # file name, or how it was generated
    notes: tuple[str, ...] = field(
        default=()
    )  # what was done to it: rows dropped, lengths scaled, rate changed
    priority: NDArray[np.int64] | None = (
        None  # the smaller, the more urgent; None: all are equally urgent
    )
    scaling: Scaling | None = None  # what was done to the lengths; None: they are as they were read

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def priorities(self) -> list[int]:
        """Of each request; 0 where the trace has none."""
        return [0] * len(self) if self.priority is None else self.priority.tolist()

    def rows(self) -> Iterator[tuple[float, int, int, int, int]]:
        """Arrival, prompt, output, limit and priority of each request, as numbers of Python's."""
        columns = (self.arrival_s, self.prompt_tokens, self.output_tokens, self.max_tokens)
        return zip(*(column.tolist() for column in columns), self.priorities, strict=True)

    def prioritised(self, rows: Rows) -> NDArray[np.int64] | None:
        """The priorities of a part of the trace."""
        return None if self.priority is None else self.priority[rows]


# The traces that ship with the package; docs/traces.md has the commands that made them.

FOLDER = Path(__file__).parent / "data"


def trace_path(trace: str | os.PathLike[str]) -> Path:
    """A trace's file: a path that exists, or the bare name of a shipped trace. InputError for
    neither.
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
