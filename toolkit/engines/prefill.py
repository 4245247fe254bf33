"""Prefilling newcomers apart from the running batch: together where lengths are alike, and in passes that are bounded.

BATON, section 4.2: the caches of those who are done are then embedded into the batch. A pass is one forward call;
between two passes the batch may decode, so that a long prompt does not hold up those who run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from toolkit.engines.batch import PaddedBatch
from toolkit.engines.endings import LiveRow
from toolkit.engines.memory import ByteLedger, ModelShape
from toolkit.engines.rebatch_cache import RowKV
from toolkit.engines.row_cache import BatchCache
from toolkit.sched.likeness import alike

Newcomer = tuple[int, LiveRow]  # its number, and the row


@dataclass(slots=True, eq=False)
class Group:
    """Newcomers of similar length, longest first, padded to one width; `done` columns of it are cached."""

    newcomers: list[Newcomer]
    batch: PaddedBatch
    held_bytes: int
    done: int = 0

    def caches(self) -> list[RowKV]:
        """Each newcomer's keys and values, without padding; views."""
        layers, width = self.batch.cache.layers, self.batch.width
        lengths = [len(live.row.tokens) for _, live in self.newcomers]
        return [
            [(layer.keys[index, :, width - n : width], layer.values[index, :, width - n : width]) for layer in layers]
            for index, n in enumerate(lengths)
        ]


class Prefiller:
    """Newcomers on their way into the batch, in the order of their arrival as far as groups allow.

    Args:
        forward: runs columns [from, to) of a padded batch and gives the last one's logits [N, V].
        make_batch: rows and a width to a `PaddedBatch`.
        shape, ledger: what a group and its passes are charged for, and where.
        cache: where newcomers will be embedded; room has to be left for that.
        mixes: rows of any lengths share a pass, as in a static batch; else those of like length.
        chunk_tokens: of a bounded pass, at most, padding counted; None: no pass is bounded.
    """

    def __init__(
        self,
        forward: Callable[[PaddedBatch, int, int], torch.Tensor],
        make_batch: Callable[[Sequence[Sequence[int]], int], PaddedBatch],
        shape: ModelShape,
        ledger: ByteLedger,
        cache: BatchCache,
        chunk_tokens: int | None,
        *,
        mixes: bool = False,
    ) -> None:
        self._forward = forward
        self._make_batch = make_batch
        self._shape = shape
        self._ledger = ledger
        self._cache = cache
        self._mixes = mixes
        self._chunk_tokens = chunk_tokens
        self._waiting: deque[Newcomer] = deque()
        self._group: Group | None = None

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or self._group is not None

    @property
    def tokens(self) -> int:
        """Of KV cache that the group in the works takes."""
        return self._group.batch.width * len(self._group.newcomers) if self._group else 0

    def add(self, newcomers: Iterable[Newcomer]) -> None:
        self._waiting.extend(newcomers)

    def remove(self, number: int) -> LiveRow | None:
        """Take a newcomer out; what was prefilled of it is lost. None: it is not here."""
        for index, (waiting, live) in enumerate(self._waiting):
            if waiting == number:
                del self._waiting[index]
                return live
        group = self._group
        if group is None or number not in [one for one, _ in group.newcomers]:
            return None
        self.release(group)  # the others begin anew, which costs less code than to cut one out of a half-made cache
        self._group = None
        self._waiting.extendleft(one for one in reversed(group.newcomers) if one[0] != number)
        return next(live for one, live in group.newcomers if one == number)

    def take_waiting(self) -> list[Newcomer]:
        """All who wait, for whoever prefills them otherwise."""
        taken = list(self._waiting)
        self._waiting.clear()
        return taken

    def advance(self, *, bounded: bool) -> tuple[Group, torch.Tensor] | None:
        """One pass: of `chunk_tokens` at most where it is bounded, or where memory is too short for a whole one.

        The group that is complete with it, with the logits of each row's next token; the caller embeds it and calls
        `release`. `torch.OutOfMemoryError` where not even the first who waits fits.
        """
        group = self._group = self._group or self._form(bounded=bounded)
        rows, start, end = len(group.newcomers), group.done, group.batch.width
        if bounded or self._shape.prefill_bytes(rows, end - start, start) > self._ledger.free_bytes:
            end = min(end, start + self._columns(rows, end))
        with self._ledger.reserve(self._shape.prefill_bytes(rows, end - start, start)):
            logits = self._forward(group.batch, start, end)
        group.done = end
        if end < group.batch.width:
            return None
        self._group = None
        return group, logits

    def release(self, group: Group) -> None:
        """The group's caches are not needed any more."""
        self._ledger.take(-group.held_bytes)

    def clear(self) -> None:
        self._waiting.clear()
        if self._group is not None:
            self.release(self._group)
            self._group = None

    def _columns(self, rows: int, width: int) -> int:
        """Columns of a bounded pass."""
        return width if self._chunk_tokens is None else max(self._chunk_tokens // rows, 1)

    def _form(self, *, bounded: bool) -> Group:
        """The first who waits, and those like it or all, as far as the bound and memory allow."""
        lengths = [len(live.row.tokens) for _, live in self._waiting]
        together = range(len(lengths)) if self._mixes else alike(lengths, self._chunk_tokens if bounded else None)
        members = [self._waiting[index] for index in together]
        if self._bytes(members) > self._ledger.free_bytes:
            self._cache.fit()
        while len(members) > 1 and self._bytes(members) > self._ledger.free_bytes:
            members = members[: (len(members) + 1) // 2]
        width = max(len(live.row.tokens) for _, live in members)
        held = len(members) * width * self._cache.bytes_per_token
        self._ledger.take(held)
        chosen = {number for number, _ in members}
        self._waiting = deque(one for one in self._waiting if one[0] not in chosen)
        members.sort(key=lambda one: -len(one[1].row.tokens))
        return Group(members, self._make_batch([live.row.tokens for _, live in members], width), held)

    def _bytes(self, members: Sequence[Newcomer]) -> int:
        """What these take as a group: their caches, and beside them the largest pass or, later, their rows' places."""
        rows, width = len(members), max(len(live.row.tokens) for _, live in members)
        columns = width if rows > 1 else min(self._columns(1, width), width)  # one that is too long can be cut
        passing = self._shape.prefill_bytes(rows, columns, width - columns)
        return rows * width * self._cache.bytes_per_token + max(passing, self._cache.growth_bytes(rows, width))
