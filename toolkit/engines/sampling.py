"""Sampling: the next token of every row of a batch.

The order is vLLM's: repetition penalty, tokens forbidden before `min_tokens`, temperature, min_p,
top_k, top_p. A draw is the inverse of the cumulative distribution, in the vocabulary's order, at a
number that depends only on (seed, position). So logits that differ in their last bits, as they do
between batches of different shapes, rarely change a draw.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from toolkit.engines.protocol import Row, stop_tokens

GREEDY_BELOW = 1e-5  # temperature
AHEAD = 64  # so many draws have their random numbers made at once


class Sampler:
    """Draws for the rows of a batch. Greedy rows take the largest logit.

    Args:
        eos_ids: the model's, forbidden before a row's `min_tokens`.
        vocab_size: V.
        device: of the logits.
        starts: the position of each row's next draw; None: each row's `generated`.
        seen: [N, V] whether each row contains each token, for the repetition penalty; None: from
            the rows' tokens.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        eos_ids: Sequence[int],
        vocab_size: int,
        device: torch.device,
        starts: Sequence[int] | None = None,
        seen: torch.Tensor | None = None,
    ) -> None:
        params = [row.sampling for row in rows]
        self._rows = rows
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self._device = device
        self._starts = [row.generated for row in rows] if starts is None else starts
        self._greedy = [p.temperature < GREEDY_BELOW for p in params]
        self._penalties = any(p.repetition_penalty != 1.0 for p in params)
        self._forbidden = [
            (index, row.sampling.min_tokens, sorted(stop_tokens(row, eos_ids)))
            for index, row in enumerate(rows)
            if row.sampling.min_tokens > self._starts[index]
        ]
        if self._penalties:
            self._penalty = self._column([p.repetition_penalty for p in params])
            self._seen = _seen(rows, vocab_size).to(device) if seen is None else seen
        if not all(self._greedy):
            self._is_greedy = torch.tensor(self._greedy, device=device)
            self._temperature = self._column([max(p.temperature, GREEDY_BELOW) for p in params])
            self._filter = _Filter(rows, vocab_size, device)
            self._points = torch.empty(0)  # [N, AHEAD] random numbers, from the draw `_first` on
            self._first = -1

    def regrouped(self, kept: Sequence[int], joined: Sequence[Row], step: int) -> Sampler:
        """A sampler for the rows at the indices `kept`, in this order, after `step` draws, followed
        by the rows `joined`.
        """
        rows = [self._rows[index] for index in kept] + list(joined)
        starts = [self._starts[index] + step for index in kept] + [row.generated for row in joined]
        seen = None
        if any(row.sampling.repetition_penalty != 1.0 for row in rows):
            if self._penalties:
                before = self._seen[list(kept)]
            else:  # no kept row has a penalty, so its tokens do not matter
                before = torch.zeros(
                    len(kept), self._vocab_size, dtype=torch.bool, device=self._device
                )
            seen = torch.cat([before, _seen(joined, self._vocab_size).to(self._device)])
        return Sampler(rows, self._eos_ids, self._vocab_size, self._device, starts, seen)

    def draw(self, logits: torch.Tensor, step: int) -> torch.Tensor:
        """The next tokens [N], from logits [N, V]; `step` counts the draws from 0."""
        if self._penalties or self._forbidden:
            logits = logits.float()
        if self._penalties:
            penalised = torch.where(logits < 0, logits * self._penalty, logits / self._penalty)
            logits = torch.where(self._seen, penalised, logits)
        for index, min_tokens, forbidden in self._forbidden:
            if self._starts[index] + step < min_tokens:
                logits[index, forbidden] = -torch.inf
        if logits.is_cuda:
            tokens = logits.argmax(dim=-1)
        else:  # numpy takes a twentieth of torch's time for this; both take the first of equals
            tokens = torch.from_numpy(logits.float().numpy().argmax(axis=-1))
        if not all(self._greedy):
            tokens = torch.where(self._is_greedy, tokens, self._sample(logits, step))
        if self._penalties:
            self._seen.scatter_(1, tokens[:, None], True)
        return tokens

    def _sample(self, logits: torch.Tensor, step: int) -> torch.Tensor:
        scores = self._filter.apply(logits.float() / self._temperature)
        cumulative = scores.softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)
        first = step // AHEAD * AHEAD
        if first != self._first:
            seeds = torch.tensor([_signed(row.sampling.seed) for row in self._rows])
            positions = torch.tensor([start + first for start in self._starts])
            points = uniforms(seeds[:, None], positions[:, None] + torch.arange(AHEAD))
            self._points = points.to(self._device)
            self._first = first
        shares = self._points[:, step - first, None]
        targets = shares * cumulative[:, -1:]
        return torch.searchsorted(cumulative, targets, right=True).squeeze(1)

    def _column(self, values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, device=self._device)[:, None]


