"""Synthetic traces: arrivals and lengths drawn with a seed.

SCLS's assumption, for one: prompts lognormal:400:1 and outputs lognormal:120:0.75, both up to 1024
tokens, Poisson arrivals at 20/s for 600 s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import InputError, nearest
from toolkit.traces.types import Trace

# Distributions of lengths for synthetic traces, spelled `lognormal:400:1`.

LONGEST = 2**31 - 1
USUAL_LONGEST = 1024  # tokens, the SCLS paper's bound
BOUNDED = {"uniform", "fixed"}
WIDEST_SIGMA = (
    10.0  # of a lognormal: one length in three is more than 20,000 times the median, or less
)
THINNEST_ALPHA = 0.1  # of a pareto: half of the lengths are more than 1,000 times the least
MOST_ALPHA = 1000.0  # of a pareto: all lengths are LOW
FORMS = {
    "lognormal": "MEDIAN:SIGMA",
    "uniform": "LOW:HIGH",
    "pareto": "LOW:ALPHA",
    "fixed": "TOKENS",
}


@dataclass(slots=True, frozen=True)
class Lengths:
    """A distribution of lengths in tokens, rounded, at least 1 and at most `longest`.

    lognormal: median `a`, `b` the sigma of the logarithm; uniform: from `a` to `b`, both included;
    pareto: a heavy tail from `a` on with exponent `b` (at 1 and below it has no mean); fixed:
    always `a`.
    """

    kind: str
    a: float
    b: float = 0.0
    longest: int = LONGEST

    def __post_init__(self) -> None:
        if self.kind not in FORMS:
            raise InputError(
                f"'{self.kind}' is no distribution of lengths", nearest(self.kind, FORMS)
            )
        low, high, limits = self._limits_of_b()
        if not (1 <= self.a <= LONGEST and low <= self.b <= high):
            raise InputError(
                f"'{self._words()}' is not possible", f"{self.kind}:{FORMS[self.kind]}, {limits}"
            )
        if not 1 <= self.longest <= LONGEST:
            raise InputError(
                f"lengths cannot be clipped to {self.longest} tokens", f"give 1 to {LONGEST}"
            )

    def __str__(self) -> str:
        return self._words() + (f" up to {self.longest}" if self.longest < LONGEST else "")

    def _words(self) -> str:
        numbers = [self.a] if self.kind == "fixed" else [self.a, self.b]
        return ":".join([self.kind, *(f"{value:g}" for value in numbers)])

    def _limits_of_b(self) -> tuple[float, float, str]:
        """The second number's least and most, and both numbers' limits in words."""
        tokens = f"lengths from 1 to {LONGEST} tokens"
        match self.kind:
            case "uniform":
                return self.a, LONGEST, f"{tokens}, LOW not above HIGH"
            case "lognormal":
                return 1e-9, WIDEST_SIGMA, f"{tokens}, SIGMA above 0 and up to {WIDEST_SIGMA:g}"
            case "pareto":
                return (
                    THINNEST_ALPHA,
                    MOST_ALPHA,
                    f"{tokens}, ALPHA from {THINNEST_ALPHA:g} to {MOST_ALPHA:g}",
                )
        return 0.0, 0.0, tokens

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """`count` lengths."""
        return np.clip(np.rint(self._values(rng, count)), 1, self.longest).astype(np.int64)

    def _values(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        if self.kind == "lognormal":
            return self.a * np.exp(self.b * rng.standard_normal(count))
        if self.kind == "uniform":
            return rng.integers(round(self.a), round(self.b), count, endpoint=True).astype(
                np.float64
            )
        if self.kind == "pareto":
            return self.a * (1.0 - rng.random(count)) ** (-1.0 / self.b)
        return np.full(count, self.a)


def parse_lengths(text: str, longest: int = LONGEST) -> Lengths:
    """`lognormal:400:1`, `uniform:32:4096`, `pareto:20:1.5` or `fixed:128`. InputError names what
    is wrong.
    """
    kind, *rest = text.split(":")
    if kind not in FORMS:
        raise InputError(f"'{text}' is no distribution of lengths", nearest(kind, FORMS))
    wanted = FORMS[kind].count(":") + 1
    try:
        numbers = [float(value) for value in rest]
    except ValueError as error:
        raise InputError(f"'{text}': {error}", f"give {kind}:{FORMS[kind]}") from error
    if len(numbers) != wanted:
        raise InputError(
            f"'{text}' has {len(numbers)} numbers, not {wanted}", f"give {kind}:{FORMS[kind]}"
        )
    return Lengths(kind, numbers[0], numbers[1] if wanted == 2 else 0.0, longest)


def usual_longest(text: str) -> int:
    """Where to clip a distribution when nobody says: not at all where it has a bound of its own."""
    return LONGEST if text.partition(":")[0] in BOUNDED else USUAL_LONGEST


MOST_REQUESTS = 10_000_000  # about 1 GB while it is drawn and written
LARGEST_CV = (
    100.0  # Gamma's shape is 1e-4 there; far above, every gap rounds to 0 and no trace ever ends
)
SMALLEST_CV = (
    1e-6  # below, gaps are equal to the microsecond, and their variance is lost in the rounding
)

Floats = NDArray[np.float64]


@dataclass(slots=True, frozen=True)
class Arrivals:
    """How requests arrive: gaps are Gamma distributed with mean 1/rate_rps and coefficient of
    variation `cv`.

    cv 1 is a Poisson process, above it bursts (up to 100), 0 a metronome.
    """

    rate_rps: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.rate_rps < math.inf:
            raise InputError(
                f"a rate of {self.rate_rps:g} requests/s is not possible", "give a positive rate"
            )
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
        _check_count(
            self.rate_rps * duration_s, f"{self.rate_rps:g} requests/s for {duration_s:g} s"
        )
        times = np.zeros(1)
        while times[-1] < duration_s:
            expected = int(self.rate_rps * (duration_s - times[-1])) + 64
            times = np.concatenate([times, times[-1] + np.cumsum(self.gaps(rng, expected))])
        return times[times < duration_s]


def generate(
    arrivals: Arrivals, duration_s: float, prompt: Lengths, output: Lengths, seed: int
) -> Trace:
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
    note = (
        f"generated: a backlog of {count} requests, prompts {prompt}, outputs {output}, seed {seed}"
    )
    return Trace(
        np.zeros(count), prompts, outputs, np.zeros(count, dtype=np.int64), "generated", (note,)
    )


def _check_count(count: float, what: str) -> None:
    if count > MOST_REQUESTS:
        limit = f"generate at most {MOST_REQUESTS:,} at a time"
        raise InputError(f"{what}: {count:,.0f} requests are too many for one trace", limit)


def limited(trace: Trace, max_tokens: int) -> Trace:
    """The same requests with a limit that their clients set; `InputError` where an output is
    longer.
    """
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
    return replace(
        trace,
        arrival_s=arrival_s,
        notes=(*trace.notes, f"arrival times drawn: {arrivals}, seed {seed}"),
    )
