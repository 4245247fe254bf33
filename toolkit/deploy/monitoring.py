"""Alert rules for Prometheus and a dashboard for Grafana, over the metrics of a deployment.

The rules are the content of a rules file, or the spec of a PrometheusRule. They check that the
server is there, that batches take the predicted time, that memory suffices, and that targets are
met. Limits come from the plan: its targets, the error that the fit states, and the number of
requests that may wait. The rules of a deployment read only its own series.

The dashboards are files of `templates/grafana/` in Grafana's classic model, which every version
imports: `llmctl.json` with llmctl's metric names, and `vllm.json` with vLLM's (`serve
--vllm-metrics`, or vLLM itself) and the panels that vLLM has metrics for. The data source and the
models are variables, so the files name no installation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from toolkit.deploy.order import Order, Sourced
from toolkit.deploy.reckon import startup_s
from toolkit.files.shipped import shipped_templates

Names = Literal["llmctl", "vllm"]  # the metric names that a dashboard reads
Rule = dict[str, Any]  # an alert of a rules file
RulesFile = dict[str, Any]  # the content of a rules file, and the spec of a PrometheusRule

WAITING = "vllm:num_requests_waiting"  # in every server of vLLM
# vLLM's histograms of what targets are about. It has none of the longest gap in a request.
VLLM_LATENCIES = {
    "ttft": "vllm:time_to_first_token_seconds",
    "tpot": "vllm:request_time_per_output_token_seconds",
    "itl": "vllm:inter_token_latency_seconds",
    "e2e": "vllm:e2e_request_latency_seconds",
}
MIN_DRIFT_PERCENT = 15.0  # the times of a shared machine vary by about this much anyway
MIN_AWAY_S = 900  # before one that is away alerts: others have its requests
FULL_SHARE = 0.95  # of a KV cache
# Preemptions of 100 requests that a plan without a prediction may have; else twice the predicted.
USUAL_PREEMPTED_PERCENT = 5.0
RATE = "[10m]"
RUNBOOKS = "https://example.org/llmctl/docs/how-to/alerts.html"  # a section for each alert
TARGET_RULE = "LlmctlTarget"  # what the names of all rules about targets begin with
WHAT = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "gap between tokens",
    "mtpot": "longest gap in a request",
    "e2e": "time of a whole request",
}
GAP = "Longest gap in a request"  # the panel of what vLLM has no metric for
GAP_PLACE = {"h": 8, "w": 8, "x": 16, "y": 18}  # free on vLLM's dashboard, beside latencies


def drift_percent(order: Order) -> Sourced[float]:
    """The allowed mean deviation of batch times from predictions, in percent.

    Twice the error that the fit states, but at least `MIN_DRIFT_PERCENT`.
    """
    fit = order.plan.fit
    overhead = fit.rounds.overhead if fit.rounds else fit.overhead
    off = [fit.off_percent(law) for law in (fit.prefill, fit.decode)]
    stated = max(*off, overhead.error.median_percent)
    source = f"twice the largest median error of the fit's laws, {stated:.1f} %"
    if 2 * stated < MIN_DRIFT_PERCENT:
        return Sourced(MIN_DRIFT_PERCENT, f"{source}, but at least {MIN_DRIFT_PERCENT:g} %")
    return Sourced(round(2 * stated, 1), source)


def job(order: Order, *, monitored: bool, of: str = "") -> str:
    """The `job` label of the deployment's series, or of those of the pods named `of`.

    Prometheus puts `job` on every series that it scrapes. Prometheus' operator sets it to
    NAMESPACE/NAME of the PodMonitor (`monitored`), which has the deployment's name: API reference
    of monitoring.coreos.com/v1, PodMonitorSpec.jobLabel. Elsewhere it is the job_name of the scrape
    configuration, which EXPLAIN.md tells the operator to set.
    """
    name = of or order.name
    return f"{order.options.namespace}/{name}" if monitored else name


def series(order: Order, *, monitored: bool, of: str = "") -> str:
    """The label matchers of the deployment's own series, or of those of the pods named `of`."""
    own = f'job="{job(order, monitored=monitored, of=of)}"'
    return f'namespace="{order.options.namespace}",{own}' if monitored else own