class _Filter:
    """min_p, top_k and top_p of each row: scores that they exclude become -inf."""

    def __init__(self, rows: Sequence[Row], vocab_size: int, device: torch.device) -> None:
        params = [row.sampling for row in rows]
        self._log_min_p = torch.tensor([p.min_p for p in params], device=device).log()[:, None]
        self._top_k = torch.tensor(
            [min(p.top_k or vocab_size, vocab_size) for p in params], device=device
        )[:, None]
        self._top_p = torch.tensor([p.top_p for p in params], device=device)[:, None]
        self._by_min_p = any(p.min_p > 0 for p in params)
        self._by_rank = any(p.top_k or p.top_p < 1 for p in params)

    def apply(self, scores: torch.Tensor) -> torch.Tensor:
        """[N, V] -> [N, V]. The best token always stays."""
        if self._by_min_p:
            floor = scores.amax(dim=-1, keepdim=True) + self._log_min_p.clamp(max=0.0)
            scores = scores.masked_fill(scores < floor, -torch.inf)
        if not self._by_rank:
            return scores
        ranked = scores.sort(dim=-1, descending=True).values
        ranked = ranked.masked_fill(ranked < ranked.gather(1, self._top_k - 1), -torch.inf)
        shares = ranked.softmax(dim=-1)
        before = shares.cumsum(dim=-1) - shares  # the probability of all better tokens
        kept = ((before < self._top_p) | (self._top_p >= 1)) & (ranked > -torch.inf)
        last = kept.sum(dim=-1, keepdim=True).clamp(min=1) - 1
        return scores.masked_fill(scores < ranked.gather(1, last), -torch.inf)


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return a number in [0, 1) with 32 random bits for each (seed, position): a row that moves to
    another batch or runs again after a crash draws the same tokens. So few bits, that the product
    with a sum in 64 bits stays below the sum.

    It is SplitMix64 over tensors of 64-bit integers: torch's products wrap around.
    """
    state = _finish(seeds + _GAMMA)
    state = _finish((state ^ positions) + _GAMMA)
    return _unsigned_shift(state, 32).double() * 2.0**-32


def _finish(words: torch.Tensor) -> torch.Tensor:
    words = (words ^ _unsigned_shift(words, 30)) * _FACTORS[0]
    words = (words ^ _unsigned_shift(words, 27)) * _FACTORS[1]
    return words ^ _unsigned_shift(words, 31)


def _unsigned_shift(words: torch.Tensor, bits: int) -> torch.Tensor:
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """The signed integer with the same 64 bits."""
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)


# The numbers of SplitMix64.
_GAMMA = _signed(0x9E3779B97F4A7C15)
_FACTORS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


def _seen(rows: Sequence[Row], vocab_size: int) -> torch.Tensor:
    """[N, V]: whether each row contains each token."""
    seen = torch.zeros(len(rows), vocab_size, dtype=torch.bool)
    for index, row in enumerate(rows):
        seen[index, torch.tensor(row.tokens)] = True
    return seen
