"""Admission by forecast: whether a request would keep its targets on any replica.

`LatencyLimits` compares a forecast with the targets, and `Delay` learns by how much requests take
longer than predicted; the front of one engine uses both, too (`toolkit.server.forecast`).
`Admission` forecasts a request behind a router, by the fitted law of a pass and from what the
balancer knows: what each replica has, and what is probably cached there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from toolkit.routing.base import Router
from toolkit.routing.by_law import LawRouter
from toolkit.routing.replicas import Replica, RouterView, Sent
from toolkit.routing.types import strictest
from toolkit.sched.types import Request

TARGET_SHARE_MAX = 0.9  # refuse a request that is predicted to take more than this of a target
DELAY_WINDOW_REQUESTS = 256  # a delay is learnt from this many recent requests
DELAY_UPDATE_REQUESTS = 8  # and computed anew after this many
DELAY_QUANTILE = 0.97  # of the differences between measured and predicted latency
DELAY_SHARE_MAX = 0.5  # bound on a learnt delay, as a share of the latency limit
# A delay ignores predictions below this share of the limit: they say nothing about overload.
INFORMATIVE_SHARE_MIN = 0.125


class PredictedLatency(NamedTuple):
    """Predicted latency of a request with mean lengths, in seconds from its arrival."""

    ttft_s: float
    e2e_s: float
    contention_s: float  # the part of `e2e_s` that other requests cause


NO_PREDICTION = PredictedLatency(0.0, 0.0, 0.0)


class LatencyLimits(NamedTuple):
    """The latency targets of admission, in seconds. Infinity means no target."""

    ttft_s: float = math.inf
    e2e_s: float = math.inf

    @classmethod
    def of(cls, sla: Mapping[str, float]) -> LatencyLimits:
        """The strictest TTFT target and the strictest E2E target of a recipe."""
        return cls(strictest(sla, "ttft"), strictest(sla, "e2e"))

    def possible(self, alone: PredictedLatency) -> LatencyLimits:
        """These limits without those that a request with this forecast misses."""
        ttft_s = math.inf if alone.ttft_s > TARGET_SHARE_MAX * self.ttft_s else self.ttft_s
        e2e_s = math.inf if alone.e2e_s > TARGET_SHARE_MAX * self.e2e_s else self.e2e_s
        return LatencyLimits(ttft_s, e2e_s)

    def excess_s(self, predicted: PredictedLatency) -> float:
        """Seconds until a new request would meet the limits if no other request came.

        0 means that it meets them now, or that no other request delays it.
        """
        ttft_s = TARGET_SHARE_MAX * self.ttft_s
        e2e_s = TARGET_SHARE_MAX * self.e2e_s
        late_s = max(predicted.ttft_s - ttft_s, predicted.e2e_s - e2e_s)
        return max(min(late_s, predicted.contention_s), 0.0)


UNLIMITED = LatencyLimits()


class Overload(NamedTuple):
    """The answer to a request that would miss a target on every replica."""

    predicted: PredictedLatency  # on the best replica
    wait_s: float  # until such a request would keep the targets if no other came


class Admission:
    """Forecasts requests behind a router, and refuses those that would miss a target everywhere.

    A target that a request would miss even alone on an idle replica refuses nothing: no wait would
    help. All replicas need a law of their passes.
    """

    def __init__(self, limits: LatencyLimits, router: Router) -> None:
        self.limits = limits
        self._law = router if isinstance(router, LawRouter) else LawRouter()
        self._delay = Delay(limits.ttft_s)

    def place(
        self, request: Request, view: RouterView, able: Sequence[Replica], chosen: int
    ) -> int | Overload:
        """The replica for a request: the `chosen` one where it would keep the targets, else the one
        where it would come nearest to them. `view.expected` is then the request there.
        """
        home = view.every[chosen]
        sent = view.expected or self._law.expected(request, home, view)
        excess_s, predicted = self._excess(sent, home, view)
        if excess_s:
            each = [self._law.expected(request, replica, view) for replica in able]
            excesses = [
                self._excess(one, replica, view) for one, replica in zip(each, able, strict=True)
            ]
            best = min(range(len(able)), key=lambda k: excesses[k])
            home = able[best]
            sent = each[best]
            excess_s, predicted = excesses[best]
        if excess_s:
            return Overload(predicted, excess_s)
        view.expected = sent
        return home.index

    def first_token(self, sent: Sent, now_s: float) -> None:
        """The first token of a request came back."""
        if sent.first_s >= 0.0:
            self._delay.add(sent.first_s - sent.sent_s, now_s - sent.sent_s)

    def _excess(
        self, sent: Sent, replica: Replica, view: RouterView
    ) -> tuple[float, PredictedLatency]:
        """See `LatencyLimits.excess_s`, and the forecast."""
        predicted = self._latency(sent, replica, view, self._delay.value_s)
        if not self.limits.excess_s(predicted):
            return 0.0, predicted
        idle = Replica(replica.index, replica.traits)
        alone = self._latency(self._law.expected(sent.request, idle, view), idle, view, 0.0)
        predicted = predicted._replace(contention_s=predicted.e2e_s - alone.e2e_s)
        return self.limits.possible(alone).excess_s(predicted), predicted

    def _latency(
        self, sent: Sent, replica: Replica, view: RouterView, delay_s: float
    ) -> PredictedLatency:
        """The forecast, as if other requests caused all of it."""
        first_s = max(sent.first_s - view.now_s + delay_s, 0.0)
        law = replica.traits.law
        assert law is not None
        request = sent.request
        expected = min(view.expected_tokens, request.max_new_tokens)
        rows = min(replica.requests + 1, replica.traits.max_rows)
        context = replica.prompt_tokens + request.prompt_tokens + rows * expected / 2
        e2e_s = first_s + expected * law.pass_s(rows, context, 0, 0, 0.0)
        return PredictedLatency(first_s, e2e_s, math.inf)


class Delay:
    """By how many seconds requests take longer than predicted: a high quantile of recent ones."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._late_s: deque[float] = deque(maxlen=DELAY_WINDOW_REQUESTS)
        self._added = 0
        self.value_s = 0.0

    def add(self, predicted_s: float, measured_s: float) -> None:
        """The predicted and the measured latency of one request."""
        if predicted_s < INFORMATIVE_SHARE_MIN * self._limit_s:
            return
        self._late_s.append(measured_s - predicted_s)
        self._added += 1
        if self._added % DELAY_UPDATE_REQUESTS == 0:
            bound_s = DELAY_SHARE_MAX * self._limit_s
            late_s = float(np.quantile(self._late_s, DELAY_QUANTILE))
            self.value_s = min(max(late_s, -bound_s), bound_s)
