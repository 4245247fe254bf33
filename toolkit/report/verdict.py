"""The conclusion of a tuning in words, a line each, for the terminal and for the page.

First the verdict itself (warnings, workers, the binding target, the gain, how sure it is), then
what else would keep the limits.
"""

from __future__ import annotations

from collections.abc import Callable

from toolkit.files.tuning import (
    BEHIND,
    OOM,
    Interval,
    Tuning,
    breaks,
    changes_in_words,
)
from toolkit.report.rows import settings_of, share_used, which_settings
from toolkit.units import bracketed, number, percent, word

FEW_REQUESTS = 100  # with fewer, a 99th percentile is the slowest request
KEPT_SHARE = 0.97  # of the tuned rate: a capacity below it contradicts that this rate is kept
NO_GAIN_PERCENT = 0.05  # a smaller difference in goodput is printed as 0.0 %


def verdict(result: Tuning) -> list[str]:
    """Return the conclusion of a tuning, a sentence each."""
    lines = [*_warnings(result), *_judged_lines(result)]
    if result.keep_defaults and not result.keeps_limits:
        lines.append("nothing better than the defaults was found; they also break limits")
    elif result.keep_defaults and result.alternatives.declined is not None:
        lines.append("keep the defaults for headroom; other settings have a lower latency")
    elif result.keep_defaults:
        lines.append(f"nothing to gain: {_no_better(result)}; keep the defaults")
    elif not result.keeps_limits:
        lines.append("do not serve this: the best settings break limits")
    elif _no_gain(result.gain_percent):
        lines.append(_latency_gain(result))
    elif result.gain_percent is not None:
        lines.append(f"gain over the defaults: {result.gain_percent:+.1f} % goodput")
    else:
        lines.append("gain over the defaults: they have no goodput")
    lines += [
        *_declined_lines(result),
        *_slow_end_lines(result),
        *_capacity_lines(result),
        *_router_lines(result),
        *_alternative_lines(result),
        *_how_sure(result),
    ]
    refused = next(
        (
            one.refusal
            for one in result.policies
            if one.best.settings.key == result.best.settings.key
        ),
        None,
    )
    if refused and not result.keep_defaults:
        lines.append(f"`serve` cannot start it: {refused}")
    return lines


def _judged_lines(result: Tuning) -> list[str]:
    """What the verdict is about, whether the server keeps up there, and the limit that binds."""
    part = result.judged
    about = f"the whole trace, {part.requests:,} requests"
    if not part.whole:
        span = f"{number(part.start_s)} to {number(part.end_s)} s"
        about = f"{part.requests:,} of {part.of_requests:,} requests, the busiest part, {span}"
    lines = [f"judged on {about}{bracketed(result.changes)}, at {result.load}"]
    behind = next((limit for limit in result.limits if limit.name == BEHIND), None)
    if behind is not None and behind.predicted is not None and not behind.kept:
        late_s = behind.predicted / 100.0 * (part.end_s - part.start_s)
        growing = f"at its end, requests wait {number(late_s)} s longer than at its beginning"
        lines.append(
            f"overloaded: the queue grows with the trace ({which_settings(result)}); {growing}"
        )
    used = result.recommended.outcome.used
    targets = [name for name in used if name not in (OOM, BEHIND)]
    if targets:
        binding = max(targets, key=lambda name: used[name])
        state = "missed" if used[binding] > 1 else "met"
        binds = f"{binding}, {state}, {share_used(used[binding])}"
        lines.append(f"the limit that binds: {binds}")
    if result.further:
        further = f"{len(result.further)} further settings were tried on the trace"
        lines.append(f"{further}, since the search's best broke a limit there")
    return lines


def _slow_end_lines(result: Tuning) -> list[str]:
    """How the recommended settings stand at the slow end of the law's error; empty where they were
    not simulated there.
    """
    end = result.slow_end
    if end is None:
        return []
    how = breaks(end.limits) or "keep all limits"
    times = f"times {end.law.slow:.2f} x as long, the slow end of {end.law.basis}"
    return [f"at {times}: {which_settings(result)} {how}"]


def _capacity_lines(result: Tuning) -> list[str]:
    """Up to which rate the limits hold; empty where it was not searched."""
    capacity = result.capacity
    if capacity is None:
        return []
    if capacity.recommended_rps is None:
        return [f"capacity: {which_settings(result)} keep all limits at no rate that was tried"]
    most = f"{number(capacity.recommended_rps)} requests/s with {which_settings(result)}"
    line = f"capacity: all limits hold up to {most}"
    if not result.keep_defaults:
        own = capacity.defaults_rps
        line += f", with the defaults {f'up to {number(own)}' if own else 'at no rate'}"
    line += bracketed(changes_in_words(result.scaling, capacity.repeats))
    if capacity.binding:
        line += f"; then {capacity.binding} breaks"
    lines = [line]
    if result.keeps_limits and capacity.recommended_rps < KEPT_SHARE * result.request_rate_rps:
        short = f"at {result.load} it is over before its queue could grow"
        lines.append(f"warning: the trace keeps the limits only since {short}")
    return lines


