"""Lengths drawn from a server's own metrics: histograms of a page in Prometheus' format.

A histogram says how many requests fell into each bucket of lengths, and the sum of all lengths.
Lengths are drawn within the buckets so that both come out. The names are of vLLM's metrics.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import InputError
from toolkit.traces.types import MAX_LENGTH

PROMPT = "vllm:request_prompt_tokens"
OUTPUT = "vllm:request_generation_tokens"
MODEL = "model_name"  # the label of the served model

ABOVE = float("inf")  # the bound of the last bucket
MANTISSAS = (1, 2, 5)  # vLLM's bounds are these times powers of ten, up to the context

UNKNOWN = (
    "metrics do not say when requests came, which output belongs to which prompt, what prompts"
    " share, sessions, or limits (max_tokens): prompts and outputs are drawn apart"
)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Sample = tuple[str, Mapping[str, str], float]  # name, labels and value of a line of /metrics


@dataclass(slots=True, frozen=True)
class LengthHistogram:
    """How many lengths fell into each bucket, and their sum in tokens.

    Attributes:
        bounds: the greatest length of each bucket, ascending; the last is infinite.
        counts: of each bucket.
        total: the sum of all lengths.
        what: the name of the metric.
        longest: the limit of lengths above the last finite bound.
    """

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float
    what: str = ""
    longest: int = MAX_LENGTH

    def __str__(self) -> str:
        return f"as the {sum(self.counts):,.0f} of {self.what}"

    def draw_unclipped(self, rng: np.random.Generator, count: int) -> Floats:
        """Draw `count` lengths with the histogram's shares of buckets and its mean, in any order.

        Within a bucket from `low` to `high` a length is low + u^p * (high - low), with u uniform
        and one exponent p for all buckets, so that its mean is low + (high - low) / (1 + p).
        Lengths above the last bound reach up to `longest`, or as far as vLLM's bounds say. Raises
        `InputError` if that is not known.
        """
        counts = _apportioned(self.counts, count)
        below = [0, *(int(bound) for bound in self.bounds[:-1])]
        highs = np.array([*below[1:], self._greatest(int(counts[-1]))])
        lows = np.array(below) + 1
        used = counts > 0
        if (lows[used] > highs[used]).any():
            raise InputError(
                f"--longest {self.longest}: {self.what} counts lengths from {lows[used][-1]:,} "
                "tokens on",
                "give the model's limit",
            )
        low = np.repeat(lows, counts)
        high = np.repeat(highs, counts)
        beyond = self.total / sum(self.counts) * count - float(low.sum())
        exponent = max(float((high - low).sum()) / max(beyond, 1.0) - 1.0, 0.0)
        shares = rng.permutation((np.arange(count) + 0.5) / count)
        return rng.permutation(np.rint(low + shares**exponent * (high - low)))

    def _greatest(self, count: int) -> int:
        """The greatest length above the last finite bound, where `count` lengths are.

        vLLM's bounds end before the model's context, so the next one of the series is beyond it.
        """
        if self.longest < MAX_LENGTH or not count:
            return self.longest
        finite = self.bounds[:-1]
        series: list[int] = [mantissa * 10**power for power in range(10) for mantissa in MANTISSAS]
        if not finite or list(finite) != series[: len(finite)]:
            last = f"{finite[-1]:g} tokens" if finite else "which is none"
            raise InputError(
                f"{self.what}: {count:,} lengths are above the last bound, {last}",
                "give the model's limit with --longest",
            )
        return series[len(finite)] - 1


def lengths_of(
    samples: Iterable[Sample], longest: int, source: str
) -> tuple[LengthHistogram, LengthHistogram]:
    """Return the lengths of prompts and of outputs that a page of metrics counts.

    Raises `InputError` if it has no such histograms, counts no request, or has several models.
    """
    ours = [sample for sample in samples if sample[0].startswith((PROMPT, OUTPUT))]
    known = sorted({labels.get(MODEL, "") for _, labels, _ in ours})
    if len(known) > 1:
        listed = ", ".join(f"'{name}'" for name in known)
        hint = f"keep the lines of one: grep '{MODEL}=\"{known[0]}\"'"
        raise InputError(f"{source}: requests of several models: {listed}", hint)
    return _histogram(ours, PROMPT, longest, source), _histogram(ours, OUTPUT, longest, source)


def _histogram(samples: Sequence[Sample], name: str, longest: int, source: str) -> LengthHistogram:
    """Return one histogram, summed over all engines."""
    cumulative: dict[float, float] = {}
    total = 0.0
    for sample, labels, value in samples:
        if sample.startswith(name) and not 0 <= value < ABOVE:
            problem = f"{source}: {sample} is {value:g}"
            raise InputError(problem, "counters are finite and not below 0")
        if sample == f"{name}_bucket":
            bound = _bound(labels.get("le", ""), source)
            cumulative[bound] = cumulative.get(bound, 0.0) + value
        elif sample == f"{name}_sum":
            total += value
    if ABOVE not in cumulative:
        raise InputError(f"{source}: no {name}_bucket in it", "save the /metrics of a vLLM server")
    bounds = tuple(sorted(cumulative))
    counts = np.maximum(np.diff([0.0, *(cumulative[bound] for bound in bounds)]), 0.0)
    if not counts.sum():
        raise InputError(f"{source}: {name} counts no request", "save it once there was traffic")
    return LengthHistogram(bounds, tuple(counts.tolist()), total, name, longest)


def _bound(text: str, source: str) -> float:
    """Return the greatest length of a bucket, its label `le`. Raises `InputError` if it is none."""
    try:
        bound = float(text)
    except ValueError:
        bound = math.nan
    if not bound >= 0:
        raise InputError(f"{source}: a bucket's le is '{text[:40]}'", "it is a number of tokens")
    return bound


def _apportioned(counts: Sequence[float], total: int) -> Ints:
    """Return whole counts in these shares, with the sum `total`."""
    exact = np.array(counts) * (total / sum(counts))
    whole = np.floor(exact).astype(np.int64)
    # The largest remainders get one more.
    order = np.argsort(whole - exact, kind="stable")
    whole[order[: total - int(whole.sum())]] += 1
    return whole
