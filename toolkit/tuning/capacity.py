"""Capacity: the highest load at which settings keep every limit on the whole trace.

A load is a rate (the trace's arrivals, stretched or compressed) or a concurrency (a fixed number of
requests at once). All loads have the same requests and the same random draws, so that results
differ by the load alone. A load is kept if every limit is kept; that the queue does not grow with
the trace is one of them (`Task.whole`).

A trace that is over before a queue can grow says nothing of a rate. So at each rate a short one is
repeated (`toolkit.traces.repeat`) until it lasts `LASTING` times the longest target on waiting, and
`SESSIONS` times as long as a session; and what counts of sessions is the rate that was served.

A very long trace is searched on its busiest part first; then few simulations of all of it suffice.

More load is worse, but a simulation is not smooth: a load may be kept although a slightly lower one
is not. So the answer is made monotone: loads at or near fixed shares of it are tried too, and it is
lowered below the lowest load that is broken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from toolkit.errors import InputError
from toolkit.files.tuning import BEHIND, Evaluation
from toolkit.metrics import SERVED, Floats
from toolkit.routing.admission import UNLIMITED
from toolkit.sim.deployment import Workload
from toolkit.traces.repeat import most_repeats, repeated
from toolkit.traces.types import Trace
from toolkit.traces.windows import MAX_RATE_RPS, busiest, mean_rate
from toolkit.tuning.evaluate import Task
from toolkit.tuning.executor import Evaluate

TOLERANCE = 0.01  # of the load: the lowest that breaks a limit is at most this much higher
BELOW = (0.5, 0.9, 0.98)  # shares of the capacity at which a load must be kept
BELOW_LONG = (0.9, 0.98)  # of a very long trace, of which each simulation takes seconds
TOLERANCE_LONG = 0.02
FACTOR_BETWEEN = 1.5  # of all times, and its inverse
TOLERANCE_BETWEEN = 0.04  # of the load: what is between tried loads as near as that is interpolated
BESIDE = 0.5  # of the way from the capacity to a share: a load that near to the share will do
LEAST = 0.001  # of a guess: no lower load is tried while none is kept
GROWTH = (1.25, 2.5)  # the first and the greatest step up or down from a guess
WAITS = ("ttft", "e2e")  # metrics that waiting in a queue adds to
LASTING = 50.0  # times the longest target on waiting that a trace lasts where it is judged
USUAL_WAIT_S = 10.0  # in place of a target on waiting, where there is none
SESSIONS = 20.0  # times the mean length of a session that a trace of them lasts
MOST_LACKING = 0.03  # of the rate at which sessions start: that much less is served at most
MOST_REPEATED = 1_000_000  # requests that a trace is repeated to, at most
LONG = 100_000  # requests: a longer trace is searched on its busiest part first
PART = 50_000  # requests of that part
ROUNDS_AT_ONCE = 10  # requests for each place, where so many are served at once
NEAR = 1.03  # the first step of a good guess


@dataclass(slots=True, frozen=True)
class LoadPoint:
    """Settings at one load. `load`: requests/s, or requests at once."""

    load: float
    evaluation: Evaluation
    kept: bool
    usage: dict[str, float]  # the used share of each limit; above 1 it is broken

    @property
    def served_rps(self) -> float:
        """The rate that is served at a load. Of sessions it is what was counted: their starts come
        at `load`, and their turns when their clients have thought.
        """
        return self.evaluation.metrics.get(SERVED, self.load)


@dataclass(slots=True, frozen=True)
class Capacity:
    """The highest load that keeps every limit, and every load that was tried, in order.

    `broken` is the lowest load above it that was tried; None where the trace is too short to say
    more than "at least". `binding` is the limit that breaks there. `repeats`: how many times the
    trace was repeated at `load`.
    """

    load: float
    broken: float | None
    binding: str
    points: list[LoadPoint] = field(repr=False)
    repeats: int = 1

    @property
    def served_rps(self) -> float:
        """The rate that is served at the capacity."""
        return self.at_capacity.served_rps

    @property
    def steepness(self) -> float:
        """By how many percent more of the limits is used per percent of load where they break; 0
        where none was seen to break.
        """
        if self.broken is None:
            return 0.0
        below, above = [
            max(1e-9, *one.usage.values())
            for one in self.points
            if one.load in (self.load, self.broken)
        ]
        return max(math.log(above / below) / math.log(self.broken / self.load), 0.0)

    @property
    def error_percent(self) -> float:
        """How much higher the capacity may be, by the loads that were tried."""
        return 100.0 * (self.broken / self.load - 1.0) if self.broken else 0.0

    def load_if(self, factor: float) -> float:
        """Return about which load keeps every limit where all times are `factor` as long: what is
        served at a load `factor` times as high, in time that runs slower.
        """
        logs = self._used_logs(factor)
        loads = np.log([one.load for one in self.points])
        return float(np.exp(np.interp(0.0, logs, loads))) / factor

    def served_if(self, factor: float) -> float | None:
        """Return the rate that is served at the capacity where all times are `factor` as long, if
        it lies between two loads that were tried near to each other; None where it does not.

        Nor is it known by these loads where times are much longer or shorter: a trace is judged
        for as many seconds then, in which another number of passes fits, and an overload's queue
        grows for another share of the time.
        """
        above = int(np.searchsorted(self._used_logs(factor), 0.0, side="right"))
        is_near = 1.0 / FACTOR_BETWEEN <= factor <= FACTOR_BETWEEN
        if not (is_near and 0 < above < len(self.points)):
            return None
        low, high = self.points[above - 1 : above + 1]
        if high.load > low.load * (1.0 + TOLERANCE_BETWEEN):
            return None
        return self.load_if(factor) * self.served_rps / self.load

    def _used_logs(self, factor: float) -> Floats:
        """Return the logarithm of the used share of the first limit to break, for each load that
        was tried, where all times are `factor` as long. It never falls.
        """
        used = [
            max(
                share * (factor if name.endswith("_s") else 1.0)
                for name, share in one.usage.items()
            )
            for one in self.points
        ]
        logs: Floats = np.log(np.clip(np.maximum.accumulate(used), 1e-9, 1e9))
        return logs

    @property
    def at_capacity(self) -> LoadPoint:
        """The settings at the capacity."""
        return next(point for point in self.points if point.load == self.load)


@dataclass(slots=True)
class LoadSearch:
    """Finds the capacity of one setting. Each load is simulated once, and loads that do not depend
    on each other are given to `evaluate` together: it may simulate them at the same time.

    Args:
        at: the task at a load.
        evaluate: runs tasks.
        most: the greatest load that can be judged; beyond it, the trace says nothing.
        whole: loads are whole numbers.
        tolerance: of the load, as `TOLERANCE`.
        below: shares of the answer that must be kept. Empty: nothing is checked.
    """

    at: Callable[[float], Task]
    evaluate: Evaluate
    most: float = math.inf
    whole: bool = False
    tolerance: float = TOLERANCE
    below: Sequence[float] = BELOW
    points: dict[float, LoadPoint] = field(default_factory=dict)

    def found(self, guess: float, step: float = GROWTH[0]) -> Capacity | None:
        """Return the capacity, searched from `guess` on; None where no load was found that is kept.

        `step`: the factor between the first two loads, which lie on both sides of the guess.
        """
        self._try(self.first(guess, step))
        while True:
            self._bracket(guess, step)
            self._narrow()
            low, high = self._between()
            if low is None:
                return None
            self._try([share * low for share in self.below if not self._has(share, low)])
            if self._between() == (low, high):  # all of them are kept
                return self._answer(low, high)

    def first(self, guess: float, step: float) -> list[float]:
        """Return the loads that are tried first: two beside the guess, and lower shares of it."""
        beside = math.sqrt(step)
        shares = [share for share in self.below if share < 1.0 / step]
        return [*(share * guess for share in shares), guess / beside, guess * beside]

    def untried(self, loads: Sequence[float]) -> list[float]:
        """Return the nearest loads that can be simulated, without the ones that were."""
        possible = [self._possible(load) for load in loads]
        return [load for load in dict.fromkeys(possible) if load not in self.points]

    def keep(self, load: float, evaluation: Evaluation) -> None:
        """Keep the result of a load."""
        usage = dict(evaluation.outcome.used)
        served_rps = evaluation.metrics.get(SERVED)
        if served_rps is not None and not self.whole:  # turns wait, and so do not pile up
            lacking = (1.0 - served_rps / load) / MOST_LACKING
            usage[BEHIND] = max(usage.get(BEHIND, 0.0), lacking)
        kept = all(share <= 1.0 for share in usage.values())
        self.points[load] = LoadPoint(load, evaluation, kept, usage)

    def _try(self, loads: Sequence[float]) -> None:
        try_together([self], [loads])

    def _has(self, share: float, load: float) -> bool:
        """Return whether a load beside this share of `load` was tried and kept."""
        return any(
            point.kept and abs(point.load - share * load) <= BESIDE * (1.0 - share) * load
            for point in self.points.values()
        )

    def _answer(self, low: float, high: float | None) -> Capacity:
        """Return the capacity with its points."""
        points = sorted(self.points.values(), key=lambda point: point.load)
        nearest = self.points[low if high is None else high].usage
        binding = max(nearest, key=lambda name: nearest[name])
        [*windows] = self.at(low).windows
        repeats = windows[0].trace.repeats if windows else 1
        return Capacity(low, high, binding, points, repeats)

    def _between(self) -> tuple[float | None, float | None]:
        """Return the lowest load that is broken, second, and the highest one below it that is kept;
        None for one that was not found.
        """
        points = self.points.values()
        high = min([point.load for point in points if not point.kept], default=None)
        kept = [point.load for point in points if point.kept]
        return max([load for load in kept if high is None or load < high], default=None), high

    def _bracket(self, guess: float, step: float) -> None:
        """Try loads below or above all that were tried, in steps that grow, until one is kept and
        one is broken, or the least or the greatest possible load was tried.
        """
        while True:
            low, high = self._between()
            if low is None:
                assert high is not None
                if high <= max(LEAST * guess, float(self.whole)):
                    return
                self._try([high / step])
            elif high is None and low < self.most:
                self._try([step * low + int(self.whole)])
            else:
                return
            step = min(step * step, GROWTH[1])

    def _narrow(self) -> None:
        """Try loads between the greatest that is kept and the lowest that is broken, until these
        are as near to each other as the tolerance.

        The next two loads lie on both sides of the place where the first limit breaks by
        interpolation, nearly as far from each other as the tolerance: so they end the search if the
        place is right. If it is not, the next pair cuts the bracket into three parts.
        """
        least = 1.0 + 0.9 * self.tolerance
        is_sure = False
        while True:
            low, high = self._between()
            if low is None or high is None or high <= low * (1.0 + self.tolerance):
                return
            is_sure = not is_sure
            apart = least if is_sure else max(least, (high / low) ** (1.0 / 3.0))
            middle = min(max(self.crossing(low, high), low * apart), high / apart)
            pair = [middle / math.sqrt(apart), middle * math.sqrt(apart)]
            if self.whole:
                pair = [min(max(float(round(load)), low + 1.0), high - 1.0) for load in pair]
            new = [load for load in pair if low < load < high]
            if not new:
                return
            self._try(new)

    def crossing(self, low: float, high: float) -> float:
        """Return the load between a kept and a broken one at which the first limit is used up.

        Where a queue grows, what is used of a limit grows in a straight line with the load: so it
        is the line through the two lowest broken loads. Before there are two, it is the line of the
        logarithms from the kept load to the broken one.
        """
        broken = [load for load, point in self.points.items() if load > high and not point.kept]
        further = self.points[min(broken, default=high)].usage
        loads = []
        for name, above in self.points[high].usage.items():
            below = self.points[low].usage.get(name, 0.0)
            beyond = further.get(name, 0.0)
            if 0.0 < below <= 1.0 < above < beyond < math.inf:
                loads.append(high - (min(broken) - high) * (above - 1.0) / (beyond - above))
            elif 0.0 < below <= 1.0 < above < math.inf:
                share = math.log(1.0 / below) / math.log(above / below)
                loads.append(low * math.exp(share * math.log(high / low)))
        return max(min(loads), low) if loads else math.sqrt(low * high)

    def _possible(self, load: float) -> float:
        """The nearest load that can be simulated."""
        load = min(load, self.most)
        return float(max(round(load), 1)) if self.whole else load


def try_together(searches: Sequence[LoadSearch], loads: Sequence[Sequence[float]]) -> None:
    """Simulate loads of several searches together, `loads[k]` for `searches[k]`. The searches have
    the same `evaluate`.
    """
    wanted = [
        (search, load)
        for search, own in zip(searches, loads, strict=True)
        for load in search.untried(own)
    ]
    done = searches[0].evaluate([search.at(load) for search, load in wanted])
    for (search, load), evaluation in zip(wanted, done, strict=True):
        search.keep(load, evaluation)


def at_rate(task: Task, rate_rps: float) -> Task:
    """The task with its only window's arrivals at this mean rate, repeated as often as it takes to
    last long enough.

    Raises `InputError` where that takes more than `MOST_REPEATED` requests.
    """
    [workload] = task.windows
    most_rps = most_rate_rps(task)
    if rate_rps > most_rps:
        raise InputError(
            f"{workload.trace.source}: at {rate_rps:g} requests/s it would have to be repeated to "
            f"more than {MOST_REPEATED:,} requests to last {judged_s(task):,.4g} s",
            f"give a rate of at most {most_rps:.4g} requests/s, or shorter targets",
        )
    stretch = own_rate_rps(task) / rate_rps
    again = repeated_to(task, math.ceil(rate_rps * judged_s(task)))
    scaled = replace(again, arrival_s=again.arrival_s * stretch)
    label = f"{task.label}, {rate_rps:.9g} requests/s"
    return replace(task, windows=[replace(workload, trace=scaled)], own_rps=0.0, label=label)


def own_rate_rps(task: Task) -> float:
    """The mean rate of the trace that the only window is, or is a part of."""
    [workload] = task.windows
    return task.own_rps or mean_rate(workload.trace)


def judged_s(task: Task) -> float:
    """How long a trace lasts at least where a rate is judged, in seconds."""
    [workload] = task.windows
    wait_s, _ = longest_wait_s(task.sla)
    least_s = LASTING * (wait_s or USUAL_WAIT_S)
    sessions = workload.trace.sessions
    if sessions is None or not workload.closed_loop or workload.concurrency:
        return least_s
    length_s = float(sessions.think_s.sum()) / int((sessions.previous < 0).sum())
    return max(least_s, SESSIONS * length_s)


def lasts_long_enough(trace: Trace, wait_s: float) -> bool:
    """Whether a trace lasts long enough to be judged by a target on waiting."""
    return float(trace.arrival_s[-1]) >= LASTING * wait_s * (1.0 - 1.0 / len(trace))


def repeated_to(task: Task, requests: int) -> Trace:
    """Return the only window, repeated to `requests` requests, or as often as is possible."""
    [workload] = task.windows
    trace = workload.trace
    times = min(math.ceil(requests / len(trace)), most_repeats(trace))
    return repeated(trace, max(times, 1), task.deployment.recipe.tune.seed)


def at_concurrency(task: Task, count: int, served_rps: float = 0.0) -> Task:
    """Return the task with this number of requests at once: the next one starts when one ends. The
    trace is repeated until each place has `ROUNDS_AT_ONCE` of them and, at the rate that is served
    at most, it lasts as long as where a rate is judged.
    """
    requests = max(ROUNDS_AT_ONCE * count, math.ceil(served_rps * judged_s(task)))
    again = repeated_to(task, min(requests, MOST_REPEATED))
    return replace(
        task, windows=[Workload(again, concurrency=count)], label=f"{task.label}, {count} at once"
    )


def longest_wait_s(sla: Mapping[str, float]) -> tuple[float, str]:
    """The greatest limit of a target that waiting adds to, in seconds, and its name; 0 without."""
    waits = [(limit, key) for key, limit in sla.items() if key.split("_")[0] in WAITS]
    return max(waits, default=(0.0, ""))


def most_rate_rps(task: Task) -> float:
    """The greatest rate at which the trace can be judged: at more, it would have to be repeated to
    more than `MOST_REPEATED` requests.
    """
    [workload] = task.windows
    trace = workload.trace
    most = max(len(trace), min(MOST_REPEATED, len(trace) * most_repeats(trace)))
    return min(most / judged_s(task), MAX_RATE_RPS)


def backlog_rate_rps(task: Task, evaluate: Evaluate) -> float:
    """Return how many requests per second are let in where all of the trace's arrive at once, from
    the median first token to that of the 95th percentile: before, places are free, and at the end
    none waits for them. It is at least what is served of all, and at most `GROWTH` as much.
    """
    [workload] = task.windows
    trace = workload.trace
    waiting = replace(trace, arrival_s=np.zeros(len(trace)), priority=None)
    backlog = replace(workload, trace=waiting, closed_loop=False)
    deployment = replace(task.deployment, admission=UNLIMITED)
    label = f"{task.label}, a backlog"
    [done] = evaluate([replace(task, deployment=deployment, windows=[backlog], label=label)])
    times = done.metrics
    let_in_rps = 0.45 * len(trace) / max(times["ttft_p95_s"] - times["ttft_p50_s"], 1e-9)
    return float(np.clip(let_in_rps, times["throughput_rps"], GROWTH[0] * times["throughput_rps"]))


def rate_capacity(
    task: Task, evaluate: Evaluate, tried: list[LoadPoint] | None = None
) -> Capacity | None:
    """The highest rate at which the settings keep every limit; None where none was found.

    The only window of `task` is the trace to be judged. `tried` gets every rate that was tried.
    Raises `InputError` where the trace has no rate.
    """
    search = _rate_search(task, evaluate)
    part = busiest_part(task)
    # a queue grows from that rate on, and reaches the longest target at a little more
    guess_rps = backlog_rate_rps(part or task, evaluate) * (1.0 + 0.75 / LASTING)
    if part is not None and guess_rps:
        near = _rate_search(part, evaluate, below=()).found(guess_rps, NEAR)
        guess_rps = near.load if near else 0.0
        search = _rate_search(task, evaluate, TOLERANCE_LONG, BELOW_LONG)
    found = search.found(guess_rps, 1.0 + 0.9 * search.tolerance) if guess_rps else None
    if tried is not None:
        tried += search.points.values()
    return found


def rates_near(
    tasks: Sequence[Task], evaluate: Evaluate, guesses: Sequence[float], steepness: float
) -> list[float | None]:
    """Return about which rate is served at the capacity of each task, from a good guess of each;
    None where no rate was found that is kept.

    Where the guess uses the limits up to `TOLERANCE_LONG` of the rate, by the `steepness` of the
    deployment (see `Capacity`), it decides alone. Else the rate is interpolated between one that is
    kept and one that is not, at most `TOLERANCE_LONG` of it higher.
    """
    searches = [_rate_search(task, evaluate, TOLERANCE_LONG, ()) for task in tasks]
    try_together(searches, [[guess_rps] for guess_rps in guesses])
    rates: list[float | None] = []
    for search, guess_rps in zip(searches, guesses, strict=True):
        [point] = search.points.values()
        beyond = math.log(max(1e-9, *point.usage.values()))
        if abs(beyond) <= steepness * TOLERANCE_LONG:
            rates.append(point.served_rps * math.exp(-beyond / steepness))
            continue
        found = search.found(guess_rps, 1.0 + 0.9 * TOLERANCE_LONG)
        rate = found.served_rps if found else None
        if rate and found and found.broken is not None:
            rate *= search.crossing(found.load, found.broken) / found.load
        rates.append(rate)
    return rates


def busiest_part(task: Task) -> Task | None:
    """The busiest part of a long trace, with the whole trace's rates; None of a shorter one."""
    [workload] = task.windows
    trace = workload.trace
    if len(trace) <= LONG or mean_rate(trace) == 0.0:
        return None
    part = replace(workload, trace=busiest(trace, PART).trace)
    label = f"{task.label}, the busiest {PART:,}"
    return replace(task, windows=[part], label=label, own_rps=own_rate_rps(task))


def _rate_search(
    task: Task,
    evaluate: Evaluate,
    tolerance: float = TOLERANCE,
    below: Sequence[float] = BELOW,
) -> LoadSearch:
    """A search among rates. `InputError` where the trace has no rate that could be changed."""
    [workload] = task.windows
    if mean_rate(workload.trace) == 0.0:
        raise InputError(
            f"{workload.trace.source}: its requests arrive at once, so there is no rate to change",
            "draw arrival times first: llmctl trace convert IN OUT --draw-rate REQUESTS_PER_S",
        )
    most_rps = most_rate_rps(task)
    return LoadSearch(partial(at_rate, task), evaluate, most_rps, tolerance=tolerance, below=below)
