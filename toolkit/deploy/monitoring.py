"""A dashboard for Grafana, over the metrics of a server.

It is plain data for JSON, to be imported or provisioned as a file, in Grafana's classic model,
which every version imports. The data source and the models are variables, so the file names no
installation. Queries use llmctl's metric names; for vLLM's names (`serve --vllm-metrics`, or vLLM
itself) the metrics that vLLM has too are translated, and the other panels are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

SELECTED = 'model_name=~"$model",job=~"$job"'
WINDOW = "$__rate_interval"


Names = Literal["llmctl", "vllm"]  # the metric names that a dashboard reads

SCHEMA_VERSION = 39  # of the classic model; newer Grafanas migrate it when they load it
COLUMNS, WIDTH, HEIGHT = 24, 8, 8  # of Grafana's grid, and of a panel in it

# llmctl's names of metrics and labels to vLLM's
VLLM_NAMES = {
    "llmctl_requests_running": "vllm:num_requests_running",
    "llmctl_requests_waiting": "vllm:num_requests_waiting",
    "llmctl_kv_cache_usage_ratio": "vllm:kv_cache_usage_perc",
    "llmctl_prompt_tokens_total": "vllm:prompt_tokens_total",
    "llmctl_generation_tokens_total": "vllm:generation_tokens_total",
    "llmctl_preemptions_total": "vllm:num_preemptions_total",
    "llmctl_requests_total": "vllm:request_success_total",
    "llmctl_ttft_seconds": "vllm:time_to_first_token_seconds",
    "llmctl_itl_seconds": "vllm:inter_token_latency_seconds",
    "llmctl_tpot_seconds": "vllm:request_time_per_output_token_seconds",
    "llmctl_e2e_seconds": "vllm:e2e_request_latency_seconds",
    "llmctl_queue_seconds": "vllm:request_queue_time_seconds",
    "finish_reason": "finished_reason",
}
OURS = re.compile(r"llmctl_[a-z0-9_]+?(?=_(?:bucket|sum|count)\b|\b)|\bfinish_reason\b")


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression and the legend of its lines."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class DashboardPanel:
    """A chart of one unit. `limits` are drawn as dashed lines: the recipe's targets."""

    title: str
    unit: str  # as Grafana names it
    queries: Sequence[Query]
    text: str = ""
    limits: Sequence[float] = ()
    highest: float | None = None


@dataclass(frozen=True, slots=True)
class DashboardRow:
    """A titled row of panels."""

    title: str
    panels: Sequence[DashboardPanel] = field(default_factory=tuple)


def rows_of(sla: Mapping[str, float]) -> list[DashboardRow]:
    """All rows of the dashboard, with lines at the targets of `sla`."""
    latencies = [
        _latency("Time to first token", "ttft", sla),
        _latency("Time per output token", "tpot", sla, "Of a request, after its first token."),
        _latency("Between tokens", "itl", sla, "Tokens that arrive together share their gap."),
        _latency("Longest gap in a request", "mtpot", sla, "Between two of its tokens."),
        _latency("Whole request", "e2e", sla),
        _latency("Waiting for the first batch", "queue", sla),
        DashboardPanel(
            "First token of a request that arrives now",
            "s",
            [Query(f"llmctl_predicted_ttft_seconds{{{SELECTED}}}", "{{instance}}")],
            "As the fit predicts it.",
            [limit for key, limit in sla.items() if key.startswith("ttft_")],
        ),
    ]
    return [
        DashboardRow("Load", _load_panels()),
        DashboardRow("Latency", latencies),
        DashboardRow("Memory and workers", _worker_panels()),
        DashboardRow("The fit compared with the machine", _fit_panels()),
        DashboardRow("API keys", _key_panels()),
    ]


def _load_panels() -> list[DashboardPanel]:
    running, waiting = (
        f"sum(llmctl_requests_{state}{{{SELECTED}}})" for state in ("running", "waiting")
    )
    ends = Query(_rate("requests_total", by="finish_reason"), "{{finish_reason}}")
    prompt = Query(_rate("prompt_tokens_total"), "prompt")
    generated = Query(_rate("generation_tokens_total"), "generated")
    refused = Query(_rate("refused_total"), "503, overload")
    limited = Query(_rate("key_limited_total"), "429, a key's limit")
    share = Query(_rate("client_limited_total", by="limit"), "a client's share, {{limit}}")
    kept = f"{_rate('requests_within_targets_total')} / {_rate('requests_total')}"
    return [
        DashboardPanel(
            "Requests in the server",
            "short",
            [Query(running, "running"), Query(waiting, "waiting")],
        ),
        DashboardPanel("Requests that ended", "reqps", [ends]),
        DashboardPanel("Tokens a second", "short", [prompt, generated]),
        DashboardPanel("Refused requests", "reqps", [refused, limited, share]),
        DashboardPanel(
            "Requests that kept every target",
            "percentunit",
            [Query(kept, "share")],
            "Of all requests that ended, for any reason.",
        ),
    ]


