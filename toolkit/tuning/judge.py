"""Which settings a tuning recommends: the candidates of a search, judged on the whole trace.

A search sees windows of the trace. Its best settings may break a limit on the whole of it. Then the
next best are tried there.
The settings that are found are recommended only if they are better than the recipe's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from toolkit.files.tuning import Outcome
from toolkit.tuning.evaluate import CandidateLimits, Evaluation, Task
from toolkit.tuning.executor import Evaluate
from toolkit.tuning.search import BATCH, Found, SearchSettings

NOTABLE_GAIN = 1.01  # ratio of goodput or of latency above which other settings are worth naming
NO_LOSS = 0.999  # ratio of goodput: less is a loss
NEXT = BATCH  # further trials that are tried on the whole trace

Judge = Callable[[Task], Task]  # the same candidate on what its verdict is about


@dataclass(slots=True)
class JudgedCandidates:
    """Evaluations on the whole trace, which has `limits`.

    `default`: the recipe's settings. `of_space`: the best of each searched space, by its key.
    `further`: candidates that were tried since none of these kept the limits.
    """

    limits: CandidateLimits
    default: Evaluation
    of_space: dict[str, Evaluation]
    further: list[Evaluation] = field(default_factory=list)


def judge_candidates(
    found: Found, settings: SearchSettings, judge: Judge, evaluate: Evaluate
) -> JudgedCandidates:
    """Judge the recipe's settings and the best trial of each space; where none of those that the
    engine can run keeps the limits, further candidates too.
    """
    own = settings.spaces[0]
    best = {space.key: found.best([space.key]) for space in settings.spaces}
    trials = {key: trial for key, trial in best.items() if trial is not None}
    start = own.task(found.setup, {})
    tasks = [start, *(Task.of(found.setup, trial.outcome) for trial in trials.values())]
    limits = judge(start).setup.limits
    default, *done = evaluate(list(map(judge, tasks)))
    result = JudgedCandidates(limits, default, dict(zip(trials, done, strict=True)))
    _take_better(result, default)  # windows may have shown as better what is worse on the whole
    served = [key for key in trials if key in settings.served] or list(trials)
    candidates = [default, *(result.of_space[key] for key in served)]
    if any(candidate.feasible(limits) for candidate in candidates):
        return result
    others = _next_trials(found, served, [trials[key].outcome for key in served])
    tasks = [Task.of(found.setup, outcome) for outcome in others]
    result.further += evaluate(list(map(judge, tasks)))
    for evaluation in result.further:
        _take_better(result, evaluation)
    return result


def _next_trials(found: Found, served: list[str], judged: Sequence[Outcome]) -> list[Outcome]:
    """The settings of the best trials with other settings than those that were `judged`."""
    known = [*judged]
    ranked = sorted(found.evaluations, key=lambda trial: trial.rank(found.limits), reverse=True)
    for outcome in (trial.outcome for trial in ranked):
        is_new = not any(outcome.same_settings(other) for other in known)
        if outcome.key in served and is_new:
            known.append(outcome)
    return known[len(judged) :][:NEXT]


def _take_better(result: JudgedCandidates, evaluation: Evaluation) -> None:
    """Make an evaluation the best of its space, if it is better."""
    key = evaluation.outcome.key
    before = result.of_space.get(key)
    if before is None or evaluation.rank(result.limits) > before.rank(result.limits):
        result.of_space[key] = evaluation


def is_better(best: Evaluation, default: Evaluation, limits: CandidateLimits) -> bool:
    """Whether `best` is worth a change of the recipe's settings.

    It is if it keeps limits that they break. If both keep all, it is with notably more goodput, or
    with no less goodput and a notably lower mean E2E latency, if the limit that binds is no nearer.
    If both break limits, it is with notably more goodput and no limit that is broken by more.
    """
    if best.feasible(limits) != default.feasible(limits):
        return best.feasible(limits)
    before = max(default.usage(limits).values(), default=0.0)
    after = max(best.usage(limits).values(), default=0.0)
    no_nearer = after <= NOTABLE_GAIN * before
    if best.goodput_rps > NOTABLE_GAIN * default.goodput_rps:
        return best.feasible(limits) or no_nearer
    if best.goodput_rps < NO_LOSS * default.goodput_rps:
        return False
    before_s = default.outcome.metrics.get("e2e_mean_s", 0.0)
    after_s = best.outcome.metrics.get("e2e_mean_s", 0.0)
    return no_nearer and before_s > NOTABLE_GAIN * after_s
