"""Alert rules over what a server says of itself: is it as fast as predicted, does memory hold, do targets hold.

As a rules file that Prometheus reads, or the spec of a PrometheusRule. Limits come from the plan: what the fit claims
of its own error, and how many may wait.
"""

from __future__ import annotations

import re

from toolkit.deploy.kinds.operators import Rule, RuleGroup, RulesFile
from toolkit.deploy.order import Order, Reckoned

LEAST_DRIFT_PERCENT = 15.0  # shared machines breathe; less than that is no news
RATE = "[10m]"


def drift_percent(order: Order) -> Reckoned[float]:
    """How far batches may be from their predictions on average: twice the error that the fit states of itself."""
    fit = order.plan.fit
    overhead = fit.rounds.overhead if fit.rounds else fit.overhead
    stated = max(law.error.median_percent for law in (fit.prefill, fit.decode, overhead))
    source = f"twice the largest median held-out error of the fit's laws, {stated:.1f} %"
    if 2 * stated < LEAST_DRIFT_PERCENT:
        return Reckoned(LEAST_DRIFT_PERCENT, f"{source}, but at least {LEAST_DRIFT_PERCENT:g} %")
    return Reckoned(round(2 * stated, 1), source)


def rules(order: Order, selector: str, threshold: Reckoned[int] | None) -> RulesFile:
    """The rules for the servers that `selector` ('namespace="x"', or '') picks; `threshold` waits are too many."""
    return RulesFile(
        groups=[RuleGroup(name=order.name, rules=[*_health(order, selector), *_targets(order, selector, threshold)])]
    )


def _health(order: Order, selector: str) -> list[Rule]:
    """Whether what was measured still holds."""
    low, high = _bounds(drift_percent(order).value)
    ratio = _per_second("llmctl_batch_seconds_total", selector) + " / "
    ratio += _per_second("llmctl_predicted_batch_seconds_total", selector)
    return [
        _rule(
            "LlmctlDrift",
            f"({ratio}) > {high:g} or ({ratio}) < {low:g}",
            "15m",
            "Batches take {{ $value | humanize }} times as long as fitted",
            "Predictions no longer hold: measure again (llmctl profile, llmctl fit), or see what shares the machine.",
        ),
        _rule(
            "LlmctlOutOfMemory",
            f"increase(llmctl_oom_events_total{_braces(selector)}{RATE}) > 0",
            "0m",
            "{{ $value | humanize }} batches ran out of memory in 10 minutes",
            "No request was lost; the memory law is too generous here. Measure again, or set a reserve.",
        ),
        _rule(
            "LlmctlWorkersLost",
            f"increase(llmctl_worker_restarts_total{_braces(selector)}{RATE}) > 2",
            "0m",
            "{{ $value | humanize }} workers died in 10 minutes",
            "Their requests went on elsewhere; the server's log says why they died.",
        ),
        _rule(
            "LlmctlNoWorker",
            f"llmctl_workers_alive{_braces(selector)} == 0",
            "1m",
            "No worker is alive",
            "Requests wait and nothing runs; the server's log says why its workers do not start.",
        ),
    ]


def _targets(order: Order, selector: str, threshold: Reckoned[int] | None) -> list[Rule]:
    """Whether the recipe's latency targets hold, and whether they can with so many waiting."""
    found = [
        _rule(
            f"LlmctlTarget{key.title().replace('_', '')}",
            f"histogram_quantile(0.{quantile}, {_buckets(f'llmctl_{metric}_seconds_bucket', selector)}) > {limit:g}",
            "5m",
            f"{key} is {{{{ $value | humanize }}}} s",
            f"The recipe's target is {limit:g} s; histograms are coarse, so it may be a little less or more.",
        )
        for key, limit in order.plan.recipe.sla.items()
        for metric, quantile in re.findall(r"^(ttft|tpot|itl|e2e)_p([0-9]+)_s$", key)
    ]
    refusing = _rule(
        "LlmctlRefusing",
        f"{_per_second('llmctl_refused_total', selector)} > 0",
        "5m",
        "{{ $value | humanize }} requests a second get 503",
        "For five minutes more came than the targets allow: add replicas, or send less.",
    )
    found.append(refusing)
    if threshold is None:
        return found
    queue = _rule(
        "LlmctlQueue",
        f"llmctl_requests_waiting{_braces(selector)} > {threshold.value}",
        "2m",
        "{{ $value | humanize }} requests wait, and first tokens come too late",
        f"More than {threshold.value} waiting break the TTFT target: add replicas, or send less.",
    )
    return [*found, queue]


def _bounds(percent: float) -> tuple[float, float]:
    return round(1 / (1 + percent / 100), 3), round(1 + percent / 100, 3)


def _per_second(metric: str, selector: str) -> str:
    return f"sum by (instance) (rate({metric}{_braces(selector)}{RATE}))"


def _buckets(metric: str, selector: str) -> str:
    return f"sum by (instance, le) (rate({metric}{_braces(selector)}{RATE}))"


def _braces(selector: str) -> str:
    return f"{{{selector}}}" if selector else ""


def _rule(name: str, expression: str, lasting: str, summary: str, description: str) -> Rule:
    return Rule(
        alert=name,
        expr=expression,
        for_=lasting,
        labels={"severity": "warning"},
        annotations={"summary": summary, "description": description},
    )
