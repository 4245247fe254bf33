"""Alert rules over what a server says of itself: is it there, as fast as predicted, does memory
hold, do targets hold.

As a rules file that Prometheus reads, or the spec of a PrometheusRule. Limits come from the plan:
its targets, what the fit claims of its own error, and how many may wait. Each deployment's rules
read its own series alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from toolkit.deploy.kinds.operators import AlertRule, RuleGroup, RulesFile
from toolkit.deploy.order import Order, Reckoned

LEAST_DRIFT_PERCENT = 15.0  # shared machines breathe; less than that is no news
RATE = "[10m]"
WHAT = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "gap between tokens",
    "mtpot": "longest gap in a request",
    "e2e": "time of a whole request",
}


def drift_percent(order: Order) -> Reckoned[float]:
    """How far batches may be from their predictions on average: twice the error that the fit states
    of itself.
    """
    fit = order.plan.fit
    overhead = fit.rounds.overhead if fit.rounds else fit.overhead
    stated = max(law.error.median_percent for law in (fit.prefill, fit.decode, overhead))
    source = f"twice the largest median held-out error of the fit's laws, {stated:.1f} %"
    if 2 * stated < LEAST_DRIFT_PERCENT:
        return Reckoned(LEAST_DRIFT_PERCENT, f"{source}, but at least {LEAST_DRIFT_PERCENT:g} %")
    return Reckoned(round(2 * stated, 1), source)


def job(order: Order, *, monitored: bool) -> str:
    """The `job` label of the deployment's series.

    Prometheus puts `job` on every series that it scrapes. Prometheus' operator sets it to
    NAMESPACE/NAME of the PodMonitor (`monitored`), which is called as the deployment is: API
    reference of monitoring.coreos.com/v1, PodMonitorSpec.jobLabel. Elsewhere it is the scrape
    configuration's job_name, which EXPLAIN.md asks for.
    """
    return f"{order.options.namespace}/{order.name}" if monitored else order.name


def series(order: Order, *, monitored: bool) -> str:
    """The label matchers that pick the deployment's own series, and those of no other."""
    own = f'job="{job(order, monitored=monitored)}"'
    return f'namespace="{order.options.namespace}",{own}' if monitored else own


def rules(order: Order, selector: str, threshold: Reckoned[int | None]) -> RulesFile:
    """The rules for the servers that `selector` (of `series`) picks; more than `threshold` waiting
    are too many.
    """
    found = [*_health(order, selector), *_targets(order, selector, threshold)]
    named = [
        rule.model_copy(update={"labels": rule.labels | {"deployment": order.name}})
        for rule in found
    ]
    return RulesFile(groups=[RuleGroup(name=order.name, rules=named)])


def _health(order: Order, selector: str) -> list[AlertRule]:
    """Whether it is there, and whether what was measured still holds."""
    low, high = _bounds(drift_percent(order).value)
    ratio = _per_second("llmctl_batch_seconds_total", selector) + " / "
    ratio += _per_second("llmctl_predicted_batch_seconds_total", selector)
    alive, lost = (
        f"llmctl_workers_alive{{{selector}}}",
        f"llmctl_worker_restarts_total{{{selector}}}",
    )
    workers = f"count without (worker) (llmctl_worker_load_seconds{{{selector}}})"
    return [
        _rule(
            "LlmctlDown",
            f"absent(up{{{selector}}} == 1)",
            "5m",
            "No server of this deployment answers Prometheus",
            f"It does not run, or Prometheus does not scrape it with these labels: {selector}.",
            "critical",
        ),
        _rule(
            "LlmctlNoWorker",
            f"{alive} == 0 and {lost} > 0",  # before the first load none is alive either
            "1m",
            "No worker is alive",
            "Requests wait while the server loads its workers again; its log says why they were lost.",
            "critical",
        ),
        _rule(
            "LlmctlWorkerMissing",
            f"({alive} > 0) < {workers}",
            "15m",
            "Only {{ $value | humanize }} of the workers are alive",
            "The others take requests; the server's log says why these were lost, or do not load.",
        ),
        _rule(
            "LlmctlWorkersLost",
            f"increase({lost}{RATE}) > 2",
            "0m",
            "{{ $value | humanize }} workers died in 10 minutes",
            "Their requests went on elsewhere; the server's log says why they died.",
        ),
        _rule(
            "LlmctlDrift",
            f"({ratio}) > {high:g} or ({ratio}) < {low:g}",
            "15m",
            "Batches take {{ $value | humanize }} times as long as fitted",
            "Predictions no longer hold: measure again (llmctl profile, llmctl fit), or see what shares the machine.",
        ),
        _rule(
            "LlmctlOutOfMemory",
            f"increase(llmctl_oom_events_total{{{selector}}}{RATE}) > 0",
            "0m",
            "{{ $value | humanize }} batches ran out of memory in 10 minutes",
            "No request was lost; the memory law is too generous here. Measure again, or set a reserve.",
        ),
    ]


