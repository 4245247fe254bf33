"""What a replay measured, beside what was predicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from toolkit.bench.client import Replay, send_lag_s
from toolkit.endpoints.connection import INTERRUPTED
from toolkit.endpoints.stream import Sample
from toolkit.files.bench import BenchReport, Compared, Front, Scheduling, Warmup
from toolkit.files.io import Head
from toolkit.metrics import Served, summarize
from toolkit.traces.write import Line, to_ms

COMPARED = (
    "throughput_rps",
    "goodput_rps",
    *(f"{name}_{stat}_s" for name in ("ttft", "tpot", "e2e") for stat in ("mean", "p95", "p99")),
)
NOT_SENT = Sample.__dataclass_fields__["failure"].default


@dataclass(slots=True, frozen=True)
class Prediction:
    """What was predicted before the replay, at the speed that the warm-up showed and as fitted; empty: no plan."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    as_fitted: Mapping[str, float] = field(default_factory=dict)
    warmup: Warmup | None = None


def served(samples: Sequence[Sample]) -> Served:
    """The samples as arrays for `toolkit.metrics`."""
    return Served(
        arrival_s=np.array([one.scheduled_s for one in samples]),
        first_token_s=np.array([one.first_token_s for one in samples]),
        finish_s=np.array([one.last_token_s for one in samples]),
        output_tokens=np.array([one.output_tokens for one in samples], dtype=np.int64),
        max_gap_s=np.array([one.max_gap_s for one in samples]),
        ok=np.array([not one.failure for one in samples], dtype=np.bool_),
    )


def report(
    replay: Replay,
    head: Head,
    *,
    model: str,
    lengths: Literal["hidden", "given"],
    trace_notes: Sequence[str],
    sla: Mapping[str, float],
    predicted: Prediction,
    replay_slowdown: float | None = None,
    replay_front: Front | None = None,
    in_hindsight: Mapping[str, float] | None = None,
    scheduling: Scheduling | None = None,
    policy: str | None = None,
    request_rate_rps: float | None = None,
) -> BenchReport:
    """The report of a replay.

    An interrupted replay is not compared: the prediction is about all of it.
    """
    answered = [one for one in replay.samples if one.failure not in (INTERRUPTED, NOT_SENT)]
    measured = summarize(served(answered), sla) if answered else {}
    if replay.interrupted:
        predicted = Prediction(warmup=predicted.warmup)
    return BenchReport(
        **head,
        model=model,
        policy=policy,
        request_rate_rps=request_rate_rps,
        lengths=lengths,
        trace_notes=list(trace_notes),
        interrupted=replay.interrupted,
        requests=len(replay.samples),
        answered=len(answered),
        failures=dict(Counter(one.failure for one in answered if one.failure)),
        wrong_length=sum(not one.failure and one.output_tokens != one.wanted_tokens for one in answered),
        send_lag_p99_s=send_lag_s(replay.samples),
        sla=dict(sla),
        warmup=predicted.warmup,
        replay_slowdown=replay_slowdown,
        replay_front=replay_front,
        predicted_in_hindsight={} if replay.interrupted else dict(in_hindsight or {}),
        scheduling=scheduling,
        measured=measured,
        predicted=dict(predicted.metrics),
        predicted_as_fitted=dict(predicted.as_fitted),
        compared=compare(measured, predicted.metrics, predicted.as_fitted),
    )


def compare(
    measured: Mapping[str, float], predicted: Mapping[str, float], as_fitted: Mapping[str, float]
) -> list[Compared]:
    """The metrics that tell how well a server does, those that any side has."""
    return [
        Compared(
            metric=metric,
            measured=measured.get(metric),
            predicted=predicted.get(metric),
            error_percent=_error_percent(measured.get(metric), predicted.get(metric)),
            as_fitted=as_fitted.get(metric),
            as_fitted_error_percent=_error_percent(measured.get(metric), as_fitted.get(metric)),
        )
        for metric in COMPARED
        if metric in measured or metric in predicted
    ]


def _error_percent(measured: float | None, predicted: float | None) -> float | None:
    return 100.0 * (predicted / measured - 1.0) if measured and predicted is not None else None


def request_lines(samples: Sequence[Sample]) -> list[Line]:
    """The requests as a canonical trace with what was measured; those that failed say why in `status`."""
    return [
        Line(
            timestamp=to_ms(one.scheduled_s),
            input_length=one.prompt_tokens,
            output_length=one.output_tokens,
            ttft_ms=None if one.failure else to_ms(one.first_token_s - one.scheduled_s),
            e2e_ms=None if one.failure else to_ms(one.last_token_s - one.scheduled_s),
            status=one.failure or "ok",
        )
        for one in samples
    ]