def _worker_panels() -> list[DashboardPanel]:
    return [
        DashboardPanel(
            "KV cache in use",
            "percentunit",
            [Query(f"llmctl_kv_cache_usage_ratio{{{SELECTED}}}", "{{instance}}")],
            "Of the part that running batches may fill.",
            highest=1.0,
        ),
        DashboardPanel(
            "Workers",
            "short",
            [
                Query(f"sum(llmctl_workers_alive{{{SELECTED}}})", "alive"),
                Query(_increase("worker_restarts_total"), "restarted"),
            ],
        ),
        DashboardPanel(
            "Preemptions and batches out of memory",
            "short",
            [
                Query(_increase("preemptions_total"), "rows preempted"),
                Query(_increase("oom_events_total"), "batches out of memory"),
            ],
        ),
        _by_worker("Requests in a worker's batch", "short", "worker_requests_running"),
        _by_worker(
            "A worker's KV cache in use", "percentunit", "worker_kv_cache_usage_ratio", highest=1.0
        ),
        _by_worker(
            "Work assigned to a worker", "s", "worker_load_seconds", "Estimated (SCLS Eq. 11)."
        ),
    ]


def _fit_panels() -> list[DashboardPanel]:
    actual, predicted = _rate("batch_seconds_total"), _rate("predicted_batch_seconds_total")
    by_worker = " / ".join(
        _rate(f"worker_{name}_seconds_total", by="worker") for name in ("batch", "predicted_batch")
    )
    outside = f"{_rate('extrapolated_batches_total')} / {_rate('batches_total')}"
    steps = _rate("engine_steps_total")
    return [
        DashboardPanel(
            "Actual over predicted batch time",
            "short",
            [Query(f"{actual} / {predicted}", "actual / predicted")],
            "1: batches take as long as fitted. Elsewhere for long: profile and fit again.",
            [1.0],
        ),
        DashboardPanel(
            "The same by worker",
            "short",
            [Query(by_worker, "worker {{worker}}")],
            "One worker apart from the others: its machine is shared, or another one.",
            [1.0],
        ),
        DashboardPanel(
            "Batches outside the profile",
            "percentunit",
            [Query(outside, "share")],
            "Larger or longer than any profiled batch.",
        ),
        DashboardPanel(
            "Cost of scheduling",
            "s",
            [
                Query(f"histogram_quantile(0.95, {_by_bucket(metric)})", f"{name}, p95")
                for metric, name in (("deciding", "a decision"), ("hop", "from batch to batch"))
            ],
        ),
        DashboardPanel(
            "A step of the engine",
            "s",
            [
                Query(f"{_rate('engine_seconds_total')} / {steps}", "a step"),
                Query(f"{_rate('reporting_seconds_total')} / {steps}", "of it, to report"),
            ],
        ),
    ]


def _key_panels() -> list[DashboardPanel]:
    requests, tokens = (_rate(f"key_{what}_total", by="key") for what in ("requests", "tokens"))
    running = f"sum by (key) (llmctl_key_running{{{SELECTED}}})"
    return [
        DashboardPanel("Requests by key", "reqps", [Query(requests, "{{key}}")]),
        DashboardPanel("Tokens by key", "short", [Query(tokens, "{{key}}")]),
        DashboardPanel("Choices in the server by key", "short", [Query(running, "{{key}}")]),
    ]


def _latency(title: str, metric: str, sla: Mapping[str, float], text: str = "") -> DashboardPanel:
    queries = [
        Query(f"histogram_quantile({share}, {_by_bucket(metric)})", name)
        for share, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
    ]
    limits = [limit for key, limit in sla.items() if key.startswith(f"{metric}_")]
    return DashboardPanel(title, "s", queries, text, limits)


def _by_worker(
    title: str, unit: str, metric: str, text: str = "", highest: float | None = None
) -> DashboardPanel:
    query = Query(f"llmctl_{metric}{{{SELECTED}}}", "{{instance}}, worker {{worker}}")
    return DashboardPanel(title, unit, [query], text, highest=highest)


