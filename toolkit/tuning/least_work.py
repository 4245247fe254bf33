"""Counts of servers that cannot keep the limits, told by their laws without a simulation.

A percentile target, or an attainment, says that at least so many requests end by a deadline. Each
needs passes, the passes of a server do not overlap, and the fitted law gives the least that a
request adds to the passes that it is in. So the least work of the cheapest so many requests must
fit into the time from the first arrival to the last deadline, on all servers together:

- A pass takes its constant, whatever is in it. Parts of it may be charged to the rows (a pass has
  at most `max_num_seqs`), to the new tokens, and to the tokens in memory (a cache has so many):
  each division gives a lower bound (`SHARES`).
- A preempted request computes at least what it would have without, except that a chunk that finds
  its own blocks may be cheaper than the decode step that it replaces. Unless the cache has room for
  the most rows at their longest, cached tokens are charged by the cheapest way to the next token.
- Where prompts share something, one token of each is charged, since the rest may be found. In a
  closed loop of sessions deadlines are not known before, and nothing is told.
- For kinds of servers, each second is weighed by what the kind could do with it alone, and each
  request is charged on the kind where that is least: the bound of a linear program by a feasible
  solution of its dual.

Nothing is inferred from one simulated count for another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toolkit.estimators.steps import StepLaw
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.paged_engine import PagedEngine
from toolkit.traces.types import Trace
from toolkit.tuning.evaluate import CandidateLimits, EvaluationSetup

Floats = NDArray[np.float64]
GAPS = ("tpot", "mtpot", "itl")  # metrics that bound the time from the first to the last token
# How a pass's constant is charged: to rows, to new tokens, to tokens in memory.
SHARES = ((1.0, 0.0, 0.0), (0.5, 0.5, 0.0), (0.0, 1.0, 0.0), (0.0, 0.5, 0.5), (0.0, 0.0, 1.0))
ROUNDING = 1e-9  # relative: sums of floats do not exclude what is exactly possible


@dataclass(frozen=True, slots=True)
class Promised:
    """At least `share` of the served requests, less `slack` of them, end by their deadlines.

    `span_s`: the seconds from each window's first arrival to its last deadline, summed.
    `of_all`: the share is of all requests, refused ones too.
    """

    share: float
    slack: float
    span_s: float
    of_all: bool = False

    def count(self, served: int, requests: int) -> int:
        """How many requests that is at least, if at least `served` are served."""
        of = requests if self.of_all else served
        return max(0, math.ceil(self.share * of * (1.0 - ROUNDING) - self.slack))


class LeastWork:
    """Whether counts of servers could keep the limits of a setup, as far as the laws tell.

    Args:
        setup: its world has all kinds; its counts of them do not matter.
        policy: the flags of the first kind, and of those without flags of their own.
        limits: the limits besides the latency targets.
    """

    def __init__(self, setup: EvaluationSetup, policy: VllmPolicy, limits: CandidateLimits) -> None:
        windows, world = setup.windows, setup.world
        self._kinds = [(kind.engine(), kind.flags or policy) for kind in world.kinds]
        known = not any(window.sessions is not None for window in windows)
        self._promises = (
            _promises(windows, setup.sla, limits, world.max_new_tokens) if known else []
        )
        requests = [_requests(window, world.max_new_tokens) for window in windows]
        self._prompt, self._output, self._longest = map(np.concatenate, zip(*requests, strict=True))
        self._finds = any(window.shared is not None for window in windows)
        self._refused = (limits.max_refused_percent or 0.0) / 100.0  # without it none are
        self._needs: dict[tuple[bool, ...], list[tuple[Floats, float]]] = {}

    def allows(self, counts: Sequence[int]) -> bool:
        """False where no schedule on so many servers of each kind could keep the limits."""
        used = tuple(count > 0 for count in counts)
        if used not in self._needs:
            self._needs[used] = self._needed(used)
        given = np.array([count for count in counts if count], dtype=np.float64)
        return all(
            float(worth @ given) >= need * (1.0 - ROUNDING) for worth, need in self._needs[used]
        )

    def _needed(self, used: Sequence[bool]) -> list[tuple[Floats, float]]:
        """For servers of the kinds in use: what one of each is worth, and how much is needed."""
        kinds = [kind for kind, is_used in zip(self._kinds, used, strict=True) if is_used]
        served = self._served(kinds)
        found = []
        for shares in SHARES:
            if self._finds and shares[2]:
                continue  # what several rows hold together takes memory once
            work = np.array([self._work_s(engine, flags, shares) for engine, flags in kinds])
            totals = work.sum(axis=1)
            if not totals.all():
                continue
            least = np.sort((work / totals[:, None]).min(axis=0)).cumsum()
            for promise in self._promises:
                count = min(promise.count(served, len(least)), len(least))
                if count:
                    found.append((promise.span_s / totals, float(least[count - 1])))
        return found

    def _served(self, kinds: Sequence[tuple[PagedEngine, VllmPolicy]]) -> int:
        """At least so many requests are served: those that every kind can hold, less those that a
        front may refuse.
        """
        room = min(
            engine.capacity_tokens
            if flags.chunked_prefill
            else min(engine.capacity_tokens, flags.max_num_batched_tokens)
            for engine, flags in kinds
        )
        fit, all_of_them = int((self._longest <= room).sum()), len(self._longest)
        return max(0, math.floor(fit - self._refused * all_of_them))

    def _work_s(
        self, engine: PagedEngine, flags: VllmPolicy, shares: tuple[float, float, float]
    ) -> Floats:
        """The least seconds that each request adds to the passes of such a server."""
        law, prompt, output = engine.steps, self._prompt, self._output
        to_rows, to_tokens, to_memory = (share * law.base_s for share in shares)
        row_s = law.row_s + to_rows / flags.max_num_seqs
        token_s = _token_s(law, to_tokens, flags.max_num_batched_tokens)
        decode_s = law.cached_s
        if not self._has_room(engine, flags):
            decode_s = min(law.cached_s, law.attended_s + law.behind_s, token_s)
        decode_s += to_memory / engine.capacity_tokens
        steps = output - 1.0  # after the pass that completes the prompt
        cached = steps * prompt + steps * (steps - 1.0) / 2.0  # before each of them, summed
        work: Floats = row_s * output + law.prefill_s + decode_s * cached
        if self._finds:
            work += token_s * output
        else:
            work += token_s * (prompt + steps) + law.attended_s * prompt**2 / 2.0
        return work

    def _has_room(self, engine: PagedEngine, flags: VllmPolicy) -> bool:
        """Whether such a server never has to preempt."""
        longest = int((self._prompt + self._output).max()) // engine.block_tokens + 1  # in blocks
        return flags.max_num_seqs * longest <= engine.blocks


def _token_s(law: StepLaw, base_s: float, most: int) -> float:
    """The least seconds of a new token in a pass of at most `most`: (base + f(n)) / n, which is
    least where a slope of f ends, at one token, or at `most`.
    """
    places = {1, most, *(knot for knot in law.knots if 1 <= knot < most)}
    ends = (*law.knots[1:], math.inf)
    parts = list(zip(law.token_s, law.knots, ends, strict=True))
    return min(
        (base_s + sum(slope * max(0.0, min(n, end) - start) for slope, start, end in parts)) / n
        for n in places
    )


def _requests(window: Trace, max_new_tokens: int) -> tuple[Floats, Floats, Floats]:
    """Prompts, outputs and greatest lengths in tokens, as the simulator takes them."""
    limit = np.where(window.max_tokens > 0, window.max_tokens, max_new_tokens)
    output = np.minimum(window.output_tokens, limit)
    longest = window.prompt_tokens + limit - 1
    return window.prompt_tokens.astype(float), output.astype(float), longest.astype(float)


def _promises(
    windows: Sequence[Trace],
    sla: Mapping[str, float],
    limits: CandidateLimits,
    max_new_tokens: int,
) -> list[Promised]:
    """What targets and attainment say about when requests end. A target on the first token says it
    together with one on the gaps between tokens. Means say nothing here.
    """
    steps = [_requests(window, max_new_tokens)[1] - 1.0 for window in windows]
    arrivals = [window.arrival_s for window in windows]

    def span_s(until_s: float, gap_s: float) -> float:
        return sum(
            float((arrival_s + gap_s * more).max() - arrival_s.min()) + until_s
            for arrival_s, more in zip(arrivals, steps, strict=True)
        )

    targets: list[tuple[str, str, float]] = []
    for key, limit in sla.items():
        metric, stat, _ = key.split("_")
        targets.append((metric, stat, limit))
    shares = {stat: _share(stat) for _, stat, _ in targets}
    ends = [(limit, 0.0, [stat]) for metric, stat, limit in targets if metric == "e2e"]
    ends += [
        (first_s, gap_s, [stat, gap_stat])
        for metric, stat, first_s in targets
        for gap, gap_stat, gap_s in targets
        if metric == "ttft" and gap in GAPS
    ]
    found = []
    for until_s, gap_s, stats in ends:
        late = sum(1.0 - shares[stat] for stat in stats)
        if late < 1.0:
            found.append(Promised(1.0 - late, float(len(stats)), span_s(until_s, gap_s)))
    if limits.min_attainment_percent is not None and ends:
        span = min(span_s(until_s, gap_s) for until_s, gap_s, _ in ends)
        found.append(Promised(limits.min_attainment_percent / 100.0, 0.0, span, of_all=True))
    return found


def _share(stat: str) -> float:
    """The share of the requests that are within a target on this statistic; 0: it says nothing.

    A percentile p of n values is within a limit if more than p * (n - 1) of them are.
    """
    if stat == "max":
        return 1.0
    return float(stat[1:]) / 100.0 if stat[1:].isdecimal() else 0.0
