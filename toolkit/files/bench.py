"""bench.json: what a replay of a trace against a server measured, beside what was predicted before
it.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from toolkit.files.strict import Envelope, Strict


class Front(Strict):
    """By how much clients see tokens later than the server's driver has them, arrivals counted:
    means of latencies.
    """

    first_s: float
    last_s: float


class Warmup(Strict):
    """What other requests showed before the replay: how long batches take, and how long the laws
    say they take.
    """

    requests: int
    batch_s: float
    predicted_batch_s: float
    slowdown: float = Field(
        description="their ratio, without the arrivals' cost; the prediction takes every batch to be so much longer"
    )
    arrival_cost_s: float = Field(
        default=0.0, description="what each request that arrived added to every slice that ran then"
    )
    front: Front | None = Field(
        default=None,
        description="added to every predicted latency; none: the server was not ours alone meanwhile",
    )


class Compared(Strict):
    """One metric. Errors are the prediction's: 100 (predicted / measured - 1)."""

    metric: str
    measured: float | None
    predicted: float | None
    error_percent: float | None
    as_fitted: float | None = Field(description="predicted without the warm-up's slowdown")
    as_fitted_error_percent: float | None


class TargetResult(Strict):
    """A latency target: its limit, and the value that was measured and predicted, in seconds.

    Over the requests that were served; those that failed miss every target, which attainment
    counts.
    """

    target: str
    limit_s: float
    measured_s: float
    predicted_s: float | None = Field(description="none: nothing was predicted")
    kept: bool = Field(description="whether the measured value is within the limit")
    predicted_kept: bool | None


class Scheduling(Strict):
    """What a server spent beside running the model, over all its workers. Seconds are of wall time."""

    batches: int = Field(description="slices or rounds")
    steps: int
    engine_s: float = Field(description="inside the engines, reporting included")
    reporting_s: float = Field(
        description="between two steps, to send tokens and hear of cancellations"
    )
    deciding_s: float = Field(description="in the scheduler, in the front's process")
    hops: int = Field(description="batches that followed one at once")
    hop_s: float = Field(
        description="from the end of the batch before to their start, deciding included"
    )

    def text(self) -> str:
        """One line for people. Shares are of the engine's time, which the front's other work is not
        part of.
        """
        shares = [
            100.0 * value / self.engine_s
            for value in (self.deciding_s, self.hop_s, self.reporting_s)
        ]
        each_ms = [1e3 * self.deciding_s / self.batches, 1e3 * self.hop_s / max(self.hops, 1)]
        step = f"{self.steps / self.batches:.1f} steps of {1e3 * self.engine_s / max(self.steps, 1):.2f} ms"
        parts = f"deciding {shares[0]:.2f} %, hop {shares[1]:.2f} %, reporting {shares[2]:.2f} % of engine time"
        return f"scheduler: {parts}; per batch of {step}: {each_ms[0]:.3f} and {each_ms[1]:.3f} ms"


class BenchReport(Envelope):
    """bench.json, whole."""

    remake: ClassVar[str] = "llmctl bench --url URL --trace TRACE"

    model: str
    policy: str | None = Field(
        default=None, description="the plan's; none: made without a plan, or by an older llmctl"
    )
    request_rate_rps: float | None = Field(
        default=None,
        description="mean rate of the whole trace as it was scaled; none: its requests come all at once",
    )
    lengths: Literal["hidden", "given"] = Field(
        description="'given': each request asked for exactly its output as max_tokens, so the scheduler knew the "
        "lengths as limits, which it does not of real traffic; the prediction simulates the same"
    )
    trace_notes: list[str]
    interrupted: bool
    requests: int = Field(description="in the replayed part of the trace")
    answered: int = Field(description="served or failed; the metrics are about these")
    failures: dict[str, int] = Field(
        description="reason to count; '...' where reasons differ in numbers alone"
    )
    refused: int = Field(
        default=0,
        description="of the failures: refused for load (HTTP 429 or 503). They count as missed in attainment; the "
        "prediction serves every request",
    )
    wrong_length: int = Field(description="served with another number of tokens than the trace has")
    send_lag_p99_s: float = Field(description="how late the client itself was")
    sla: dict[str, float]
    warmup: Warmup | None
    replay_slowdown: float | None = Field(
        description="as the warm-up's, of the replay's own batches: known afterwards"
    )
    replay_arrival_cost_s: float = Field(
        default=0.0, description="as the warm-up's, of the replay itself"
    )
    replay_front: Front | None = Field(
        default=None, description="as the warm-up's, of the replay itself"
    )
    predicted_in_hindsight: dict[str, float] = Field(
        default={},
        description="with the replay's own slowdown and front: what is left is the laws' error",
    )
    scheduling: Scheduling | None = Field(
        description="what the server spent on scheduling meanwhile; llmctl's tell"
    )
    measured: dict[str, float]
    predicted: dict[str, float]
    predicted_as_fitted: dict[str, float] = Field(description="without what the warm-up showed")
    compared: list[Compared]
    targets: list[TargetResult] = Field(
        default=[], description="each target of `sla`; none where nothing was served"
    )


# validation.json: how far a plan's predictions were off on windows of a trace that were replayed
# against a server.

TOLD = ("throughput_rps", "ttft_mean_s", "e2e_mean_s")  # in one line


class WindowResult(Strict):
    """One window: what was measured and predicted, by metric."""

    start_s: float = Field(description="in the scaled trace")
    end_s: float
    requests: int
    failed: int
    refused: int = Field(
        default=0,
        description="of the failed: refused for load (HTTP 429 or 503); the prediction serves every request",
    )
    slowdown: float = Field(
        description="batches took so many times as long as fitted, just before; 1: nobody tells"
    )
    arrival_cost_s: float = Field(
        default=0.0,
        description="each request that arrived added so much to every slice that ran then, just before",
    )
    front_first_s: float = Field(
        default=0.0,
        description="clients saw first tokens so much later than the server's driver, just before",
    )
    front_last_s: float = Field(default=0.0, description="the same of last tokens")
    measured: dict[str, float]
    predicted: dict[str, float]
    slowdown_meanwhile: float | None = Field(
        default=None,
        description="as `slowdown`, of the window's own batches: known afterwards; none: nobody tells",
    )
    predicted_in_hindsight: dict[str, float] = Field(
        default={},
        description="with that and the window's own front: what is then left is the laws' error",
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
    median_percent: float = Field(
        description="with its sign: half of the requests were predicted lower"
    )
    median_absolute_percent: float
    p90_absolute_percent: float
    requests: int


class Validation(Envelope):
    """validation.json, whole."""

    remake: ClassVar[str] = "llmctl validate PLAN --url URL"

    model: str
    policy: str
    notes: list[str] = Field(
        description="what was done to the trace, and how the server was asked for its lengths"
    )
    windows: list[WindowResult]
    metrics: list[MetricError]
    requests: list[RequestError]

    def summary(self) -> str:
        """One line for where a prediction is shown."""
        found = {each.metric: each.error_percent for each in self.metrics}
        errors = ", ".join(f"{name} {found[name]:+.1f} %" for name in TOLD if name in found)
        return f"validated on {len(self.windows)} windows, the prediction's errors: {errors}"
