"""bench.json and validation.json: measurements of a replayed trace, each with its prediction.

bench.json is about one replay against a server. validation.json compares a plan's predictions
with measurements on several windows of a trace. All errors are 100 (predicted / measured - 1).
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from toolkit.files.strict import Envelope, Strict, optional
from toolkit.units import bracketed, seconds

SUMMARY_METRICS = ("throughput_rps", "ttft_mean_s", "e2e_mean_s")  # of a validation, in one line
SAME_RATE = 0.02  # request rates that differ by a smaller share are equal: people round them


LATE_SHARE = 0.1  # of the measured mean latency that the client's own delay may reach
LEAST_LATE_S = 0.005  # a smaller delay is never too much: a busy loop of Python has it
NOT_SERVERS = "not the server's figures"


class ClientTimes(Strict):
    """How late the load generator itself was, in seconds.

    What it measures is the server's only while its own delays are small beside it.
    """

    beats: int = Field(description="timers that the client set itself, one every 10 ms")
    beat_late_p99_s: float = Field(description="how late it came to a timer")
    beat_late_max_s: float
    send_late_p99_s: float = Field(description="how late requests left")
    connect_p99_s: float = Field(
        description="from the time that a request was due until it had its connection"
    )
    connect_late_p99_s: float = Field(
        description="the same beyond the fastest connection, which is the network's own time; 0 "
        "with TLS: the server has a part in the handshake"
    )
    limit_s: float = Field(
        description="10 % of the mean TTFT, or of the mean MTPOT if that is less and has a target; "
        "at least 5 ms"
    )
    late: bool = Field(
        description="whether a p99 of timers, requests or connections was late beyond the limit: "
        "the figures are then not the server's. Never in a replay of less than a second"
    )

    def text(self) -> str:
        """One line for a person."""
        return (
            f"the client's own delays at p99: timers {seconds(self.beat_late_p99_s)} late (worst "
            f"{seconds(self.beat_late_max_s)}), requests {seconds(self.send_late_p99_s)}, "
            f"connections {seconds(self.connect_late_p99_s)}; the limit is {seconds(self.limit_s)}"
        )


class Front(Strict):
    """Mean delay in seconds from the server's driver to the client, arrivals included."""

    first_s: float  # of first tokens
    last_s: float  # of last tokens


def took_text(slowdown: float, launch_slowdown: float | None, verb: str = "took") -> str:
    """How long batches take against the fit, in words."""
    if launch_slowdown is None:
        return f"batches {verb} {slowdown:.2f} times as long as fitted"
    launches = f"their launches {launch_slowdown:.2f} times"
    return f"passes {verb} {slowdown:.2f} times as long as fitted on the GPU, {launches}"


class Warmup(Strict):
    """Batch times of other requests before the replay, measured and predicted by the laws."""

    requests: int = Field(description="the first quarter settles the server and is not timed")
    batch_s: float
    predicted_batch_s: float
    slowdown: float = Field(
        description="batch_s / predicted_batch_s without the arrivals' cost; the prediction "
        "multiplies every batch time by it. Of passes that overlap: of their work on the GPU"
    )
    launch_slowdown: float | None = optional(
        "the same of the launches of passes that overlap; none: there are none, or not known"
    )
    arrival_cost_s: float = Field(
        0.0, description="what each arriving request adds to every slice that runs then"
    )
    front: Front | None = optional("added to every predicted latency; none: it had other clients")
    client: ClientTimes | None = optional("none: nothing was served")


class Compared(Strict):
    """One metric of a replay, measured and predicted."""

    metric: str
    measured: float | None
    predicted: float | None
    error_percent: float | None
    as_fitted: float | None = Field(description="predicted without the warm-up's slowdown")
    as_fitted_error_percent: float | None


class TargetResult(Strict):
    """A latency target: its limit, and the measured and predicted values, in seconds.

    The values are over served requests. Failed requests miss every target; attainment counts that.
    """

    target: str
    limit_s: float
    measured_s: float
    predicted_s: float | None = Field(description="none: nothing was predicted")
    kept: bool = Field(description="whether the measured value is within the limit")
    predicted_kept: bool | None


