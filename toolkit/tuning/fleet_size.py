"""How many servers of each kind a fleet needs: the cheapest counts that keep all limits.

Counts are tried in the order of their cost (`Mixes`), and the first that keep the limits are the
answer. More servers of another kind need not be better: a slow kind may miss a target that a fast
one keeps. So nothing is inferred from one simulated count for another, and only counts that cannot
do the work at all are left out (`LeastWork`).

Where nothing keeps the limits, this order is endless. So some counts that keep them are found
first: of each kind with the fewest of the others, and of all kinds in the fleet's own proportion,
by doubling and bisection. They bound the cost, and so the number of simulations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from heapq import heappop, heappush
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import InputError, LimitsBrokenError
from toolkit.estimators.pipeline import PipelineLaw
from toolkit.estimators.steps import StepLaw
from toolkit.files.fleet import CountRange
from toolkit.files.io import EnvelopeFields
from toolkit.files.tuning import Outcome, SizedKind, Sizing, SizingRow, Tuning, share_used
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.paged_engine import PagedEngine
from toolkit.sim.world import flags_of, reflagged
from toolkit.traces.types import Trace
from toolkit.tuning.alternatives import RECIPE, WORKERS_MAX, fewest, sizing_row
from toolkit.tuning.evaluate import EvaluationSetup, Task
from toolkit.tuning.executor import Evaluate, Runner, collect
from toolkit.tuning.inputs import Inputs
from toolkit.tuning.search import Found, Progress
from toolkit.tuning.tune import best_trial, reported, search_of, settings_name

ALL_AT_MOST = 64  # counts that are all tried where none of the first ones keeps
COUNTED_AT_MOST = 20_000  # counts, for the estimate
GAPS = ("tpot", "mtpot", "itl")  # metrics that bound the time from the first to the last token
# How a pass's constant is charged: to rows, to new tokens, to tokens in memory.
SHARES = ((1.0, 0.0, 0.0), (0.5, 0.5, 0.0), (0.0, 1.0, 0.0), (0.0, 0.5, 0.5), (0.0, 0.0, 1.0))
ROUNDING = 1e-9  # relative: sums of floats do not exclude what is exactly possible

Floats = NDArray[np.float64]
Counts = tuple[int, ...]  # servers of each kind, in the fleet's order
Rank = tuple[Fraction, int, Counts]
Expect = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Mixes:
    """The counts that may be tried, in the order of their cost.

    Counts of equal cost: fewer servers first, then more of the kinds that the fleet names first.

    Attributes:
        ranges: of each kind.
        prices: of one server of each kind, in any unit, above 0; equal without prices.
        most: servers of all kinds together.
    """

    ranges: tuple[CountRange, ...]
    prices: tuple[Fraction, ...]
    most: int = WORKERS_MAX

    def rank(self, counts: Counts) -> Rank:
        """The place in the order: a lower rank is earlier."""
        cost = sum((n * price for n, price in zip(counts, self.prices, strict=True)), Fraction(0))
        return cost, sum(counts), tuple(-count for count in counts)

    def in_order(self, below: Counts | None = None) -> Iterator[Counts]:
        """All counts by rank, made one by one; only those before `below`."""
        end = self.rank(below) if below else None
        first = tuple(kind.least for kind in self.ranges)
        # Counts grow only in the kind that grew last and those after it, so each is made once.
        heap = [(self.rank(first), first, 0)] if self._has(first) else []
        while heap:
            rank, counts, grew = heappop(heap)
            if end is not None and rank >= end:
                return
            yield counts
            for number in range(grew, len(counts)):
                if more := self.more(counts, number):
                    heappush(heap, (self.rank(more), more, number))

    def rays(self, own: Counts) -> Iterator[list[Counts]]:
        """Growing counts: of each kind with the fewest of the others, then multiples of `own`."""
        least = tuple(kind.least for kind in self.ranges)
        for number, kind in enumerate(self.ranges):
            alone = [_more(least, number, by) for by in range(kind.most - kind.least + 1)]
            yield list(filter(self._has, alone))
        multiples = [
            tuple(
                min(max(kind.least, times * count), kind.most)
                for count, kind in zip(own, self.ranges, strict=True)
            )
            for times in range(1, self.most + 1)
        ]
        yield list(filter(self._has, dict.fromkeys(multiples)))

    def near(self, counts: Counts) -> list[Counts]:
        """Cheaper counts by rank, with one less of a kind and perhaps one more of another."""
        fewer = [_more(counts, number, -1) for number in range(len(counts))]
        near = {*fewer, *(_more(less, to) for less in fewer for to in range(len(counts)))}
        rank = self.rank(counts)
        cheaper = [one for one in near if self._has(one) and self.rank(one) < rank]
        return sorted(cheaper, key=self.rank)

    def more(self, counts: Counts, number: int) -> Counts | None:
        """One more of a kind; None where that is out of range."""
        more = _more(counts, number)
        return more if self._has(more) else None

    def _has(self, counts: Counts) -> bool:
        within = all(
            kind.least <= n <= kind.most for n, kind in zip(counts, self.ranges, strict=True)
        )
        return within and 0 < sum(counts) <= self.most


def _more(counts: Counts, number: int, by: int = 1) -> Counts:
    return (*counts[:number], counts[number] + by, *counts[number + 1 :])


@dataclass(slots=True)
class JudgedSettings:
    """Settings with a name, and the counts that the laws exclude for them."""

    name: str
    outcome: Outcome
    work: LeastWork


@dataclass(slots=True)
class FleetCounts:
    """Tried counts of a fleet; each pair of settings and counts is simulated once, on the trace.

    `expect` is called with the number of further simulations that there may be; negative: fewer.
    """

    inputs: Inputs
    mixes: Mixes
    evaluate: Evaluate
    expect: Expect
    rows: dict[tuple[str, Counts], SizingRow] = field(default_factory=dict)

    def judged(self, name: str, outcome: Outcome) -> JudgedSettings:
        """Settings that can be judged."""
        flags = VllmPolicy(**VllmPolicy.within(outcome.parameters))  # type: ignore[arg-type]
        setup = self.inputs.whole(VllmPolicy.name)
        setup = replace(setup, world=reflagged(setup.world, outcome.kind_parameters))
        return JudgedSettings(name, outcome, LeastWork(setup, flags))

    def keeps(self, settings: JudgedSettings, counts: Counts) -> bool:
        """Whether the settings keep every limit with these counts, by simulation."""
        key = settings.name, counts
        if key not in self.rows:
            setup = at_counts(self.inputs, counts).whole(VllmPolicy.name)
            task = Task.of(setup, settings.outcome)
            self.rows[key] = sizing_row(self.evaluate, settings.name, task, counts)
        return self.rows[key].feasible

    def first(self, settings: JudgedSettings, own: Counts) -> Counts | None:
        """The cheapest counts that keep the limits; None where none was found."""
        known = self._some(settings, own)
        few = len(list(islice(self.mixes.in_order(), ALL_AT_MOST + 1))) <= ALL_AT_MOST
        return self.cheaper(settings, known) or known if known or few else None

    def cheaper(self, settings: JudgedSettings, than: Counts | None) -> Counts | None:
        """The cheapest counts that keep the limits and are cheaper than these; None: none are."""
        todo = list(islice(self._possible(settings, than), COUNTED_AT_MOST))
        new = sum((settings.name, counts) not in self.rows for counts in todo)
        before = len(self.rows)
        self.expect(new)
        for counts in self._possible(settings, than):
            if self.keeps(settings, counts):
                self.expect(len(self.rows) - before - new)
                return counts
        return None

    def _possible(self, settings: JudgedSettings, than: Counts | None) -> Iterator[Counts]:
        return filter(settings.work.allows, self.mixes.in_order(than))

    def _some(self, settings: JudgedSettings, own: Counts) -> Counts | None:
        """Counts that keep the limits, not yet the cheapest."""
        best: Counts | None = None
        for line in self.mixes.rays(own):
            end = best and self.mixes.rank(best)
            ray = [
                counts
                for counts in line
                if (end is None or self.mixes.rank(counts) < end) and settings.work.allows(counts)
            ]
            ray += ray[-1:] * WORKERS_MAX  # the line's last counts stand for those beyond its end
            if ray and (place := fewest(lambda n: self.keeps(settings, ray[n - 1]))):  # noqa: B023
                best = ray[place - 1]
        return best


def at_counts(inputs: Inputs, counts: Counts) -> Inputs:
    """The inputs with so many servers of each kind, without kinds of count 0. A single server is
    searched like several: no policy of ours runs inside it.
    """
    recipe = inputs.recipe.model_copy(update={"workers": counts[0]})
    if sum(counts) == 1:
        own = recipe.tune.model_copy(update={"policies": ["own"]})
        recipe = recipe.model_copy(update={"tune": own})
    others = tuple(
        kind.model_copy(update={"workers": count})
        for kind, count in zip(inputs.others, counts[1:], strict=True)
        if count
    )
    return replace(inputs, recipe=recipe, others=others)


def tune_fleet_to_size(
    inputs: Inputs,
    runner: Runner,
    head: EnvelopeFields,
    progress: Progress,
    *,
    ranges: Sequence[CountRange],
    expect: Expect,
) -> Tuning:
    """As `tune`, with the cheapest counts of a fleet's kinds of servers that keep all limits.

    The recipe's settings give first counts. A search with these may find settings for which cheaper
    counts suffice; then another search follows. The best settings behind each router are tried
    with counts that differ by one server, or by one of each of two kinds.

    Args:
        ranges: how many of each kind may be tried.
        expect: see `FleetCounts`.

    Raises `InputError` where there is no latency target, or only some kinds have a price;
    `LimitsBrokenError` where no counts suffice.
    """
    sizes = _sizes(inputs, ranges, runner, progress, expect)
    own = inputs.settings.spaces[0]
    start = Outcome(policy=own.policy, parameters=dict(own.start), metrics={})
    chosen = recipes = sizes.judged(RECIPE, start)
    counts = sizes.first(recipes, tuple(kind.workers for kind in inputs.kinds))
    if counts is None:
        raise _nothing_suffices(sizes)
    while True:
        here = at_counts(inputs, counts)
        found = search_of(here, runner, progress)
        tuned = best_trial(found, here.settings.served).outcome
        best = recipes
        if not tuned.same_settings(found.evaluations[0].outcome):
            best = sizes.judged(_name(tuned, counts), tuned)
        if not sizes.keeps(best, counts):
            break
        cheaper = sizes.cheaper(best, counts) or counts
        other, behind = _behind_others(sizes, found, cheaper, counts)
        chosen = other or best
        if behind == counts:
            break
        counts = behind
        expect(inputs.recipe.tune.trials)
    sizing = _sizing(sizes, chosen, counts)
    result = reported(here, found, runner, head, progress)
    return result.model_copy(update={"sizing": sizing})


def _name(outcome: Outcome, counts: Counts) -> str:
    return settings_name(outcome, " + ".join(map(str, counts)))


def _behind_others(
    sizes: FleetCounts, found: Found, counts: Counts, searched: Counts
) -> tuple[JudgedSettings | None, Counts]:
    """The best settings behind each router, tried with cheaper counts near `counts` as long as some
    keep the limits: the last settings that did, and their counts. `found`: a search at `searched`.
    """
    chosen = None
    for key in dict.fromkeys(trial.outcome.key for trial in found.evaluations):
        outcome = best_trial(found, [key]).outcome
        if outcome.replica_router is None:
            continue
        other = sizes.judged(_name(outcome, searched), outcome)
        while True:
            near = filter(other.work.allows, sizes.mixes.near(counts))
            kept = next((one for one in near if sizes.keeps(other, one)), None)
            if kept is None:
                break
            chosen = other
            counts = kept
    return chosen, counts


def _sizes(
    inputs: Inputs, ranges: Sequence[CountRange], runner: Runner, progress: Progress, expect: Expect
) -> FleetCounts:
    """Check the fleet's targets, ranges and prices; see `tune_fleet_to_size`."""
    if not inputs.recipe.sla:
        raise InputError(
            "--workers auto needs latency targets",
            "give some in the first recipe's sla, like ttft_p99_s: 5",
        )
    kinds = inputs.kinds
    flags_of(kinds[0], {})
    least = sum(each.least for each in ranges)
    if least > WORKERS_MAX:
        raise InputError(
            f"min_workers: the kinds have at least {least} servers together; the limit of "
            f"--workers auto is {WORKERS_MAX}",
            "give less in the fleet's file",
        )
    prices = [kind.recipe.hardware.usd_per_hour for kind in kinds]
    if None in prices and any(prices):
        without = kinds[prices.index(None)].recipe.name
        priced = max(kinds, key=lambda kind: kind.recipe.hardware.usd_per_hour or 0.0).recipe.name
        raise InputError(
            f"--workers auto: recipe '{without}' has no hardware.usd_per_hour, and "
            f"'{priced}' has one",
            "give all kinds a price, for the cheapest servers, or none, for the fewest",
        )
    mixes = Mixes(tuple(ranges), tuple(Fraction(str(price or 1)) for price in prices))
    evaluate = partial(collect, runner, tick=partial(progress, 0.0))
    return FleetCounts(inputs, mixes, evaluate, expect)


