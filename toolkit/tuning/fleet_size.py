"""How many servers of each kind a fleet needs: the cheapest that keep all limits.

Without prices every server costs the same. Counts of equal cost come in this order: fewer servers,
then more of the kinds that the fleet names first. Counts are tried in the order of their cost, and
the first that keep the limits are the answer. More servers of another kind need not be better: the
slow kind may miss a target that the fast one keeps. So nothing is inferred from one simulated count
for another, and only counts that cannot do the work at all are left out (`LeastWork`).

The order is endless where nothing keeps. So some counts that keep come first: of each kind with the
fewest of the others, and of all kinds in the fleet's own proportion, doubled and then bisected as
for one kind. They bound the cost, and with it the number of simulations.

`tune_fleet_to_size` is the entry; `Mixes` is the order, `FleetCounts` judges counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from heapq import heappop, heappush
from itertools import islice

from toolkit.errors import InputError, LimitsBrokenError
from toolkit.files.fleet import CountRange
from toolkit.files.io import EnvelopeFields
from toolkit.files.plan import Kind
from toolkit.files.tuning import Outcome, SizedKind, Sizing, SizingRow, Tuning, share_used
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.world import flags_of, reflagged
from toolkit.tuning.alternatives import RECIPE, WORKERS_MAX, fewest
from toolkit.tuning.evaluate import CandidateLimits, EvaluationSetup, Task
from toolkit.tuning.executor import Runner, collect
from toolkit.tuning.least_work import LeastWork
from toolkit.tuning.search import Found, Progress
from toolkit.tuning.tune import (
    Inputs,
    best_trial,
    limits_of,
    reported,
    search_of,
    settings_name,
    settings_of,
)

ALL_AT_MOST = 64  # counts that are all tried where none of the first ones keeps
COUNTED_AT_MOST = 20_000  # counts, for the estimate

Counts = tuple[int, ...]  # servers of each kind, in the fleet's order
Rank = tuple[Fraction, int, Counts]
Expect = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Mixes:
    """The counts that may be tried, in the order of their cost.

    Attributes:
        ranges: of each kind.
        prices: of one server of each kind, in any unit, above 0.
        most: servers of all kinds together.
    """

    ranges: tuple[CountRange, ...]
    prices: tuple[Fraction, ...]
    most: int = WORKERS_MAX

    def rank(self, counts: Counts) -> Rank:
        """Cost, then servers, then more of the kinds that come first: less is earlier."""
        cost = sum((n * price for n, price in zip(counts, self.prices, strict=True)), Fraction(0))
        return cost, sum(counts), tuple(-count for count in counts)

    def in_order(self, below: Counts | None = None) -> Iterator[Counts]:
        """All counts by rank, as far as they are asked for; only those before `below`."""
        end = self.rank(below) if below else None
        first = tuple(each.least for each in self.ranges)
        # each is made once: by one more of a kind that is not before the last one that grew
        heap: list[tuple[Rank, Counts, int]] = []
        if self._has(first):
            heap.append((self.rank(first), first, 0))
        while heap:
            rank, counts, grew = heappop(heap)
            if end is not None and rank >= end:
                return
            yield counts
            for number in range(grew, len(counts)):
                more = _more(counts, number)
                if self._has(more):
                    heappush(heap, (self.rank(more), more, number))

    def rays(self, own: Counts) -> Iterator[list[Counts]]:
        """Lines of growing counts: of each kind with the fewest of the others, then multiples of
        the fleet's `own` counts.
        """
        least = tuple(each.least for each in self.ranges)
        for number, each in enumerate(self.ranges):
            alone = range(max(each.least, int(sum(least) == 0)), each.most + 1)
            yield self._within(_with(least, number, count) for count in alone)
        yield self._within(
            tuple(
                min(max(each.least, times * count), each.most)
                for count, each in zip(own, self.ranges, strict=True)
            )
            for times in range(1, self.most + 1)
        )

    def near(self, counts: Counts) -> list[Counts]:
        """Cheaper counts by rank, with one less of a kind and perhaps one more of another."""
        fewer = [_more(counts, number, -1) for number in range(len(counts))]
        found = {*fewer, *(_more(each, to) for each in fewer for to in range(len(counts)))}
        rank = self.rank(counts)
        cheaper = [each for each in found if self._has(each) and self.rank(each) < rank]
        return sorted(cheaper, key=self.rank)

    def _within(self, counts: Iterator[Counts]) -> list[Counts]:
        return list(dict.fromkeys(each for each in counts if self._has(each)))

    def _has(self, counts: Counts) -> bool:
        within = all(
            each.least <= n <= each.most for n, each in zip(counts, self.ranges, strict=True)
        )
        return within and 0 < sum(counts) <= self.most

    def more(self, counts: Counts, number: int) -> Counts | None:
        """One more of a kind; None where that is out of range."""
        found = _more(counts, number)
        return found if self._has(found) else None


def _with(counts: Counts, number: int, count: int) -> Counts:
    return (*counts[:number], count, *counts[number + 1 :])


def _more(counts: Counts, number: int, by: int = 1) -> Counts:
    return _with(counts, number, counts[number] + by)


@dataclass(slots=True)
class JudgedSettings:
    """Settings with a name, and what the laws exclude with them."""

    name: str
    outcome: Outcome
    work: LeastWork


@dataclass(slots=True)
class FleetCounts:
    """Tried counts of a fleet; each pair of settings and counts is simulated once, on all windows.

    `expect` is told how many more simulations there may be, and less if there are fewer.
    """

    inputs: Inputs
    mixes: Mixes
    runner: Runner
    limits: CandidateLimits
    tick: Callable[[], None]
    expect: Expect
    rows: dict[tuple[str, Counts], SizingRow] = field(default_factory=dict)

    def judged(self, name: str, outcome: Outcome) -> JudgedSettings:
        """Settings that can be judged."""
        flags = VllmPolicy.within(outcome.parameters)
        setup = self._setup(self.inputs)
        world = reflagged(setup.world, outcome.kind_parameters)
        setup = replace(setup, world=world)
        return JudgedSettings(name, outcome, LeastWork(setup, VllmPolicy(**flags), self.limits))  # type: ignore[arg-type]

    def keeps(self, settings: JudgedSettings, counts: Counts) -> bool:
        """Whether the settings keep every limit with these counts, by simulation."""
        key = settings.name, counts
        if key not in self.rows:
            task = Task.of(self._setup(at_counts(self.inputs, counts)), settings.outcome)
            [done] = collect(self.runner, [task], self.tick)
            usage = done.usage(self.limits)
            binding = max(usage, key=lambda name: usage[name])
            self.rows[key] = SizingRow(
                settings=settings.name,
                workers=sum(counts),
                counts=list(counts),
                feasible=done.feasible(self.limits),
                goodput_rps=done.goodput_rps,
                attainment_percent=done.outcome.metrics.get("sla_attainment_percent", 0.0),
                binding=binding,
                binding_ratio=usage[binding],
            )
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
            if not ray:
                continue
            place = fewest(partial(self._keeps_on, settings, ray))
            if place is not None:
                best = ray[min(place, len(ray)) - 1]
        return best

    def _keeps_on(self, settings: JudgedSettings, ray: Sequence[Counts], place: int) -> bool:
        """Whether place `place` of a line keeps the limits, from 1; beyond its end its last one."""
        return self.keeps(settings, ray[min(place, len(ray)) - 1])

    def _setup(self, inputs: Inputs) -> EvaluationSetup:
        workload = self.inputs.workload
        return inputs.setup("all windows", [*workload.search, *workload.held_out])


def kinds_of(inputs: Inputs) -> list[Kind]:
    """All kinds of a fleet's inputs."""
    first = Kind(recipe=inputs.recipe, fit=inputs.fit, workers=inputs.recipe.workers)
    return [first, *inputs.others]


