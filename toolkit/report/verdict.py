"""The conclusion of a tuning in words, a line each, for the terminal and for the page.

First the verdict itself (warnings, workers, the binding target, the gain, how sure it is), then the
alternatives: changes that keep the limits or serve clearly more.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from toolkit.engine_traits import traits_of
from toolkit.files.tuning import Interval, Sibling, Tuning, share_used
from toolkit.sched.policies import BUILT_IN
from toolkit.units import number, percent

NOTABLE_RATE = 1.25  # a sibling that keeps the limits up to this multiple of the rate is named
FEW_REQUESTS = 100  # with fewer, a 99th percentile is the slowest request
WINDOW_MARGIN = 1.25  # proposed windows are longer by this factor than the mean rate needs
WAITS = ("ttft_", "e2e_")  # metrics that waiting in a queue adds to
NO_GAIN_PERCENT = 0.05  # a smaller difference in goodput is printed as 0.0 %

METHODS = {"profile": "profile resampled", "held-out errors": "no profile: laws scaled"}


def verdict(result: Tuning) -> list[str]:
    """The conclusion of a tuning, a line each; indented lines continue the one before."""
    lines = [*_warnings(result), *_size_lines(result)]
    if not any(trial.feasible for trial in result.trials):
        lines.append("no trial keeps all limits")
        worst = max(result.usage, key=lambda key: result.usage[key], default="")
        if worst:
            what = "the defaults are" if result.keep_defaults else "the best is"
            lines[-1] += f"; {worst} binds: held out, {what} {share_used(result.usage[worst])}"
        if result.alternatives is None:
            remedies = (
                "fewer requests (--rate), more workers, or a looser target in the recipe's sla"
            )
            lines.append(f"remedy: {remedies}")
    elif result.binding_sla and result.binding_ratio is not None:
        state = "missed" if result.binding_ratio > 1 else "met"
        binds = f"{result.binding_sla}, {state}, {share_used(result.binding_ratio)}"
        lines.append(f"the target that binds: {binds}")
    defaults_feasible = any(t.number == 0 and t.feasible for t in result.trials)
    if result.keep_defaults and not result.keeps_limits:
        none = "nothing better than the defaults was found on the held-out windows"
        lines.append(f"{none}; they also break limits")
    elif _no_gain(result.gain_percent) and defaults_feasible:
        lines += _equal_goodput(result)
    elif result.keep_defaults:
        lines.append("keep the defaults: nothing better was found on the held-out windows")
    elif not result.keeps_limits:
        lines.append("do not serve this: the best breaks limits on the held-out windows")
    elif result.gain_percent is not None:
        lines.append(f"gain over the defaults, held out: {result.gain_percent:+.1f} % goodput")
    else:
        lines.append("gain over the defaults, held out: the defaults have no goodput")
    lines += [*_router_lines(result), *_cost_lines(result), *_alternative_lines(result)]
    lines += _how_sure(result)
    best = result.best_held_out.policy
    refused = next((one.refusal for one in result.policies if one.policy == best), None)
    if refused and not result.keep_defaults:
        lines.append(f"`serve` cannot start it: {refused}")
    return lines


def _router_lines(result: Tuning) -> list[str]:
    """What the best settings' router gains over requests in turn; empty without replicas."""
    best, in_turn = result.best_held_out, result.in_turn
    if best.replica_router is None or in_turn is None:
        return []
    name = best.replica_router.name
    if best.same_settings(in_turn):
        return [
            "nothing to gain from a router: no other serves notably more than requests to each "
            "replica in turn, with the same flags"
        ]
    old, new = in_turn.metrics, best.metrics
    before, after = (metrics.get("goodput_rps", 0.0) for metrics in (old, new))
    change = f"{100 * (after / before - 1):+.1f} % goodput" if before else "goodput from none"
    if "ttft_mean_s" in old and "ttft_mean_s" in new:
        change += f", mean TTFT {number(new['ttft_mean_s'])} s for {number(old['ttft_mean_s'])} s"
    if "hit_percent" in old and "hit_percent" in new:
        cached = f"{number(new['hit_percent'])} % of prompt tokens cached"
        change += f", {cached} for {number(old['hit_percent'])} %"
    return [f"router '{name}' over requests in turn, with the same flags: {change}"]


def _cost_lines(result: Tuning) -> list[str]:
    """What the recommended settings cost, and a recipe that is cheaper; empty without a price."""
    cost = result.cost
    if cost is None:
        return []
    prices = {
        "in": cost.usd_per_million_in,
        "cached": cost.usd_per_million_cached,
        "out": cost.usd_per_million_out,
    }
    each = [f"{number(price)} {name}" for name, price in prices.items() if price is not None]
    tokens = f", USD per million tokens: {', '.join(each)}" if each else ""
    lines = [
        f"cost: {number(cost.usd_per_hour)} USD an hour, "
        f"{number(cost.usd_per_million_requests)} USD per million requests{tokens}"
    ]
    siblings = result.alternatives.siblings if result.alternatives else []
    priced = [(one.usd_per_hour, one) for one in siblings if one.feasible and one.usd_per_hour]
    if not priced or result.sizing is None:
        return lines
    usd, cheapest = min(priced, key=lambda pair: pair[0])
    if usd < cost.usd_per_hour or not result.keeps_limits:
        lines.append(f"cheaper: {_sibling(cheapest)}, {number(usd)} USD an hour")
    else:
        lines.append(f"no shipped recipe for this model and GPU is cheaper: {number(usd)} USD/h")
    return lines