def rules(order: Order, selector: str, threshold: Sourced[int | None]) -> RulesFile:
    """The rules for the servers that `selector` (of `series`) selects.

    One alerts when more than `threshold` requests wait; None: no such rule.
    """
    alerts = _health(order, selector)
    alerts += [_target(key, limit, selector) for key, limit in order.plan.recipe.sla.items()]
    waiting = f"max by (instance) (llmctl_requests_waiting{{{selector}}})"
    used = f"llmctl_kv_cache_usage_ratio{{{selector}}}"
    ended = _per_second("llmctl_requests_total", selector)
    alerts += [
        _refusing(selector),
        _failing(selector),
        _preempting(order, "Llmctl", _per_second("llmctl_preemptions_total", selector), ended),
        _full("Llmctl", used, waiting),
    ]
    if (most := threshold.value) is not None:
        queue = _rule(
            "LlmctlQueue",
            f"llmctl_requests_waiting{{{selector}}} > {most}",
            "2m",
            "{{ $value | humanize }} requests wait, and first tokens come too late",
            f"More than {most} waiting break the TTFT target: add replicas, or send less.",
        )
        alerts.append(queue)
    return _file(order, alerts)


def _health(order: Order, selector: str) -> list[Rule]:
    """Rules about the server, its workers, its memory, and whether the fit still holds."""
    drift = 1 + drift_percent(order).value / 100
    low = round(1 / drift, 3)
    high = round(drift, 3)
    ratio = _per_second("llmctl_batch_seconds_total", selector) + " / "
    ratio += _per_second("llmctl_predicted_batch_seconds_total", selector)
    alive = f"llmctl_workers_alive{{{selector}}}"
    lost = f"llmctl_worker_restarts_total{{{selector}}}"
    workers = f"count without (worker) (llmctl_worker_load_seconds{{{selector}}})"
    return [
        _down(selector, "server"),
        _rule(
            "LlmctlNoWorker",
            f"{alive} == 0 and {lost} > 0",  # before the first load no worker is alive either
            "1m",
            "No worker is alive",
            "Requests wait while the server loads its workers again; its log says why they were "
            "lost.",
            "critical",
        ),
        _rule(
            "LlmctlWorkerMissing",
            f"({alive} > 0) < {workers}",
            _load_time(order),
            "Only {{ $value | humanize }} of the workers are alive",
            "These serve requests; the server's log says why the others were lost or do not load.",
        ),
        _rule(
            "LlmctlWorkersLost",
            f"increase({lost}{RATE}) > 2",
            "0m",
            "{{ $value | humanize }} workers died in 10 minutes",
            "Other workers continued their requests; the server's log says why they died.",
        ),
        _rule(
            "LlmctlDrift",
            f"({ratio}) > {high:g} or ({ratio}) < {low:g}",
            "15m",
            "Batches take {{ $value | humanize }} times as long as fitted",
            "Predictions no longer hold: measure again (llmctl profile, llmctl fit), or find what "
            "else uses the machine.",
        ),
        _rule(
            "LlmctlOutOfMemory",
            f"increase(llmctl_oom_events_total{{{selector}}}{RATE}) > 0",
            "0m",
            "{{ $value | humanize }} batches ran out of memory in 10 minutes",
            "No request was lost; the memory law allows too much here. Measure again, or set a "
            "reserve.",
        ),
    ]


