"""Memory laws: how many rows fit (SCLS paper, Eq. 5-9 and Algorithm 2), and where memory really
ends.

A memory law tells a scheduler how many rows to send: `ZetaMemory` counts tokens against the
engine's resolved KV capacity, and `RuleMemory` looks up a probed limit. `DrawnEdge` tells a
simulated worker whether a batch would have run out of memory: the fitted edge is uncertain, so it
is drawn for each batch. No policy may see it.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from toolkit.files.fit import BatchRule

# (1 - 0.1) * 0.9 * 1000 / 81 is 9.99..98 in floating point; rounding must not cost a row.
ROUNDING = 1e-9
UNBOUNDED_TOKENS = 1 << 40


@dataclass(frozen=True)
class ZetaMemory:
    """Eq. 8 and 9: N_max = floor((1 - reserve) * zeta * capacity / (L + S)), all in tokens of KV
    cache.

    `workspace` goes beyond the paper: besides the cache a prefill holds activations that take as
    much memory as `workspace` tokens of cache per input token, so L counts (1 + workspace) times.
    """

    capacity_tokens: int
    zeta: float = 1.0
    workspace: float = 0.0

    @property
    def usable_tokens(self) -> int:
        """zeta * capacity. It ignores a prefill's workspace: the rows that enter a round are a
        small part of the rows that run.
        """
        return int(self.zeta * self.capacity_tokens + ROUNDING)

    def max_batch(
        self, input_lengths: NDArray[np.int64], steps: int, reserve: float
    ) -> NDArray[np.int64]:
        """N_max for each of `input_lengths` [n] -> [n]; 0 where not even one row fits."""
        budget = (1.0 - reserve) * self.zeta * self.capacity_tokens
        row = input_lengths * (1.0 + self.workspace) + steps
        rows: NDArray[np.int64] = np.floor(budget / row + ROUNDING).astype(np.int64)
        return rows

    def runs_out(self, batch_size: int, input_length: int, steps: int, shift: float) -> bool:
        """Whether N rows of L tokens, run for S steps, need more than zeta + `shift` of the
        capacity.
        """
        needed = batch_size * (input_length * (1.0 + self.workspace) + steps)
        return needed > (self.zeta + shift) * self.capacity_tokens * (1 + ROUNDING)


@dataclass(frozen=True)
class RuleMemory:
    """Algorithm 2: the first rule, by `length_above` descending, that L + S exceeds. Without such a
    rule nothing fits.
    """

    rules: tuple[BatchRule, ...]

    @property
    def usable_tokens(self) -> int:
        """The largest N * L that a rule allows up to the length where the next begins.

        The rule for the longest inputs counts at its shortest length. A single rule gives no bound.
        """
        if len(self.rules) == 1:
            return UNBOUNDED_TOKENS
        longest = [self.rules[0].length_above + 1] + [rule.length_above for rule in self.rules[:-1]]
        return max(
            rule.max_batch_size * length for rule, length in zip(self.rules, longest, strict=True)
        )

    def max_batch(
        self, input_lengths: NDArray[np.int64], steps: int, reserve: float
    ) -> NDArray[np.int64]:
        """N_max for each of `input_lengths` [n] -> [n]; `reserve` is subtracted as a share of the
        rule's batch size.
        """
        ascending = self.rules[::-1]
        bounds = np.array([rule.length_above for rule in ascending])
        limits = np.array([0] + [rule.max_batch_size for rule in ascending])
        chosen = limits[np.searchsorted(bounds, input_lengths + steps, side="left")]
        return np.floor((1.0 - reserve) * chosen + ROUNDING).astype(np.int64)

    def runs_out(self, batch_size: int, input_length: int, steps: int, shift: float) -> bool:
        """Whether N is above the limit for L + S times 1 + `shift`."""
        total = input_length + steps
        limit = next((r.max_batch_size for r in self.rules if total > r.length_above), 0)
        return batch_size > limit * (1.0 + shift) * (1 + ROUNDING)


_NORMAL = NormalDist()
DRAW_BYTES = 6  # of a hash: as many bits as a float tells apart


@dataclass(frozen=True)
class DrawnEdge:
    """Where memory really ends: normally distributed around the fitted `law`, with a standard
    deviation of `std` (`MemoryFit.zeta_std`). A batch's edge is drawn by its id, so it does not
    depend on the batches before it.
    """

    law: ZetaMemory | RuleMemory
    std: float
    seed: int

    def __call__(self, batch_id: int, batch_size: int, input_length: int, steps: int) -> bool:
        """Whether N rows of L tokens, run for S steps, run out of memory."""
        digest = blake2b(f"{self.seed} {batch_id}".encode(), digest_size=DRAW_BYTES).digest()
        share = (int.from_bytes(digest, "big") + 0.5) / 256.0**DRAW_BYTES
        shift = self.std * _NORMAL.inv_cdf(share)
        return self.law.runs_out(batch_size, input_length, steps, shift)
