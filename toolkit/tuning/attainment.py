"""How sure a share of good requests is: a lower confidence bound that knows that neighbours share their fate.

Requests that wait in one queue are late together, so n requests say less than n independent ones would. Each window is
cut into blocks of consecutive requests (batch means, as simulation studies do), and the variance between the blocks
over the variance that independent requests would show is the design effect. Wilson's interval is taken with the
effective number of requests, n / design effect, as surveys with clusters do, and less of them for the few blocks that
the design effect is known from (Korn and Graubard 1998; Franco et al. 2019, *Comparative study of confidence intervals
for proportions in complex sample surveys*).

Wilson rather than a bootstrap over windows: there are two windows by default, and a bootstrap of two, or of shares that
are all 100 %, says that nothing is uncertain.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BLOCKS = 5  # per window: of 5, 8, 10 and 15 it covers best where requests are late in long stretches
Z = 1.6449  # one-sided, 95 %


def lower_bound_percent(windows: Sequence[NDArray[np.bool_]]) -> float:
    """The share of good requests that is exceeded with 95 % confidence, in percent.

    Args:
        windows: of each window, whether each request was good, in the order of arrival.
    """
    blocks = [block for window in windows for block in np.array_split(window, min(BLOCKS, max(len(window), 1)))]
    good = np.array([block.sum() for block in blocks], dtype=np.float64)
    size = np.array([len(block) for block in blocks], dtype=np.float64)
    if not size.sum():
        return 0.0
    share = float(good.sum() / size.sum())
    return 100.0 * wilson_lower(share, _effective_count(good, size) if 0.0 < share < 1.0 else float(size.sum()))


def wilson_lower(share: float, count: float) -> float:
    """The lower end of Wilson's score interval, one-sided 95 %, of a share seen in `count` independent requests."""
    square = Z * Z / count
    spread = np.sqrt(share * (1.0 - share) / count * Z * Z + square * square / 4.0)
    return float(max((share + square / 2.0 - spread) / (1.0 + square), 0.0))


def _effective_count(good: NDArray[np.float64], size: NDArray[np.float64]) -> float:
    """As many independent requests as would show the variance that is between the blocks [n]; at most all there are."""
    total, blocks = float(size.sum()), len(size)
    share = good.sum() / total
    between = blocks / (blocks - 1) * np.square(good - share * size).sum() / total**2
    design_effect = max(between / (share * (1.0 - share) / total), 1.0)
    return float(total / design_effect * (Z / _student(blocks - 1)) ** 2)


def _student(freedom: int) -> float:
    """Student's t where the normal distribution has Z (Cornish and Fisher's expansion: within 1 % from 4 on)."""
    first = (Z**3 + Z) / (4 * freedom)
    return Z + first + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * freedom**2)