def _router_lines(result: Tuning) -> list[str]:
    """What the best settings' router gains over requests in turn; empty without replicas."""
    best = result.best
    in_turn = result.in_turn
    router = best.settings.replica_router
    if router is None or in_turn is None:
        return []
    if best.settings == in_turn.settings:
        return [
            "nothing to gain from a router: no other serves notably more than requests to each "
            "replica in turn, with the same flags"
        ]
    before, after = (one.metrics.get("goodput_rps", 0.0) for one in (in_turn, best))
    change = f"{100 * (after / before - 1):+.1f} % goodput" if before else "goodput from none"
    return [f"router '{router.name}' over requests in turn, with the same flags: {change}"]


def _how_sure(result: Tuning) -> list[str]:
    """How the gain varies over held-out windows; empty without a gain to judge."""
    found = result.held_out_gain
    if found is None:
        return []
    gain = f", by {_span(found.gain_percent, percent)}" if found.gain_percent else ""
    beats = f"the best beats the defaults in {found.better} of them{gain}"
    if found.gain_percent and _no_gain(found.gain_percent.low, found.gain_percent.high):
        beats = "the difference is less than 0.1 %: no gain in goodput"
    return [
        f"on {found.windows} windows that the search did not see: "
        f"goodput {_span(found.best_goodput_rps)}/s, "
        f"the defaults' {_span(found.defaults_goodput_rps)}/s; {beats}"
    ]


def _warnings(result: Tuning) -> list[str]:
    """Warnings where requests were scaled much, laws were computed, or the trace is short."""
    lines = [f"warning: {line}" for line in result.scaling.warnings()] if result.scaling else []
    if result.analytic:
        lines.append("by analytic laws: nothing was measured on this GPU")
    count = result.judged.requests
    if count < FEW_REQUESTS:
        needs = f"a 99th percentile needs {FEW_REQUESTS} or more"
        lines.append(f"warning: this rests on only {count} requests; {needs}: give a longer trace")
    return lines


def _no_gain(*gains_percent: float | None) -> bool:
    return all(gain is not None and abs(gain) < NO_GAIN_PERCENT for gain in gains_percent)


def _no_better(result: Tuning) -> str:
    """Why the defaults are kept although they keep every limit."""
    at = f"at {result.load}"
    if result.defaults.metrics.get("sla_attainment_percent") == 100.0:
        return f"{at} the defaults serve every request within all targets"
    return f"{at} no settings were found that are notably better than the defaults"


def _latency_gain(result: Tuning) -> str:
    """How the best differs from the defaults where the goodput is the same."""
    before_s = result.defaults.metrics.get("e2e_mean_s", 0.0)
    after_s = result.best.metrics.get("e2e_mean_s", 0.0)
    times = f"mean E2E {number(after_s)} s, the defaults' {number(before_s)} s"
    return f"the same goodput as the defaults, at a lower latency: {times}"


def _declined_lines(result: Tuning) -> list[str]:
    """The quicker settings that were declined, and which ones are for which wish; may be empty."""
    declined = result.alternatives.declined
    if declined is None:
        return []
    kept = result.recommended
    before_s, after_s = (one.metrics.get("e2e_mean_s", 0.0) for one in (kept, declined))
    own = settings_of(kept.settings)
    other = settings_of(declined.settings)
    changed = ", ".join(f"{key} {word(other[key])}" for key in other if other[key] != own.get(key))
    limit = str(declined.outcome.binding)
    used = share_used(kept.outcome.used.get(limit, 0.0))
    nearer = share_used(declined.outcome.used[limit])
    return [
        f"declined, for latency: policy '{declined.settings.policy}', {changed}, with mean E2E "
        f"{number(after_s)} s for {number(before_s)} s and {limit} {nearer}",
        f"recommended, for headroom: {which_settings(result)}, with {limit} {used}",
    ]


def _span(interval: Interval, form: Callable[[float], str] = number) -> str:
    return f"{form(interval.low)} to {form(interval.high)}"


def _alternative_lines(result: Tuning) -> list[str]:
    """What else would serve this traffic, the cheapest change first; may be empty."""
    found = result.alternatives
    lines: list[str] = []
    wanted = found.best_of_all
    best = next((one for one in result.policies if one.best.settings.policy == wanted), None)
    if best is not None:
        state = "keeps all limits" if best.best.outcome.kept else "also breaks limits"
        goodput = f"{number(best.best.metrics.get('goodput_rps', 0.0))} good requests/s"
        lines = [
            f"best of all policies: {wanted}, which needs engine {' or '.join(best.engines)}; "
            f"by this engine's laws it {state}, {goodput}"
        ]
    if result.keeps_limits:
        return lines
    keeps = []
    if found.workers is not None:
        keeps.append(f"more workers, {found.workers} with the best settings")
    most_rps = result.capacity and result.capacity.recommended_rps
    if most_rps:
        keeps.append(f"fewer requests, at most {number(most_rps)} requests/s (--rate)")
    changes = "; ".join(keeps) or "a looser target in the recipe's sla"
    lines.append(f"what keeps all limits at {result.load}, simulated: {changes}")
    return lines