def at_counts(inputs: Inputs, counts: Counts) -> Inputs:
    """The inputs with so many servers of each kind; kinds of which there is none are left out. A
    single server is searched like several: no policy of ours runs inside it.
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
    counts suffice, and then another search follows. The best settings behind each router are tried
    with counts that differ by one server, or by one of each of two kinds.

    Args:
        ranges: how many of each kind may be tried.
        expect: told how many more simulations there may be, and less if there are fewer.

    Raises `InputError` where there is no latency target, or only some kinds have a price;
    `LimitsBrokenError` where no counts suffice.
    """
    sizes = _sizes(inputs, ranges, runner, progress, expect)
    settings = settings_of(inputs.recipe, inputs.fit, inputs.others)
    own = settings.spaces[0]
    start = Outcome(policy=own.policy, parameters=dict(own.start), metrics={})
    chosen = recipes = sizes.judged(RECIPE, start)
    counts = sizes.first(recipes, tuple(kind.workers for kind in kinds_of(inputs)))
    if counts is None:
        raise _nothing_suffices(sizes)
    searches = 0
    while True:
        here = at_counts(inputs, counts)
        expect(settings.trials if searches else 0)
        searches += 1
        found = search_of(here, runner, progress)
        settings = settings_of(here.recipe, here.fit, here.others)
        tuned = found.evaluations[best_trial(found, settings.served)].outcome
        best = recipes
        if not tuned.same_settings(found.evaluations[0].outcome):
            best = sizes.judged(_name(tuned, counts), tuned)
        if not sizes.keeps(best, counts):
            break
        chosen = best
        cheaper = sizes.cheaper(best, counts)
        other, behind = _behind_others(sizes, found, cheaper or counts, counts)
        chosen = other or chosen
        if behind == counts:
            break
        counts = behind
    sizing = _sizing(sizes, chosen, counts)
    result = reported(here, found, runner, head, progress, [])
    return result.model_copy(update={"sizing": sizing})


