"""Cutting a trace into windows of time: some to search on, others, which the search never sees, for the verdict."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from toolkit.errors import InputError
from toolkit.traces.types import Trace


@dataclass(slots=True, frozen=True)
class Window:
    """A stretch [start_s, end_s) of a trace; the times in `trace` count from start_s."""

    start_s: float
    end_s: float
    trace: Trace


def cut(trace: Trace, start_s: float, end_s: float) -> Trace:
    """The requests that arrive in [start_s, end_s), their times counted from start_s.

    Raises InputError where there is none.
    """
    first, last = np.searchsorted(trace.arrival_s, [start_s, end_s], side="left")
    if first >= last:
        raise InputError(
            f"{trace.source}: no request arrives in {_span(start_s, end_s)}",
            f"its {len(trace):,} requests arrive from 0 s to {trace.arrival_s[-1]:.6g} s",
        )
    kept = slice(int(first), int(last))
    return replace(
        trace,
        arrival_s=trace.arrival_s[kept] - start_s,
        prompt_tokens=trace.prompt_tokens[kept],
        output_tokens=trace.output_tokens[kept],
        max_tokens=trace.max_tokens[kept],
        priority=trace.prioritised(kept),
        notes=(*trace.notes, f"cut to {_span(start_s, end_s)}: {last - first:,} requests"),
    )


def _span(start_s: float, end_s: float) -> str:
    return f"{start_s:.6g} s .. {end_s:.6g} s" if end_s < float("inf") else f"{start_s:.6g} s .. its end"


def split_windows(
    trace: Trace, window_s: float, search: int, held_out: int, seed: int = 0
) -> tuple[list[Window], list[Window]]:
    """`search` and `held_out` windows of `window_s` each, no two of which overlap, spread evenly over the trace.

    The trace is divided into as many equal parts as there are windows; each part holds one, at a place drawn with
    `seed`, and the two kinds take turns as evenly as their numbers allow. Both lists are in order of time.
    Raises InputError where the trace is too short, or a window would hold no request.
    """
    count = search + held_out
    duration_s = float(trace.arrival_s[-1])
    if not window_s > 0 or search < 0 or held_out < 0 or count == 0:
        raise InputError(f"{search} + {held_out} windows of {window_s:g} s cannot be cut", "give positive numbers")
    part_s = duration_s / count
    if window_s > part_s:
        longest_s = math.floor(part_s * 100) / 100
        raise InputError(
            f"{trace.source}: lasts {duration_s:.6g} s, too short for {search} + {held_out} windows of {window_s:g} s",
            f"windows of at most {longest_s:g} s, or {int(duration_s / window_s)} windows in all, would fit",
        )
    rng = np.random.default_rng(seed)
    edges = np.linspace(0.0, duration_s, count + 1)
    starts = edges[:-1] + rng.random(count) * (part_s - window_s)
    ends = np.minimum(starts + window_s, edges[1:])  # rounding must not let two windows overlap
    windows = [Window(a, b, cut(trace, a, b)) for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
    turns = np.diff((np.arange(count + 1) * search + rng.integers(count)) // count) > 0
    return (
        [window for window, searched in zip(windows, turns, strict=True) if searched],
        [window for window, searched in zip(windows, turns, strict=True) if not searched],
    )
