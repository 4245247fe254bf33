"""Cutting a trace into windows of time: some to search on, others, which the search never sees, for the verdict."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from toolkit.errors import InputError
from toolkit.traces.scale import mean_rate
from toolkit.traces.types import Trace

COVERED = 0.8  # share of the trace that its windows take where their length is not given or does not fit


class EmptyWindowError(InputError):
    """No request arrives in a window."""


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


@dataclass(slots=True, frozen=True)
class Windows:
    """Windows of one trace. Each list is in order of time; all windows last `seconds`.

    `trace` is the whole, with a note where the windows are not as long as was wished; `longest_s`
    is how long windows can be made with gaps between them.
    """

    trace: Trace
    search: list[Window]
    held_out: list[Window]
    seconds: float
    wished_s: float | None
    longest_s: float


def fit_windows(trace: Trace, wished_s: float | None, search: int, held_out: int, seed: int = 0) -> Windows:
    """Windows as long as wished where the trace allows it, else as long as fits with gaps.

    A trace does not allow windows that it is too short for, nor windows without requests. Without
    a wish they are as long as fits with gaps, too. Raises `InputError` for a wish that is not
    positive, a trace whose requests all arrive at once, and `EmptyWindowError` for one with so few
    requests that even such windows hold none.
    """
    duration_s = float(trace.arrival_s[-1])
    if duration_s == 0:
        raise InputError(
            f"{trace.source}: all {len(trace)} requests arrive at once, so it cannot be cut into windows",
            "draw arrival times first: llmctl trace convert IN OUT --draw-rate REQUESTS_PER_S",
        )
    part_s = duration_s / max(search + held_out, 1)
    longest_s = COVERED * part_s

    def made(seconds: float, why: str = "") -> Windows:
        whole = trace
        if why and wished_s is not None:
            note = f"windows of {seconds:,.3g} s instead of {wished_s:,g} s: {trace.source} {why}"
            whole = replace(trace, notes=(*trace.notes, note))
        windows = split_windows(whole, seconds, search, held_out, seed)
        return Windows(whole, *windows, seconds, wished_s, longest_s)

    if wished_s is None:
        return made(longest_s)
    if wished_s > part_s:
        lasts = f"lasts {duration_s:,.4g} s at {mean_rate(trace):.3g} requests/s"
        return made(longest_s, f"{lasts}, for {search + held_out} windows")
    try:
        return made(wished_s)
    except EmptyWindowError:
        return made(longest_s, f"has no request in one of these at {mean_rate(trace):.3g} requests/s")


def split_windows(
    trace: Trace, window_s: float, search: int, held_out: int, seed: int = 0
) -> tuple[list[Window], list[Window]]:
    """`search` and `held_out` windows of `window_s` each, no two of which overlap, spread evenly over the trace.

    The trace is divided into as many equal parts as there are windows; each part holds one, at a place drawn with
    `seed`, and the two kinds take turns as evenly as their numbers allow. Both lists are in order of time.
    Raises `InputError` where the windows are longer than these parts, `EmptyWindowError` where one holds no request.
    """
    count = search + held_out
    duration_s = float(trace.arrival_s[-1])
    if not window_s > 0 or search < 0 or held_out < 0 or count == 0:
        raise InputError(f"{search} + {held_out} windows of {window_s:g} s cannot be cut", "give positive numbers")
    part_s = duration_s / count
    if window_s > part_s:
        raise InputError(
            f"{trace.source}: lasts {duration_s:.6g} s, too short for {search} + {held_out} windows of {window_s:g} s",
            f"windows of at most {part_s:.4g} s, or {int(duration_s / window_s)} windows in all, would fit",
        )
    rng = np.random.default_rng(seed)
    edges = np.linspace(0.0, duration_s, count + 1)
    starts = edges[:-1] + rng.random(count) * (part_s - window_s)
    ends = np.minimum(starts + window_s, edges[1:])  # rounding must not let two windows overlap
    held = np.searchsorted(trace.arrival_s, ends) - np.searchsorted(trace.arrival_s, starts)
    if not held.all():
        empty = int(np.flatnonzero(held == 0)[0])
        raise EmptyWindowError(
            f"{trace.source}: no request arrives in {_span(starts[empty], ends[empty])}, one of "
            f"{search} + {held_out} windows of {window_s:.3g} s ({len(trace):,} requests in {duration_s:,.6g} s)",
            "give a longer trace, longer windows (--window), or fewer windows",
        )
    windows = [Window(a, b, cut(trace, a, b)) for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
    turns = np.diff((np.arange(count + 1) * search + rng.integers(count)) // count) > 0
    return (
        [window for window, searched in zip(windows, turns, strict=True) if searched],
        [window for window, searched in zip(windows, turns, strict=True) if not searched],
    )