def _targets(order: Order, selector: str, threshold: Reckoned[int | None]) -> list[AlertRule]:
    """Whether the recipe's latency targets hold, each of them, and whether they can with so many
    waiting.
    """
    found = [_target(key, limit, selector) for key, limit in order.plan.recipe.sla.items()]
    refusing = _rule(
        "LlmctlRefusing",
        f"{_per_second('llmctl_refused_total', selector)} > 0",
        "5m",
        "{{ $value | humanize }} requests a second get 503",
        "For five minutes more came than the targets allow: add replicas, or send less.",
    )
    found.append(refusing)
    if threshold.value is None:
        return found
    queue = _rule(
        "LlmctlQueue",
        f"llmctl_requests_waiting{{{selector}}} > {threshold.value}",
        "2m",
        "{{ $value | humanize }} requests wait, and first tokens come too late",
        f"More than {threshold.value} waiting break the TTFT target: add replicas, or send less.",
    )
    return [*found, queue]


def _target(key: str, limit: float, selector: str) -> AlertRule:
    """The rule of one target, `ttft_p99_s`.

    The server has each limit as a bucket's bound (`toolkit.serve.stats`), so how many were late is
    exact: more than 1 % of them break a p99, any breaks a max.
    """
    metric, statistic, _ = key.split("_")
    name, what = f"llmctl_{metric}_seconds", WHAT[metric]
    all_ = _per_second(f"{name}_count", selector)
    if statistic == "mean":
        expression = f"{_per_second(f'{name}_sum', selector)} / {all_} > {limit:g}"
        summary = f"The mean {what} is {{{{ $value | humanize }}}} s"
        text = f"The recipe's target {key} is {limit:g} s."
    else:
        allowed = 0.0 if statistic == "max" else 1 - float(statistic.removeprefix("p")) / 100
        kept = _per_second(f"{name}_bucket", f'{selector},le="{float(limit)}"')
        expression = f"1 - {kept} / {all_} > {allowed:.4g}"
        summary = f"{{{{ $value | humanizePercentage }}}} are beyond {limit:g} s: {what}"
        text = f"The recipe's target {key} is {limit:g} s; it allows {100 * allowed:.4g} % beyond."
    return _rule(f"LlmctlTarget{key.title().replace('_', '')}", expression, "5m", summary, text)


def _bounds(percent: float) -> tuple[float, float]:
    return round(1 / (1 + percent / 100), 3), round(1 + percent / 100, 3)


def _per_second(metric: str, selector: str) -> str:
    return f"sum by (instance) (rate({metric}{{{selector}}}{RATE}))"


def _rule(
    name: str,
    expression: str,
    lasting: str,
    summary: str,
    description: str,
    severity: str = "warning",
) -> AlertRule:
    return AlertRule(
        alert=name,
        expr=expression,
        for_=lasting,
        labels={"severity": severity},
        annotations={"summary": summary, "description": description},
    )


# What is on the dashboard: rows of charts, and what each asks of the server's metrics, under our
# names.

SELECTED = 'model_name=~"$model",job=~"$job"'
WINDOW = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL, and what its lines are called."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class DashboardPanel:
    """A chart of one unit. `limits` are drawn as dashed lines: the targets of the recipe."""

    title: str
    unit: str  # Grafana's name of it
    queries: Sequence[Query]
    text: str = ""
    limits: Sequence[float] = ()
    highest: float | None = None


@dataclass(frozen=True, slots=True)
class DashboardRow:
    title: str
    panels: Sequence[DashboardPanel] = field(default_factory=tuple)


def rows_of(sla: Mapping[str, float]) -> list[DashboardRow]:
    return [
        DashboardRow("Load", [_requests(), _ends(), _tokens(), _turned_away(), _within()]),
        DashboardRow(
            "Latency",
            [
                _latency("Time to first token", "ttft", sla),
                _latency(
                    "Time per output token", "tpot", sla, "Of a request, after its first token."
                ),
                _latency(
                    "Between tokens", "itl", sla, "Tokens that come together share their gap."
                ),
                _latency("Longest gap in a request", "mtpot", sla, "Between two of its tokens."),
                _latency("Whole request", "e2e", sla),
                _latency("Waiting for the first batch", "queue", sla),
                _forecast(sla),
            ],
        ),
        DashboardRow(
            "Memory and workers",
            [_memory(), _workers(), _troubles(), _rows_by_worker(), _memory_by_worker(), _work()],
        ),
        DashboardRow(
            "The fit, held against the machine",
            [_ratio(), _ratio_by_worker(), _extrapolated(), _costs(), _steps()],
        ),
        DashboardRow(
            "API keys", [_keys("requests", "reqps"), _keys("tokens", "short"), _keys_running()]
        ),
    ]