class Scheduling(Strict):
    """Time that a server spent on scheduling, over all its workers. Seconds are wall time."""

    batches: int = Field(description="slices or rounds")
    steps: int
    engine_s: float = Field(description="inside the engines, reporting included")
    reporting_s: float = Field(
        description="between two steps, to send tokens and receive cancellations"
    )
    deciding_s: float = Field(description="in the scheduler, in the front's process")
    hops: int = Field(description="batches that directly followed another batch")
    hop_s: float = Field(
        description="from the end of the previous batch to their start, deciding included"
    )

    def text(self) -> str:
        """One line for a person. Shares are of engine time, without the front's other work."""
        percent = 100.0 / self.engine_s
        shares = (
            f"deciding {percent * self.deciding_s:.2f} %, hop {percent * self.hop_s:.2f} %, "
            f"reporting {percent * self.reporting_s:.2f} % of engine time"
        )
        step_ms = 1e3 * self.engine_s / max(self.steps, 1)
        deciding_ms = 1e3 * self.deciding_s / self.batches
        hop_ms = 1e3 * self.hop_s / max(self.hops, 1)
        batch = f"per batch of {self.steps / self.batches:.1f} steps of {step_ms:.2f} ms"
        return f"scheduler: {shares}; {batch}: {deciding_ms:.3f} and {hop_ms:.3f} ms"


class CacheUse(Strict):
    """How much of the prompts a server took from its prefix cache, measured and predicted."""

    prompt_tokens: int = Field(description="of served requests, by the server's count")
    hit_tokens: int | None = Field(
        description="of these from the cache, by each answer's usage; none: it does not say"
    )
    counter_queries: float | None = optional(
        "tokens looked up, by the server's counters; none: not reached"
    )
    counter_hits: float | None = optional("of these found")
    predicted_percent: float | None = optional("share of the prompt tokens; none: not predicted")
    blind: bool = Field(
        False, description="prompts share tokens, and the prediction computes every prompt whole"
    )

    @property
    def hit_percent(self) -> float | None:
        """By the usage, else by the counters."""
        if self.hit_tokens is not None and self.prompt_tokens:
            return 100.0 * self.hit_tokens / self.prompt_tokens
        return self.counter_percent

    @property
    def counter_percent(self) -> float | None:
        if not self.counter_queries or self.counter_hits is None:
            return None
        return 100.0 * self.counter_hits / self.counter_queries

    def text(self) -> str:
        """One line for a person."""
        parts = []
        if self.hit_tokens is not None:
            parts.append(f"{self.hit_percent:.1f} % of {self.prompt_tokens:,} prompt tokens")
        if self.counter_percent is not None:
            parts.append(f"{self.counter_percent:.1f} % by the server's counters")
        measured = ", ".join(parts) or "the server does not say what it hit"
        if self.predicted_percent is not None:
            measured += f"; predicted {self.predicted_percent:.1f} %"
        if self.blind:
            measured += "; the prediction computes every prompt whole"
        return f"prefix cache: {measured}"


class BenchReport(Envelope):
    """bench.json, whole."""

    remake: ClassVar[str] = "llmctl bench --url URL --trace TRACE"

    model: str
    policy: str | None = optional("the plan's; none: made without a plan")
    request_rate_rps: float | None = optional(
        "mean rate of the whole scaled trace; none: its requests arrive all at once, or at a fixed "
        "concurrency"
    )
    concurrency: int = Field(
        0, description="requests at once, each sent when one ended; 0: they were sent by time"
    )
    lengths: Literal["hidden", "given"] = Field(
        description="'given': max_tokens was the output's length, so the scheduler knew it, unlike "
        "with real traffic; the prediction simulates the same"
    )
    trace_notes: list[str]
    changes: str = Field(
        "", description="what makes the requests other ones than the trace's; empty: nothing"
    )
    interrupted: bool
    requests: int = Field(description="in the replayed part of the trace")
    answered: int = Field(description="served or failed; the metrics are about these")
    failures: dict[str, int] = Field(
        description="reason to count; '...' where reasons differ only in numbers"
    )
    refused: int = Field(
        0,
        description="of the failures: refused for load (HTTP 429 or 503). They count as missed in "
        "attainment; the prediction serves every request",
    )
    wrong_length: int = Field(
        description="requests served with another number of tokens than the trace has"
    )
    client: ClientTimes | None = optional("none: nothing was served")
    sla: dict[str, float]
    warmup: Warmup | None
    replay_slowdown: float | None = Field(
        description="as in `warmup`, from the replay's own batches; known afterwards"
    )
    replay_launch_slowdown: float | None = optional("as in `warmup`, likewise")
    replay_arrival_cost_s: float = Field(0.0, description="as in `warmup`, from the replay itself")
    replay_front: Front | None = optional("as in `warmup`, from the replay itself")
    predicted_in_hindsight: dict[str, float] = Field(
        {}, description="with the replay's own slowdown and front, so the rest is the laws' error"
    )
    scheduling: Scheduling | None = Field(
        description="the server's scheduling time during the replay; only llmctl servers report it"
    )
    measured: dict[str, float]
    predicted: dict[str, float]
    predicted_as_fitted: dict[str, float] = Field(description="without the warm-up's corrections")
    compared: list[Compared]
    cache: CacheUse | None = optional("none: neither the server nor the prediction has one")
    targets: list[TargetResult] = Field(
        [], description="each target of `sla`; none where nothing was served"
    )

    @property
    def late(self) -> str:
        """Why this does not count as measured, in words; '' if it does."""
        if self.client and self.client.late:
            return self.client.text()
        if self.warmup and self.warmup.client and self.warmup.client.late:
            return f"in the warm-up {self.warmup.client.text()}"
        return ""