def _how_sure(result: Tuning) -> list[str]:
    drawn = result.uncertainty
    if drawn is None:
        return []
    gain = f", by {_span(drawn.gain_percent, percent)}" if drawn.gain_percent else ""
    beats = f"the best beats the defaults in {drawn.better_percent:.0f} % of the draws{gain}"
    if drawn.gain_percent and _no_gain(drawn.gain_percent.low, drawn.gain_percent.high):
        beats = "the difference is less than 0.1 %: no gain in goodput"
    return [
        f"with the fit's error, in 90 % of {drawn.draws} draws ({METHODS[drawn.method]}):",
        f"  goodput {_span(drawn.best_goodput_rps)}/s, "
        f"the defaults' {_span(drawn.defaults_goodput_rps)}/s",
        f"  {beats}",
    ]


def _warnings(result: Tuning) -> list[str]:
    """Warnings where the requests were scaled much, or where the windows show too little."""
    lines = [f"warning: {line}" for line in result.scaling.warnings()] if result.scaling else []
    windows, length = result.held_out_windows, result.window_length
    # at twice the load that is served, requests wait for as long as it has lasted
    waits = [(limit, key) for key, limit in result.sla.items() if key.startswith(WAITS)]
    limit_s, key = min(waits, default=(0.0, ""))
    if length and result.keeps_limits and length.seconds < limit_s:
        remedy = "give a longer trace, or a lower --rate"
        if math.ceil(limit_s) <= length.longest_s:
            remedy = f"--window {math.ceil(limit_s)}"
        short = f"windows of {number(length.seconds)} s are shorter than {key}, {number(limit_s)} s"
        late = "even at twice the load that is served, no request waits so long in one"
        lines.append(f"warning: {short}: {late}; {remedy}")
    count = sum(window.requests for window in windows)
    if count < FEW_REQUESTS:
        remedy = "give a longer trace"
        if length and count:
            needed_s = math.ceil(WINDOW_MARGIN * length.seconds * FEW_REQUESTS / count)
            if needed_s <= length.longest_s:
                remedy = f"--window {needed_s} would hold enough"
        basis = f"this rests on only {count} requests in {len(windows)} held-out windows"
        needs = f"a 99th percentile needs {FEW_REQUESTS} or more"
        lines.append(f"warning: {basis}; {needs}: {remedy}")
    return lines


def _no_gain(*gains_percent: float | None) -> bool:
    return all(gain is not None and abs(gain) < NO_GAIN_PERCENT for gain in gains_percent)


def _equal_goodput(result: Tuning) -> list[str]:
    """Why no setting raises the goodput, and how else the best differs."""
    defaults, best = result.defaults_held_out.metrics, result.best_held_out.metrics
    at = f"at {number(result.request_rate_rps)} requests/s"
    if defaults.get("sla_attainment_percent") == best.get("sla_attainment_percent") == 100.0:
        served = f"{at} the defaults also serve every request within all targets"
        lines = [f"nothing to gain: {served}; a higher --rate shows what settings are worth"]
    else:
        lines = [f"nothing to gain: {at} the best and the defaults have the same goodput"]
    if result.keep_defaults:
        lines.append("keep the defaults: nothing better was found on the held-out windows")
    elif "e2e_mean_s" in best and "e2e_mean_s" in defaults:
        times = f"{number(best['e2e_mean_s'])} s, the defaults' {number(defaults['e2e_mean_s'])} s"
        lines.append(f"the best differs only in latency: mean E2E {times}")
    return lines


def _span(interval: Interval, form: Callable[[float], str] = number) -> str:
    return f"{form(interval.low)} to {form(interval.high)}"