def _requests() -> DashboardPanel:
    return DashboardPanel(
        "Requests in the server",
        "short",
        [
            Query(f"sum(llmctl_requests_running{{{SELECTED}}})", "running"),
            Query(f"sum(llmctl_requests_waiting{{{SELECTED}}})", "waiting"),
        ],
    )


def _ends() -> DashboardPanel:
    expr = f"sum by (finish_reason) (rate(llmctl_requests_total{{{SELECTED}}}[{WINDOW}]))"
    return DashboardPanel("Requests that ended", "reqps", [Query(expr, "{{finish_reason}}")])


def _tokens() -> DashboardPanel:
    queries = [
        Query(f"sum(rate(llmctl_{kind}_tokens_total{{{SELECTED}}}[{WINDOW}]))", name)
        for kind, name in (("prompt", "prompt"), ("generation", "generated"))
    ]
    return DashboardPanel("Tokens a second", "short", queries)


def _turned_away() -> DashboardPanel:
    refused = Query(f"sum(rate(llmctl_refused_total{{{SELECTED}}}[{WINDOW}]))", "503, overload")
    limited = Query(
        f"sum(rate(llmctl_key_limited_total{{{SELECTED}}}[{WINDOW}]))", "429, a key's limit"
    )
    return DashboardPanel("Requests that were turned away", "reqps", [refused, limited])


def _within() -> DashboardPanel:
    kept, all_ = (
        f"sum(rate(llmctl_{name}_total{{{SELECTED}}}[{WINDOW}]))"
        for name in ("requests_within_targets", "requests")
    )
    text = "Of all that ended, however they ended."
    return DashboardPanel(
        "Requests that kept every target", "percentunit", [Query(f"{kept} / {all_}", "share")], text
    )


def _forecast(sla: Mapping[str, float]) -> DashboardPanel:
    query = Query(f"llmctl_predicted_ttft_seconds{{{SELECTED}}}", "{{instance}}")
    limits = [limit for key, limit in sla.items() if key.startswith("ttft_")]
    return DashboardPanel(
        "First token of a request that came now", "s", [query], "As the fit predicts it.", limits
    )


def _latency(title: str, metric: str, sla: Mapping[str, float], text: str = "") -> DashboardPanel:
    queries = [
        Query(f"histogram_quantile({share}, {_by_bucket(metric)})", name)
        for share, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
    ]
    limits = [limit for key, limit in sla.items() if key.startswith(f"{metric}_")]
    return DashboardPanel(title, "s", queries, text, limits)


def _by_bucket(metric: str) -> str:
    return f"sum by (le) (rate(llmctl_{metric}_seconds_bucket{{{SELECTED}}}[{WINDOW}]))"


def _memory() -> DashboardPanel:
    query = Query(f"llmctl_kv_cache_usage_ratio{{{SELECTED}}}", "{{instance}}")
    return DashboardPanel(
        "KV cache in use", "percentunit", [query], "What running batches may fill.", highest=1.0
    )


def _workers() -> DashboardPanel:
    return DashboardPanel(
        "Workers",
        "short",
        [
            Query(f"sum(llmctl_workers_alive{{{SELECTED}}})", "alive"),
            Query(
                f"sum(increase(llmctl_worker_restarts_total{{{SELECTED}}}[{WINDOW}]))", "restarted"
            ),
        ],
    )


def _troubles() -> DashboardPanel:
    return DashboardPanel(
        "Preemptions and memory that ran out",
        "short",
        [
            Query(
                f"sum(increase(llmctl_preemptions_total{{{SELECTED}}}[{WINDOW}]))", "rows preempted"
            ),
            Query(
                f"sum(increase(llmctl_oom_events_total{{{SELECTED}}}[{WINDOW}]))",
                "batches out of memory",
            ),
        ],
    )


def _rows_by_worker() -> DashboardPanel:
    return _by_worker("Requests in a worker's batch", "short", "worker_requests_running")


def _memory_by_worker() -> DashboardPanel:
    return _by_worker(
        "A worker's KV cache in use", "percentunit", "worker_kv_cache_usage_ratio", highest=1.0
    )


def _work() -> DashboardPanel:
    return _by_worker(
        "Work given to a worker", "s", "worker_load_seconds", "Estimated (SCLS Eq. 11)."
    )


def _by_worker(
    title: str, unit: str, metric: str, text: str = "", highest: float | None = None
) -> DashboardPanel:
    query = Query(f"llmctl_{metric}{{{SELECTED}}}", "{{instance}}, worker {{worker}}")
    return DashboardPanel(title, unit, [query], text, highest=highest)


