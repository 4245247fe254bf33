"""What a trace looks like, in numbers: rate, burstiness, lengths. Printing them is the command's affair."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toolkit.traces.scale import mean_rate
from toolkit.traces.types import Trace

PERCENTILES = (1, 25, 50, 75, 95, 99)


@dataclass(slots=True, frozen=True)
class Spread:
    """How a length is distributed, in tokens."""

    mean: float
    percentiles: dict[str, float]  # p1, p25, p50, ...
    max: int
    histogram: list[tuple[int, int, int]]  # first and last length of a bin, and how many requests fall into it


@dataclass(slots=True, frozen=True)
class Description:
    """A trace in numbers."""

    requests: int
    duration_s: float
    rate_rps: float
    burstiness_cv: float  # coefficient of variation of the gaps between arrivals: 1 for a Poisson process
    input_tokens_per_s: float
    output_tokens_per_s: float
    prompt: Spread
    output: Spread


def describe(trace: Trace) -> Description:
    """All of it. Rates are 0 where all requests arrive at once."""
    duration_s = float(trace.arrival_s[-1])
    gaps = np.diff(trace.arrival_s)
    per_s = 1.0 / duration_s if duration_s > 0 else 0.0
    return Description(
        requests=len(trace),
        duration_s=duration_s,
        rate_rps=mean_rate(trace),
        burstiness_cv=float(gaps.std() / gaps.mean()) if duration_s > 0 else 0.0,
        input_tokens_per_s=float(trace.prompt_tokens.sum()) * per_s,
        output_tokens_per_s=float(trace.output_tokens.sum()) * per_s,
        prompt=spread(trace.prompt_tokens),
        output=spread(trace.output_tokens),
    )


def spread(lengths: NDArray[np.int64]) -> Spread:
    """Mean, percentiles and a histogram of lengths in powers of two."""
    values = np.percentile(lengths, PERCENTILES)
    return Spread(
        mean=float(lengths.mean()),
        percentiles={f"p{q}": float(value) for q, value in zip(PERCENTILES, values, strict=True)},
        max=int(lengths.max()),
        histogram=histogram(lengths),
    )


def histogram(lengths: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Bins 1, 2-3, 4-7, ... from the shortest length to the longest, with their counts."""
    exponents = np.frexp(lengths.astype(np.float64))[1] - 1  # floor(log2), exact
    low = int(exponents.min())
    counts = np.bincount(exponents - low)
    return [(2 ** (low + k), 2 ** (low + k + 1) - 1, int(count)) for k, count in enumerate(counts)]
