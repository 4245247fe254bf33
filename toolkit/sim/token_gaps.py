"""Every gap between two tokens of a request (ITL), kept as stretches: so many gaps, growing evenly from one to another.

A law's step time is a line in the cached length, so a leap over many steps is one stretch, and what is kept grows with
the decisions, not with the tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from toolkit.metrics import Floats

PERCENTILES = (50, 95, 99)


class TokenGaps:
    """The gaps of one simulation, in seconds."""

    __slots__ = ("_counts", "_first_s", "_last_s")

    def __init__(self) -> None:
        self._counts = array("q")
        self._first_s = array("d")
        self._last_s = array("d")

    def add(self, count: int, first_s: float, last_s: float) -> None:
        """`count` gaps that grow evenly from `first_s` to `last_s`."""
        if count > 0:
            self._counts.append(count)
            self._first_s.append(first_s)
            self._last_s.append(last_s)

    def add_rows(self, generated: Sequence[int], second_s: float, growth_s: float) -> None:
        """The gaps within a slice: each row's first is `second_s`, before its second token; each next is longer by
        `growth_s`.
        """
        for tokens in generated:
            self.add(tokens - 1, second_s, second_s + (tokens - 2) * growth_s)

    @property
    def count(self) -> int:
        """How many gaps."""
        return sum(self._counts)

    def summary(self) -> dict[str, float]:
        """Mean and percentiles over all gaps; nothing where there is none."""
        columns = (self._counts, self._first_s, self._last_s)
        counts, first, last = (np.asarray(column, dtype=float) for column in columns)
        if not len(counts):
            return {}
        found = {"itl_mean_s": float((counts * (first + last)).sum() / 2.0 / counts.sum())}
        values = _quantiles(counts, np.minimum(first, last), np.maximum(first, last), np.array(PERCENTILES) / 100.0)
        return found | {f"itl_p{q}_s": value for q, value in zip(PERCENTILES, values, strict=True)}


def _quantiles(counts: Floats, low: Floats, high: Floats, shares: Floats) -> list[float]:
    """Of a mixture of stretches: where the share of all gaps that are no longer than x reaches `shares`.

    The number of gaps up to x rises by `counts` at a stretch that is a point, and along a line within one that is not.
    """
    point = high <= low
    slope = counts[~point] / (high - low)[~point]
    places = np.concatenate([low[point], low[~point], high[~point]])
    jumps = np.concatenate([counts[point], np.zeros(2 * len(slope))])
    slopes = np.concatenate([np.zeros(int(point.sum())), slope, -slope])
    order = np.argsort(places, kind="stable")
    places, jumps, slopes = places[order], jumps[order], np.cumsum(slopes[order])
    along = np.concatenate([[0.0], np.cumsum(slopes[:-1] * np.diff(places))])  # by lines, up to each place
    upto = np.maximum.accumulate(along + np.cumsum(jumps))  # rounding must not let it fall
    before = upto - jumps
    found = []
    for share in shares:
        wanted = share * counts.sum()
        k = min(int(np.searchsorted(upto, wanted)), len(places) - 1)
        if k == 0 or wanted >= before[k]:
            found.append(float(places[k]))
        else:
            rise = before[k] - upto[k - 1]
            found.append(float(places[k - 1] + (places[k] - places[k - 1]) * (wanted - upto[k - 1]) / rise))
    return found