def _sizing(sizes: FleetCounts, chosen: JudgedSettings, counts: Counts) -> Sizing:
    """The answer, with the table of all tried counts."""
    mixes = sizes.mixes
    kinds = []
    for number, kind in enumerate(sizes.inputs.kinds):
        more = mixes.more(counts, number)
        kinds.append(
            SizedKind(
                recipe=kind.recipe.name,
                workers=counts[number],
                usd_per_hour=kind.recipe.hardware.usd_per_hour,
                one_more_keeps=None if more is None else sizes.keeps(chosen, more),
            )
        )
    tried = [kind.one_more_keeps for kind in kinds if kind.one_more_keeps is not None]

    def place(row: SizingRow) -> tuple[bool, str, Rank]:
        return row.settings != RECIPE, row.settings, mixes.rank(tuple(row.counts))

    return Sizing(
        workers=sum(counts),
        kinds=kinds,
        excluded=sum(not chosen.work.allows(cheaper) for cheaper in mixes.in_order(counts)),
        settings=chosen.name,
        one_more_keeps=all(tried) if tried else None,
        rows=sorted(sizes.rows.values(), key=place),
    )


def _nothing_suffices(sizes: FleetCounts) -> LimitsBrokenError:
    """The error, which names the limit that binds with the most servers tried."""
    remedy = "a looser target in the first recipe's sla, a lower --rate, or more max_workers"
    if not sizes.rows:
        return LimitsBrokenError(
            "no counts of the fleet's servers can do this work within the targets, by their laws",
            remedy,
        )
    last = max(sizes.rows.values(), key=lambda row: row.workers)
    pairs = zip(last.counts, sizes.inputs.kinds, strict=True)
    with_all = ", ".join(f"{n} of {kind.recipe.name}" for n, kind in pairs)
    return LimitsBrokenError(
        f"no counts of the fleet's servers that were tried keep all limits: {last.binding} is "
        f"{share_used(last.binding_ratio)} even with {with_all}",
        remedy,
    )


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
    """A lower bound, by the fitted laws, of the work that counts of servers must be able to do.

    By a percentile target, or an attainment, at least n requests end by a deadline. Each needs
    passes, the passes of a server do not overlap, and the fitted law gives the least time that a
    request adds to its passes. So the work of the n cheapest requests must fit into the time from
    the first arrival to the last deadline, on all servers together:

    - A pass takes its constant, whatever is in it. Parts of it may be charged to the rows (a pass
      has at most `max_num_seqs`), to the new tokens, and to the tokens in the KV cache (at most its
      capacity): each division gives a lower bound (`SHARES`).
    - A preempted request computes at least what it would otherwise, except that a chunk that finds
      its own blocks may be cheaper than the decode step that it replaces. Unless the KV cache has
      room for the most rows at their longest, cached tokens are charged by the cheapest way to the
      next token.
    - Where prompts share blocks, one token of each is charged, since the rest may be in the cache.
      In a closed loop of sessions, deadlines are not known beforehand, and nothing is excluded.
    - For several kinds of servers, each second is weighed by the work that the kind alone could do
      in it, and each request is charged on its cheapest kind: the bound of a linear program by a
      feasible solution of its dual.

    Args:
        setup: its world has all kinds; its counts of them do not matter.
        policy: the flags of the first kind, and of kinds without flags.
    """

    def __init__(self, setup: EvaluationSetup, policy: VllmPolicy) -> None:
        windows = setup.windows
        world = setup.world
        limits = setup.limits
        self._kinds = [(kind.engine(), kind.flags or policy) for kind in world.kinds]
        self._promises = _promises(setup)
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
        """For servers of the kinds in use: the worth of one of each, and the sum that is needed."""
        kinds = [kind for kind, is_used in zip(self._kinds, used, strict=True) if is_used]
        # At least as many are served as every kind can hold, less those that a front may refuse.
        room = min(
            engine.capacity_tokens
            if flags.chunked_prefill
            else min(engine.capacity_tokens, flags.max_num_batched_tokens)
            for engine, flags in kinds
        )
        fit = int((self._longest <= room).sum())
        requests = len(self._longest)
        served = max(0, math.floor(fit - self._refused * requests))
        found = []
        for shares in SHARES:
            if self._finds and shares[2]:
                continue  # blocks that several rows share take memory once
            work = np.array([self._work_s(engine, flags, shares) for engine, flags in kinds])
            totals = work.sum(axis=1)
            if not totals.all():
                continue
            least = np.sort((work / totals[:, None]).min(axis=0)).cumsum()
            for promise in self._promises:
                count = min(promise.count(served, requests), requests)
                if count:
                    found.append((promise.span_s / totals, float(least[count - 1])))
        return found

    def _work_s(
        self, engine: PagedEngine, flags: VllmPolicy, shares: tuple[float, float, float]
    ) -> Floats:
        """The least seconds that each request adds to the passes of such a server."""
        law = engine.steps
        prompt = self._prompt
        output = self._output
        if isinstance(law, PipelineLaw):
            return self._overlapping_s(law, flags)
        if law.beside_s is not None and law.beside_s < law.cached_s:
            law = replace(law, cached_s=law.beside_s)
        to_rows, to_tokens, to_memory = (share * law.base_s for share in shares)
        row_s = law.row_s + to_rows / flags.max_num_seqs
        token_s = _token_s(law, to_tokens, flags.max_num_batched_tokens)
        decode_s = law.cached_s
        longest = int((prompt + output).max()) // engine.block_tokens + 1  # in blocks
        if flags.max_num_seqs * longest > engine.blocks:  # the server may have to preempt
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

    def _overlapping_s(self, law: PipelineLaw, flags: VllmPolicy) -> Floats:
        """The same where passes overlap: the least seconds of the GPU, which runs one at a time. A
        decode runs in a pass of decodes alone, or beside a chunk.
        """
        decode_s = min(law.row_s + law.decode_s / flags.max_num_seqs, law.token_s)
        read_s = min(law.cached_s, law.beside_s)
        steps = self._output - 1.0
        cached = steps * self._prompt + steps * (steps - 1.0) / 2.0
        work: Floats = decode_s * steps + read_s * cached
        if not self._finds:
            work += law.token_s * self._prompt + law.attended_s * self._prompt**2 / 2.0
        return work


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


