"""Predictions held against a running server: by metric over windows of a trace, and request by request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from toolkit.errors import TargetMissedError
from toolkit.files.validation import MetricError, RequestError, WindowResult
from toolkit.metrics import Served
from toolkit.traces.types import Trace
from toolkit.traces.write import to_ms

METRICS = ("throughput_rps", "ttft_mean_s", "tpot_mean_s", "e2e_mean_s", "e2e_p95_s")
HELD_TO = ("throughput_rps", "ttft_mean_s", "tpot_mean_s", "e2e_mean_s")  # what --max-error is about

Floats = NDArray[np.float64]


@dataclass(slots=True, frozen=True)
class Pair:
    """The requests of one window as they were served and as they were predicted, in the same order."""

    measured: Served
    predicted: Served


def metric_errors(windows: Sequence[WindowResult]) -> list[MetricError]:
    """Each of `METRICS` over the windows, those left out that nothing was measured of."""
    found = []
    for name in METRICS:
        measured = np.array([window.measured.get(name, 0.0) for window in windows])
        predicted = np.array([window.predicted.get(name, 0.0) for window in windows])
        if not measured.size or (measured <= 0.0).any():
            continue
        errors = 100.0 * (predicted / measured - 1.0)
        found.append(
            MetricError(
                metric=name,
                measured=float(measured.mean()),
                predicted=float(predicted.mean()),
                error_percent=float(100.0 * (predicted.mean() / measured.mean() - 1.0)),
                worst_percent=float(errors[np.abs(errors).argmax()]),
            )
        )
    return found


def request_errors(pairs: Sequence[Pair]) -> list[RequestError]:
    """TTFT and E2E of every request that was served here and there."""
    found = []
    for name in ("ttft", "e2e"):
        errors = np.concatenate([_errors(pair, name) for pair in pairs]) if pairs else np.empty(0)
        if not errors.size:
            continue
        found.append(
            RequestError(
                latency=name,
                median_percent=float(np.median(errors)),
                median_absolute_percent=float(np.median(np.abs(errors))),
                p90_absolute_percent=float(np.percentile(np.abs(errors), 90)),
                requests=errors.size,
            )
        )
    return found


class RequestLine(msgspec.Struct, frozen=True):
    """A request of a validation, as measured and as predicted. A prediction of a warm-up knows nothing of today."""

    window: int
    part: str  # warm-up or window
    timestamp: float  # ms
    input_length: int
    output_length: int
    ttft_ms: float | None
    e2e_ms: float | None
    predicted_ttft_ms: float | None
    predicted_e2e_ms: float | None


def request_lines(number: int, part: str, trace: Trace, pair: Pair) -> list[str]:
    """The requests of window `number`'s `part`, a line of JSON each; None stands where one was not served."""
    latencies = [
        [to_ms(value) if ok else None for value, ok in zip(_latency(one, name).tolist(), one.ok.tolist(), strict=True)]
        for one in (pair.measured, pair.predicted)
        for name in ("ttft", "e2e")
    ]
    columns = (trace.arrival_s.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), *latencies)
    encode = msgspec.json.Encoder().encode
    return [
        encode(RequestLine(number, part, to_ms(arrival_s), *rest)).decode() + "\n"
        for arrival_s, *rest in zip(*columns, strict=True)
    ]


def hold(errors: Iterable[tuple[str, float | None]], limit_percent: float) -> None:
    """`TargetMissedError` where one of `HELD_TO` is predicted further off; None stands where nothing was predicted."""
    known = [(metric, error) for metric, error in errors if metric in HELD_TO and error is not None]
    wrong = [f"{metric} {error:+.1f} %" for metric, error in known if abs(error) > limit_percent]
    if wrong:
        told = f"beyond {limit_percent:g} %: {', '.join(wrong)}"
        raise TargetMissedError(told, "profile and fit again, on the machine as it is now")


def _errors(pair: Pair, name: str) -> Floats:
    both = pair.measured.ok & pair.predicted.ok
    measured, predicted = (_latency(served, name)[both] for served in (pair.measured, pair.predicted))
    seen = measured > 0.0
    return np.asarray(100.0 * (predicted[seen] / measured[seen] - 1.0))


def _latency(served: Served, name: str) -> Floats:
    return (served.first_token_s if name == "ttft" else served.finish_s) - served.arrival_s