def replica_rules(
    order: Order, front: str, queues: Sequence[tuple[str, Sourced[int | None]]]
) -> RulesFile:
    """The rules for a front and the replicas behind it, by their selectors (of `series`).

    The targets are checked in the front's histograms, which have the limits as bounds; the queue in
    the replicas' own metric, as the autoscaler does: each kind by its selector and its threshold.
    """
    up = f"llmctl_replicas_up{{{front}}}"
    lost = f"llmctl_replica_losses_total{{{front}}}"
    recent = f"[{startup_s(order).value + 3600}s]"
    alerts = [
        _down(front, "front"),
        _rule(
            "LlmctlNoReplica",
            f"{up} == 0 and max_over_time({up}{recent}) > 0",  # before the first load none is up
            "1m",
            "The front has no replica",
            "Requests get 503 until one is up again; the front's log says what is wrong with each.",
            "critical",
        ),
        _rule(
            "LlmctlNeverReady",
            f"{up} == 0",
            _load_time(order),
            "The front has had no replica for as long as one may load",
            "Requests get 503; the front's log says what is wrong with each replica.",
            "critical",
        ),
        _rule(
            "LlmctlReplicasLost",
            f"increase({lost}[1h]) > 1",
            "0m",
            "Replicas were lost {{ $value | humanize }} times in an hour",
            "Others continued their requests; the front's log says why each was lost.",
        ),
        _rule(
            "LlmctlReplicaDown",
            f"llmctl_replica_up{{{front}}} == 0",
            _load_time(order),
            "Replica {{ $labels.replica }} gets no requests",
            "The others have its requests; the front's /replicas says what is wrong with it.",
        ),
        _refusing(front),
        _failing(front),
    ]
    alerts += [_target(key, limit, front) for key, limit in order.plan.recipe.sla.items()]
    for replicas, threshold in queues:
        preempted = _per_second("vllm:num_preemptions_total", replicas)
        ended = _per_second("vllm:request_success_total", replicas)
        waiting = f"max by (instance) ({WAITING}{{{replicas}}})"
        alerts += [
            _preempting(order, "LlmctlReplica", preempted, ended),
            _full("LlmctlReplica", f"vllm:kv_cache_usage_perc{{{replicas}}}", waiting),
        ]
        if threshold.value is not None:
            queue = _rule(
                "LlmctlReplicaQueue",
                f"avg({WAITING}{{{replicas}}}) > {threshold.value}",
                "2m",
                "{{ $value | humanize }} requests wait at each replica: first tokens come too late",
                f"More than {threshold.value} waiting break the TTFT target: add replicas.",
            )
            alerts.append(queue)
    return _file(order, alerts)


def _file(order: Order, alerts: Sequence[Rule]) -> RulesFile:
    """The rules in one group, with the deployment's name as a label."""
    named = [rule | {"labels": rule["labels"] | {"deployment": order.name}} for rule in alerts]
    return {"groups": [{"name": order.name, "rules": named}]}


def _down(selector: str, what: str) -> Rule:
    return _rule(
        "LlmctlDown",
        f"absent(up{{{selector}}} == 1)",
        "5m",
        f"No {what} of this deployment answers Prometheus",
        f"It does not run, or Prometheus does not scrape it with these labels: {selector}.",
        "critical",
    )


def _refusing(selector: str) -> Rule:
    return _rule(
        "LlmctlRefusing",
        f"{_per_second('llmctl_refused_total', selector)} > 0",
        "5m",
        "{{ $value | humanize }} requests a second get 503",
        "For five minutes more requests came than the targets allow: add replicas, or send less.",
    )


def _failing(selector: str) -> Rule:
    failed = f'llmctl_http_responses_total{{{selector},status=~"5..",status!="503"}}'
    return _rule(
        "LlmctlServerErrors",
        f"sum by (instance, status) (increase({failed}{RATE})) > 0",
        "0m",
        "{{ $value | humanize }} answers with status {{ $labels.status }} in 10 minutes",
        "Clients did not get what they asked for, and no overload explains it.",
    )


def _preempting(order: Order, of: str, preempted: str, ended: str) -> Rule:
    """Many rows lose their place in the cache, and are computed again or swapped."""
    predicted = order.plan.predicted.get("evicted_percent", 0.0)
    most = max(2 * predicted, USUAL_PREEMPTED_PERCENT)
    return _rule(
        f"{of}Preempting",
        f"100 * {preempted} / {ended} > {most:.4g}",
        "15m",
        "{{ $value | humanize }} preemptions of 100 requests",
        f"The plan predicts {predicted:.3g}. More or longer requests come.",
    )


