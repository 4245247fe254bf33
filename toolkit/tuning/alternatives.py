"""What else would serve this traffic: another policy or engine, another rate, more workers.

Nothing is inferred: each alternative is simulated on the windows that the search did not see. The
order is that of their price. A policy costs a line of the recipe, an engine a package, and more
workers cost GPUs; so those are only looked for where nothing cheaper keeps the limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from toolkit.engine_traits import traits_of
from toolkit.errors import LimitsBrokenError
from toolkit.files.fit import Fit
from toolkit.files.plan import Kind
from toolkit.files.recipe import PolicySpec, Recipe
from toolkit.files.tuning import Alternatives, Outcome, Sibling, Sizing, SizingRow, share_used
from toolkit.sched.policies.servable import refusal
from toolkit.sim.api import usual_policies
from toolkit.sim.world import world_of
from toolkit.traces.types import Trace
from toolkit.tuning.evaluate import CandidateLimits, Evaluation, EvaluationSetup, Task, capacity_rps
from toolkit.tuning.executor import Runner, collect

# How few workers serve this trace within the limits: a gallop, a bisection, and a search at each
# count it ends on.
#
# Each count is judged on all windows, those of the search and those held out: a count that is too
# small must not pass by the luck of one. More workers need not be better (a router may deal
# badly), so nothing is inferred: the answer has been simulated and keeps the limits, the count
# below it has been and breaks one, and the one above is looked at too.

WORKERS_MAX = 256
RECIPE = "recipe"  # the name of the recipe's own settings


@dataclass(slots=True)
class WorkerCounts:
    """Worker counts tried with settings: each count and settings are simulated once."""

    bench: EvaluationSetup
    runner: Runner
    limits: CandidateLimits
    tick: Callable[[], None]
    rows: list[SizingRow]

    def keeps(self, settings: str, outcome: Outcome, workers: int) -> bool:
        """Whether `outcome`'s policy and parameters keep every limit with so many workers."""
        known = [row for row in self.rows if (row.settings, row.workers) == (settings, workers)]
        return known[0].feasible if known else self._try(settings, outcome, workers).feasible

    def _try(self, settings: str, outcome: Outcome, workers: int) -> SizingRow:
        bench = at_size(self.bench, workers)
        [done] = collect(self.runner, [Task(bench, outcome.policy, outcome.parameters)], self.tick)
        self.rows.append(_row(settings, workers, done, self.limits))
        return self.rows[-1]


def at_size(bench: EvaluationSetup, workers: int) -> EvaluationSetup:
    """The same bench with so many workers."""
    return replace(
        bench,
        world=replace(bench.world, workers=workers),
        label=f"{bench.label}, {workers} workers",
    )


def fewest(keeps: Callable[[int], bool], known: int | None = None) -> int | None:
    """The least count found that `keeps`, while the one below it does not; `known` is one that
    does.

    Doubles until a count keeps, then halves the gap. Where more workers are not always better there
    may be a smaller one. None where no power of two up to `WORKERS_MAX` does.
    """
    low, high = 0, 1
    while high != known and not keeps(high):
        low, high = high, min(2 * high, known or 2 * high)
        if high > WORKERS_MAX:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        if keeps(middle):
            high = middle
        else:
            low = middle
    return high


def answer(
    sizes: WorkerCounts, settings: str, workers: int, one_more: Callable[[], bool] | None
) -> Sizing:
    """The table with the answer, and whether `one_more` worker keeps the limits as well; None:
    there cannot be one.
    """
    return Sizing(
        workers=workers,
        settings=settings,
        one_more_keeps=one_more() if one_more else None,
        rows=sorted(
            sizes.rows, key=lambda row: (row.settings != RECIPE, row.settings, row.workers)
        ),
    )


