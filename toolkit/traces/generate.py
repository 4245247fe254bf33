"""Synthetic traces: arrivals and lengths drawn with a seed.

SCLS's assumption, for one: prompts lognormal:400:1 and outputs lognormal:120:0.75, both up to 1024 tokens, Poisson
arrivals at 20/s for 600 s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import InputError
from toolkit.traces.lengths import Lengths
from toolkit.traces.types import Trace

MOST_REQUESTS = 10_000_000  # about 1 GB while it is drawn and written
LARGEST_CV = 100.0  # Gamma's shape is 1e-4 there; far above, every gap rounds to 0 and no trace ever ends
SMALLEST_CV = 1e-6  # below, gaps are equal to the microsecond, and their variance is lost in the rounding

Floats = NDArray[np.float64]


@dataclass(slots=True, frozen=True)
class Arrivals:
    """How requests arrive: gaps are Gamma distributed with mean 1/rate_rps and coefficient of variation `cv`.

    cv 1 is a Poisson process, above it bursts (up to 100), 0 a metronome.
    """

    rate_rps: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.rate_rps < math.inf:
            raise InputError(f"a rate of {self.rate_rps:g} requests/s is not possible", "give a positive rate")
        if not 0 <= self.cv <= LARGEST_CV:
            raise InputError(
                f"a variation of gaps of {self.cv:g} is not possible",
                f"give 0 to {LARGEST_CV:g}; 1 is Poisson, above 1 is bursty",
            )

    def __str__(self) -> str:
        return f"{self.rate_rps:g} requests/s, gaps with cv {self.cv:g}"

    def gaps(self, rng: np.random.Generator, count: int) -> Floats:
        """`count` gaps in seconds."""
        if self.cv < SMALLEST_CV:
            return np.full(count, 1.0 / self.rate_rps)
        return rng.gamma(1.0 / self.cv**2, self.cv**2 / self.rate_rps, count)

    def times(self, rng: np.random.Generator, duration_s: float) -> Floats:
        """Arrival times in [0, duration_s), the first at 0."""
        if not 0 < duration_s < math.inf:
            raise InputError(f"a trace cannot last {duration_s:g} s", "give a positive duration")
        _check_count(self.rate_rps * duration_s, f"{self.rate_rps:g} requests/s for {duration_s:g} s")
        times = np.zeros(1)
        while times[-1] < duration_s:
            expected = int(self.rate_rps * (duration_s - times[-1])) + 64
            times = np.concatenate([times, times[-1] + np.cumsum(self.gaps(rng, expected))])
        return times[times < duration_s]


def generate(arrivals: Arrivals, duration_s: float, prompt: Lengths, output: Lengths, seed: int) -> Trace:
    """A synthetic trace. The same arguments give the same trace."""
    rng = np.random.default_rng(seed)
    arrival_s = arrivals.times(rng, duration_s)
    count = len(arrival_s)
    prompts, outputs = prompt.draw(rng, count), output.draw(rng, count)
    note = f"generated: {arrivals} for {duration_s:g} s, prompts {prompt}, outputs {output}, seed {seed}"
    return Trace(arrival_s, prompts, outputs, np.zeros(count, dtype=np.int64), "generated", (note,))


def backlog(count: int, prompt: Lengths, output: Lengths, seed: int) -> Trace:
    """`count` requests that all arrive at 0 s. The same arguments give the same trace."""
    if count < 1:
        raise InputError(f"a backlog of {count} requests is not possible", "give at least 1")
    _check_count(count, "the backlog")
    rng = np.random.default_rng(seed)
    prompts, outputs = prompt.draw(rng, count), output.draw(rng, count)
    note = f"generated: a backlog of {count} requests, prompts {prompt}, outputs {output}, seed {seed}"
    return Trace(np.zeros(count), prompts, outputs, np.zeros(count, dtype=np.int64), "generated", (note,))


def _check_count(count: float, what: str) -> None:
    if count > MOST_REQUESTS:
        limit = f"generate at most {MOST_REQUESTS:,} at a time"
        raise InputError(f"{what}: {count:,.0f} requests are too many for one trace", limit)


def limited(trace: Trace, max_tokens: int) -> Trace:
    """The same requests with a limit that their clients set; `InputError` where an output is longer."""
    longest = int(trace.output_tokens.max())
    if longest > max_tokens:
        raise InputError(
            f"outputs reach {longest} tokens, above --max-tokens {max_tokens}: readers drop such rows",
            "leave --max-tokens out, and give the limit to `simulate --max-new-tokens`",
        )
    return replace(trace, max_tokens=np.full(len(trace), max_tokens, dtype=np.int64))


def draw_arrivals(trace: Trace, arrivals: Arrivals, seed: int) -> Trace:
    """The same requests in the same order with drawn arrival times: for traces that have none."""
    gaps = arrivals.gaps(np.random.default_rng(seed), len(trace) - 1)
    arrival_s = np.concatenate([np.zeros(1), np.cumsum(gaps)])
    return replace(trace, arrival_s=arrival_s, notes=(*trace.notes, f"arrival times drawn: {arrivals}, seed {seed}"))
