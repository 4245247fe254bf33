"""Alert rules over what a server says of itself: is it there, as fast as predicted, does memory hold, do targets hold.

As a rules file that Prometheus reads, or the spec of a PrometheusRule. Limits come from the plan: its targets, what
the fit claims of its own error, and how many may wait. Each deployment's rules read its own series alone.
"""

from __future__ import annotations

from toolkit.deploy.kinds.operators import Rule, RuleGroup, RulesFile
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
    """How far batches may be from their predictions on average: twice the error that the fit states of itself."""
    fit = order.plan.fit
    overhead = fit.rounds.overhead if fit.rounds else fit.overhead
    stated = max(law.error.median_percent for law in (fit.prefill, fit.decode, overhead))
    source = f"twice the largest median held-out error of the fit's laws, {stated:.1f} %"
    if 2 * stated < LEAST_DRIFT_PERCENT:
        return Reckoned(LEAST_DRIFT_PERCENT, f"{source}, but at least {LEAST_DRIFT_PERCENT:g} %")
    return Reckoned(round(2 * stated, 1), source)


def job(order: Order, *, monitored: bool) -> str:
    """The `job` label of the deployment's series.

    Prometheus puts `job` on every series that it scrapes. Prometheus' operator sets it to NAMESPACE/NAME of the
    PodMonitor (`monitored`), which is called as the deployment is: API reference of monitoring.coreos.com/v1,
    PodMonitorSpec.jobLabel. Elsewhere it is the scrape configuration's job_name, which EXPLAIN.md asks for.
    """
    return f"{order.options.namespace}/{order.name}" if monitored else order.name


def series(order: Order, *, monitored: bool) -> str:
    """The label matchers that pick the deployment's own series, and those of no other."""
    own = f'job="{job(order, monitored=monitored)}"'
    return f'namespace="{order.options.namespace}",{own}' if monitored else own


def rules(order: Order, selector: str, threshold: Reckoned[int | None]) -> RulesFile:
    """The rules for the servers that `selector` (of `series`) picks; more than `threshold` waiting are too many."""
    found = [*_health(order, selector), *_targets(order, selector, threshold)]
    named = [rule.model_copy(update={"labels": rule.labels | {"deployment": order.name}}) for rule in found]
    return RulesFile(groups=[RuleGroup(name=order.name, rules=named)])


def _health(order: Order, selector: str) -> list[Rule]:
    """Whether it is there, and whether what was measured still holds."""
    low, high = _bounds(drift_percent(order).value)
    ratio = _per_second("llmctl_batch_seconds_total", selector) + " / "
    ratio += _per_second("llmctl_predicted_batch_seconds_total", selector)
    alive, lost = f"llmctl_workers_alive{{{selector}}}", f"llmctl_worker_restarts_total{{{selector}}}"
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


def _targets(order: Order, selector: str, threshold: Reckoned[int | None]) -> list[Rule]:
    """Whether the recipe's latency targets hold, each of them, and whether they can with so many waiting."""
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


def _target(key: str, limit: float, selector: str) -> Rule:
    """The rule of one target, `ttft_p99_s`.

    The server has each limit as a bucket's bound (`toolkit.serve.stats`), so how many were late is exact: more than
    1 % of them break a p99, any breaks a max.
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


def _rule(name: str, expression: str, lasting: str, summary: str, description: str, severity: str = "warning") -> Rule:
    return Rule(
        alert=name,
        expr=expression,
        for_=lasting,
        labels={"severity": severity},
        annotations={"summary": summary, "description": description},
    )
