"""Other ways to serve this traffic: the fewest workers, another policy or engine, another rate.

The search for the fewest workers comes first: doubling, then bisection. A count is judged on all
windows, those of the search and those held out, so that the luck of one window cannot pass a count
that is too small. More workers need not be better (a router may distribute badly), so nothing is
inferred: the answer, the count below it and the count above it are all simulated.

Then come the alternatives to a result, by rising price, simulated on held-out windows. A policy
costs a line of the recipe, an engine a package, and more workers cost GPUs; so more workers are
tried only where nothing cheaper keeps the limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from toolkit.engine_traits import traits_of
from toolkit.errors import LimitsBrokenError
from toolkit.files.fit import Fit
from toolkit.files.plan import Kind
from toolkit.files.recipe import PolicySpec, Recipe
from toolkit.files.tuning import Alternatives, Outcome, Sibling, Sizing, SizingRow, share_used
from toolkit.sched.policies import BUILT_IN, refusal
from toolkit.sim.api import usual_policies
from toolkit.sim.world import world_of
from toolkit.traces.types import Trace
from toolkit.tuning.evaluate import ATTAINMENT, Evaluation, EvaluationSetup, Task, capacity_rps
from toolkit.tuning.executor import Evaluate

WORKERS_MAX = 256  # the greatest number of workers that is tried
RECIPE = "recipe"  # the name of the recipe's own settings
HALVINGS = 6  # of the rate, before the search for a rate that keeps the limits gives up
BISECTIONS = 4  # of a factor of 2: the rate that is found is within 5 %
NOTABLE_GAIN = 1.01  # ratio of goodput above which another policy is worth naming


@dataclass(slots=True)
class WorkerCounts:
    """Tried numbers of workers; each pair of settings and number is simulated once."""

    setup: EvaluationSetup
    evaluate: Evaluate
    rows: dict[tuple[str, int], SizingRow] = field(default_factory=dict)

    def keeps(self, settings: str, outcome: Outcome, workers: int) -> bool:
        """Whether the policy and parameters of `outcome` keep every limit with `workers`."""
        key = settings, workers
        if key not in self.rows:
            setup = at_size(self.setup, workers)
            self.rows[key] = sizing_row(self.evaluate, settings, Task.of(setup, outcome))
        return self.rows[key].feasible


def sizing_row(
    evaluate: Evaluate, settings: str, task: Task, counts: Sequence[int] = ()
) -> SizingRow:
    """How named settings do on the task's workers; `counts`: of each kind of a fleet."""
    [done] = evaluate([task])
    usage = done.usage(task.setup.limits)
    binding = max(usage, key=lambda key: usage[key])
    return SizingRow(
        settings=settings,
        workers=task.setup.world.size,
        counts=list(counts),
        feasible=done.feasible(task.setup.limits),
        goodput_rps=done.goodput_rps,
        attainment_percent=done.outcome.metrics.get(ATTAINMENT, 0.0),
        binding=binding,
        binding_ratio=usage[binding],
    )


def at_size(setup: EvaluationSetup, workers: int) -> EvaluationSetup:
    """The same setup with `workers` workers."""
    world = replace(setup.world, workers=workers)
    return replace(setup, world=world, label=f"{setup.label}, {workers} workers")


def fewest(keeps: Callable[[int], bool], known: int | None = None) -> int | None:
    """A number that `keeps` while the number below it does not: doubling, then bisection.

    `known` is a number that keeps. Where more workers are not always better, a smaller number may
    exist. None where no power of two up to `WORKERS_MAX` keeps.
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


def answer(sizes: WorkerCounts, settings: str, workers: int, one_more_keeps: bool | None) -> Sizing:
    """The answer with the table of all tried numbers.

    `one_more_keeps`: whether one more worker keeps the limits too; None where there cannot be one.
    """
    rows = sorted(
        sizes.rows.values(), key=lambda row: (row.settings != RECIPE, row.settings, row.workers)
    )
    return Sizing(workers=workers, settings=settings, one_more_keeps=one_more_keeps, rows=rows)


def nothing_suffices(sizes: WorkerCounts, siblings: Sequence[Sibling] = ()) -> LimitsBrokenError:
    """The error where no number of workers keeps the limits.

    It names the limit that binds with the greatest number tried. Its hint names a sibling that
    keeps the limits, if any does.
    """
    able = next((sibling for sibling in siblings if sibling.feasible), None)
    last = max(sizes.rows.values(), key=lambda row: row.workers)
    return LimitsBrokenError(
        f"no number of workers up to {last.workers} keeps all limits: {last.binding} is "
        f"{share_used(last.binding_ratio)} even with {last.workers}",
        f"tune {able.recipe} (engine {able.engine}): it keeps them with {able.workers}"
        if able
        else "a looser target in the recipe's sla, or other parameters: more workers do not help",
    )


@dataclass(slots=True, frozen=True)
class AlternativeRuns:
    """The recipe's own setup, and how to simulate alternatives to it."""

    recipe: Recipe
    setup: EvaluationSetup
    rate_rps: float
    evaluate: Evaluate

    def keeps(self, setup: EvaluationSetup, outcome: Outcome) -> bool:
        """Whether the policy and parameters of `outcome` keep every limit on `setup`."""
        [done] = self.evaluate([replace(Task.of(setup, outcome), stops_early=True)])
        return done.feasible(setup.limits)

    def fewest_workers(self, setup: EvaluationSetup, outcome: Outcome) -> int | None:
        """The fewest workers found with which `outcome` keeps every limit on `setup`, or None."""
        return fewest(lambda count: self.keeps(at_size(setup, count), outcome))

    def up_to_rps(
        self, recipe: Recipe, setup: EvaluationSetup, outcome: Outcome, feasible: bool
    ) -> float | None:
        """The highest rate found at which `outcome` keeps every limit, or None.

        `feasible` says whether it does at its own rate. The rate is at most the rate at which a
        backlog is served, since a short window at a higher rate ends before its queue has grown.
        """
        most = self.rate_rps
        if feasible:
            policy = PolicySpec(name=outcome.policy, parameters=outcome.parameters)
            own = recipe.model_copy(update={"policy": policy})
            windows = setup.windows
            joined = Trace(
                np.concatenate([window.arrival_s for window in windows]),
                np.concatenate([window.prompt_tokens for window in windows]),
                np.concatenate([window.output_tokens for window in windows]),
                np.concatenate([window.max_tokens for window in windows]),
            )
            most = max(most, capacity_rps(own, setup.world, joined))

        def keeps(rate_rps: float) -> bool:
            """Try the same requests with arrival times stretched to `rate_rps`."""
            stretch, label = self.rate_rps / rate_rps, f"{setup.label}, {rate_rps:.6g} requests/s"
            windows = [replace(w, arrival_s=w.arrival_s * stretch) for w in setup.windows]
            return self.keeps(replace(setup, windows=windows, label=label), outcome)

        return highest_rate(keeps, self.rate_rps, most, feasible)


