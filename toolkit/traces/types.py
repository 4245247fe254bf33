"""A trace in memory (arrival times and lengths of requests, what their prompts share), and the
traces that ship.

docs/reference/traces.md has the commands that made the shipped traces.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import InputError, nearest
from toolkit.files.tuning import Scaling, changes_in_words

FOLDER = Path(__file__).parent / "data"  # of the shipped traces
MAX_LENGTH = 2**31 - 1  # tokens; a greater length is a mistake, and would overflow sums
MOONCAKE_BLOCK = 512  # tokens of a block in Mooncake's traces, which do not say it

Rows = NDArray[np.int64] | slice


@dataclass(slots=True, frozen=True)
class SharedBlocks:
    """What prompts have in common: the content of each prompt as blocks of `block_tokens` tokens.

    Equal ids stand for equal tokens at that place and equal tokens before it (a chain), so two
    prompts share their longest common run of leading ids. The last block of a prompt may be
    partial. A prompt without ids shares nothing.
    """

    block_tokens: int
    ids: NDArray[np.int64]  # of all prompts, one after another
    offsets: NDArray[np.int64]  # n + 1: the ids of prompt i are ids[offsets[i]:offsets[i + 1]]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def counts(self) -> NDArray[np.int64]:
        """The number of blocks of each prompt."""
        return np.diff(self.offsets)

    def of(self, row: int) -> NDArray[np.int64]:
        """The ids of one prompt."""
        return self.ids[self.offsets[row] : self.offsets[row + 1]]

    def take(self, rows: Rows) -> SharedBlocks:
        """The blocks of some prompts, in the order of `rows`."""
        counts = self.counts[rows]
        firsts = self.offsets[:-1][rows]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        places = np.arange(offsets[-1]) + np.repeat(firsts - offsets[:-1], counts)
        return SharedBlocks(self.block_tokens, self.ids[places], offsets)


@dataclass(slots=True, frozen=True)
class Sessions:
    """Turns of conversations: the prompt of a turn is the prompt of the turn before, its answer,
    and something new. At most one turn continues another.
    """

    previous: NDArray[np.int64]  # row of the turn before; -1 for a first turn
    # Seconds from the end of the turn before to this one's arrival, in a closed loop; 0 for a
    # first turn.
    think_s: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.previous)

    @property
    def first(self) -> NDArray[np.int64]:
        """The row of the first turn of each row's session."""
        rows = np.where(self.previous < 0, np.arange(len(self)), self.previous)
        while (rows != (further := rows[rows])).any():
            rows = further
        return rows

    def take(self, rows: Rows) -> Sessions:
        """The sessions of some rows, in the order of `rows`.

        A turn continues the last copy of the turn before that stands ahead of it and that no other
        turn continues. Without one it becomes a first turn, and later turns of its session continue
        it.
        """
        chosen = np.arange(len(self))[rows]
        wanted = self.previous[chosen]
        previous = np.full(len(chosen), -1, dtype=np.int64)
        latest: dict[int, int] = {}
        for place, (row, before) in enumerate(zip(chosen.tolist(), wanted.tolist(), strict=True)):
            previous[place] = latest.pop(before, -1)
            latest[row] = place
        return Sessions(previous, np.where(previous < 0, 0.0, self.think_s[chosen]))


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
    shared: SharedBlocks | None = None  # what prompts share; None: not known, taken as nothing
    sessions: Sessions | None = None  # None: requests are independent
    warmup: int = 0  # so many first requests are served, so that the rest finds a warm system
    repeats: int = 1  # the requests of the file stand here so many times (`repeated`)

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def counted(self) -> int:
        """The number of requests after the warm-up: results are about these."""
        return len(self) - self.warmup

    @property
    def changes(self) -> str:
        """What makes these other requests than the file's, in words; '' where nothing does. Each
        command prints it in one sentence with its result.
        """
        return changes_in_words(self.scaling, self.repeats)

    @property
    def priorities(self) -> list[int]:
        """The priority of each request; 0 where the trace has none."""
        return [0] * len(self) if self.priority is None else self.priority.tolist()

    def rows(self) -> Iterator[tuple[float, int, int, int, int]]:
        """Arrival, prompt, output, limit and priority of each request, as plain numbers."""
        columns = (self.arrival_s, self.prompt_tokens, self.output_tokens, self.max_tokens)
        return zip(*(column.tolist() for column in columns), self.priorities, strict=True)

    def take(self, rows: Rows) -> Trace:
        """Some requests, in the order of `rows`, with what their prompts share and their sessions.

        Rows may repeat. Arrival times stay as they are. None of the rows is a warm-up.
        """
        return replace(
            self,
            arrival_s=self.arrival_s[rows],
            prompt_tokens=self.prompt_tokens[rows],
            output_tokens=self.output_tokens[rows],
            max_tokens=self.max_tokens[rows],
            priority=None if self.priority is None else self.priority[rows],
            shared=self.shared and self.shared.take(rows),
            sessions=self.sessions and self.sessions.take(rows),
            warmup=0,
        )


def trace_path(trace: str | os.PathLike[str]) -> Path:
    """The file of a trace, given as a path or as the name of a shipped trace. Raises `InputError`
    where neither exists.
    """
    path = Path(trace)
    text = os.fspath(trace)
    if path.is_file():
        return path
    if path.is_dir():
        raise InputError(f"{text}: a folder, not a trace", "name a file in it")
    for shipped in FOLDER.iterdir():
        if shipped.stem == text:
            return shipped
    hint = nearest(path.stem, shipped_traces())
    raise InputError(f"{text}: no such file, and no shipped trace has that name", hint)


def shipped_traces() -> list[str]:
    """The names of the traces that ship."""
    return sorted(file.stem for file in FOLDER.iterdir())
