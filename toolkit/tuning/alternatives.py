"""What else would serve this traffic: the fewest workers, or a policy that the engine cannot run.

A number of workers is judged on the whole trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from toolkit.files.tuning import Alternatives, Evaluation
from toolkit.sched.policies import refusal
from toolkit.tuning.evaluate import rank
from toolkit.tuning.executor import Evaluate
from toolkit.tuning.inputs import TuneInputs
from toolkit.tuning.judge import NOTABLE_GAIN

WORKERS_MAX = 256  # the greatest number of workers that is tried


def fewest(keeps: Callable[[int], bool]) -> int | None:
    """Return a number that `keeps` while the number below it does not: doubling, then bisection.

    Where more workers are not always better (a router may distribute badly), a smaller number may
    exist. None where no power of two up to `WORKERS_MAX` keeps.
    """
    low = 0
    high = 1
    while not keeps(high):
        low = high
        high *= 2
        if high > WORKERS_MAX:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        if keeps(middle):
            high = middle
        else:
            low = middle
    return high


def alternatives(
    inputs: TuneInputs,
    evaluate: Evaluate,
    chosen: Evaluation,
    searched: Sequence[Evaluation],
    declined: Evaluation | None,
) -> Alternatives:
    """Return what may be worth a change beside the `chosen` settings: nothing that was not searched
    but a number of workers.

    Args:
        searched: the best evaluation of each searched policy on the whole trace.
        declined: see `JudgedCandidates.declined`.
    """
    engine = inputs.recipe.engine.name
    task = inputs.whole(chosen.settings)
    kept = chosen.outcome.kept

    def keeps(workers: int) -> bool:
        recipe = inputs.recipe.model_copy(update={"workers": workers})
        deployment = replace(task.deployment, recipe=recipe)
        label = f"{task.label}, {workers} workers"
        [done] = evaluate([replace(task, deployment=deployment, label=label)])
        return done.outcome.kept

    workers = None if kept or task.deployment.one_server else fewest(keeps)
    # The best searched policy is worth naming where the engine cannot run it and it is better.
    best = max(searched, key=rank)
    better = best.goodput_rps > NOTABLE_GAIN * chosen.goodput_rps
    better = better or (best.outcome.kept and not kept)
    not_served = refusal(best.settings.policy, engine) is not None
    return Alternatives(
        best_of_all=best.settings.policy if not_served and better else None,
        workers=workers,
        declined=declined,
    )