def highest_rate(
    keeps: Callable[[float], bool], start: float, most: float, start_keeps: bool
) -> float | None:
    """The highest rate found that `keeps`: doubled from `start` up to `most`, or halved, then
    bisected. None where not even the lowest tried rate keeps.
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


def alternatives(
    runs: AlternativeRuns,
    fit: Fit,
    chosen: Evaluation,
    searched: Sequence[Evaluation],
    siblings: Sequence[Sibling],
) -> Alternatives:
    """The alternatives to the `chosen` settings.

    Args:
        searched: the best evaluation of each searched policy on the setup of `runs`.
        siblings: as `try_siblings` found them.
    """
    limits, engine = runs.setup.limits, runs.recipe.engine.name
    feasible = chosen.feasible(limits)
    policies: list[Outcome] = []
    workers = None
    if not feasible:
        known = {best.outcome.policy for best in searched}
        routed = chosen.outcome.replica_router is not None
        tasks = [
            Task(runs.setup, name)
            for name in usual_policies(fit)
            if name not in known and refusal(name, [engine]) is None and not routed
        ]
        done = runs.evaluate(tasks)
        policies = [candidate.outcome for candidate in done if candidate.feasible(limits)]
        sibling_keeps = any(sibling.feasible for sibling in siblings)
        several = not traits_of(engine).server or chosen.outcome.policy in BUILT_IN
        if several and not policies and not sibling_keeps:
            workers = runs.fewest_workers(runs.setup, chosen.outcome)
    # The best searched policy is worth naming where the engine cannot run it and it is better.
    best = max(searched, key=lambda candidate: candidate.rank(limits))
    better = best.goodput_rps > NOTABLE_GAIN * chosen.goodput_rps
    better = better or (best.feasible(limits) and not feasible)
    not_served = refusal(best.outcome.policy, [engine]) is not None
    return Alternatives(
        feasible=feasible,
        up_to_rps=runs.up_to_rps(runs.recipe, runs.setup, chosen.outcome, feasible),
        best_of_all=best.outcome.policy if not_served and better else None,
        policies=policies,
        siblings=list(siblings),
        workers=workers,
    )


def try_siblings(
    runs: AlternativeRuns, siblings: Sequence[Kind], *, sized: bool = False
) -> list[Sibling]:
    """Simulate each sibling with its own policy, on the same windows and as many workers; if
    `sized`, on the fewest workers that keep all limits, where any number does.
    """
    found = []
    for kind in siblings:
        spec, recipe = kind.recipe, runs.recipe
        # replicas stand beside replicas; a single server stands beside several workers
        server, own = (traits_of(each.engine.name).server for each in (spec, recipe))
        workers = 1 if server and not own else runs.setup.world.size
        as_many = kind.model_copy(update={"workers": workers})
        limit, seed = recipe.serve.max_new_tokens, recipe.tune.seed
        world = world_of([as_many], max_new_tokens=limit, seed=seed)
        setup = replace(runs.setup, world=world, label=f"{runs.setup.label}, {spec.name}")
        outcome = Outcome(policy=spec.policy.name, parameters=spec.policy.parameters, metrics={})
        if sized and (not server or outcome.policy in BUILT_IN):
            setup = at_size(setup, runs.fewest_workers(setup, outcome) or workers)
            world = setup.world
        price = spec.hardware.usd_per_hour or recipe.hardware.usd_per_hour
        [done] = runs.evaluate([Task.of(setup, outcome)])
        feasible = done.feasible(setup.limits)
        found.append(
            Sibling(
                recipe=spec.name,
                engine=spec.engine.name,
                analytic=bool(kind.fit.engine.analytic),
                workers=world.size,
                held_out=done.outcome,
                usage=done.usage(setup.limits),
                feasible=feasible,
                up_to_rps=runs.up_to_rps(spec, setup, done.outcome, feasible),
                usd_per_hour=price and price * world.size,
            )
        )
    return found