def _full(of: str, used: str, waiting: str) -> Rule:
    usage = f"max by (instance) (avg_over_time({used}{RATE}))"
    return _rule(
        f"{of}CacheFull",
        f"{usage} > {FULL_SHARE:g} and {waiting} > 0",
        "5m",
        "The KV cache is {{ $value | humanizePercentage }} full, and requests wait",
        "No more requests fit at once: add replicas, or send less.",
    )


def _load_time(order: Order) -> str:
    """How long one that is away may load before an alert, at least `MIN_AWAY_S`."""
    return f"{max(startup_s(order).value, MIN_AWAY_S)}s"


def _target(key: str, limit: float, selector: str) -> Rule:
    """The rule of one target, such as `ttft_p99_s`.

    The server has a histogram bucket with each limit as its bound (`toolkit.serve.stats`), so the
    share of late values is exact: more than 1 % break a p99, and any breaks a max.
    """
    metric, statistic, _ = key.split("_")
    name = f"llmctl_{metric}_seconds"
    what = WHAT[metric]
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
    return _rule(f"{TARGET_RULE}{key.title().replace('_', '')}", expression, "5m", summary, text)


def _shipped(names: Names) -> dict[str, Any]:
    """The dashboard's file."""
    file = shipped_templates() / "grafana" / f"{names}.json"
    board: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return board


def _per_second(metric: str, selector: str) -> str:
    return f"sum by (instance) (rate({metric}{{{selector}}}{RATE}))"


def _rule(
    name: str,
    expression: str,
    lasting: str,
    summary: str,
    description: str,
    severity: str = "warning",
) -> Rule:
    return {
        "alert": name,
        "expr": expression,
        "for": lasting,
        "labels": {"severity": severity},
        "annotations": {
            "summary": summary,
            "description": description,
            "runbook_url": f"{RUNBOOKS}#{section_of(name)}",
        },
    }


def section_of(alert: str) -> str:
    """The anchor of the alert's section in docs/how-to/alerts.md; all targets have one."""
    return (TARGET_RULE if alert.startswith(TARGET_RULE) else alert).lower()


def dashboard(
    sla: Mapping[str, float] | None = None,
    names: Names = "llmctl",
    of: str = "",
    description: str = "",
    job: str = "",
    front: str = "",
) -> dict[str, Any]:
    """The dashboard, ready for `json.dumps`. The same arguments give the same dashboard.

    Args:
        sla: the targets of a recipe, drawn as dashed lines on the panels of their metrics.
        of: the name of the one deployment that the dashboard is for; '': any.
        description: where the dashboard comes from.
        job: the label of the deployment's series (see `job`), chosen at first; '': all.
        front: the label of the series of a front before servers of vLLM: it alone measures the
            longest gap of a request, and the dashboard shows it; '': there is none.
    """
    board = _shipped(names)
    if front:
        (panel,) = [panel for panel in _shipped("llmctl")["panels"] if panel["title"] == GAP]
        panel |= {"id": 1 + max(panel["id"] for panel in board["panels"]), "gridPos": GAP_PLACE}
        for target in panel["targets"]:
            target["expr"] = re.sub(r"\{model_name[^}]*\}", f'{{job="{front}"}}', target["expr"])
        board["panels"].append(panel)
    if of:
        board |= {"uid": of, "title": of}  # a uid has 40 characters at most
    board["description"] = description
    for variable in board["templating"]["list"]:
        if job and variable["name"] == "job":
            variable["current"] = {"text": job, "value": job}
    for panel in board["panels"]:
        read = " ".join(target["expr"] for target in panel.get("targets", ()))
        for key, limit in sorted((sla or {}).items(), key=lambda target: target[1]):
            metric = key.split("_")[0]
            shown = [f"llmctl_{metric}_seconds", f"llmctl_predicted_{metric}_seconds"]
            if any(name in read for name in [*shown, VLLM_LATENCIES.get(metric, shown[0])]):
                defaults = panel["fieldConfig"]["defaults"]
                defaults["thresholds"]["steps"].append({"color": "red", "value": limit})
                defaults["custom"]["thresholdsStyle"]["mode"] = "dashed"
    return board
