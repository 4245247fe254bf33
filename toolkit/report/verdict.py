"""The conclusion of a tuning in words: for the terminal and for the page."""

from __future__ import annotations

import math
from collections.abc import Callable

from toolkit.engine_traits import traits_of
from toolkit.files.tuning import (
    Alternatives,
    Interval,
    Sibling,
    Sizing,
    Tuning,
    WindowLength,
    share_used,
)
from toolkit.units import number, percent

# What else would serve the traffic, in words: which change keeps the limits, or serves clearly
# more.

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
    lines.append(
        f"what keeps all limits at {number(result.request_rate_rps)} requests/s, simulated:"
    )
    lines += [
        f"  another policy on engine '{result.engines[0]}': --policies {one.policy}"
        for one in found.policies
    ]
    lines += [f"  another engine: {_sibling(one)}" for one in kept]
    lines += [f"  not another engine: {_misses(one)}" for one in found.siblings if not one.feasible]
    if found.workers is not None:
        lines.append(f"  more workers: {found.workers} with the best settings")
    lines.append(
        f"  fewer requests: at most {number(found.up_to_rps)} requests/s (--rate) with the best settings"
        if found.up_to_rps is not None
        else "  not fewer requests: the best settings break a limit even at a 64th of the rate"
    )
    if traits_of(result.engines[0]).server:
        lines.append(
            "  a server is one worker: several side by side, behind a router, are not simulated"
        )
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
    better = [
        one for one in found.siblings if one.feasible and (one.up_to_rps or 0.0) >= CLEARLY * own
    ]
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
    at = f"{worst} is {share_used(one.usage[worst])}"
    fewer = f"; it keeps all up to {number(one.up_to_rps)} requests/s" if one.up_to_rps else ""
    return f"with recipe {one.recipe} (engine {one.engine}) {at}{fewer}"


def _workers(one: Sibling) -> str:
    return "1 worker" if one.workers == 1 else f"{one.workers} workers"


def _analytic(one: Sibling) -> str:
    return " (by its shipped analytic fit)" if one.analytic else " (by its shipped fit)"


FEW_REQUESTS = 100  # with fewer, a 99th percentile is the slowest request
AMPLE = 1.25  # windows are proposed so much longer than the mean rate asks for
NOTHING_PERCENT = 0.05  # a difference in goodput that is printed as 0.0 %

METHODS = {
    "profile": "profile resampled",
    "held-out errors": "no profile: laws scaled",
}


def verdict(result: Tuning) -> list[str]:
    """The conclusion, a line each."""
    lines = [*_requests_behind_it(result), *sizing_lines(result), *_size_lines(result.sizing)]
    if not any(trial.feasible for trial in result.trials):
        lines += _nothing_fits(result)
    elif result.binding_sla and result.binding_ratio is not None:
        state = "missed" if result.binding_ratio > 1 else "met"
        lines.append(
            f"the target that binds: {result.binding_sla}, {state}, {share_used(result.binding_ratio)}"
        )
    if result.keep_defaults and not result.keeps_limits:
        lines.append(
            "nothing better than the defaults was found on the held-out windows; they break limits, too"
        )
    elif _nothing_to_gain(result):
        lines += _equal_goodput(result)
    elif result.keep_defaults:
        lines.append("keep the defaults: nothing better was found on the held-out windows")
    elif not result.keeps_limits:
        lines.append("not to be served: the best breaks limits on the held-out windows")
    elif result.gain_percent is not None:
        lines.append(f"gain over the defaults, held out: {result.gain_percent:+.1f} % goodput")
    else:
        lines.append("gain over the defaults, held out: from no goodput at all")
    lines += alternative_lines(result)
    lines += _how_sure(result)
    refused = next(
        (one.refusal for one in result.policies if one.policy == result.best_held_out.policy), None
    )
    if refused and not result.keep_defaults:
        lines.append(f"`serve` cannot start it: {refused}")
    return lines


def _nothing_fits(result: Tuning) -> list[str]:
    broken = {key: share for key, share in result.usage.items() if share > 1}
    worst = max(broken or result.usage, key=lambda key: result.usage[key], default="")
    what = "the defaults are" if result.keep_defaults else "the best is"
    at = f"; {worst} binds: held out, {what} {share_used(result.usage[worst])}" if worst else ""
    lines = [f"no trial keeps all limits{at}"]
    if result.alternatives is None:
        lines.append(
            "remedy: fewer requests (--rate), more workers, or a looser target in the recipe's sla"
        )
    return lines


