"""More requests in some hours of a trace: tomorrow's traffic, made of today's.

`Growth.parsed` reads `9-17=1.5`; `grown` adds requests. The requests of the trace stay as they are.
An added request is a copy of a random one of these hours, so that lengths keep their distribution.
It arrives at a random time between the `NEIGHBOURS` requests before that one and as many after it,
so that the load of these hours keeps its shape.

A session is copied whole. What only one session's prompts hold gets new block ids in its copy: the
copy stands for another user, who shares with others what sessions share, and not the rest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import InputError
from toolkit.traces.types import SharedBlocks, Trace

NEIGHBOURS = 20
MOST = 100.0  # times as many requests
DAY_H = 24.0
HOUR_S = 3600.0
EXAMPLE = "for example --grow 9-17=1.5"
NUMBER = r"\d+(?:\.\d+)?"

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Growth:
    """Hours with `factor` times as many requests, from `start_h` to `end_h` (excluded)."""

    text: str
    start_h: float
    end_h: float
    factor: float

    @classmethod
    def parsed(cls, text: str) -> Growth:
        """Parse `FROM-TO=FACTOR`. Raises `InputError` if it is something else, or impossible."""
        found = re.fullmatch(rf"({NUMBER})-({NUMBER})=({NUMBER})", text)
        if not found:
            raise InputError(f"--grow {text}: it is not HOURS=FACTOR", EXAMPLE)
        start_h, end_h, factor = map(float, found.groups())
        if start_h == end_h:
            raise InputError(f"--grow {text}: from {start_h:g} to {end_h:g} is no time", EXAMPLE)
        if not 1.0 < factor <= MOST:
            problem = f"--grow {text}: the factor {factor:g} is not above 1 and at most {MOST:g}"
            raise InputError(problem, "requests are only added; for fewer: --rate")
        return cls(text, start_h, end_h, factor)

    @property
    def hours(self) -> str:
        """The hours, as they were typed."""
        return self.text.partition("=")[0]

    def stretch_of(self, hours: Floats, *, daily: bool) -> Ints:
        """Return for each of these times, which rise, the number of the stretch of hours that it is
        in; -1: none.

        Args:
            hours: on one clock.
            daily: the hours are of each day, over midnight where the end is earlier.

        Raises `InputError` if this clock does not have these hours.
        """
        found = np.full(len(hours), -1)
        if not daily:
            if self.start_h > self.end_h:
                problem = f"--grow {self.text}: hour {self.end_h:g} is before {self.start_h:g}"
                hint = "the trace has no dates: hours count from its start, the earlier first"
                raise InputError(problem, hint)
            found[(hours >= self.start_h) & (hours < self.end_h)] = 0
            return found
        latest = max(self.start_h, self.end_h)
        if latest > DAY_H:
            problem = f"--grow {self.text}: {latest:g} is no hour of a day; the limit is {DAY_H:g}"
            raise InputError(problem, "over midnight: --grow 22-6=1.5")
        lasts_h = (self.end_h - self.start_h) % DAY_H or DAY_H
        day, since_h = np.divmod(hours - self.start_h, DAY_H)
        inside = since_h < lasts_h
        found[inside] = (day - day[0])[inside]
        return found


def grown(
    trace: Trace, growths: Sequence[Growth], clock_s: float | None, seed: int
) -> tuple[Trace, int]:
    """Return the trace with more requests in some hours, and how many were added.

    Args:
        clock_s: the time of the first request, in seconds since a midnight; None: it is not known,
            and hours count from that request.
        seed: of the choice of requests and of their times.

    Raises `InputError` if hours overlap, hold no request, or get none, or the trace has no times.
    """
    if not trace.arrival_s[-1]:
        raise InputError(
            f"{trace.source}: all {len(trace)} requests arrive at once, so there are no hours",
            "draw arrival times, too: --draw-rate REQUESTS_PER_S",
        )
    rng = np.random.default_rng(seed)
    first = np.arange(len(trace)) if trace.sessions is None else trace.sessions.first
    begins = np.flatnonzero(first == np.arange(len(trace)))  # of sessions, or of single requests
    hours = (trace.arrival_s[begins] + (clock_s or 0.0)) / HOUR_S
    taken = np.full(len(begins), -1)  # by which growth
    what = "requests" if trace.sessions is None else "sessions"
    clock = "since the start" if clock_s is None else "of the day"
    chosen = [np.empty(0, dtype=np.int64)]
    shifts = [np.empty(0)]
    notes = []
    for number, growth in enumerate(growths):
        stretch = growth.stretch_of(hours, daily=clock_s is not None)
        there = np.flatnonzero(stretch >= 0)
        _refuse_hours(growth, growths, there, taken, _when(trace, clock_s))
        taken[there] = number
        count = len(there)
        extra = round((growth.factor - 1.0) * count)
        if not extra:
            problem = f"--grow {growth.text}: it adds nothing to the {count} {what} there"
            raise InputError(problem, "give a larger factor, or more hours")
        rest = rng.choice(count, extra % count, replace=False)
        places = np.concatenate([np.repeat(np.arange(count), extra // count), rest])
        arrivals_s = trace.arrival_s[begins[there]]
        shifts.append(_drawn(arrivals_s, stretch[there], places, rng) - arrivals_s[places])
        chosen.append(begins[there][places])
        notes.append(
            f"{extra:,} {what} added to the {count:,} of hours {growth.hours} {clock}: copies of "
            f"random ones there, at other times (seed {seed})"
        )
    rows, copy = _rows_of(first, np.concatenate(chosen))
    more = _with_copies(trace, first, rows, copy, np.concatenate(shifts))
    notes.append(f"{len(rows):,} requests added to {len(trace):,}, which are unchanged")
    return replace(more, notes=(*trace.notes, *notes)), len(rows)


def _refuse_hours(
    growth: Growth, growths: Sequence[Growth], there: Ints, taken: Ints, when: str
) -> None:
    """Raise `InputError` where no request is in these hours, or some are in the hours of another
    growth; `taken` has the number of the growth of each request, or -1.
    """
    if not len(there):
        problem = f"--grow {growth.text}: no request arrives in these hours"
        raise InputError(problem, f"requests arrive {when}")
    other = int(taken[there].max())
    if other >= 0:
        problem = f"--grow {growth.text}: these hours and those of {growths[other].text} overlap"
        raise InputError(problem, "give each hour once")


def _drawn(arrivals_s: Floats, stretch: Ints, places: Ints, rng: np.random.Generator) -> Floats:
    """New times for copies of the requests at `places`: each between the arrivals of its neighbours
    in its own stretch of hours.
    """
    first = np.searchsorted(stretch, stretch[places], side="left")
    last = np.searchsorted(stretch, stretch[places], side="right") - 1
    low_s = arrivals_s[np.maximum(places - NEIGHBOURS, first)]
    high_s = arrivals_s[np.minimum(places + NEIGHBOURS, last)]
    return np.asarray(rng.uniform(low_s, high_s))


def _rows_of(first: Ints, chosen: Ints) -> tuple[Ints, Ints]:
    """The rows of the sessions that begin at the rows `chosen`, one session after another, and for
    each row which of `chosen` it is of.
    """
    order = np.argsort(first, kind="stable")
    starts = np.searchsorted(first[order], chosen, side="left")
    counts = np.searchsorted(first[order], chosen, side="right") - starts
    copy = np.repeat(np.arange(len(chosen)), counts)
    within = np.arange(len(copy)) - np.repeat(np.cumsum(counts) - counts, counts)
    return order[starts[copy] + within], copy


def _with_copies(trace: Trace, first: Ints, rows: Ints, copy: Ints, shift_s: Floats) -> Trace:
    """The trace with copies of `rows`, each `shift_s` later, by the number of its `copy`."""
    both = trace.take(np.concatenate([np.arange(len(trace)), rows]))
    arrival_s = np.concatenate([trace.arrival_s, trace.arrival_s[rows] + shift_s[copy]])
    both = replace(both, arrival_s=arrival_s)
    if trace.shared is not None and both.shared is not None:
        both = replace(both, shared=_renamed(trace.shared, both.shared, first, copy))
    return both.take(np.argsort(arrival_s, kind="stable"))


def _renamed(shared: SharedBlocks, both: SharedBlocks, first: Ints, copy: Ints) -> SharedBlocks:
    """Return the blocks; a block that only one session of the trace holds has a new id in each
    copy.
    """
    session = np.repeat(first, shared.counts)
    known, place = np.unique(shared.ids, return_inverse=True)
    lowest = np.full(len(known), len(first), dtype=np.int64)
    highest = np.full(len(known), -1, dtype=np.int64)
    np.minimum.at(lowest, place, session)
    np.maximum.at(highest, place, session)
    ids = both.ids.copy()
    added = ids[len(shared.ids) :]
    here = np.searchsorted(known, added)
    own = (lowest == highest)[here]
    of_copy = np.repeat(copy, both.counts[len(first) :])
    _, fresh = np.unique(of_copy[own] * len(known) + here[own], return_inverse=True)
    added[own] = known.max() + 1 + fresh
    return replace(both, ids=ids)


def _when(trace: Trace, clock_s: float | None) -> str:
    """When the requests of a trace arrive, in hours."""
    last_h = float(trace.arrival_s[-1]) / HOUR_S
    if clock_s is None:
        return f"from hour 0 to {last_h:.3g} since the start (the trace has no dates)"
    first_h = clock_s / HOUR_S
    if last_h >= DAY_H:
        return "at all hours"
    return f"from hour {first_h % DAY_H:.4g} to {(first_h + last_h) % DAY_H:.4g} of the day"
