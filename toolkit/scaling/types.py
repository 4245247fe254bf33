"""What a rule can see of a fleet: samples, as a monitoring system scrapes them, and their history.

A rule sees no more than a cluster shows it. A sample is taken every `scrape_s` seconds, so what a
rule reads is up to that old.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable

import msgspec


class ReplicaLoad(msgspec.Struct, frozen=True):
    """One ready replica, as its metrics have it.

    Attributes:
        place: which one it is.
        waiting: requests in its queue.
        running: requests that it computes.
        kv_usage: the used share of its KV cache, from 0 to 1.
    """

    place: int
    waiting: int
    running: int
    kv_usage: float


class FleetSample(msgspec.Struct, frozen=True):
    """One scrape of a fleet.

    Attributes:
        at_s: when it was taken.
        ready: the replicas that take requests.
        starting: replicas that have been started and take no requests yet.
        queued: requests that wait before the router, since no replica may take them.
        arrived: requests that have come since the beginning, a counter.
        prompt_tokens: of these, a counter.
        ended: requests that have ended, a counter.
        output_tokens: of these, a counter.
    """

    at_s: float
    ready: tuple[ReplicaLoad, ...]
    starting: int
    queued: int
    arrived: int
    prompt_tokens: int
    ended: int
    output_tokens: int

    @property
    def under_way(self) -> int:
        """Requests that have come and have not ended, wherever they are."""
        return self.queued + sum([load.waiting + load.running for load in self.ready])


Counter = Callable[[FleetSample], float]


class History:
    """The samples of the last `keep_s` seconds at least, the oldest first."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._times_s: list[float] = []
        self._samples: list[FleetSample] = []

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def latest(self) -> FleetSample | None:
        """The last sample; None before the first."""
        return self._samples[-1] if self._samples else None

    def add(self, sample: FleetSample) -> None:
        """Take a further sample, and forget those that are too old."""
        self._times_s.append(sample.at_s)
        self._samples.append(sample)
        old = bisect_left(self._times_s, sample.at_s - self._keep_s)
        if old > len(self._samples) // 2:
            del self._times_s[:old]
            del self._samples[:old]

    def last(self, window_s: float, ago_s: float = 0.0) -> list[FleetSample]:
        """Return the samples of a window that ended `ago_s` seconds before the latest, the oldest
        first.
        """
        if not self._samples:
            return []
        to_s = self._times_s[-1] - ago_s
        first = bisect_left(self._times_s, to_s - window_s)
        return self._samples[first : bisect_right(self._times_s, to_s)]

    def rate(self, counter: Counter, window_s: float, ago_s: float = 0.0) -> float | None:
        """Return how fast a counter grew in a window, per second; None with less than two samples
        there, as PromQL's `rate`.
        """
        samples = self.last(window_s, ago_s)
        if len(samples) < 2:
            return None
        first = samples[0]
        last = samples[-1]
        return (counter(last) - counter(first)) / (last.at_s - first.at_s)


class FleetView(msgspec.Struct, frozen=True):
    """What a rule decides by.

    Attributes:
        now_s: the time of the decision.
        wanted: replicas that are wanted now, by the decision before.
        ready: replicas that take requests now, as the cluster's own API says.
        least: the fewest replicas that may be wanted.
        most: the most.
        history: the scraped metrics.
    """

    now_s: float
    wanted: int
    ready: int
    least: int
    most: int
    history: History


def arrived(sample: FleetSample) -> float:
    """Return the counter of requests that have come."""
    return sample.arrived


def prompt_tokens(sample: FleetSample) -> float:
    """Return the counter of tokens of prompts that have come."""
    return sample.prompt_tokens


def ended(sample: FleetSample) -> float:
    """Return the counter of requests that have ended."""
    return sample.ended


def output_tokens(sample: FleetSample) -> float:
    """Return the counter of tokens of the requests that have ended."""
    return sample.output_tokens
