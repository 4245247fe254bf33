"""The rate of a replay, by the machine's present speed, and its part of a trace, which a tuning's
search did not see.
"""

from __future__ import annotations

from collections.abc import Callable

from toolkit.errors import InputError
from toolkit.files.bench import SAME_RATE
from toolkit.files.plan import Plan
from toolkit.files.tuning import Tuning
from toolkit.traces.types import Trace
from toolkit.traces.windows import mean_rate

LEAST = 0.5  # the asked rate is replayed if it is at least this share of what the plan keeps
ALIKE = 1.4  # a machine is as fast at rates that differ by no larger factor
TRIES = 4  # measurements of the speed, each at the rate that the one before allows


def find_rate(
    asked_rps: float, load: float, keeps: Callable[[float], tuple[float, float | None]]
) -> tuple[float, float]:
    """Return `load` times the rate that a plan keeps at the machine's present speed, or the asked
    rate if that is no more and not far less; and how many times as long as fitted batches take.

    A machine that others use is slower under load. So the speed is measured again until that was
    about at the rate that it allows. Where others come and go, so that this does not settle, the
    slowest speed decides.

    Args:
        keeps: serves requests at a rate; returns the slowdown, and the rate that the plan keeps at
            that speed. None: no rate; the rate is then slowed as the batches are.
    """
    rate_rps = asked_rps
    seen: list[tuple[float, float]] = []  # allowed rates with their slowdowns
    for _ in range(TRIES):
        tried_rps = rate_rps
        slowdown, found_rps = keeps(tried_rps)
        capacity_rps = found_rps or asked_rps / max(slowdown, 1.0)
        rate_rps = load * capacity_rps
        if LEAST * capacity_rps <= asked_rps <= rate_rps:
            rate_rps = asked_rps
        seen.append((rate_rps, slowdown))
        if 1.0 / ALIKE <= rate_rps / tried_rps <= ALIKE:
            return rate_rps, slowdown
    return min(seen)


def held_out_window(tuning: Tuning, trace: Trace) -> tuple[float, float]:
    """Return the start and the duration, in seconds of the scaled `trace`, of the first window that
    the search of a tuning did not see. At another rate it has the same requests.

    `tune` repeats a short trace: the window is then the same part of the trace itself. Raises
    InputError for a tuning without such windows, or at a fixed concurrency.
    """
    if tuning.concurrency or not tuning.held_out_windows:
        raise InputError(
            "--tuning: it has no window of a rate that its search did not see",
            "leave it out; `llmctl trace convert --start` cuts a part",
        )
    window = tuning.held_out_windows[0]
    slower = tuning.request_rate_rps / mean_rate(trace)
    start_s = slower * window.start_s
    lasts_s = slower * (window.end_s - window.start_s)
    whole_s = float(trace.arrival_s[-1])
    if start_s + lasts_s > whole_s:
        start_s = max(min(start_s % whole_s, whole_s - lasts_s), 0.0)
    return start_s, lasts_s


def rate_notes(plan: Plan | None, trace: Trace) -> list[str]:
    """Return a line where the plan was tuned and predicted for another rate; else none."""
    if plan is None or plan.workload is None:
        return []
    tuned_rps = plan.workload.request_rate_rps
    rate_rps = mean_rate(trace)
    if abs(rate_rps / tuned_rps - 1.0) < SAME_RATE:
        return []
    rates = f"the plan was tuned for {tuned_rps:.4g} requests/s, and this replays {rate_rps:.4g}"
    return [f"{rates}; for the tuned rate: --rate {tuned_rps:.6g}"]
