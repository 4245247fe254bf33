"""What is on the dashboard: rows of charts, and what each asks of the server's metrics, under our names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SELECTED = 'model_name=~"$model",job=~"$job"'
WINDOW = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL, and what its lines are called."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart of one unit. `limits` are drawn as dashed lines: the targets of the recipe."""

    title: str
    unit: str  # Grafana's name of it
    queries: Sequence[Query]
    text: str = ""
    limits: Sequence[float] = ()
    highest: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: Sequence[Panel] = field(default_factory=tuple)


def rows_of(sla: Mapping[str, float]) -> list[Row]:
    return [
        Row("Load", [_requests(), _ends(), _tokens(), _turned_away(), _within()]),
        Row(
            "Latency",
            [
                _latency("Time to first token", "ttft", sla),
                _latency("Time per output token", "tpot", sla, "Of a request, after its first token."),
                _latency("Between tokens", "itl", sla, "Tokens that come together share their gap."),
                _latency("Longest gap in a request", "mtpot", sla, "Between two of its tokens."),
                _latency("Whole request", "e2e", sla),
                _latency("Waiting for the first batch", "queue", sla),
                _forecast(sla),
            ],
        ),
        Row(
            "Memory and workers", [_memory(), _workers(), _troubles(), _rows_by_worker(), _memory_by_worker(), _work()]
        ),
        Row("The fit, held against the machine", [_ratio(), _ratio_by_worker(), _extrapolated(), _costs(), _steps()]),
        Row("API keys", [_keys("requests", "reqps"), _keys("tokens", "short"), _keys_running()]),
    ]


def _requests() -> Panel:
    return Panel(
        "Requests in the server",
        "short",
        [
            Query(f"sum(llmctl_requests_running{{{SELECTED}}})", "running"),
            Query(f"sum(llmctl_requests_waiting{{{SELECTED}}})", "waiting"),
        ],
    )


def _ends() -> Panel:
    expr = f"sum by (finish_reason) (rate(llmctl_requests_total{{{SELECTED}}}[{WINDOW}]))"
    return Panel("Requests that ended", "reqps", [Query(expr, "{{finish_reason}}")])


def _tokens() -> Panel:
    queries = [
        Query(f"sum(rate(llmctl_{kind}_tokens_total{{{SELECTED}}}[{WINDOW}]))", name)
        for kind, name in (("prompt", "prompt"), ("generation", "generated"))
    ]
    return Panel("Tokens a second", "short", queries)


def _turned_away() -> Panel:
    refused = Query(f"sum(rate(llmctl_refused_total{{{SELECTED}}}[{WINDOW}]))", "503, overload")
    limited = Query(f"sum(rate(llmctl_key_limited_total{{{SELECTED}}}[{WINDOW}]))", "429, a key's limit")
    return Panel("Requests that were turned away", "reqps", [refused, limited])


def _within() -> Panel:
    kept, all_ = (
        f"sum(rate(llmctl_{name}_total{{{SELECTED}}}[{WINDOW}]))" for name in ("requests_within_targets", "requests")
    )
    text = "Of all that ended, however they ended."
    return Panel("Requests that kept every target", "percentunit", [Query(f"{kept} / {all_}", "share")], text)


def _forecast(sla: Mapping[str, float]) -> Panel:
    query = Query(f"llmctl_predicted_ttft_seconds{{{SELECTED}}}", "{{instance}}")
    limits = [limit for key, limit in sla.items() if key.startswith("ttft_")]
    return Panel("First token of a request that came now", "s", [query], "As the fit predicts it.", limits)


def _latency(title: str, metric: str, sla: Mapping[str, float], text: str = "") -> Panel:
    queries = [
        Query(f"histogram_quantile({share}, {_by_bucket(metric)})", name)
        for share, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
    ]
    limits = [limit for key, limit in sla.items() if key.startswith(f"{metric}_")]
    return Panel(title, "s", queries, text, limits)


def _by_bucket(metric: str) -> str:
    return f"sum by (le) (rate(llmctl_{metric}_seconds_bucket{{{SELECTED}}}[{WINDOW}]))"


