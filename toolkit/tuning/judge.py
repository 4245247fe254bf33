"""Which settings a tuning recommends: the candidates of a search, judged on the whole trace.

A search sees windows of the trace. Its best settings may break a limit on the whole of it. Then the
next best are tried there.
The settings that are found are recommended only if they are better than the recipe's own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from toolkit.files.tuning import Outcome
from toolkit.tuning.evaluate import CandidateLimits, Evaluation, Task
from toolkit.tuning.executor import Evaluate
from toolkit.tuning.search import BATCH, Found, SearchSettings
from toolkit.tuning.spaces import SWEEP_POINTS, PolicySpace, sweep

NOTABLE_GAIN = 1.01  # ratio of goodput or of latency above which other settings are worth naming
NEAR = 0.8  # used share of a limit up to which lower latency is worth coming nearer to it
NO_LOSS = 0.999  # ratio of goodput: less is a loss
TOKENS = "max_num_batched_tokens"
NEXT = BATCH  # further trials that are tried on the whole trace

Judge = Callable[[Task], Task]  # the same candidate on what its verdict is about


@dataclass(slots=True)
class JudgedCandidates:
    """Evaluations on the whole trace, which has `limits`.

    `default`: the recipe's settings. `tried`: all candidates, the default among them. `further`:
    the last of these, which were tried since none of the others kept the limits.
    """

    limits: CandidateLimits
    default: Evaluation
    tried: list[Evaluation]
    further: list[Evaluation] = field(default_factory=list)

    def of_spaces(self, spaces: Sequence[PolicySpace]) -> dict[str, Evaluation]:
        """The best of each of these spaces, by its key; spaces without a candidate are left out."""
        by_key: defaultdict[str, list[Evaluation]] = defaultdict(list)
        for evaluation in self.tried:
            by_key[evaluation.outcome.key].append(evaluation)
        keys = [space.key for space in spaces if space.key in by_key]
        return {key: self.best(by_key[key]) for key in keys}

    def best(self, candidates: Sequence[Evaluation]) -> Evaluation:
        """The best of `candidates`: by rank, unless a later one is better (`is_better`).

        Where none is better than the recipe's settings, it is the one with the greatest rank.
        """
        best = self.default
        ranked = sorted(candidates, key=lambda one: one.rank(self.limits), reverse=True)
        for one in ranked:
            if all(is_better(one, other, self.limits) for other in (self.default, best)):
                best = one
        return ranked[0] if best is self.default else best

    def declined(self, recommended: Evaluation, spaces: Collection[str]) -> Evaluation | None:
        """The quickest candidate of these spaces that keeps every limit, with notably less latency
        and not notably less goodput than the recommended one; None where there is none.

        It is declined since the limit that binds would come nearer, or for its goodput.
        """
        limits = self.limits
        quicker = [
            one
            for one in self.tried
            if one.outcome.key in spaces
            and one.feasible(limits)
            and is_quicker(one, recommended, 1.0 / NOTABLE_GAIN)
            and not is_better(one, recommended, limits)
        ]
        return min(quicker, key=lambda one: one.outcome.metrics["e2e_mean_s"], default=None)


def judge_candidates(
    found: Found, settings: SearchSettings, judge: Judge, evaluate: Evaluate
) -> JudgedCandidates:
    """Judge the recipe's settings, the best trial of each space, and other tokens of a pass; where
    none of those that the engine can run keeps the limits, further candidates too.
    """
    own = settings.spaces[0]
    best = {space.key: found.best([space.key]) for space in settings.spaces}
    trials = {key: trial for key, trial in best.items() if trial is not None}
    served = [key for key in trials if key in settings.served] or list(trials)
    start = own.task(found.setup, {})
    tasks = {key: Task.of(found.setup, trial.outcome) for key, trial in trials.items()}
    most = max(served, key=lambda key: trials[key].rank(found.limits))
    bases = [start, tasks[most]] if start.key in served else [tasks[most]]
    swept = [task for base in bases for task in _other_tokens(base, settings)]
    limits = judge(start).setup.limits
    tried = evaluate(list(map(judge, [start, *tasks.values(), *swept])))
    result = JudgedCandidates(limits, tried[0], tried)
    able = [tried[0], *(one for one in tried if one.outcome.key in served)]
    if any(one.feasible(limits) for one in able):
        return result
    others = _next_trials(found, served, [one.outcome for one in tried])
    result.further += evaluate([judge(Task.of(found.setup, outcome)) for outcome in others])
    result.tried += result.further
    return result


def _other_tokens(task: Task, settings: SearchSettings) -> list[Task]:
    """The candidate with other tokens of a pass, from end to end of the searched range; none where
    they are not searched.

    Busy windows discard settings with few tokens, which may be the quickest on the whole trace.
    """
    space = next(space for space in settings.spaces if space.key == task.key)
    among = space.distributions.get(TOKENS)
    values = sweep(among, SWEEP_POINTS) if among is not None else []
    return [replace(task, parameters={**task.parameters, TOKENS: value}) for value in values]


def _next_trials(found: Found, served: list[str], judged: Sequence[Outcome]) -> list[Outcome]:
    """The settings of the best trials with other settings than those that were `judged`."""
    known = [*judged]
    ranked = sorted(found.evaluations, key=lambda trial: trial.rank(found.limits), reverse=True)
    for outcome in (trial.outcome for trial in ranked):
        is_new = not any(outcome.same_settings(other) for other in known)
        if outcome.key in served and is_new:
            known.append(outcome)
    return known[len(judged) :][:NEXT]


def is_better(best: Evaluation, default: Evaluation, limits: CandidateLimits) -> bool:
    """Whether `best` is worth a change of the recipe's settings.

    It is if it keeps limits that they break. If both keep all, it is with notably more goodput, or
    if it is quicker (`is_quicker`) and the limit that binds is no nearer, or not beyond `NEAR`. If
    both break limits, it is with notably more goodput and no limit that is broken by more.
    """
    if best.feasible(limits) != default.feasible(limits):
        return best.feasible(limits)
    before, after = (max(one.usage(limits).values(), default=0.0) for one in (default, best))
    no_nearer = after <= max(NOTABLE_GAIN * before, NEAR)
    if best.goodput_rps > NOTABLE_GAIN * default.goodput_rps:
        return best.feasible(limits) or no_nearer
    return no_nearer and is_quicker(best, default)


def is_quicker(best: Evaluation, default: Evaluation, least: float = NO_LOSS) -> bool:
    """Whether `best` has a notably lower mean E2E, and at least this share of the goodput."""
    before_s, after_s = (one.outcome.metrics.get("e2e_mean_s", 0.0) for one in (default, best))
    lossless = best.goodput_rps >= least * default.goodput_rps
    return lossless and before_s > NOTABLE_GAIN * after_s
