"""What a replay measured, beside what was predicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from toolkit.bench.client import INTERRUPTED, Replay, send_lag_s
from toolkit.bench.stream import Sample
from toolkit.files.envelope import Envelope, Strict
from toolkit.files.io import Head
from toolkit.metrics import Served, summarize
from toolkit.traces.write import Line, to_ms

COMPARED = (
    "throughput_rps",
    "goodput_rps",
    *(f"{name}_{stat}_s" for name in ("ttft", "tpot", "e2e") for stat in ("mean", "p95", "p99")),
)
NOT_SENT = Sample.__dataclass_fields__["failure"].default


class Compared(Strict):
    """One metric. `error_percent` is the prediction's: 100 (predicted / measured - 1)."""

    metric: str
    measured: float | None
    predicted: float | None
    error_percent: float | None


class BenchReport(Envelope):
    """bench.json, whole."""

    remake: ClassVar[str] = "llmctl bench --url URL --trace TRACE"

    model: str
    lengths: Literal["hidden", "given"] = Field(
        description="'given': output lengths were told to the server as max_tokens, which no real client can do"
    )
    trace_notes: list[str]
    interrupted: bool
    requests: int = Field(description="in the replayed part of the trace")
    answered: int = Field(description="served or failed; the metrics are about these")
    failures: dict[str, int] = Field(description="reason to count")
    wrong_length: int = Field(description="served with another number of tokens than the trace has")
    send_lag_p99_s: float = Field(description="how late the client itself was")
    sla: dict[str, float]
    measured: dict[str, float]
    predicted: dict[str, float]
    compared: list[Compared]


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
    predicted: Mapping[str, float],
) -> BenchReport:
    """The report of a replay; `predicted` is empty where there is no plan to predict from.

    An interrupted replay is not compared: the prediction is about all of it.
    """
    answered = [one for one in replay.samples if one.failure not in (INTERRUPTED, NOT_SENT)]
    measured = summarize(served(answered), sla) if answered else {}
    predicted = {} if replay.interrupted else predicted
    return BenchReport(
        **head,
        model=model,
        lengths=lengths,
        trace_notes=list(trace_notes),
        interrupted=replay.interrupted,
        requests=len(replay.samples),
        answered=len(answered),
        failures=dict(Counter(one.failure for one in answered if one.failure)),
        wrong_length=sum(not one.failure and one.output_tokens != one.wanted_tokens for one in answered),
        send_lag_p99_s=send_lag_s(replay.samples),
        sla=dict(sla),
        measured=measured,
        predicted=dict(predicted),
        compared=compare(measured, predicted),
    )


def compare(measured: Mapping[str, float], predicted: Mapping[str, float]) -> list[Compared]:
    """The metrics that tell how well a server does, those that either side has."""
    rows = []
    for metric in COMPARED:
        seen, said = measured.get(metric), predicted.get(metric)
        if seen is not None or said is not None:
            error = 100.0 * (said / seen - 1.0) if seen and said is not None else None
            rows.append(Compared(metric=metric, measured=seen, predicted=said, error_percent=error))
    return rows


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