class WindowResult(Strict):
    """One window of a validation, measured and predicted by metric."""

    start_s: float = Field(description="in the scaled trace")
    end_s: float
    requests: int
    failed: int
    refused: int = Field(
        0, description="of the failed: for load (HTTP 429, 503), which is not predicted"
    )
    slowdown: float = Field(
        description="measured over fitted batch time, just before the window; 1: not known. Of "
        "passes that overlap: of their work on the GPU"
    )
    launch_slowdown: float | None = optional(
        "the same of launches of passes that overlap; none: there are none, or not known"
    )
    arrival_cost_s: float = Field(
        0.0, description="what each arrival added to every slice that ran, just before"
    )
    front_first_s: float = Field(
        0.0, description="delay of first tokens from the server's driver to clients, just before"
    )
    front_last_s: float = Field(0.0, description="the same delay of last tokens")
    measured: dict[str, float]
    predicted: dict[str, float]
    slowdown_meanwhile: float | None = optional(
        "as `slowdown`, from the window's own batches, afterwards; none: not known"
    )
    launch_slowdown_meanwhile: float | None = optional("as `launch_slowdown`, likewise")
    passes: str = Field("", description="the file of its passes beside this one; empty: not kept")
    front_by_passes_s: float | None = optional(
        "mean time before a first token that no pass explains, by that file; none: not kept"
    )
    cache: CacheUse | None = optional("as in bench.json")
    client: ClientTimes | None = optional("as in bench.json")
    warmup_client: ClientTimes | None = optional("of the warm-up just before; none: there was none")
    predicted_in_hindsight: dict[str, float] = Field(
        {}, description="with that and the window's own front, so the rest is the laws' error"
    )


class MetricError(Strict):
    """A metric over all windows, measured and predicted."""

    metric: str
    measured: float = Field(description="mean over the windows")
    predicted: float
    error_percent: float = Field(description="of the means")
    worst_percent: float = Field(description="of the window where it is largest, with its sign")


class RequestError(Strict):
    """A latency compared request by request; errors in percent of the measured values."""

    latency: str
    median_percent: float = Field(description="signed: half of the requests were predicted lower")
    median_absolute_percent: float
    p90_absolute_percent: float
    requests: int


class Validation(Envelope):
    """validation.json, whole."""

    remake: ClassVar[str] = "llmctl validate PLAN --url URL"

    model: str
    policy: str
    notes: list[str] = Field(
        description="changes to the trace, and whether requests gave their output lengths"
    )
    changes: str = Field(
        "", description="what makes the requests other ones than the trace's; empty: nothing"
    )
    windows: list[WindowResult]
    metrics: list[MetricError]
    requests: list[RequestError]

    @property
    def late(self) -> str:
        """Why this does not count as measured, in words; '' if it does."""
        for number, window in enumerate(self.windows, start=1):
            if window.client and window.client.late:
                return f"window {number}: {window.client.text()}"
            if window.warmup_client and window.warmup_client.late:
                return f"in the warm-up of window {number} {window.warmup_client.text()}"
        return ""

    def summary(self) -> str:
        """One line to show with a prediction."""
        found = {metric.metric: metric.error_percent for metric in self.metrics}
        errors = [f"{name} {found[name]:+.1f} %" for name in SUMMARY_METRICS if name in found]
        windows = f"validated on {len(self.windows)} windows{bracketed(self.changes)}"
        return f"{windows}, the prediction's errors: {', '.join(errors)}"
