"""Traces drawn from a server's own metrics: histograms of lengths, and how many requests came when.

A histogram says how many requests fell into each bucket of lengths, and the sum of all lengths.
Lengths are drawn within the buckets so that both come out. Metrics do not say which output belongs
to which prompt, so both are drawn apart; nor what prompts share, nor which turns continue which.

The names are those of vLLM's metrics. It counts a request when it ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import InputError
from toolkit.traces.formats import MAX_LENGTH
from toolkit.traces.generate import Arrivals, check_count
from toolkit.traces.types import Trace

PROMPT = "vllm:request_prompt_tokens"
OUTPUT = "vllm:request_generation_tokens"
MODEL = "model_name"  # the label of the served model

ABOVE = float("inf")  # the bound of the last bucket
MANTISSAS = (1, 2, 5)  # vLLM's bounds are these times powers of ten, up to the context
STEPS = 50  # of the search for the shape within buckets: more than a float can tell apart
SUM_ERROR = 0.001  # a greater relative error of the sum of lengths is told
SHAPES = (-12.0, 12.0)  # logarithms of the exponents among which it is

UNKNOWN = (
    "metrics do not say which output belongs to which prompt, what prompts share, sessions, limits"
    " (max_tokens), bursts within an interval, or lengths within a bucket: prompts and outputs are"
    " drawn apart, lengths in one assumed shape; the rest is left out"
)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Sample = tuple[str, Mapping[str, str], float]  # name, labels and value of a line of /metrics


@dataclass(slots=True, frozen=True)
class LengthHistogram:
    """How many lengths fell into each bucket, and their sum in tokens."""

    bounds: tuple[float, ...]  # the greatest length of each bucket, ascending; the last is infinite
    counts: tuple[float, ...]  # of each bucket; Prometheus' increases are not whole
    total: float

    @property
    def count(self) -> float:
        return sum(self.counts)

    def sum_of(self, count: int) -> float:
        """The sum of `count` lengths with this mean."""
        return self.total / self.count * count

    @classmethod
    def of(cls, cumulative: Mapping[float, float], total: float) -> LengthHistogram:
        """From the number of lengths up to each bound, as Prometheus counts them."""
        bounds = tuple(sorted(cumulative))
        steps = np.diff([0.0, *(cumulative[bound] for bound in bounds)])
        return cls(bounds, tuple(np.maximum(steps, 0.0).tolist()), total)

    def since(self, earlier: LengthHistogram) -> LengthHistogram:
        """What came after `earlier`. `InputError` where counters went back."""
        pairs = zip(self.counts, earlier.counts, strict=True)
        counts = tuple(now - before for now, before in pairs)
        total = self.total - earlier.total
        if self.bounds != earlier.bounds or min(counts) < 0 or total < 0:
            raise InputError(
                "the metrics' counters went back: the server was started again in between",
                "take both scrapes from one run of the server, the earlier one first",
            )
        return LengthHistogram(self.bounds, counts, total)


@dataclass(slots=True, frozen=True)
class ScrapedTraffic:
    """The requests that ended in an interval of time: histograms of their lengths."""

    prompt: LengthHistogram
    output: LengthHistogram
    start_s: float = 0.0
    end_s: float = 0.0

    def since(self, earlier: ScrapedTraffic) -> ScrapedTraffic:
        """What came after the scrape `earlier`."""
        return ScrapedTraffic(
            self.prompt.since(earlier.prompt),
            self.output.since(earlier.output),
            earlier.end_s,
            self.end_s,
        )


def traffic_of(
    samples: Iterable[Sample], model: str | None, source: str, at_s: float = 0.0
) -> ScrapedTraffic:
    """All requests that a page of metrics counts, of one model. `InputError` where it has no such
    histograms, or several models and none is named.
    """
    ours = [sample for sample in samples if sample[0].startswith((PROMPT, OUTPUT))]
    if not ours:
        raise InputError(
            f"{source}: no {PROMPT}_bucket in it", "name the /metrics of a server of vLLM"
        )
    chosen = choose_model({labels.get(MODEL, "") for _, labels, _ in ours}, model, source)
    ours = [sample for sample in ours if sample[1].get(MODEL, "") == chosen]
    return ScrapedTraffic(
        _histogram(ours, PROMPT, source), _histogram(ours, OUTPUT, source), end_s=at_s
    )


def choose_model(models: Iterable[str], model: str | None, source: str) -> str:
    """The model of which requests are taken: `model`, or the only one. `InputError` otherwise."""
    known = sorted(models)
    listed = ", ".join(f"'{name}'" for name in known)
    if model is not None and model not in known:
        raise InputError(f"{source}: no model '{model}'; it has {listed or 'none'}", "name one")
    if model is None and len(known) != 1:
        raise InputError(f"{source}: requests of several models: {listed}", "choose with --model")
    return model if model is not None else known[0]


def bound_of(text: str, source: str) -> float:
    """The greatest length of a bucket, from its label `le`. `InputError` for what is no bound."""
    try:
        bound = float(text)
    except ValueError:
        bound = math.nan
    if not bound >= 0:
        raise InputError(f"{source}: a bucket's le is '{text[:40]}'", "it is a number of tokens")
    return bound


def _histogram(samples: Sequence[Sample], name: str, source: str) -> LengthHistogram:
    """One histogram, summed over all engines."""
    cumulative: dict[float, float] = {}
    total = 0.0
    for sample, labels, value in samples:
        if sample.startswith(name) and not 0 <= value < ABOVE:
            problem = f"{source}: {sample} is {value:g}"
            raise InputError(problem, "counters are finite and not below 0")
        if sample == f"{name}_bucket":
            bound = bound_of(labels.get("le", ""), source)
            cumulative[bound] = cumulative.get(bound, 0.0) + value
        elif sample == f"{name}_sum":
            total += value
    if ABOVE not in cumulative:
        raise InputError(f"{source}: no {name}_bucket in it", "name the /metrics of one server")
    return LengthHistogram.of(cumulative, total)


def draw_timed(intervals: Sequence[ScrapedTraffic], seed: int, longest: int | None) -> Trace:
    """Draw the requests of intervals, each within its interval, uniformly.

    Raises `InputError` where no request ended, and as `draw_lengths`.
    """
    rng = np.random.default_rng(seed)
    exact = [traffic.prompt.count for traffic in intervals]
    total = round(sum(exact))
    _check_total(total)
    drawn: list[tuple[Floats, Ints, Ints]] = []
    busy: list[tuple[ScrapedTraffic, int]] = []
    for traffic, count in zip(intervals, _apportioned(exact, total).tolist(), strict=True):
        if count:
            times_s = np.sort(rng.uniform(traffic.start_s, traffic.end_s, count))
            drawn.append((times_s, *_both(traffic, count, rng, longest)))
            busy.append((traffic, count))
    times_s, prompts, outputs = (np.concatenate(column) for column in zip(*drawn, strict=True))
    span_s = intervals[-1].end_s - intervals[0].start_s
    said = (
        f"drawn from metrics: {total:,} requests that ended within {span_s:.6g} s, in"
        f" {len(intervals):,} {'interval' if len(intervals) == 1 else 'intervals'}, seed {seed}",
        "times are those at which requests ended, uniform within an interval",
    )
    off = _off(busy, prompts, outputs)
    return _trace(times_s - times_s.min(), prompts, outputs, (*said, *off, UNKNOWN))


def draw_untimed(
    traffic: ScrapedTraffic,
    requests: int | None,
    arrivals: Arrivals,
    seed: int,
    longest: int | None,
) -> Trace:
    """Draw `requests` (None: as many as were counted) at a rate that the metrics do not say.

    Raises `InputError` where no request ended, and as `draw_lengths`.
    """
    rng = np.random.default_rng(seed)
    counted = round(traffic.prompt.count)
    count = counted if requests is None else requests
    if not counted:
        count = 0
    _check_total(count)
    times_s = arrivals.first(rng, count)
    prompts, outputs = _both(traffic, count, rng, longest)
    said = (
        f"drawn from metrics: {count:,} requests with the lengths of {counted:,}, seed {seed}",
        f"arrival times drawn: {arrivals}",
    )
    off = _off([(traffic, count)], prompts, outputs)
    return _trace(times_s, prompts, outputs, (*said, *off, UNKNOWN))


def _check_total(total: int) -> None:
    if total < 1:
        raise InputError("no request ended in this time", "scrape while the server has traffic")
    check_count(total, "the metrics' requests")


def _both(
    traffic: ScrapedTraffic, count: int, rng: np.random.Generator, longest: int | None
) -> tuple[Ints, Ints]:
    """Prompts and outputs of so many requests, in independent orders."""
    prompts = draw_lengths(traffic.prompt, count, rng, longest, "prompts")
    outputs = draw_lengths(traffic.output, count, rng, longest, "outputs")
    return prompts, outputs


def _off(drawn: Sequence[tuple[ScrapedTraffic, int]], prompts: Ints, outputs: Ints) -> list[str]:
    """Notes where the sum of lengths is not the histograms', because buckets do not allow it."""
    notes = []
    sums = {
        "prompts": (sum(one.prompt.sum_of(count) for one, count in drawn), int(prompts.sum())),
        "outputs": (sum(one.output.sum_of(count) for one, count in drawn), int(outputs.sum())),
    }
    for what, (wanted, found) in sums.items():
        if abs(found - wanted) > SUM_ERROR * wanted:
            share = f"{100.0 * (found - wanted) / wanted:+.1f} %" if wanted else f"{found} tokens"
            notes.append(f"the buckets of {what} do not allow the sum that is told: {share} off")
    return notes


