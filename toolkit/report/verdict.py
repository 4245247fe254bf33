"""The conclusion of a tuning in words: for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Callable

from toolkit.files.tuning import Interval, Sizing, Tuning
from toolkit.report.alternatives import alternative_lines, sizing_lines
from toolkit.units import number, percent

METHODS = {
    "profile": "profile resampled",
    "held-out errors": "no profile: laws scaled",
}


def verdict(result: Tuning) -> list[str]:
    """The conclusion, a line each."""
    lines = [*sizing_lines(result), *_size_lines(result.sizing)]
    if not any(trial.feasible for trial in result.trials):
        lines += _nothing_fits(result)
    elif result.binding_sla and result.binding_ratio is not None:
        state = "missed" if result.binding_ratio > 1 else "met"
        lines.append(
            f"the target that binds: {result.binding_sla}, {state}, at {result.binding_ratio:.0%} of its limit"
        )
    if result.keep_defaults:
        lines.append("keep the defaults: nothing better was found on the held-out windows")
    elif result.gain_percent is not None:
        lines.append(f"gain over the defaults, held out: {result.gain_percent:+.1f} % goodput")
    else:
        lines.append("gain over the defaults, held out: from no goodput at all")
    lines += alternative_lines(result)
    lines += _how_sure(result)
    refused = next((one.refusal for one in result.policies if one.policy == result.best_held_out.policy), None)
    if refused and not result.keep_defaults:
        lines.append(f"`serve` cannot start it: {refused}")
    return lines


def _nothing_fits(result: Tuning) -> list[str]:
    broken = {key: share for key, share in result.usage.items() if share > 1}
    worst = max(broken or result.usage, key=lambda key: result.usage[key], default="")
    at = f"; {worst} binds: held out, the best is at {result.usage[worst]:.0%} of its limit" if worst else ""
    lines = [f"no trial keeps all limits{at}"]
    if result.alternatives is None:
        lines.append("remedy: fewer requests (--rate), more workers, or a looser target in the recipe's sla")
    return lines


def _how_sure(result: Tuning) -> list[str]:
    drawn = result.uncertainty
    if drawn is None:
        return []
    gain = f", by {_span(drawn.gain_percent, percent)}" if drawn.gain_percent else ""
    return [
        f"with the fit's error, in 90 % of {drawn.draws} draws ({METHODS[drawn.method]}):",
        f"  goodput {_span(drawn.best_goodput_rps)}/s, the defaults' {_span(drawn.defaults_goodput_rps)}/s",
        f"  the best beats the defaults in {drawn.better_percent:.0f} % of the draws{gain}",
    ]


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
    lines.append(f"  to serve it: workers: {sizing.workers} in the recipe, then profile and fit again, since")
    return [*lines, "  workers side by side slow each other; here as many as the fit was made with"]
