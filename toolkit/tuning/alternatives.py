"""What else would serve this traffic: the fewest workers, or a policy that the engine cannot run.

A number of workers is judged on the whole trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from toolkit.engine_traits import traits_of
from toolkit.files.tuning import Alternatives, DeclinedSettings
from toolkit.sched.policies import BUILT_IN, refusal
from toolkit.tuning.evaluate import CandidateLimits, Evaluation, Task
from toolkit.tuning.executor import Evaluate
from toolkit.tuning.inputs import Inputs
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
    inputs: Inputs,
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
    setup = inputs.whole(chosen.outcome.policy)
    limits = setup.limits
    feasible = chosen.feasible(limits)

    def keeps(workers: int) -> bool:
        world = replace(setup.world, workers=workers)
        sized = replace(setup, world=world, label=f"{setup.label}, {workers} workers")
        [done] = evaluate([Task.of(sized, chosen.outcome)])
        return done.feasible(limits)

    several = not traits_of(engine).server or chosen.outcome.policy in BUILT_IN
    workers = fewest(keeps) if several and not feasible else None
    # The best searched policy is worth naming where the engine cannot run it and it is better.
    best = max(searched, key=lambda candidate: candidate.rank(limits))
    better = best.goodput_rps > NOTABLE_GAIN * chosen.goodput_rps
    better = better or (best.feasible(limits) and not feasible)
    not_served = refusal(best.outcome.policy, engine) is not None
    return Alternatives(
        best_of_all=best.outcome.policy if not_served and better else None,
        workers=workers,
        declined=_with_limit(declined, limits) if declined else None,
    )


def _with_limit(declined: Evaluation, limits: CandidateLimits) -> DeclinedSettings:
    usage = declined.usage(limits)
    limit = max(usage, key=lambda key: usage[key])
    return DeclinedSettings(outcome=declined.outcome, limit=limit, used=usage[limit])
