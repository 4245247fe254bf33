"""bench.json: what `llmctl bench` measured of a running server, beside the plan's prediction.

All errors are 100 (predicted / measured - 1).
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from toolkit.files.strict import Envelope, Strict, optional
from toolkit.files.tuning import Outcome
from toolkit.units import bracketed, seconds

BENCH = "bench.json"  # the usual name; it lies beside the plan
HELD_TO = ("throughput_rps", "ttft_mean_s", "tpot_mean_s", "e2e_mean_s")  # by --max-error
SUMMARY_METRICS = ("throughput_rps", "ttft_mean_s", "e2e_mean_s")  # of a report, in one line
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


def took_text(slowdown: float, verb: str = "took") -> str:
    """Say how long batches take beside the fit."""
    return f"batches {verb} {slowdown:.2f} times as long as fitted"


class Warmup(Strict):
    """The speed of the server, from other requests before the replay."""

    requests: int = Field(description="the first quarter settles the server and is not timed")
    batch_s: float = Field(description="measured time of the batches")
    predicted_batch_s: float = Field(description="time of the same batches by the laws")
    slowdown: float = Field(
        description="batch_s / predicted_batch_s; the prediction multiplies every batch time by it"
    )
    client: ClientTimes | None = optional("none: nothing was served")


class Compared(Strict):
    """One metric of a replay, measured and predicted."""

    metric: str
    measured: float | None
    predicted: float | None
    error_percent: float | None
    as_fitted: float | None = Field(description="predicted without the warm-up's factor")
    as_fitted_error_percent: float | None


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

    schema_version: Literal[3] = 3  # type: ignore[assignment]
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
        description="the slowdown of the replay's own batches, known afterwards; none: not counted"
    )
    measured: Outcome = Field(
        description="the used shares are of served requests; failed requests miss every target, "
        "which attainment counts"
    )
    predicted: Outcome
    predicted_as_fitted: Outcome = Field(description="without the warm-up's factor")
    compared: list[Compared]
    cache: CacheUse | None = optional("none: neither the server nor the prediction has one")

    @property
    def late(self) -> str:
        """Why this does not count as measured, in words; '' if it does."""
        if self.client and self.client.late:
            return self.client.text()
        if self.warmup and self.warmup.client and self.warmup.client.late:
            return f"in the warm-up {self.warmup.client.text()}"
        return ""

    def summary(self) -> str:
        """Return one line on the prediction's errors; '' where nothing was predicted."""
        found = {row.metric: row.error_percent for row in self.compared}
        errors = [
            f"{name} {error:+.1f} %"
            for name in SUMMARY_METRICS
            if (error := found.get(name)) is not None
        ]
        if not errors:
            return ""
        measured = f"measured with {self.answered:,} requests{bracketed(self.changes)}"
        return f"{measured}, the prediction's errors: {', '.join(errors)}"
