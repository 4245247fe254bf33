"""Pseudo-random numbers that depend only on their key (SplitMix64).

With a generator's state, a draw would depend on the draws before it. With a key, a row that moves
to another batch or runs again after a crash draws the same tokens.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1


def mix(*words: int) -> int:
    """A 64-bit hash of integers, in order."""
    state = 0
    for word in words:
        state = _finish((state ^ (word & _MASK)) + 0x9E3779B97F4A7C15 & _MASK)
    return state


def uniform(*words: int) -> float:
    """A number in [0, 1) with 32 random bits: few enough that its product with a float64 sum stays
    below that sum.
    """
    return (mix(*words) >> 32) * 2.0**-32


def _finish(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK
    return word ^ (word >> 31)