def nothing_suffices(sizes: WorkerCounts, siblings: Sequence[Sibling] = ()) -> LimitsBrokenError:
    """The error where no number of workers keeps the limits: which one binds, even with the most
    that were tried.

    Its hint names one of the `siblings` that does.
    """
    able = next((one for one in siblings if one.feasible), None)
    last = max(sizes.rows, key=lambda row: row.workers)
    return LimitsBrokenError(
        f"no number of workers up to {last.workers} keeps all limits: {last.binding} is "
        f"{share_used(last.binding_ratio)} even with {last.workers}",
        f"tune {able.recipe} (engine {able.engine}): on {able.workers} it keeps them"
        if able
        else "a looser target in the recipe's sla, or other parameters: more workers do not help",
    )


def _row(settings: str, workers: int, done: Evaluation, limits: CandidateLimits) -> SizingRow:
    usage = done.usage(limits)
    binding = max(usage, key=lambda key: usage[key])
    metrics = done.outcome.metrics
    return SizingRow(
        settings=settings,
        workers=workers,
        feasible=done.feasible(limits),
        goodput_rps=done.goodput_rps,
        attainment_percent=metrics.get("sla_attainment_percent", 0.0),
        binding=binding,
        binding_ratio=usage[binding],
    )


HALVINGS = 6  # of the rate, until the search for one that keeps the limits gives up
BISECTIONS = 4  # of a factor of 2: the answer is within 5 %
NOTABLY = 1.01  # so many times the goodput is worth naming another policy


@dataclass(slots=True, frozen=True)
class Ground:
    """Where alternatives are tried: the recipe's own bench, and how to run tasks on it."""

    recipe: Recipe
    bench: EvaluationSetup
    rate_rps: float
    runner: Runner
    limits: CandidateLimits
    tick: Callable[[], None]

    def run(self, bench: EvaluationSetup, outcome: Outcome) -> Evaluation:
        """The policy and parameters of `outcome`, on `bench`."""
        [done] = collect(self.runner, [Task(bench, outcome.policy, outcome.parameters)], self.tick)
        return done

    def keeps(self, bench: EvaluationSetup, outcome: Outcome) -> bool:
        """Whether they keep every limit there."""
        return self.run(bench, outcome).feasible(self.limits)

    def up_to_rps(
        self, recipe: Recipe, bench: EvaluationSetup, outcome: Outcome, feasible: bool
    ) -> float | None:
        """The highest rate found at which `outcome`, `feasible` or not at its own, keeps every
        limit.

        At most what it serves of a backlog: a short window at a higher rate ends before its queue
        has grown.
        """
        most = self.rate_rps
        if feasible:
            policy = PolicySpec(name=outcome.policy, parameters=outcome.parameters)
            own = recipe.model_copy(update={"policy": policy})
            most = max(most, capacity_rps(own, bench.world, _joined(bench.windows)))
        return highest_rate(
            lambda rate: self.keeps(_at_rate(bench, rate, self.rate_rps), outcome),
            self.rate_rps,
            most,
            feasible,
        )


def highest_rate(
    keeps: Callable[[float], bool], start: float, most: float, start_keeps: bool
) -> float | None:
    """The highest rate found that `keeps`, at most `most`: a gallop from `start`, then a bisection.

    None where not even the lowest that was tried does.
    """
    low, high = start, start
    if start_keeps:
        while low < most:
            high = min(2 * low, most)
            if not keeps(high):
                break
            low = high
        else:
            return low
    else:
        for _ in range(HALVINGS):
            low = high / 2
            if keeps(low):
                break
            high = low
        else:
            return None
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def most_evaluations(siblings: Sequence[Kind]) -> int:
    """About how many evaluations `alternatives` takes."""
    return (1 + len(siblings)) * (1 + HALVINGS + BISECTIONS)


