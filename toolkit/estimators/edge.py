"""Where memory really ends, for a simulated worker: the fitted edge is known only so well, so it is drawn.

A memory law says how many rows to send; this says whether they would have run out of memory. Both come from the same
`MemoryFit`, and nothing here may reach a policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

from toolkit.estimators.memory import ROUNDING
from toolkit.files.fit import Rule

_NORMAL = NormalDist()
_MASK = (1 << 64) - 1
SMALLEST_DRAW = 2.0**-53


class MemoryEdge(Protocol):
    """Whether a batch runs out of memory, given a uniform draw from (0, 1)."""

    def runs_out(self, batch_size: int, input_length: int, steps: int, draw: float) -> bool:
        """True where N rows of L tokens, run for S steps, do not fit."""
        ...


@dataclass(frozen=True)
class ZetaEdge:
    """N * (L * (1 + workspace) + S) / capacity against an edge that is normal around the fitted zeta."""

    capacity_tokens: int
    zeta: float
    zeta_std: float
    workspace: float = 0.0

    def runs_out(self, batch_size: int, input_length: int, steps: int, draw: float) -> bool:
        """True where the share of the capacity that the batch needs lies above the drawn edge."""
        edge = self.zeta + self.zeta_std * _NORMAL.inv_cdf(draw)
        needed = batch_size * (input_length * (1.0 + self.workspace) + steps)
        return needed > edge * self.capacity_tokens * (1 + ROUNDING)


@dataclass(frozen=True)
class RuleEdge:
    """N against the rule's batch size (Algorithm 2), scaled by a draw that is normal around 1."""

    rules: tuple[Rule, ...]  # by length_above, descending
    relative_std: float

    def runs_out(self, batch_size: int, input_length: int, steps: int, draw: float) -> bool:
        """True where N lies above the drawn limit of its range of L + S."""
        total = input_length + steps
        limit = next((r.max_batch_size for r in self.rules if total > r.length_above), 0)
        edge = limit * (1.0 + self.relative_std * _NORMAL.inv_cdf(draw))
        return batch_size > edge * (1 + ROUNDING)


def uniform_draw(seed: int, key: int) -> float:
    """A number in (0, 1) that depends on (seed, key) alone: the same batch draws the same, whatever ran before it.

    SplitMix64 over both words; a keyed hash, because a generator's state would tie a draw to the order of events.
    """
    return max((_mix(_mix(seed & _MASK) ^ (key & _MASK)) >> 11) * 2.0**-53, SMALLEST_DRAW)


def _mix(word: int) -> int:
    word = (word + 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)
