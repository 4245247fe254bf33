"""What else would serve the traffic, in words: which change keeps the limits, or serves clearly more."""

from __future__ import annotations

from toolkit.files.fleet import SERVERS
from toolkit.files.tuning import Alternatives, Sibling, Tuning
from toolkit.units import number

CLEARLY = 1.25  # a sibling that keeps the limits up to so many times the rate is worth a line


def alternative_lines(result: Tuning) -> list[str]:
    """A line each, the cheapest change first; none where there is nothing to say."""
    found = result.alternatives
    if found is None:
        return []
    lines = _best_of_all(result, found)
    if found.feasible:
        return lines + _serves_more(found)
    kept = [one for one in found.siblings if one.feasible]
    lines.append(f"what keeps all limits at {number(result.request_rate_rps)} requests/s, simulated:")
    lines += [f"  another policy on engine '{result.engines[0]}': --policies {one.policy}" for one in found.policies]
    lines += [f"  another engine: {_sibling(one)}" for one in kept]
    lines += [f"  not another engine: {_misses(one)}" for one in found.siblings if not one.feasible]
    if found.workers is not None:
        lines.append(f"  more workers: {found.workers} with the best settings")
    lines.append(
        f"  fewer requests: at most {number(found.up_to_rps)} requests/s (--rate) with the best settings"
        if found.up_to_rps is not None
        else "  not fewer requests: the best settings break a limit even at a 64th of the rate"
    )
    if result.engines[0] in SERVERS:
        lines.append("  a server is one worker: several side by side, behind a router, are not simulated")
    if not (kept or found.policies or found.workers or found.up_to_rps):
        lines.append("  a looser target in the recipe's sla")
    return lines


def sizing_lines(result: Tuning) -> list[str]:
    """Before more workers are asked for: the recipe that keeps the limits on as many as there are."""
    found = result.alternatives
    if result.sizing is None or found is None:
        return []
    return [
        f"before you add workers: {_sibling(one)}"
        for one in found.siblings
        if one.feasible and one.workers < result.sizing.workers
    ]


def _best_of_all(result: Tuning, found: Alternatives) -> list[str]:
    best = next((one for one in result.policies if one.policy == found.best_of_all), None)
    if best is None:
        return []
    state = "keeps all limits" if best.feasible else "breaks limits, too"
    goodput = number(best.held_out.metrics.get("goodput_rps", 0.0))
    return [
        f"best of all policies: {best.policy}, which needs engine {' or '.join(best.engines)}; by this engine's laws "
        f"it {state}, {goodput} good requests/s"
    ]


def _serves_more(found: Alternatives) -> list[str]:
    own = found.up_to_rps or 0.0
    better = [one for one in found.siblings if one.feasible and (one.up_to_rps or 0.0) >= CLEARLY * own]
    if not better:
        return []
    best = max(better, key=lambda one: one.up_to_rps or 0.0)
    return [
        f"recipe {best.recipe} (engine {best.engine}) keeps all limits up to {number(best.up_to_rps or 0.0)} "
        f"requests/s on {_workers(best)}, this one up to {number(own)}{_analytic(best)}"
    ]


def _sibling(one: Sibling) -> str:
    metrics = one.held_out.metrics
    most = f", and all limits up to {number(one.up_to_rps)} requests/s" if one.up_to_rps else ""
    return (
        f"recipe {one.recipe} (engine {one.engine}) keeps the targets on {_workers(one)}: "
        f"{number(metrics.get('goodput_rps', 0.0))} good requests/s, "
        f"{number(metrics.get('sla_attainment_percent', 0.0))} % within targets{most}{_analytic(one)}"
    )


def _misses(one: Sibling) -> str:
    worst = max(one.usage, key=lambda key: one.usage[key])
    at = f"{worst} is at {one.usage[worst]:.0%} of its limit"
    fewer = f"; it keeps all up to {number(one.up_to_rps)} requests/s" if one.up_to_rps else ""
    return f"with recipe {one.recipe} (engine {one.engine}) {at}{fewer}"


def _workers(one: Sibling) -> str:
    return "1 worker" if one.workers == 1 else f"{one.workers} workers"


def _analytic(one: Sibling) -> str:
    return " (by its shipped analytic fit)" if one.analytic else " (by its shipped fit)"