def _how_sure(result: Tuning) -> list[str]:
    drawn = result.uncertainty
    if drawn is None:
        return []
    gain = f", by {_span(drawn.gain_percent, percent)}" if drawn.gain_percent else ""
    beats = f"the best beats the defaults in {drawn.better_percent:.0f} % of the draws{gain}"
    if drawn.gain_percent and _is_nothing(drawn.gain_percent.low, drawn.gain_percent.high):
        beats = "the difference is less than 0.1 %: no gain in goodput"
    return [
        f"with the fit's error, in 90 % of {drawn.draws} draws ({METHODS[drawn.method]}):",
        f"  goodput {_span(drawn.best_goodput_rps)}/s, the defaults' {_span(drawn.defaults_goodput_rps)}/s",
        f"  {beats}",
    ]


def _requests_behind_it(result: Tuning) -> list[str]:
    """What the verdict's requests are, where they are not the trace's own, or few."""
    lines = [f"warning: {line}" for line in result.scaling.warnings()] if result.scaling else []
    windows, length = result.held_out_windows, result.window_length
    count = sum(window.requests for window in windows)
    if count >= FEW_REQUESTS:
        return lines
    lines.append(
        f"warning: only {count} requests in {len(windows)} held-out windows stand behind this; a 99th "
        f"percentile needs {FEW_REQUESTS} or more: {_more_requests(length, count)}"
    )
    return lines


def _more_requests(length: WindowLength | None, count: int) -> str:
    """The remedy for too few requests: longer windows where the trace allows them."""
    if length and count:
        needed_s = math.ceil(AMPLE * length.seconds * FEW_REQUESTS / count)
        if needed_s <= length.longest_s:
            return f"--window {needed_s} would hold as many"
    return "give a longer trace"


def _is_nothing(*gains_percent: float | None) -> bool:
    return all(gain is not None and abs(gain) < NOTHING_PERCENT for gain in gains_percent)


def _nothing_to_gain(result: Tuning) -> bool:
    """Whether the defaults keep all limits, and no settings found have more goodput."""
    return _is_nothing(result.gain_percent) and any(
        t.number == 0 and t.feasible for t in result.trials
    )


def _equal_goodput(result: Tuning) -> list[str]:
    """Goodput that no setting raises: why, and what the best has to offer besides."""
    defaults, best = result.defaults_held_out.metrics, result.best_held_out.metrics
    at = f"at {number(result.request_rate_rps)} requests/s"
    if defaults.get("sla_attainment_percent") == best.get("sla_attainment_percent") == 100.0:
        lines = [
            f"nothing to gain: {at} the defaults, too, serve every request within all targets;"
            " a higher --rate shows what settings are worth"
        ]
    else:
        lines = [f"nothing to gain: {at} the best and the defaults have the same goodput"]
    if result.keep_defaults:
        lines.append("keep the defaults: nothing better was found on the held-out windows")
    elif "e2e_mean_s" in best and "e2e_mean_s" in defaults:
        times = f"{number(best['e2e_mean_s'])} s, the defaults' {number(defaults['e2e_mean_s'])} s"
        lines.append(f"the best differs in latency alone: mean E2E {times}")
    return lines


def _span(interval: Interval, form: Callable[[float], str] = number) -> str:
    return f"{form(interval.low)} to {form(interval.high)}"


def _size_lines(sizing: Sizing | None) -> list[str]:
    if sizing is None:
        return []
    settings = "the recipe's settings" if sizing.settings == "recipe" else "the best settings"
    lines = [f"workers needed: {sizing.workers}, with {settings}"]
    if sizing.one_more_keeps is None:
        return [f"workers needed: {sizing.workers}, with {settings}; a server is one worker"]
    if not sizing.one_more_keeps:
        lines.append(f"  with {sizing.workers + 1} a limit is broken again: leave a margin")
    lines.append(
        f"  to serve it: workers: {sizing.workers} in the recipe, then profile and fit again, since"
    )
    return [*lines, "  workers side by side slow each other; here as many as the fit was made with"]