def alternatives(
    ground: Ground,
    fit: Fit,
    chosen: Evaluation,
    searched: Sequence[Evaluation],
    siblings: Sequence[Sibling],
) -> Alternatives:
    """What else there is beside the `chosen` settings.

    Args:
        searched: the best of each policy that was searched, on the ground's bench.
        siblings: as `try_siblings` found them.
    """
    engine, feasible = ground.recipe.engine.name, chosen.feasible(ground.limits)
    policies: list[Outcome] = []
    workers = None
    if not feasible:
        known = {one.outcome.policy for one in searched}
        others = [
            name
            for name in usual_policies(fit)
            if name not in known and refusal(name, [engine]) is None
        ]
        tasks = [Task(ground.bench, name) for name in others]
        done = collect(ground.runner, tasks, ground.tick)
        policies = [one.outcome for one in done if one.feasible(ground.limits)]
        if (
            not traits_of(engine).server
            and not policies
            and not any(one.feasible for one in siblings)
        ):
            workers = fewest(
                lambda count: ground.keeps(at_size(ground.bench, count), chosen.outcome)
            )
    return Alternatives(
        feasible=feasible,
        up_to_rps=ground.up_to_rps(ground.recipe, ground.bench, chosen.outcome, feasible),
        best_of_all=_best_of_all(ground, chosen, searched),
        policies=policies,
        siblings=list(siblings),
        workers=workers,
    )


def _best_of_all(ground: Ground, chosen: Evaluation, searched: Sequence[Evaluation]) -> str | None:
    """The policy that is better than the `chosen` settings and that the recipe's engine cannot run."""
    best = max(searched, key=lambda one: (one.feasible(ground.limits), one.score))
    better = best.feasible(ground.limits) and not chosen.feasible(ground.limits)
    if refusal(best.outcome.policy, [ground.recipe.engine.name]) is None:
        return None
    return (
        best.outcome.policy if better or best.goodput_rps > NOTABLY * chosen.goodput_rps else None
    )


def try_siblings(ground: Ground, siblings: Sequence[Kind]) -> list[Sibling]:
    """Each sibling on the ground's windows, at its rate, on as many workers: with its own policy."""
    return [_try(ground, sibling) for sibling in siblings]


def _try(ground: Ground, sibling: Kind) -> Sibling:
    spec = sibling.recipe
    bench = _bench_of(ground, sibling)
    outcome = Outcome(policy=spec.policy.name, parameters=spec.policy.parameters, metrics={})
    done = ground.run(bench, outcome)
    feasible = done.feasible(ground.limits)
    return Sibling(
        recipe=spec.name,
        engine=spec.engine.name,
        analytic=bool(sibling.fit.engine.analytic),
        workers=bench.world.size,
        held_out=done.outcome,
        usage=done.usage(ground.limits),
        feasible=feasible,
        up_to_rps=ground.up_to_rps(spec, bench, done.outcome, feasible),
    )


def _bench_of(ground: Ground, sibling: Kind) -> EvaluationSetup:
    recipe, workers = ground.recipe, ground.bench.world.size
    kind = sibling.model_copy(
        update={"workers": 1 if traits_of(sibling.recipe.engine.name).server else workers}
    )
    world = world_of([kind], max_new_tokens=recipe.serve.max_new_tokens, seed=recipe.tune.seed)
    return replace(ground.bench, world=world, label=f"{ground.bench.label}, {sibling.recipe.name}")


def _at_rate(bench: EvaluationSetup, rate_rps: float, own_rps: float) -> EvaluationSetup:
    """The same requests, so much denser or sparser that their mean rate is no longer `own_rps`."""
    stretch = partial(_stretched, by=own_rps / rate_rps)
    return replace(
        bench,
        windows=list(map(stretch, bench.windows)),
        label=f"{bench.label}, {rate_rps:.6g} requests/s",
    )


def _stretched(window: Trace, by: float) -> Trace:
    return replace(window, arrival_s=window.arrival_s * by)


def _joined(windows: Sequence[Trace]) -> Trace:
    """The lengths of all windows, for a backlog: times do not matter in it."""
    return Trace(
        np.concatenate([one.arrival_s for one in windows]),
        np.concatenate([one.prompt_tokens for one in windows]),
        np.concatenate([one.output_tokens for one in windows]),
        np.concatenate([one.max_tokens for one in windows]),
    )
