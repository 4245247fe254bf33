"""The rows that decode together, each at its own length: they join between two steps, and leave when they end."""

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
        self._last = torch.empty(0)  # [N] the tokens that the next step reads

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, number: int) -> bool:
        return any(number == one for one, _ in self._rows)

    def welcome(self, newcomers: Sequence[Newcomer], caches: Sequence[RowKV], logits: torch.Tensor) -> StepOutput:
        """The first tokens of newcomers who were prefilled apart; those who do not end with them join."""
        step = self.first_tokens(newcomers, logits)
        ended = {number for number, _ in step.ended}
        stay = [index for index, (number, _) in enumerate(newcomers) if number not in ended]
        self.join([newcomers[index] for index in stay], [caches[index] for index in stay])
        return step

    def first_tokens(self, newcomers: Sequence[Newcomer], logits: torch.Tensor) -> StepOutput:
        """What newcomers who were prefilled apart draw from `logits` [N, V]."""
        drawn = self._make_sampler([live.as_row() for _, live in newcomers]).draw(logits, 0).tolist()
        return _advance(newcomers, drawn)

    def join(self, newcomers: Sequence[Newcomer], caches: Sequence[RowKV]) -> None:
        """Embed rows whose tokens but for the last are cached. They decode from the next step on."""
        if not newcomers:
            return
        longest = max(cached[0][0].shape[1] for cached in caches)
        self.cache.make_room(len(self) + len(newcomers), longest, ahead=1)
        for cached in caches:
            self.cache.join(cached)
        self._regroup(range(len(self)), newcomers)

    def peek(self, number: int) -> tuple[LiveRow, RowKV]:
        """A row and views of its cache, valid until rows come, go or step."""
        index = next(index for index, (one, _) in enumerate(self._rows) if one == number)
        return self._rows[index][1], self.cache.read(index)

    def drop(self, number: int) -> None:
        """Take a row out and forget it."""
        self._drop([index for index, (one, _) in enumerate(self._rows) if one == number])

    def step(self) -> StepOutput:
        """One more token for every row; those who end with it leave."""
        cache = self.cache
        cache.make_room(len(self), 0, ahead=1)
        mask = cache.mask(as_4d=self._masks_as_4d)
        logits = self._forward(self._last[:, None], mask, cache.positions(), cache)
        cache.advance()
        return self._draw(logits)

    def step_with(self, newcomers: Sequence[Newcomer]) -> StepOutput:
        """One more token for every row, and the first one of newcomers who are prefilled in the same pass.

        BATON's vector shaping (section 4.1): the rows' single tokens are padded to the longest newcomer. The padding is
        taken out of the cache afterwards, where the paper keeps it until all columns before it are released.
        """
        cache, old = self.cache, len(self)
        assert isinstance(cache, RebatchCache)
        tokens = [live.row.tokens for _, live in newcomers]
        lengths = [len(one) for one in tokens]
        width = max(lengths)
        cache.make_room(old + len(newcomers), width, ahead=width)
        cache.clear_behind(len(newcomers))
        device = self._last.device
        ids = torch.zeros(old + len(newcomers), width, dtype=torch.long, device=device)
        ids[:old, -1] = self._last
        for index, one in enumerate(tokens, old):
            ids[index, width - len(one) :] = torch.tensor(one, device=device)
        own = torch.tensor([1] * old + lengths, device=device)[:, None]
        column = torch.arange(width, device=device)[None, :] - (width - own)
        positions = column.clamp(min=0)
        positions[:old, -1:] = cache.positions()
        mask = torch.cat([self._past(cache, len(newcomers)), column >= 0], dim=1)
        logits = self._forward(ids, mask, positions, cache)
        cache.take_in(width, lengths)
        self._regroup(range(old), newcomers)
        return self._draw(logits)

    def clear(self) -> None:
        """Drop all rows and their memory."""
        self._rows.clear()
        self.cache.clear()
        self._sampler, self._draws = self._make_sampler([]), 0

    def _past(self, cache: RebatchCache, newcomers: int) -> torch.Tensor:
        """[N + newcomers, width] what each may see of the window: a newcomer nothing."""
        device = self._last.device
        mask = cache.mask(as_4d=False)
        past = torch.ones(len(self), cache.width, dtype=torch.bool, device=device) if mask is None else mask[:, :-1]
        return torch.cat([past, torch.zeros(newcomers, cache.width, dtype=torch.bool, device=device)])

    def _draw(self, logits: torch.Tensor) -> StepOutput:
        self._last = self._sampler.draw(logits, self._draws)
        self._draws += 1
        step = _advance(self._rows, self._last.tolist())
        if step.ended:
            ended = {number for number, _ in step.ended}
            self._drop([index for index, (number, _) in enumerate(self._rows) if number in ended])
        return step

    def _drop(self, indices: Sequence[int]) -> None:
        self._regroup(self.cache.leave(indices), [])
        if self._rows:
            self.cache.shrink()
        else:
            self.cache.clear()

    def _regroup(self, kept: Sequence[int], joined: Sequence[Newcomer]) -> None:
        self._rows = [self._rows[index] for index in kept] + list(joined)
        self._sampler = self._sampler.regrouped(kept, [live.as_row() for _, live in joined], self._draws)
        self._draws = 0
        self._last = torch.tensor(
            [live.last_token for _, live in self._rows], dtype=torch.long, device=self.cache.device
        )


def _advance(rows: Sequence[Newcomer], drawn: Sequence[int]) -> StepOutput:
    tokens: list[int] = []
    ended: list[tuple[int, FinishReason]] = []
    for (number, live), one in zip(rows, drawn, strict=True):
        token, finish = live.advance(one)
        tokens.append(token)
        if finish:
            ended.append((number, finish))
    return StepOutput(tuple([number for number, _ in rows]), tuple(tokens), tuple(ended))
