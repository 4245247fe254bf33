"""Prefilling newcomers apart from the running batch: together where lengths are alike, and in passes that are bounded.

BATON, section 4.2: the caches of those who are done are then embedded into the batch. A pass is one forward call;
between two passes the batch may decode, so that a long prompt does not hold up those who run. Which passes there are is
`toolkit.sched.passes`' to say; this makes them, and sees that memory suffices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from toolkit.engines.batch import PaddedBatch
from toolkit.engines.endings import LiveRow
from toolkit.engines.memory import ByteLedger, ModelShape
from toolkit.engines.rebatch_cache import RowKV
from toolkit.engines.row_cache import BatchCache
from toolkit.sched.passes import Pass, Passes

Newcomer = tuple[int, LiveRow]  # its number, and the row


@dataclass(slots=True, eq=False)
class Group:
    """Newcomers of similar length, longest first, padded to one width."""

    newcomers: list[Newcomer]
    batch: PaddedBatch
    held_bytes: int

    def caches(self) -> list[RowKV]:
        """Each newcomer's keys and values, without padding; views."""
        layers, width = self.batch.cache.layers, self.batch.width
        lengths = [len(live.row.tokens) for _, live in self.newcomers]
        return [
            [(layer.keys[index, :, width - n : width], layer.values[index, :, width - n : width]) for layer in layers]
            for index, n in enumerate(lengths)
        ]


class Prefiller:
    """Newcomers on their way into the batch.

    Args:
        forward: runs columns [from, to) of a padded batch and gives the last one's logits [N, V].
        make_batch: rows and a width to a `PaddedBatch`.
        shape, ledger: what a group and its passes are charged for, and where.
        cache: where newcomers will be embedded; room has to be left for that.
        mixes: rows of any lengths share a pass, as in a static batch; else those of like length.
    """

    def __init__(
        self,
        forward: Callable[[PaddedBatch, int, int], torch.Tensor],
        make_batch: Callable[[Sequence[Sequence[int]], int], PaddedBatch],
        shape: ModelShape,
        ledger: ByteLedger,
        cache: BatchCache,
        *,
        mixes: bool = False,
    ) -> None:
        self._forward = forward
        self._make_batch = make_batch
        self._shape = shape
        self._ledger = ledger
        self._cache = cache
        self._passes: Passes[int] = Passes(mixes=mixes)
        self._rows: dict[int, LiveRow] = {}
        self._group: Group | None = None  # the one that is being prefilled

    @property
    def busy(self) -> bool:
        return bool(self._rows)

    @property
    def tokens(self) -> int:
        """Of KV cache that the group in the works takes."""
        return self._group.batch.width * len(self._group.newcomers) if self._group else 0

    def add(self, newcomers: Iterable[Newcomer]) -> None:
        for number, live in newcomers:
            self._rows[number] = live
            self._passes.add(number, len(live.row.tokens))

    def remove(self, number: int) -> LiveRow | None:
        """Take a newcomer out; what was prefilled of it is lost. None: it is not here."""
        if number not in self._rows:
            return None
        self._passes.remove(number)
        if self._group is not None and self._passes.group is None:
            self.release(self._group)
            self._group = None
        return self._rows.pop(number)

    def take_waiting(self) -> list[Newcomer]:
        """All who wait, for whoever prefills them otherwise."""
        return [(number, self._rows.pop(number)) for number in self._passes.take_waiting()]

    @property
    def numbers(self) -> tuple[int, ...]:
        """All who are here."""
        return tuple(self._rows)

    def advance(self, bound: int = 0, parts: int = 1, *, cuts: bool = False) -> list[tuple[Group, torch.Tensor]]:
        """One pass: of `bound` tokens at most (0: no bound), and with `cuts` of fewer where memory is too short.

        Of several `parts` that it can be made in, it is the first.

        The group that is complete with it, if one is, with the logits of each row's next token; the caller embeds it
        and calls `release`. `torch.OutOfMemoryError` where not even the first who waits fits; `clear` comes next then.
        """
        cuts = cuts or parts > 1
        group = self._group = self._group or self._begin(bound, cuts)
        one = self._passes.next(bound)
        one = replace(one, end=one.start - (one.start - one.end) // parts)
        if cuts:
            one = self._fitting(one)
        group.batch.cache.keep(one.start)
        with self._ledger.reserve(self._pass_bytes(one)):
            logits = self._forward(group.batch, one.start, one.end)
        self._passes.made(one)
        if not one.completes:
            return []
        self._group = None
        for number, _ in group.newcomers:
            del self._rows[number]
        return [(group, logits)]

    def release(self, group: Group) -> None:
        """The group's caches are not needed any more."""
        self._ledger.take(-group.held_bytes)

    def clear(self) -> None:
        self._passes.clear()
        self._rows.clear()
        if self._group is not None:
            self.release(self._group)
            self._group = None

    def _begin(self, bound: int, cuts: bool) -> Group:
        """The first who waits, and those like it or all, as far as the bound and memory allow."""
        formed = self._passes.form(bound, lambda lengths: self._fits(lengths, bound, cuts))
        held = len(formed.keys) * formed.width * self._cache.bytes_per_token
        newcomers = [(number, self._rows[number]) for number in formed.keys]
        with self._ledger.hold(held):
            return Group(newcomers, self._make_batch([live.row.tokens for _, live in newcomers], formed.width), held)

    def _fits(self, lengths: Sequence[int], bound: int, cuts: bool) -> bool:
        """Whether memory has room for a group; where it is short, the batch gives up what it has to spare."""
        needed = self._bytes(len(lengths), max(lengths), bound, cuts)
        if needed > self._ledger.free_bytes:
            self._cache.fit()
        return needed <= self._ledger.free_bytes

    def _bytes(self, rows: int, width: int, bound: int, cuts: bool) -> int:
        """What a group takes: its caches, and beside them the largest pass or, later, its rows' places."""
        columns = min(width, max(bound // rows, 1)) if bound else width
        if rows == 1 and cuts:
            columns = 1  # one that is too long can be cut
        passing = self._shape.prefill_bytes(rows, columns, width - columns)
        return rows * width * self._cache.bytes_per_token + max(passing, self._cache.growth_bytes(rows, width))

    def _fitting(self, one: Pass[int]) -> Pass[int]:
        """The pass, or the first part of it that memory has room for."""
        while one.end - one.start > 1 and self._pass_bytes(one) > self._ledger.free_bytes:
            one = replace(one, end=(one.start + one.end + 1) // 2)
        return one

    def _pass_bytes(self, one: Pass[int]) -> int:
        return self._shape.prefill_bytes(len(one.group.keys), one.end - one.start, one.start)
