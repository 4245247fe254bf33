"""What else would serve this traffic: the fewest workers, or a policy that the engine cannot run.

The search for the fewest workers: doubling, then bisection. A count is judged on the whole trace.
More workers need not be better (a router may distribute badly), so nothing is inferred: the answer,
the count below it and the count above it are all simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from toolkit.engine_traits import traits_of
from toolkit.errors import LimitsBrokenError
from toolkit.files.tuning import Alternatives, Outcome, Sizing, SizingRow, share_used
from toolkit.sched.policies import BUILT_IN, refusal
from toolkit.tuning.evaluate import ATTAINMENT, Evaluation, EvaluationSetup, Task
from toolkit.tuning.executor import Evaluate, keeps_limits
from toolkit.tuning.inputs import Inputs
from toolkit.tuning.judge import NOTABLE_GAIN

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
            [done] = self.evaluate([Task.of(setup, outcome)])
            usage = done.usage(setup.limits)
            binding = max(usage, key=lambda key: usage[key])
            self.rows[key] = SizingRow(
                settings=settings,
                workers=workers,
                feasible=done.feasible(setup.limits),
                goodput_rps=done.goodput_rps,
                attainment_percent=done.outcome.metrics.get(ATTAINMENT, 0.0),
                binding=binding,
                binding_ratio=usage[binding],
            )
        return self.rows[key].feasible


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


def nothing_suffices(sizes: WorkerCounts) -> LimitsBrokenError:
    """The error where no number of workers keeps the limits.

    It names the limit that binds with the greatest number tried.
    """
    last = max(sizes.rows.values(), key=lambda row: row.workers)
    return LimitsBrokenError(
        f"no number of workers up to {last.workers} keeps all limits: {last.binding} is "
        f"{share_used(last.binding_ratio)} even with {last.workers}",
        "a looser target in the recipe's sla, or other parameters: more workers do not help",
    )


def fewest_workers(evaluate: Evaluate, setup: EvaluationSetup, outcome: Outcome) -> int | None:
    """The fewest workers found with which `outcome` keeps every limit on `setup`, or None."""
    return fewest(lambda count: keeps_limits(evaluate, at_size(setup, count), outcome))


def alternatives(
    inputs: Inputs, evaluate: Evaluate, chosen: Evaluation, searched: Sequence[Evaluation]
) -> Alternatives:
    """What may be worth a change beside the `chosen` settings: nothing that was not searched but a
    number of workers.

    Args:
        searched: the best evaluation of each searched policy on the whole trace.
    """
    engine = inputs.recipe.engine.name
    setup = inputs.whole(chosen.outcome.policy)
    limits = setup.limits
    feasible = chosen.feasible(limits)
    workers = None
    several = not traits_of(engine).server or chosen.outcome.policy in BUILT_IN
    if several and not feasible:
        workers = fewest_workers(evaluate, setup, chosen.outcome)
    # The best searched policy is worth naming where the engine cannot run it and it is better.
    best = max(searched, key=lambda candidate: candidate.rank(limits))
    better = best.goodput_rps > NOTABLE_GAIN * chosen.goodput_rps
    better = better or (best.feasible(limits) and not feasible)
    not_served = refusal(best.outcome.policy, engine) is not None
    return Alternatives(
        best_of_all=best.outcome.policy if not_served and better else None, workers=workers
    )