def _name(outcome: Outcome, counts: Counts) -> str:
    return settings_name(outcome, " + ".join(map(str, counts)))


def _behind_others(
    sizes: FleetCounts, found: Found, counts: Counts, searched: Counts
) -> tuple[JudgedSettings | None, Counts]:
    """The best settings behind each router with counts near `counts`, as long as cheaper ones keep
    the limits: the last that did, and its counts. `found` is of a search with `searched`.
    """
    chosen = None
    for key in {trial.outcome.key: None for trial in found.evaluations}:
        number = found.best([key])
        if number is None or found.evaluations[number].outcome.replica_router is None:
            continue
        outcome = found.evaluations[number].outcome
        other = sizes.judged(_name(outcome, searched), outcome)
        while True:
            near = filter(other.work.allows, sizes.mixes.near(counts))
            kept = next((each for each in near if sizes.keeps(other, each)), None)
            if kept is None:
                break
            chosen, counts = other, kept
    return chosen, counts


def _sizes(
    inputs: Inputs,
    ranges: Sequence[CountRange],
    runner: Runner,
    progress: Progress,
    expect: Expect,
) -> FleetCounts:
    """What judges counts. `InputError` where that is not possible."""
    if not inputs.recipe.sla:
        raise InputError(
            "--workers auto needs latency targets",
            "give some in the first recipe's sla, like ttft_p99_s: 5",
        )
    kinds = kinds_of(inputs)
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
        named = [kind.recipe.name for kind in kinds]
        without = named[prices.index(None)]
        raise InputError(
            f"--workers auto: recipe '{without}' has no hardware.usd_per_hour, and "
            f"'{named[prices.index(max(price or 0.0 for price in prices))]}' has one",
            "give all kinds a price, for the cheapest servers, or none, for the fewest",
        )
    exact = tuple(Fraction(str(price or 1)) for price in prices)
    mixes = Mixes(tuple(ranges), exact)
    limits, tick = limits_of(inputs.recipe), partial(progress, 0.0)
    return FleetCounts(inputs, mixes, runner, limits, tick, expect)


def _sizing(sizes: FleetCounts, chosen: JudgedSettings, counts: Counts) -> Sizing:
    """The answer, with the table of all tried counts."""
    mixes, kinds = sizes.mixes, []
    for number, kind in enumerate(kinds_of(sizes.inputs)):
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
        excluded=sum(not chosen.work.allows(each) for each in mixes.in_order(counts)),
        settings=chosen.name,
        one_more_keeps=all(tried) if tried else None,
        rows=sorted(sizes.rows.values(), key=place),
    )


def _nothing_suffices(sizes: FleetCounts) -> LimitsBrokenError:
    """The error where no counts keep the limits. It names the limit that binds with the most
    servers tried.
    """
    remedy = "a looser target in the first recipe's sla, a lower --rate, or more max_workers"
    if not sizes.rows:
        return LimitsBrokenError(
            "no counts of the fleet's servers can do this work within the targets, by their laws",
            remedy,
        )
    last = max(sizes.rows.values(), key=lambda row: row.workers)
    names = [kind.recipe.name for kind in kinds_of(sizes.inputs)]
    with_all = ", ".join(f"{n} of {name}" for n, name in zip(last.counts, names, strict=True))
    return LimitsBrokenError(
        f"no counts of the fleet's servers that were tried keep all limits: {last.binding} is "
        f"{share_used(last.binding_ratio)} even with {with_all}",
        remedy,
    )