def draw_lengths(
    histogram: LengthHistogram,
    count: int,
    rng: np.random.Generator,
    longest: int | None,
    what: str,
) -> Ints:
    """Draw `count` lengths with the histogram's shares of buckets and its mean, in random order.

    Within a bucket from `low` to `high` a length is low + u^p * (high - low), with u uniform and
    one exponent p for all buckets, found so that the sum comes out; single tokens correct the rest.
    Lengths above the last bound reach up to `longest`, or as far as vLLM's bounds say. Raises
    `InputError` where that is not known.
    """
    if histogram.count <= 0:
        raise InputError(f"the metrics count no {what}", "scrape while the server has traffic")
    counts = _apportioned(histogram.counts, count)
    below = [0, *(int(bound) for bound in histogram.bounds[:-1])]
    highs = np.array([*below[1:], _greatest(histogram, int(counts[-1]), longest, what)])
    lows = np.array(below) + 1
    used = counts > 0
    if (lows[used] > highs[used]).any():
        raise InputError(
            f"--longest {longest}: the metrics count {what} from {lows[used][-1]:,} tokens on",
            "give the model's limit",
        )
    low = np.repeat(lows, counts)
    high = np.repeat(highs, counts)
    target = min(max(round(histogram.sum_of(count)), int(low.sum())), int(high.sum()))
    return rng.permutation(_to_sum(low, high, target, rng))


