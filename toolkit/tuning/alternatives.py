"""Other ways to serve this traffic: the fewest workers, another policy or engine, another rate.

The search for the fewest workers comes first: doubling, then bisection. A count is judged on the
whole trace. More workers need not be better (a router may distribute badly), so nothing is
inferred: the answer, the count below it and the count above it are all simulated.

Then come the alternatives to a result, by rising price, simulated on the whole trace. A policy
costs a line of the recipe, an engine a package, and more workers cost GPUs; so more workers are
tried only where nothing cheaper keeps the limits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from toolkit.engine_traits import traits_of
from toolkit.errors import LimitsBrokenError
from toolkit.files.tuning import Alternatives, Outcome, Sibling, Sizing, SizingRow, share_used
from toolkit.sched.policies import BUILT_IN, refusal
from toolkit.sim.api import usual_policies
from toolkit.sim.world import world_of
from toolkit.tuning.capacity import rough_rate_rps
from toolkit.tuning.evaluate import ATTAINMENT, Evaluation, EvaluationSetup, Task
from toolkit.tuning.executor import Evaluate, keeps_limits
from toolkit.tuning.inputs import Inputs
from toolkit.tuning.judge import NOTABLE_GAIN
from toolkit.tuning.workload import whole_setup

WORKERS_MAX = 256  # the greatest number of workers that is tried
RECIPE = "recipe"  # the name of the recipe's own settings
RATES = 20  # that a capacity takes, about


@dataclass(slots=True)
class WorkerCounts:
    """Tried numbers of workers; each pair of settings and number is simulated once.

    `setup`: where a policy is judged.
    """

    setup: Callable[[str], EvaluationSetup]
    evaluate: Evaluate
    rows: dict[tuple[str, int], SizingRow] = field(default_factory=dict)

    def keeps(self, settings: str, outcome: Outcome, workers: int) -> bool:
        """Whether the policy and parameters of `outcome` keep every limit with `workers`."""
        key = settings, workers
        if key not in self.rows:
            setup = at_size(self.setup(outcome.policy), workers)
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
    low = 0
    high = 1
    while high != known and not keeps(high):
        low = high
        high = min(2 * high, known or 2 * high)
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


def fewest_workers(evaluate: Evaluate, setup: EvaluationSetup, outcome: Outcome) -> int | None:
    """The fewest workers found with which `outcome` keeps every limit on `setup`, or None."""
    return fewest(lambda count: keeps_limits(evaluate, at_size(setup, count), outcome))


def alternatives(
    inputs: Inputs,
    evaluate: Evaluate,
    chosen: Evaluation,
    searched: Sequence[Evaluation],
    siblings: Sequence[Sibling],
) -> Alternatives:
    """The alternatives to the `chosen` settings.

    Args:
        searched: the best evaluation of each searched policy on the whole trace.
        siblings: as `try_siblings` found them.
    """
    engine = inputs.recipe.engine.name
    setup = inputs.whole(chosen.outcome.policy)
    limits = setup.limits
    feasible = chosen.feasible(limits)
    policies: list[Outcome] = []
    workers = None
    if not feasible:
        known = {best.outcome.policy for best in searched}
        routed = chosen.outcome.replica_router is not None
        tasks = [
            Task(inputs.whole(name), name)
            for name in usual_policies(inputs.fit)
            if name not in known and refusal(name, [engine]) is None and not routed
        ]
        done = evaluate(tasks)
        policies = [candidate.outcome for candidate in done if candidate.feasible(limits)]
        sibling_keeps = any(sibling.feasible for sibling in siblings)
        several = not traits_of(engine).server or chosen.outcome.policy in BUILT_IN
        if several and not policies and not sibling_keeps:
            workers = fewest_workers(evaluate, setup, chosen.outcome)
    # The best searched policy is worth naming where the engine cannot run it and it is better.
    best = max(searched, key=lambda candidate: candidate.rank(limits))
    better = best.goodput_rps > NOTABLE_GAIN * chosen.goodput_rps
    better = better or (best.feasible(limits) and not feasible)
    not_served = refusal(best.outcome.policy, [engine]) is not None
    return Alternatives(
        feasible=feasible,
        best_of_all=best.outcome.policy if not_served and better else None,
        policies=policies,
        siblings=list(siblings),
        workers=workers,
    )


def try_siblings(inputs: Inputs, evaluate: Evaluate, *, sized: bool = False) -> list[Sibling]:
    """Simulate each sibling with its own policy, on the same trace and as many workers; if
    `sized`, on the fewest workers that keep all limits, where any number does.
    """
    found = []
    recipe = inputs.recipe
    own_world = inputs.world
    for kind in inputs.siblings:
        spec = kind.recipe
        # replicas stand beside replicas; a single server stands beside several workers
        server, own = (traits_of(each.engine.name).server for each in (spec, recipe))
        workers = 1 if server and not own else own_world.size
        as_many = kind.model_copy(update={"workers": workers})
        limit = recipe.serve.max_new_tokens
        seed = recipe.tune.seed
        world = world_of([as_many], max_new_tokens=limit, seed=seed)
        world = replace(world, concurrency=own_world.concurrency)
        outcome = Outcome(policy=spec.policy.name, parameters=spec.policy.parameters, metrics={})
        label = f"whole trace, {spec.name}, {world.size} workers"
        setup = whole_setup(world, inputs.workload.trace, recipe, outcome.policy, label)
        if sized and (not server or outcome.policy in BUILT_IN):
            setup = at_size(setup, fewest_workers(evaluate, setup, outcome) or workers)
            world = setup.world
        price = spec.hardware.usd_per_hour or recipe.hardware.usd_per_hour
        [done] = evaluate([Task.of(setup, outcome)])
        up_to_rps = None
        if not world.concurrency:
            up_to_rps = rough_rate_rps(setup, done.outcome, evaluate)
        found.append(
            Sibling(
                recipe=spec.name,
                engine=spec.engine.name,
                analytic=bool(kind.fit.engine.analytic),
                workers=world.size,
                outcome=done.outcome,
                usage=done.usage(setup.limits),
                feasible=done.feasible(setup.limits),
                up_to_rps=up_to_rps,
                usd_per_hour=price and price * world.size,
            )
        )
    return found
