"""Live runs beside their predictions as Markdown: the table of `online_rebatch`.

Errors are the prediction's, 100 (predicted / measured - 1): as it was made before the replay, and
in hindsight, at the replay's own speed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from toolkit.files.bench import BenchReport

# percent, for the recipe's own policy
TARGETS = {"throughput_rps": 8.0, "ttft_mean_s": 15.0, "e2e_mean_s": 15.0}
COLUMNS = (
    ("throughput_rps", "throughput, requests/s", 1.0, ".2f"),
    ("ttft_mean_s", "mean TTFT, ms", 1e3, ".0f"),
    ("tpot_mean_s", "mean TPOT, ms", 1e3, ".1f"),
    ("e2e_mean_s", "mean E2E, s", 1.0, ".2f"),
    ("goodput_rps", "goodput, requests/s", 1.0, ".2f"),
)


@dataclass(slots=True, frozen=True)
class Outcome:
    """A live run: its report, and the dropped, swapped and paused caches of the replay."""

    policy: str
    load: int  # percent of the capacity
    found: BenchReport
    dropped: Mapping[str, int]
    others_percent: float  # of the CPUs, used by other programs from the server's start to its end

    def error_percent(self, metric: str) -> float:
        """The prediction's error in a metric that both sides have; 0 where both are 0."""
        measured = self.found.measured[metric]
        predicted = self.found.predicted[metric]
        if not measured:
            return 0.0 if not predicted else float("inf")
        return 100.0 * (predicted / measured - 1.0)

    def hindsight_percent(self, metric: str) -> float | None:
        """The error of the prediction at the replay's own speed; None where that is unknown."""
        measured = self.found.measured[metric]
        predicted = self.found.predicted_in_hindsight.get(metric)
        return None if predicted is None or not measured else 100.0 * (predicted / measured - 1.0)

    @property
    def predicted_evictions(self) -> float:
        predicted = self.found.predicted
        return predicted["evicted_percent"] / 100.0 * (predicted["requests"] - predicted["failed"])


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """A line per run."""
    heads = [f"{title}" for _, title, _, _ in COLUMNS]
    heads += ["evictions", "swaps out", "speed: warm-up, replay", "others' CPU %", "failed"]
    head = f"| policy | load % | requests | {' | '.join(heads)} |"
    return [head, "|---|---:|---:|" + "---|" * len(heads), *map(_line, outcomes)]


def _line(one: Outcome) -> str:
    found = one.found
    cells = [
        f"{scale * found.measured[metric]:{form}} /"
        f" {scale * found.predicted[metric]:{form}} ({_errors(one, metric)})"
        for metric, _, scale, form in COLUMNS
    ]
    cells.append(f"{one.dropped['evictions']} / {one.predicted_evictions:.0f}")
    cells.append(f"{one.dropped['swaps_out']} / {found.predicted.get('swaps_out', 0.0):.0f}")
    warm = found.warmup.slowdown if found.warmup else None
    cells.append(f"{_speed(warm)}, {_speed(found.replay_slowdown)}")
    cells.append(f"{one.others_percent:.0f}")
    cells.append(str(sum(found.failures.values())))
    return f"| {one.policy} | {one.load} | {found.requests} | {' | '.join(cells)} |"


def _errors(one: Outcome, metric: str) -> str:
    later = one.hindsight_percent(metric)
    return f"{one.error_percent(metric):+.1f} %" + ("" if later is None else f"; {later:+.1f} %")


def _speed(slowdown: float | None) -> str:
    return f"{slowdown:.2f}" if slowdown else "-"


def medians(outcomes: Sequence[Outcome]) -> list[str]:
    """A line per policy and load: the median error of its repeats, and of each run, where there are
    several.
    """
    heads = " | ".join(f"{metric} ({limit:g} %)" for metric, limit in TARGETS.items())
    lines = [f"| policy | load % | runs | {heads} |", "|---|---:|---:|" + "---|" * len(TARGETS)]
    for policy, load in dict.fromkeys((one.policy, one.load) for one in outcomes):
        own = [one for one in outcomes if (one.policy, one.load) == (policy, load)]
        cells = [
            _spread([one.error_percent(metric) for one in own], limit)
            for metric, limit in TARGETS.items()
        ]
        lines.append(f"| {policy} | {load} | {len(own)} | {' | '.join(cells)} |")
    return lines


def _spread(errors: Sequence[float], limit: float) -> str:
    middle = median(errors)
    text = f"{middle:+.1f} %" if abs(middle) <= limit else f"**{middle:+.1f} %**"
    each = ", ".join(f"{error:+.1f}" for error in errors)
    return text if len(errors) == 1 else f"{text} ({each})"


def verdict(outcomes: Sequence[Outcome]) -> list[str]:
    """How often the aims were met, and the worst miss, per policy."""
    heads = " | ".join(f"{metric} within {limit:g} %" for metric, limit in TARGETS.items())
    lines = [f"| policy | runs | {heads} |", "|---|---:|" + "---|" * len(TARGETS)]
    for policy in dict.fromkeys(one.policy for one in outcomes):
        own = [one for one in outcomes if one.policy == policy]
        cells = [
            _met([one.error_percent(metric) for one in own], limit)
            for metric, limit in TARGETS.items()
        ]
        lines.append(f"| {policy} | {len(own)} | {' | '.join(cells)} |")
        later = [[one.hindsight_percent(metric) for one in own] for metric in TARGETS]
        known = [[error for error in errors if error is not None] for errors in later]
        if all(known):
            cells = [_met(*pair) for pair in zip(known, TARGETS.values(), strict=True)]
            label = f"{policy}, had it known the replay's speed"
            lines.append(f"| {label} | {len(own)} | {' | '.join(cells)} |")
    return lines


def _met(errors: Sequence[float], limit: float) -> str:
    met = sum(abs(error) <= limit for error in errors)
    return f"{met} of {len(errors)}, worst {max(errors, key=abs):+.1f} %"


def goodput(outcomes: Sequence[Outcome]) -> list[str]:
    """Goodput by policy and load: measured / predicted, means over repeats."""
    policies = list(dict.fromkeys(one.policy for one in outcomes))
    lines = ["| load % | " + " | ".join(policies) + " |", "|---:|" + "---|" * len(policies)]
    for load in sorted({one.load for one in outcomes}):
        cells = []
        for policy in policies:
            own = [one.found for one in outcomes if (one.policy, one.load) == (policy, load)]
            sides = ([one.measured for one in own], [one.predicted for one in own])
            means = (fmean(one["goodput_rps"] for one in side) for side in sides)
            cells.append(" / ".join(f"{mean:.2f}" for mean in means) if own else "")
        lines.append(f"| {load} | {' | '.join(cells)} |")
    return lines