def _size_lines(result: Tuning) -> list[str]:
    """How many workers, or servers of each kind, suffice, and what one more of them does; before
    that the recipes that need fewer workers.
    """
    sizing, others = result.sizing, result.alternatives
    if sizing is None:
        return []
    lines = [
        f"before you add workers: {_sibling(sibling)}"
        for sibling in (others.siblings if others else [])
        if sibling.feasible and sibling.workers < sizing.workers
    ]
    settings = "the recipe's settings" if sizing.settings == "recipe" else "the best settings"
    if sizing.kinds:
        counts = ", ".join(f"{kind.workers} of {kind.recipe}" for kind in sizing.kinds)
        tried = sum(row.settings == sizing.settings for row in sizing.rows)
        usd = sum((kind.usd_per_hour or 0.0) * kind.workers for kind in sizing.kinds)
        price, none = "", "no fewer servers keep all limits"
        order = "of equal number: more of the kinds named first"
        if usd:
            price, none = f", {number(usd)} USD an hour", "no cheaper counts keep all limits"
            order = "of equal cost: fewer servers, then more of the kinds named first"
        simulated = f"{tried} were simulated with these settings"
        lines += [
            f"servers needed: {counts}{price}, with {settings}",
            f"  {none}: {simulated}, {sizing.excluded} cannot do the work by the laws",
            f"  {order}",
        ]
        worse = [kind.recipe for kind in sizing.kinds if kind.one_more_keeps is False]
        if worse:
            lines.append(f"  with one more of {' or '.join(worse)} a limit is broken again")
        return lines
    needed = f"workers needed: {sizing.workers}, with {settings}"
    if sizing.one_more_keeps is None:
        return [*lines, f"{needed}; a server is one worker"]
    lines.append(needed)
    if not sizing.one_more_keeps:
        lines.append(f"  with {sizing.workers + 1} a limit is broken again: leave a margin")
    if not (result.engines and traits_of(result.engines[0]).server):
        again = f"workers: {sizing.workers} in the recipe, then profile and fit again, since"
        slow = "workers on one machine slow each other, and the fit holds for its own number"
        lines += [f"  to serve it: {again}", f"  {slow}"]
    return lines


def _alternative_lines(result: Tuning) -> list[str]:
    """The alternatives to the recommended settings, the cheapest change first; may be empty."""
    found = result.alternatives
    if found is None:
        return []
    lines: list[str] = []
    best = next((policy for policy in result.policies if policy.policy == found.best_of_all), None)
    if best is not None:
        state = "keeps all limits" if best.feasible else "also breaks limits"
        goodput = f"{number(best.held_out.metrics.get('goodput_rps', 0.0))} good requests/s"
        lines = [
            f"best of all policies: {best.policy}, which needs engine {' or '.join(best.engines)}; "
            f"by this engine's laws it {state}, {goodput}"
        ]
    if found.feasible:
        kept = [sibling for sibling in found.siblings if sibling.feasible]
        top = max(kept, key=lambda sibling: sibling.up_to_rps or 0.0, default=None)
        own_rps = found.up_to_rps or 0.0
        if top is not None and (top.up_to_rps or 0.0) >= NOTABLE_RATE * own_rps:
            up_to = f"up to {number(top.up_to_rps or 0.0)} requests/s on {_workers(top)}"
            lines.append(
                f"recipe {top.recipe} (engine {top.engine}) keeps all limits {up_to}, "
                f"this one up to {number(own_rps)}{_fit_kind(top)}"
            )
        return lines
    kept = [option for option in found.siblings if option.feasible]
    lines.append(
        f"changes that keep all limits at {number(result.request_rate_rps)} requests/s, simulated:"
    )
    lines += [
        f"  another policy on engine '{result.engines[0]}': --policies {option.policy}"
        for option in found.policies
    ]
    lines += [f"  another engine: {_sibling(option)}" for option in kept]
    for option in found.siblings:
        if not option.feasible:
            worst = max(option.usage, key=lambda key: option.usage[key])
            at = f"{worst} is {share_used(option.usage[worst])}"
            if option.up_to_rps:
                at += f"; it keeps all up to {number(option.up_to_rps)} requests/s"
            recipe = f"with recipe {option.recipe} (engine {option.engine})"
            lines.append(f"  not another engine: {recipe} {at}")
    if found.workers is not None:
        lines.append(f"  more workers: {found.workers} with the best settings")
    if found.up_to_rps is not None:
        most = f"at most {number(found.up_to_rps)} requests/s (--rate)"
        lines.append(f"  fewer requests: {most} with the best settings")
    else:
        none = "the best settings break a limit even at a 64th of the rate"
        lines.append(f"  not fewer requests: {none}")
    policy = result.recommended.policy
    if traits_of(result.engines[0]).server and policy not in BUILT_IN:
        lines.append(f"  not more workers: '{policy}' inside a server is simulated for one server")
    if not (kept or found.policies or found.workers or found.up_to_rps):
        lines.append("  a looser target in the recipe's sla")
    return lines


def _sibling(sibling: Sibling) -> str:
    metrics = sibling.held_out.metrics
    up_to = f"{number(sibling.up_to_rps or 0.0)} requests/s"
    most = f", and all limits up to {up_to}" if sibling.up_to_rps else ""
    return (
        f"recipe {sibling.recipe} (engine {sibling.engine}) keeps the targets on "
        f"{_workers(sibling)}: {number(metrics.get('goodput_rps', 0.0))} good requests/s, "
        f"{number(metrics.get('sla_attainment_percent', 0.0))} % within targets{most}"
        f"{_fit_kind(sibling)}"
    )


def _workers(sibling: Sibling) -> str:
    return "1 worker" if sibling.workers == 1 else f"{sibling.workers} workers"


def _fit_kind(sibling: Sibling) -> str:
    return " (by its shipped analytic fit)" if sibling.analytic else " (by its shipped fit)"