def _memory() -> Panel:
    query = Query(f"llmctl_kv_cache_usage_ratio{{{SELECTED}}}", "{{instance}}")
    return Panel("KV cache in use", "percentunit", [query], "What running batches may fill.", highest=1.0)


def _workers() -> Panel:
    return Panel(
        "Workers",
        "short",
        [
            Query(f"sum(llmctl_workers_alive{{{SELECTED}}})", "alive"),
            Query(f"sum(increase(llmctl_worker_restarts_total{{{SELECTED}}}[{WINDOW}]))", "restarted"),
        ],
    )


def _troubles() -> Panel:
    return Panel(
        "Preemptions and memory that ran out",
        "short",
        [
            Query(f"sum(increase(llmctl_preemptions_total{{{SELECTED}}}[{WINDOW}]))", "rows preempted"),
            Query(f"sum(increase(llmctl_oom_events_total{{{SELECTED}}}[{WINDOW}]))", "batches out of memory"),
        ],
    )


def _rows_by_worker() -> Panel:
    return _by_worker("Requests in a worker's batch", "short", "worker_requests_running")


def _memory_by_worker() -> Panel:
    return _by_worker("A worker's KV cache in use", "percentunit", "worker_kv_cache_usage_ratio", highest=1.0)


def _work() -> Panel:
    return _by_worker("Work given to a worker", "s", "worker_load_seconds", "Estimated (SCLS Eq. 11).")


def _by_worker(title: str, unit: str, metric: str, text: str = "", highest: float | None = None) -> Panel:
    query = Query(f"llmctl_{metric}{{{SELECTED}}}", "{{instance}}, worker {{worker}}")
    return Panel(title, unit, [query], text, highest=highest)


def _ratio() -> Panel:
    took, said = (
        f"sum(rate(llmctl_{name}_seconds_total{{{SELECTED}}}[{WINDOW}]))" for name in ("batch", "predicted_batch")
    )
    return Panel(
        "Actual over predicted batch time",
        "short",
        [Query(f"{took} / {said}", "actual / predicted")],
        "1: the machine does what was fitted. Elsewhere for long: profile and fit again.",
        [1.0],
    )


def _ratio_by_worker() -> Panel:
    took, said = (
        f"sum by (worker) (rate(llmctl_worker_{name}_seconds_total{{{SELECTED}}}[{WINDOW}]))"
        for name in ("batch", "predicted_batch")
    )
    text = "One worker apart from the others: its machine is shared, or another one."
    return Panel("The same by worker", "short", [Query(f"{took} / {said}", "worker {{worker}}")], text, [1.0])


def _extrapolated() -> Panel:
    outside, all_ = (
        f"sum(rate(llmctl_{name}_total{{{SELECTED}}}[{WINDOW}]))" for name in ("extrapolated_batches", "batches")
    )
    text = "Larger or longer than anything that was profiled."
    return Panel("Batches outside the profile", "percentunit", [Query(f"{outside} / {all_}", "share")], text)


def _costs() -> Panel:
    queries = [
        Query(f"histogram_quantile(0.95, {_by_bucket(metric)})", f"{name}, p95")
        for metric, name in (("deciding", "a decision"), ("hop", "from batch to batch"))
    ]
    return Panel("What scheduling costs", "s", queries)


def _steps() -> Panel:
    spent, reporting, steps = (
        f"sum(rate(llmctl_{name}_total{{{SELECTED}}}[{WINDOW}]))"
        for name in ("engine_seconds", "reporting_seconds", "engine_steps")
    )
    queries = [Query(f"{spent} / {steps}", "a step"), Query(f"{reporting} / {steps}", "of it, to report")]
    return Panel("A step of the engine", "s", queries)


def _keys(what: str, unit: str) -> Panel:
    expr = f"sum by (key) (rate(llmctl_key_{what}_total{{{SELECTED}}}[{WINDOW}]))"
    return Panel(f"{what.title()} by key", unit, [Query(expr, "{{key}}")])


def _keys_running() -> Panel:
    running = Query(f"sum by (key) (llmctl_key_running{{{SELECTED}}})", "{{key}}")
    return Panel("Choices in the server by key", "short", [running])