def _apportioned(counts: Sequence[float], total: int) -> Ints:
    """Whole counts in these shares that sum to `total`: the largest remainders get one more."""
    exact = np.array(counts) * (total / sum(counts))
    whole = np.floor(exact).astype(np.int64)
    order = np.argsort(whole - exact, kind="stable")
    whole[order[: total - int(whole.sum())]] += 1
    return whole


def _greatest(histogram: LengthHistogram, count: int, longest: int | None, what: str) -> int:
    """The greatest length above the last finite bound.

    vLLM's bounds end before the model's context, so the next one of the series is beyond it.
    """
    if longest is not None or not count:
        return longest or MAX_LENGTH
    finite = histogram.bounds[:-1]
    series: list[int] = [mantissa * 10**power for power in range(10) for mantissa in MANTISSAS]
    if not finite or list(finite) != series[: len(finite)]:
        last = f"{finite[-1]:g} tokens" if finite else "which is none"
        raise InputError(
            f"{count:,} {what} are longer than the last bound, {last}",
            "give the model's limit with --longest",
        )
    return series[len(finite)] - 1


def _to_sum(low: Ints, high: Ints, target: int, rng: np.random.Generator) -> Ints:
    """Values from `low` to `high` that sum to `target`, which is possible."""
    drawn = rng.random(len(low))
    room = high - low + 1

    def values(log_exponent: float) -> Ints:
        steps: Floats = drawn ** math.exp(log_exponent) * room
        return np.minimum(low + steps.astype(np.int64), high)

    below, above = SHAPES
    for _ in range(STEPS):
        middle = (below + above) / 2.0
        if int(values(middle).sum()) > target:
            below = middle
        else:
            above = middle
    found = values(above)
    while left := target - int(found.sum()):
        step = 1 if left > 0 else -1
        free = np.flatnonzero(found < high if left > 0 else found > low)
        found[rng.permutation(free)[: abs(left)]] += step
    return found


def _trace(times_s: Floats, prompts: Ints, outputs: Ints, notes: tuple[str, ...]) -> Trace:
    order = np.argsort(times_s, kind="stable")
    no_limits = np.zeros(len(times_s), dtype=np.int64)
    return Trace(times_s[order], prompts[order], outputs[order], no_limits, "from metrics", notes)
