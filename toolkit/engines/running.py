"""The rows that decode together, each at its own length: they join between two steps, and leave when they end.

Memory may run out anywhere in a step or while rows join: the batch is then as it was before, so that either can be
tried again. Leaving takes no memory: what a step needs is made anew when the next one begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from toolkit.engines.endings import LiveRow
from toolkit.engines.prefill import Newcomer
from toolkit.engines.protocol import FinishReason, Row, StepOutput
from toolkit.engines.rebatch_cache import RebatchCache, RowKV
from toolkit.engines.row_cache import BatchCache
from toolkit.engines.sampling import Sampler

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

    def __init__(self, forward: Forward, cache: BatchCache, make_sampler: MakeSampler, *, masks_as_4d: bool) -> None:
        self.cache = cache
        self._forward = forward
        self._make_sampler = make_sampler
        self._masks_as_4d = masks_as_4d
        self._rows: list[Newcomer] = []
        self._sampler = make_sampler([])
        self._draws = 0  # since the sampler was made
        self._places: list[int] = []  # of the rows in the sampler; NEW: not in it yet
        self._last: torch.Tensor | None = None  # [N] the tokens that the next step reads; None: rows came or went

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
        drawn = self._make_sampler([live.as_row() for _, live in newcomers]).draw(logits, 0).tolist()
        return _advance(newcomers, drawn)

    def join(self, newcomers: Sequence[Newcomer], caches: Sequence[RowKV]) -> int:
        """Embed rows whose tokens but for the last are cached, all or, where memory runs out, none; how many did.

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
        """One more token for every row, and the first one of newcomers who are prefilled in the same pass.

        BATON's vector shaping (section 4.1): the rows' single tokens are padded to the longest newcomer. The padding is
        taken out of the cache afterwards, where the paper keeps it until all columns before it are released.
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
        sampler = self._sampler.regrouped(range(old), [live.as_row() for _, live in newcomers], self._draws)
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
        return self._forward(last[:, None], cache.mask(as_4d=self._masks_as_4d), cache.positions(), cache)

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
        past = torch.ones(len(self), cache.width, dtype=torch.bool, device=device) if mask is None else mask[:, :-1]
        return torch.cat([past, torch.zeros(newcomers, cache.width, dtype=torch.bool, device=device)])

    def _prepared(self) -> torch.Tensor:
        """[N] the tokens that a step reads, its sampler and all made anew where rows came or went since the last."""
        if self._last is None:
            sampler = self._regrouped_sampler()
            tokens = [live.last_token for _, live in self._rows]
            self._last = torch.tensor(tokens, dtype=torch.long, device=self.cache.device)
            self._sampler, self._draws, self._places = sampler, 0, list(range(len(self)))
        return self._last

    def _regrouped_sampler(self) -> Sampler:
        kept = [place for place in self._places if place != NEW]
        if self._places[: len(kept)] != kept:  # some went after others had come, and the last took their places
            return self._make_sampler([live.as_row() for _, live in self._rows])
        return self._sampler.regrouped(kept, [live.as_row() for _, live in self._rows[len(kept) :]], self._draws)

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