def _promises(setup: EvaluationSetup) -> list[Promised]:
    """When requests must end, by the targets and the attainment. A target on the first token counts
    together with one on the gaps between tokens. Means promise nothing, nor do traces of sessions.
    """
    windows = setup.windows
    limits = setup.limits
    if any(window.sessions is not None for window in windows):
        return []
    steps = [_requests(window, setup.world.max_new_tokens)[1] - 1.0 for window in windows]
    arrivals = [window.arrival_s for window in windows]

    def span_s(until_s: float, gap_s: float) -> float:
        return sum(
            float((arrival_s + gap_s * more).max() - arrival_s.min()) + until_s
            for arrival_s, more in zip(arrivals, steps, strict=True)
        )

    split = ((key.split("_"), limit) for key, limit in setup.sla.items())
    targets = [(metric, stat, limit) for (metric, stat, _), limit in split]
    ends = [(limit, 0.0, [stat]) for metric, stat, limit in targets if metric == "e2e"]
    ends += [
        (first_s, gap_s, [stat, gap_stat])
        for metric, stat, first_s in targets
        for gap, gap_stat, gap_s in targets
        if metric == "ttft" and gap in GAPS
    ]
    promises = []
    for until_s, gap_s, stats in ends:
        late = sum(1.0 - _share(stat) for stat in stats)
        if late < 1.0:
            promises.append(Promised(1.0 - late, float(len(stats)), span_s(until_s, gap_s)))
    if limits.min_attainment_percent is not None and ends:
        span = min(span_s(until_s, gap_s) for until_s, gap_s, _ in ends)
        promises.append(Promised(limits.min_attainment_percent / 100.0, 0.0, span, of_all=True))
    return promises


def _share(stat: str) -> float:
    """The share of the requests that a target on this statistic holds to it; 0 for a mean.

    A percentile p of n values is within a limit if more than p * (n - 1) of them are.
    """
    if stat == "max":
        return 1.0
    return float(stat[1:]) / 100.0 if stat[1:].isdecimal() else 0.0