def _rate(metric: str, by: str = "") -> str:
    group = f" by ({by}) " if by else ""
    return f"sum{group}(rate(llmctl_{metric}{{{SELECTED}}}[{WINDOW}]))"


def _increase(metric: str) -> str:
    return f"sum(increase(llmctl_{metric}{{{SELECTED}}}[{WINDOW}]))"


def _by_bucket(metric: str) -> str:
    return _rate(f"{metric}_seconds_bucket", by="le")


def dashboard(
    sla: Mapping[str, float] | None = None,
    names: Names = "llmctl",
    of: str = "",
    description: str = "",
    job: str = "",
) -> dict[str, Any]:
    """The dashboard, ready for `json.dumps`. The same arguments give the same dashboard.

    Args:
        sla: the targets of a recipe, drawn as lines.
        of: the name of the one deployment that the dashboard is for; '': any.
        description: where the dashboard comes from.
        job: the label of the deployment's series (see `job`), chosen at first; '': all.
    """
    rows = rows_of(sla or {})
    if names == "vllm":
        rows = [row for row in map(_as_vllm, rows) if row.panels]
    return {
        "uid": of or f"llmctl-{names}",  # 40 characters at most
        "title": of or ("llmctl" if names == "llmctl" else "llmctl, vLLM's names"),
        "description": description,
        "tags": ["llmctl"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,  # all panels share the cross-hair
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables(names, job)},
        "panels": _placed(rows),
    }


def _as_vllm(row: DashboardRow) -> DashboardRow:
    """The panels with metrics that vLLM has too, under its names."""
    panels = []
    for panel in row.panels:
        queries = [
            Query(_vllm_names(query.expr), _vllm_names(query.legend))
            for query in panel.queries
            if all(name in VLLM_NAMES for name in OURS.findall(query.expr))
        ]
        if queries:
            panels.append(replace(panel, queries=queries))
    return replace(row, panels=panels)


def _vllm_names(text: str) -> str:
    return OURS.sub(lambda found: VLLM_NAMES[found[0]], text)


def _variables(names: Names, job: str) -> list[dict[str, Any]]:
    source = {
        "type": "datasource",
        "name": "datasource",
        "label": "Data source",
        "query": "prometheus",
    }
    metric = "llmctl_requests_running"
    metric = _vllm_names(metric) if names == "vllm" else metric
    return [
        source,
        _label_variable("job", "Deployment", f"label_values({metric}, job)", job),
        _label_variable("model", "Model", f'label_values({metric}{{job=~"$job"}}, model_name)'),
    ]


def _label_variable(name: str, label: str, query: str, chosen: str = "") -> dict[str, Any]:
    """A variable over the values of a label. At first it has the value `chosen`; '': all."""
    current = {"text": chosen, "value": chosen}
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": _source(),
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,  # whenever the time range changes
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": current if chosen else {"text": "All", "value": "$__all"},
    }


def _source() -> dict[str, str]:
    return {"type": "prometheus", "uid": "${datasource}"}


def _placed(rows: Sequence[DashboardRow]) -> list[dict[str, Any]]:
    """The rows and their panels, placed in Grafana's grid and numbered from 1."""
    placed: list[dict[str, Any]] = []
    top = 0
    for row in rows:
        place = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        placed.append(
            {
                "id": len(placed) + 1,
                "type": "row",
                "title": row.title,
                "gridPos": place,
                "collapsed": False,
            }
        )
        top += 1
        for index, panel in enumerate(row.panels):
            line, column = divmod(index, COLUMNS // WIDTH)
            place = {"x": column * WIDTH, "y": top + line * HEIGHT, "w": WIDTH, "h": HEIGHT}
            placed.append({"id": len(placed) + 1, "gridPos": place} | _chart(panel))
        top += -(-len(row.panels) // (COLUMNS // WIDTH)) * HEIGHT
    return placed


def _chart(panel: DashboardPanel) -> dict[str, Any]:
    steps = [
        {"color": "text", "value": None},
        *({"color": "red", "value": limit} for limit in sorted(panel.limits)),
    ]
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "thresholds": {"mode": "absolute", "steps": steps},
        "custom": {
            "thresholdsStyle": {"mode": "dashed" if panel.limits else "off"},
            "fillOpacity": 8,
        },
    }
    if panel.highest is not None:
        defaults["max"] = panel.highest
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": _source(),
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "tooltip": {"mode": "multi", "sort": "desc"},
            "legend": {"displayMode": "list", "showLegend": True},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "expr": query.expr,
                "legendFormat": query.legend,
                "datasource": _source(),
            }
            for index, query in enumerate(panel.queries)
        ],
    }
