"""The rows that decode together, each at its own length: they join between two steps, and leave
when they end.

Memory may run out anywhere in a step or while rows join: the batch is then as it was before, so
that either can be tried again. Leaving takes no memory: what a step needs is made anew when the
next one begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from toolkit.engines.memory import ByteLedger, ModelShape
from toolkit.engines.protocol import FinishReason, LiveRow, Row, StepOutput
from toolkit.engines.rebatch_cache import RebatchCache, RowKV
from toolkit.engines.row_cache import BatchCache
from toolkit.engines.sampling import Sampler
from toolkit.engines.slab import PaddedBatch
from toolkit.sched.rounds import PrefillPass, PrefillPasses

# Prefilling newcomers apart from the running batch: together where lengths are alike, and in
# passes that are bounded.
#
# BATON, section 4.2: the caches of those who are done are then embedded into the batch. A pass is
# one forward call; between two passes the batch may decode, so that a long prompt does not hold
# up those who run. Which passes there are is `toolkit.sched.rounds`' to say; this makes them, and
# sees that memory suffices.

Newcomer = tuple[int, LiveRow]  # its number, and the row


@dataclass(slots=True, eq=False)
class PrefillBatch:
    """Newcomers of similar length, longest first, padded to one width."""

    newcomers: list[Newcomer]
    batch: PaddedBatch
    held_bytes: int

    def caches(self) -> list[RowKV]:
        """Each newcomer's keys and values, without padding; views."""
        layers, width = self.batch.cache.layers, self.batch.width
        lengths = [len(live.row.tokens) for _, live in self.newcomers]
        return [
            [
                (layer.keys[index, :, width - n : width], layer.values[index, :, width - n : width])
                for layer in layers
            ]
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
        self._passes: PrefillPasses[int] = PrefillPasses(mixes=mixes)
        self._rows: dict[int, LiveRow] = {}
        self._group: PrefillBatch | None = None  # the one that is being prefilled

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

    def advance(
        self, bound: int = 0, parts: int = 1, *, cuts: bool = False
    ) -> list[tuple[PrefillBatch, torch.Tensor]]:
        """One pass: of `bound` tokens at most (0: no bound), and with `cuts` of fewer where memory
        is too short.

        Of several `parts` that it can be made in, it is the first.

        The group that is complete with it, if one is, with the logits of each row's next token; the
        caller embeds it and calls `release`. `torch.OutOfMemoryError` where not even the first who
        waits fits; `clear` comes next then.
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

    def release(self, group: PrefillBatch) -> None:
        """The group's caches are not needed any more."""
        self._ledger.take(-group.held_bytes)

    def clear(self) -> None:
        self._passes.clear()
        self._rows.clear()
        if self._group is not None:
            self.release(self._group)
            self._group = None

    def _begin(self, bound: int, cuts: bool) -> PrefillBatch:
        """The first who waits, and those like it or all, as far as the bound and memory allow."""
        formed = self._passes.form(bound, lambda lengths: self._fits(lengths, bound, cuts))
        held = len(formed.keys) * formed.width * self._cache.bytes_per_token
        newcomers = [(number, self._rows[number]) for number in formed.keys]
        with self._ledger.hold(held):
            return PrefillBatch(
                newcomers,
                self._make_batch([live.row.tokens for _, live in newcomers], formed.width),
                held,
            )

    def _fits(self, lengths: Sequence[int], bound: int, cuts: bool) -> bool:
        """Whether memory has room for a group; where it is short, the batch gives up what it has to
        spare.
        """
        needed = self._bytes(len(lengths), max(lengths), bound, cuts)
        if needed > self._ledger.free_bytes:
            self._cache.fit()
        return needed <= self._ledger.free_bytes

    def _bytes(self, rows: int, width: int, bound: int, cuts: bool) -> int:
        """What a group takes: its caches, and beside them the largest pass or, later, its rows'
        places.
        """
        columns = min(width, max(bound // rows, 1)) if bound else width
        if rows == 1 and cuts:
            columns = 1  # one that is too long can be cut
        passing = self._shape.prefill_bytes(rows, columns, width - columns)
        return rows * width * self._cache.bytes_per_token + max(
            passing, self._cache.growth_bytes(rows, width)
        )

    def _fitting(self, one: PrefillPass[int]) -> PrefillPass[int]:
        """The pass, or the first part of it that memory has room for."""
        while one.end - one.start > 1 and self._pass_bytes(one) > self._ledger.free_bytes:
            one = replace(one, end=(one.start + one.end + 1) // 2)
        return one

    def _pass_bytes(self, one: PrefillPass[int]) -> int:
        return self._shape.prefill_bytes(len(one.group.keys), one.end - one.start, one.start)


# (input_ids [N, L], mask, position_ids [N, L], cache) to the last column's logits [N, V]
Forward = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, BatchCache], torch.Tensor]
MakeSampler = Callable[[Sequence[Row]], Sampler]
NEW = -1


class RunningBatch:
    """N rows in a cache, and what each drew.

    Args:
        forward: the model.
        cache: where the rows' keys and values are.
        make_sampler: for rows that have drawn nothing yet.
        masks_as_4d: whether the model takes boolean masks of four dimensions.
    """

    def __init__(
        self, forward: Forward, cache: BatchCache, make_sampler: MakeSampler, *, masks_as_4d: bool
    ) -> None:
        self.cache = cache
        self._forward = forward
        self._make_sampler = make_sampler
        self._masks_as_4d = masks_as_4d
        self._rows: list[Newcomer] = []
        self._sampler = make_sampler([])
        self._draws = 0  # since the sampler was made
        self._places: list[int] = []  # of the rows in the sampler; NEW: not in it yet
        self._last: torch.Tensor | None = (
            None  # [N] the tokens that the next step reads; None: rows came or went
        )

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, number: int) -> bool:
        return any(number == one for one, _ in self._rows)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of the rows."""
        return tuple([number for number, _ in self._rows])

    def first_tokens(self, newcomers: Sequence[Newcomer], logits: torch.Tensor) -> StepOutput:
        """What newcomers who were prefilled apart draw from `logits` [N, V]."""
        drawn = (
            self._make_sampler([live.as_row() for _, live in newcomers]).draw(logits, 0).tolist()
        )
        return _advance(newcomers, drawn)

    def join(self, newcomers: Sequence[Newcomer], caches: Sequence[RowKV]) -> int:
        """Embed rows whose tokens but for the last are cached, all or, where memory runs out, none;
        how many did.

        They decode from the next step on.
        """
        if not newcomers:
            return 0
        longest = max(cached[0][0].shape[1] for cached in caches)
        self.cache.make_room(len(self) + len(newcomers), longest, ahead=1)
        try:
            for cached in caches:
                self.cache.join(cached)
        except RuntimeError:
            self.cache.leave(range(len(self), self.cache.rows))
            raise
        self._rows += newcomers
        self._places += [NEW] * len(newcomers)
        self._last = None
        return len(newcomers)

    def peek(self, number: int) -> tuple[LiveRow, RowKV]:
        """A row and views of its cache, valid until rows come, go or step."""
        index = next(index for index, (one, _) in enumerate(self._rows) if one == number)
        return self._rows[index][1], self.cache.read(index)

    def drop(self, number: int) -> None:
        """Take a row out and forget it."""
        self._drop([index for index, (one, _) in enumerate(self._rows) if one == number])

    def step(self, parts: int = 1) -> StepOutput:
        """One more token for every row, in so many passes; those who end with it leave."""
        cache, last = self.cache, self._prepared()
        cache.make_room(len(self), 0, ahead=1)
        logits = self._logits(last) if parts == 1 else self._logits_in_parts(last, parts)
        drawn = self._sampler.draw(logits, self._draws)
        tokens = drawn.tolist()
        cache.advance()
        return self._take(drawn, tokens)

    def step_with(self, newcomers: Sequence[Newcomer]) -> StepOutput:
        """One more token for every row, and the first one of newcomers who are prefilled in the
        same pass.

        BATON's vector shaping (section 4.1): the rows' single tokens are padded to the longest
        newcomer. The padding is taken out of the cache afterwards, where the paper keeps it until
        all columns before it are released.
        """
        cache, old, last = self.cache, len(self), self._prepared()
        assert isinstance(cache, RebatchCache)
        tokens = [live.row.tokens for _, live in newcomers]
        lengths = [len(one) for one in tokens]
        width = max(lengths)
        cache.make_room(old + len(newcomers), width, ahead=width)
        cache.clear_behind(len(newcomers))
        device = last.device
        ids = torch.zeros(old + len(newcomers), width, dtype=torch.long, device=device)
        ids[:old, -1] = last
        for index, one in enumerate(tokens, old):
            ids[index, width - len(one) :] = torch.tensor(one, device=device)
        own = torch.tensor([1] * old + lengths, device=device)[:, None]
        column = torch.arange(width, device=device)[None, :] - (width - own)
        positions = column.clamp(min=0)
        positions[:old, -1:] = cache.positions()
        mask = torch.cat([self._past(cache, len(newcomers)), column >= 0], dim=1)
        logits = self._forward(ids, mask, positions, cache)
        sampler = self._sampler.regrouped(
            range(old), [live.as_row() for _, live in newcomers], self._draws
        )
        drawn = sampler.draw(logits, 0)
        tokens_drawn = drawn.tolist()
        cache.take_in(width, lengths)
        self._rows += newcomers
        self._sampler, self._draws, self._places = sampler, 0, list(range(len(self)))
        return self._take(drawn, tokens_drawn)

    def clear(self) -> None:
        """Drop all rows and their memory."""
        self._rows.clear()
        self._places.clear()
        self.cache.clear()
        self._sampler, self._draws, self._last = self._make_sampler([]), 0, None

    def _logits(self, last: torch.Tensor) -> torch.Tensor:
        """[N, V] of the tokens after `last` [N]."""
        cache = self.cache
        return self._forward(
            last[:, None], cache.mask(as_4d=self._masks_as_4d), cache.positions(), cache
        )

    def _logits_in_parts(self, last: torch.Tensor, parts: int) -> torch.Tensor:
        """The same of some rows after others: a pass over fewer needs less memory beside the cache."""
        cache, size = self.cache, -(-len(self) // parts)
        mask, positions = cache.mask(as_4d=self._masks_as_4d), cache.positions()
        found = []
        for first in range(0, len(self), size):
            rows = slice(first, first + size)
            with cache.rows_from(first):
                own = None if mask is None else mask[rows]
                found.append(self._forward(last[rows, None], own, positions[rows], cache))
        return torch.cat(found)

    def _past(self, cache: RebatchCache, newcomers: int) -> torch.Tensor:
        """[N + newcomers, width] what each may see of the window: a newcomer nothing."""
        device = cache.device
        mask = cache.mask(as_4d=False)
        past = (
            torch.ones(len(self), cache.width, dtype=torch.bool, device=device)
            if mask is None
            else mask[:, :-1]
        )
        return torch.cat(
            [past, torch.zeros(newcomers, cache.width, dtype=torch.bool, device=device)]
        )

    def _prepared(self) -> torch.Tensor:
        """[N] the tokens that a step reads, its sampler and all made anew where rows came or went
        since the last.
        """
        if self._last is None:
            sampler = self._regrouped_sampler()
            tokens = [live.last_token for _, live in self._rows]
            self._last = torch.tensor(tokens, dtype=torch.long, device=self.cache.device)
            self._sampler, self._draws, self._places = sampler, 0, list(range(len(self)))
        return self._last

    def _regrouped_sampler(self) -> Sampler:
        kept = [place for place in self._places if place != NEW]
        if (
            self._places[: len(kept)] != kept
        ):  # some went after others had come, and the last took their places
            return self._make_sampler([live.as_row() for _, live in self._rows])
        return self._sampler.regrouped(
            kept, [live.as_row() for _, live in self._rows[len(kept) :]], self._draws
        )

    def _take(self, drawn: torch.Tensor, tokens: Sequence[int]) -> StepOutput:
        """What was drawn are the rows' tokens; from here on nothing can fail."""
        self._last = drawn
        self._draws += 1
        step = _advance(self._rows, tokens)
        if step.ended:
            ended = {number for number, _ in step.ended}
            self._drop([index for index, (number, _) in enumerate(self._rows) if number in ended])
        return step

    def _drop(self, indices: Sequence[int]) -> None:
        order = self.cache.leave(indices)
        self._rows = [self._rows[index] for index in order]
        self._places = [self._places[index] for index in order]
        self._last = None
        if self._rows:
            self.cache.shrink()
        else:
            self.clear()


def _advance(rows: Sequence[Newcomer], drawn: Sequence[int]) -> StepOutput:
    tokens: list[int] = []
    ended: list[tuple[int, FinishReason]] = []
    for (number, live), one in zip(rows, drawn, strict=True):
        token, finish = live.advance(one)
        tokens.append(token)
        if finish:
            ended.append((number, finish))
    return StepOutput(tuple([number for number, _ in rows]), tuple(tokens), tuple(ended))
