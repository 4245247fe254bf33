"""validation.json: how far a plan's predictions were off on windows of a trace that were replayed against a server."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from toolkit.files.envelope import Envelope, Strict

TOLD = ("throughput_rps", "ttft_mean_s", "e2e_mean_s")  # in one line


class WindowResult(Strict):
    """One window: what was measured and predicted, by metric."""

    start_s: float = Field(description="in the scaled trace")
    end_s: float
    requests: int
    failed: int
    refused: int = Field(
        default=0, description="of the failed: refused for load (HTTP 429 or 503); the prediction serves every request"
    )
    slowdown: float = Field(description="batches took so many times as long as fitted, just before; 1: nobody tells")
    arrival_cost_s: float = Field(
        default=0.0, description="each request that arrived added so much to every slice that ran then, just before"
    )
    front_first_s: float = Field(
        default=0.0, description="clients saw first tokens so much later than the server's driver, just before"
    )
    front_last_s: float = Field(default=0.0, description="the same of last tokens")
    measured: dict[str, float]
    predicted: dict[str, float]
    slowdown_meanwhile: float | None = Field(
        default=None, description="as `slowdown`, of the window's own batches: known afterwards; none: nobody tells"
    )
    predicted_in_hindsight: dict[str, float] = Field(
        default={}, description="with that and the window's own front: what is then left is the laws' error"
    )


class MetricError(Strict):
    """A metric over all windows. Errors are the prediction's: 100 (predicted / measured - 1)."""

    metric: str
    measured: float = Field(description="mean over the windows")
    predicted: float
    error_percent: float = Field(description="of the means")
    worst_percent: float = Field(description="of the window where it is largest, with its sign")


class RequestError(Strict):
    """A latency request by request. Errors are the prediction's, in percent of what was measured."""

    latency: str
    median_percent: float = Field(description="with its sign: half of the requests were predicted lower")
    median_absolute_percent: float
    p90_absolute_percent: float
    requests: int


class Validation(Envelope):
    """validation.json, whole."""

    remake: ClassVar[str] = "llmctl validate PLAN --url URL"

    model: str
    policy: str
    notes: list[str] = Field(description="what was done to the trace, and how the server was asked for its lengths")
    windows: list[WindowResult]
    metrics: list[MetricError]
    requests: list[RequestError]

    def summary(self) -> str:
        """One line for where a prediction is shown."""
        found = {each.metric: each.error_percent for each in self.metrics}
        errors = ", ".join(f"{name} {found[name]:+.1f} %" for name in TOLD if name in found)
        return f"validated on {len(self.windows)} windows, the prediction's errors: {errors}"
