"""Distributions of lengths for synthetic traces, spelled `lognormal:400:1`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import InputError, nearest

LONGEST = 2**31 - 1
USUAL_LONGEST = 1024  # tokens, the SCLS paper's bound
BOUNDED = {"uniform", "fixed"}
WIDEST_SIGMA = 10.0  # of a lognormal: one length in three is more than 20,000 times the median, or less
THINNEST_ALPHA = 0.1  # of a pareto: half of the lengths are more than 1,000 times the least
MOST_ALPHA = 1000.0  # of a pareto: all lengths are LOW
FORMS = {"lognormal": "MEDIAN:SIGMA", "uniform": "LOW:HIGH", "pareto": "LOW:ALPHA", "fixed": "TOKENS"}


@dataclass(slots=True, frozen=True)
class Lengths:
    """A distribution of lengths in tokens, rounded, at least 1 and at most `longest`.

    lognormal: median `a`, `b` the sigma of the logarithm; uniform: from `a` to `b`, both included; pareto: a heavy tail
    from `a` on with exponent `b` (at 1 and below it has no mean); fixed: always `a`.
    """

    kind: str
    a: float
    b: float = 0.0
    longest: int = LONGEST

    def __post_init__(self) -> None:
        if self.kind not in FORMS:
            raise InputError(f"'{self.kind}' is no distribution of lengths", nearest(self.kind, FORMS))
        low, high, limits = self._limits_of_b()
        if not (1 <= self.a <= LONGEST and low <= self.b <= high):
            raise InputError(f"'{self._words()}' is not possible", f"{self.kind}:{FORMS[self.kind]}, {limits}")
        if not 1 <= self.longest <= LONGEST:
            raise InputError(f"lengths cannot be clipped to {self.longest} tokens", f"give 1 to {LONGEST}")

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
                return THINNEST_ALPHA, MOST_ALPHA, f"{tokens}, ALPHA from {THINNEST_ALPHA:g} to {MOST_ALPHA:g}"
        return 0.0, 0.0, tokens

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """`count` lengths."""
        return np.clip(np.rint(self._values(rng, count)), 1, self.longest).astype(np.int64)

    def _values(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        if self.kind == "lognormal":
            return self.a * np.exp(self.b * rng.standard_normal(count))
        if self.kind == "uniform":
            return rng.integers(round(self.a), round(self.b), count, endpoint=True).astype(np.float64)
        if self.kind == "pareto":
            return self.a * (1.0 - rng.random(count)) ** (-1.0 / self.b)
        return np.full(count, self.a)


def parse_lengths(text: str, longest: int = LONGEST) -> Lengths:
    """`lognormal:400:1`, `uniform:32:4096`, `pareto:20:1.5` or `fixed:128`. InputError names what is wrong."""
    kind, *rest = text.split(":")
    if kind not in FORMS:
        raise InputError(f"'{text}' is no distribution of lengths", nearest(kind, FORMS))
    wanted = FORMS[kind].count(":") + 1
    try:
        numbers = [float(value) for value in rest]
    except ValueError as error:
        raise InputError(f"'{text}': {error}", f"give {kind}:{FORMS[kind]}") from error
    if len(numbers) != wanted:
        raise InputError(f"'{text}' has {len(numbers)} numbers, not {wanted}", f"give {kind}:{FORMS[kind]}")
    return Lengths(kind, numbers[0], numbers[1] if wanted == 2 else 0.0, longest)


def usual_longest(text: str) -> int:
    """Where to clip a distribution when nobody says: not at all where it has a bound of its own."""
    return LONGEST if text.partition(":")[0] in BOUNDED else USUAL_LONGEST
