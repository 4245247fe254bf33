"""Random-looking numbers that are a function of their key alone (SplitMix64).

A generator's state would tie a draw to what was drawn before it; here a row that is moved to
another batch, or run again after a crash, draws the same.
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
    """A number in [0, 1) with 32 random bits, so that its product with a float64 sum stays below
    that sum.
    """
    return (mix(*words) >> 32) * 2.0**-32


def _finish(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK
    return word ^ (word >> 31)
