"""A Grafana dashboard that reads the server's metrics, as plain data for JSON: import it, or provision it as a file.

Queries are written with our names. Under vLLM's (`serve --vllm-metrics`, or vLLM itself) those that it has too are
translated, and the panels of the others are left out. Dashboards are in Grafana's classic model, which every version
imports; the data source and the models are variables, so nothing in the file names an installation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from toolkit.deploy.panels import Panel, Row, rows_of

Names = Literal["llmctl", "vllm"]

SCHEMA_VERSION = 39  # of the classic model; newer Grafanas migrate it when they load it
COLUMNS, WIDTH, HEIGHT = 24, 8, 8  # of Grafana's grid, and of a panel in it

# Ours to vLLM's, of metrics and of labels.
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


def dashboard(
    sla: Mapping[str, float] | None = None,
    names: Names = "llmctl",
    of: str = "",
    description: str = "",
    job: str = "",
) -> dict[str, Any]:
    """The dashboard, ready for `json.dumps`; the same arguments give the same one.

    `sla` is a recipe's, for the lines of its targets; `of` names a deployment, whose board then is its own,
    `description` says where it comes from, and `job` is the label of its series (`toolkit.deploy.alerts.job`), which
    the board then shows; '': all, until somebody chooses.
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
        "graphTooltip": 1,  # the cross-hair is on all panels at once
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables(names, job)},
        "panels": _placed(rows),
    }


def expressions(board: Mapping[str, Any]) -> list[str]:
    """All PromQL of a dashboard, its variables' included."""
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    return queries + [one["definition"] for one in board["templating"]["list"] if one["type"] == "query"]


def _as_vllm(row: Row) -> Row:
    """Only what vLLM has, under its names."""
    panels = []
    for panel in row.panels:
        queries = [replace(query, expr=_translated(query.expr)) for query in panel.queries if _has_names(query.expr)]
        queries = [replace(query, legend=query.legend.replace("finish_reason", "finished_reason")) for query in queries]
        if queries:
            panels.append(replace(panel, queries=queries))
    return replace(row, panels=panels)


def _has_names(expr: str) -> bool:
    return all(name in VLLM_NAMES for name in OURS.findall(expr))


def _translated(expr: str) -> str:
    return OURS.sub(lambda found: VLLM_NAMES[found[0]], expr)


def _variables(names: Names, job: str) -> list[dict[str, Any]]:
    source = {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus"}
    metric = "llmctl_requests_running"
    metric = _translated(metric) if names == "vllm" else metric
    return [
        source,
        _labels("job", "Deployment", f"label_values({metric}, job)", job),
        _labels("model", "Model", f'label_values({metric}{{job=~"$job"}}, model_name)'),
    ]


def _labels(name: str, label: str, query: str, chosen: str = "") -> dict[str, Any]:
    """A variable of a label's values; `chosen` at first, or all."""
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
        "current": {"text": chosen, "value": chosen} if chosen else {"text": "All", "value": "$__all"},
    }


def _source() -> dict[str, str]:
    return {"type": "prometheus", "uid": "${datasource}"}


def _placed(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows and their panels in Grafana's grid, numbered from 1."""
    placed: list[dict[str, Any]] = []
    top = 0
    for row in rows:
        place = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        placed.append({"id": len(placed) + 1, "type": "row", "title": row.title, "gridPos": place, "collapsed": False})
        top += 1
        for index, panel in enumerate(row.panels):
            line, column = divmod(index, COLUMNS // WIDTH)
            place = {"x": column * WIDTH, "y": top + line * HEIGHT, "w": WIDTH, "h": HEIGHT}
            placed.append({"id": len(placed) + 1, "gridPos": place} | _chart(panel))
        top += -(-len(row.panels) // (COLUMNS // WIDTH)) * HEIGHT
    return placed


def _chart(panel: Panel) -> dict[str, Any]:
    steps = [{"color": "text", "value": None}, *({"color": "red", "value": limit} for limit in sorted(panel.limits))]
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "thresholds": {"mode": "absolute", "steps": steps},
        "custom": {"thresholdsStyle": {"mode": "dashed" if panel.limits else "off"}, "fillOpacity": 8},
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
            {"refId": chr(ord("A") + index), "expr": query.expr, "legendFormat": query.legend, "datasource": _source()}
            for index, query in enumerate(panel.queries)
        ],
    }