def _ratio() -> DashboardPanel:
    took, said = (
        f"sum(rate(llmctl_{name}_seconds_total{{{SELECTED}}}[{WINDOW}]))"
        for name in ("batch", "predicted_batch")
    )
    return DashboardPanel(
        "Actual over predicted batch time",
        "short",
        [Query(f"{took} / {said}", "actual / predicted")],
        "1: the machine does what was fitted. Elsewhere for long: profile and fit again.",
        [1.0],
    )


def _ratio_by_worker() -> DashboardPanel:
    took, said = (
        f"sum by (worker) (rate(llmctl_worker_{name}_seconds_total{{{SELECTED}}}[{WINDOW}]))"
        for name in ("batch", "predicted_batch")
    )
    text = "One worker apart from the others: its machine is shared, or another one."
    return DashboardPanel(
        "The same by worker", "short", [Query(f"{took} / {said}", "worker {{worker}}")], text, [1.0]
    )


def _extrapolated() -> DashboardPanel:
    outside, all_ = (
        f"sum(rate(llmctl_{name}_total{{{SELECTED}}}[{WINDOW}]))"
        for name in ("extrapolated_batches", "batches")
    )
    text = "Larger or longer than anything that was profiled."
    return DashboardPanel(
        "Batches outside the profile", "percentunit", [Query(f"{outside} / {all_}", "share")], text
    )


def _costs() -> DashboardPanel:
    queries = [
        Query(f"histogram_quantile(0.95, {_by_bucket(metric)})", f"{name}, p95")
        for metric, name in (("deciding", "a decision"), ("hop", "from batch to batch"))
    ]
    return DashboardPanel("What scheduling costs", "s", queries)


def _steps() -> DashboardPanel:
    spent, reporting, steps = (
        f"sum(rate(llmctl_{name}_total{{{SELECTED}}}[{WINDOW}]))"
        for name in ("engine_seconds", "reporting_seconds", "engine_steps")
    )
    queries = [
        Query(f"{spent} / {steps}", "a step"),
        Query(f"{reporting} / {steps}", "of it, to report"),
    ]
    return DashboardPanel("A step of the engine", "s", queries)


def _keys(what: str, unit: str) -> DashboardPanel:
    expr = f"sum by (key) (rate(llmctl_key_{what}_total{{{SELECTED}}}[{WINDOW}]))"
    return DashboardPanel(f"{what.title()} by key", unit, [Query(expr, "{{key}}")])


def _keys_running() -> DashboardPanel:
    running = Query(f"sum by (key) (llmctl_key_running{{{SELECTED}}})", "{{key}}")
    return DashboardPanel("Choices in the server by key", "short", [running])


# A Grafana dashboard that reads the server's metrics, as plain data for JSON: import it, or
# provision it as a file.
#
# Queries are written with our names. Under vLLM's (`serve --vllm-metrics`, or vLLM itself) those
# that it has too are translated, and the panels of the others are left out. Dashboards are in
# Grafana's classic model, which every version imports; the data source and the models are
# variables, so nothing in the file names an installation.

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

    `sla` is a recipe's, for the lines of its targets; `of` names a deployment, whose board then is
    its own, `description` says where it comes from, and `job` is the label of its series
    (`toolkit.deploy.monitoring.job`), which the board then shows; '': all, until somebody chooses.
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
    return queries + [
        one["definition"] for one in board["templating"]["list"] if one["type"] == "query"
    ]


def _as_vllm(row: DashboardRow) -> DashboardRow:
    """Only what vLLM has, under its names."""
    panels = []
    for panel in row.panels:
        queries = [
            replace(query, expr=_translated(query.expr))
            for query in panel.queries
            if _has_names(query.expr)
        ]
        queries = [
            replace(query, legend=query.legend.replace("finish_reason", "finished_reason"))
            for query in queries
        ]
        if queries:
            panels.append(replace(panel, queries=queries))
    return replace(row, panels=panels)


def _has_names(expr: str) -> bool:
    return all(name in VLLM_NAMES for name in OURS.findall(expr))


def _translated(expr: str) -> str:
    return OURS.sub(lambda found: VLLM_NAMES[found[0]], expr)


def _variables(names: Names, job: str) -> list[dict[str, Any]]:
    source = {
        "type": "datasource",
        "name": "datasource",
        "label": "Data source",
        "query": "prometheus",
    }
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
        "current": {"text": chosen, "value": chosen}
        if chosen
        else {"text": "All", "value": "$__all"},
    }


def _source() -> dict[str, str]:
    return {"type": "prometheus", "uid": "${datasource}"}


def _placed(rows: Sequence[DashboardRow]) -> list[dict[str, Any]]:
    """Rows and their panels in Grafana's grid, numbered from 1."""
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
