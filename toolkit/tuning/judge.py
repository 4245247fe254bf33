"""Which settings a tuning recommends: the candidates of a search, judged on the whole trace.

A search sees windows of the trace. Its best settings may break a limit on the whole of it. Then the
next best are tried there.
The settings that are found are recommended only if they are better than the recipe's own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from toolkit.files.tuning import Evaluation, Settings
from toolkit.tuning.evaluate import Task, rank
from toolkit.tuning.executor import Evaluate
from toolkit.tuning.search import BATCH, SearchSettings, best_of
from toolkit.tuning.spaces import PolicySpace, sweep

NOTABLE_GAIN = 1.01  # ratio of goodput or of latency above which other settings are worth naming
NEAR = 0.8  # used share of a limit up to which lower latency is worth coming nearer to it
NO_LOSS = 0.999  # ratio of goodput: less is a loss
TOKENS = "max_num_batched_tokens"
NEXT = BATCH  # further trials that are tried on the whole trace

Judge = Callable[[Settings], Task]  # settings on what their verdict is about


@dataclass(slots=True)
class JudgedCandidates:
    """Evaluations on the whole trace.

    `default`: the recipe's settings. `tried`: all candidates, the default among them. `further`:
    the last of these, which were tried since none of the others kept the limits.
    """

    default: Evaluation
    tried: list[Evaluation]
    further: list[Evaluation] = field(default_factory=list)

    def of_spaces(self, spaces: Sequence[PolicySpace]) -> dict[str, Evaluation]:
        """The best of each of these spaces, by its key; spaces without a candidate are left out."""
        by_key: defaultdict[str, list[Evaluation]] = defaultdict(list)
        for evaluation in self.tried:
            by_key[evaluation.settings.key].append(evaluation)
        keys = [space.key for space in spaces if space.key in by_key]
        return {key: self.best(by_key[key]) for key in keys}

    def best(self, candidates: Sequence[Evaluation]) -> Evaluation:
        """The best of `candidates`: by rank, unless a later one is better (`is_better`).

        Where none is better than the recipe's settings, it is the one with the greatest rank.
        """
        best = self.default
        ranked = sorted(candidates, key=rank, reverse=True)
        for one in ranked:
            if all(is_better(one, other) for other in (self.default, best)):
                best = one
        return ranked[0] if best is self.default else best

    def declined(self, recommended: Evaluation, spaces: Collection[str]) -> Evaluation | None:
        """The quickest candidate of these spaces that keeps every limit, with notably less latency
        and not notably less goodput than the recommended one; None where there is none.

        It is declined since the limit that binds would come nearer, or for its goodput.
        """
        quicker = [
            one
            for one in self.tried
            if one.settings.key in spaces
            and one.outcome.kept
            and is_quicker(one, recommended, 1.0 / NOTABLE_GAIN)
            and not is_better(one, recommended)
        ]
        return min(quicker, key=lambda one: one.metrics["e2e_mean_s"], default=None)


def judge_candidates(
    trials: Sequence[Evaluation], settings: SearchSettings, judge: Judge, evaluate: Evaluate
) -> JudgedCandidates:
    """Judge the recipe's settings, the best trial of each space, and other tokens of a pass; where
    none of those that the engine can run keeps the limits, further candidates too.
    """
    own = settings.spaces[0]
    found = [best_of(trials, [space.key]) for space in settings.spaces]
    best = {trial.settings.key: trial for trial in found if trial is not None}
    served = [key for key in best if key in settings.served] or list(best)
    start = own.settings({})
    most = max((best[key] for key in served), key=rank)
    bases = [start, most.settings] if start.key in served else [most.settings]
    swept = [other for base in bases for other in _other_tokens(base, settings)]
    tried = evaluate(
        [judge(one) for one in [start, *(one.settings for one in best.values()), *swept]]
    )
    result = JudgedCandidates(tried[0], tried)
    able = [tried[0], *(one for one in tried if one.settings.key in served)]
    if any(one.outcome.kept for one in able):
        return result
    others = _next_trials(trials, served, [one.settings for one in tried])
    result.further += evaluate([judge(one) for one in others])
    result.tried += result.further
    return result


def _other_tokens(own: Settings, search: SearchSettings) -> list[Settings]:
    """The settings with other tokens of a pass, from end to end of the searched range; none where
    they are not searched.

    Busy windows discard settings with few tokens, which may be the quickest on the whole trace.
    """
    space = next(space for space in search.spaces if space.key == own.key)
    among = space.distributions.get(TOKENS)
    values = sweep(among) if among is not None else []
    parameters = [{**own.parameters, TOKENS: value} for value in values]
    return [own.model_copy(update={"parameters": one}) for one in parameters]


def _next_trials(
    trials: Sequence[Evaluation], served: list[str], judged: Sequence[Settings]
) -> list[Settings]:
    """The settings of the best trials with other settings than those that were `judged`."""
    known = [*judged]
    ranked = sorted(trials, key=rank, reverse=True)
    for settings in (trial.settings for trial in ranked):
        if settings.key in served and settings not in known:
            known.append(settings)
    return known[len(judged) :][:NEXT]


def is_better(best: Evaluation, default: Evaluation) -> bool:
    """Whether `best` is worth a change of the recipe's settings.

    It is if it keeps limits that they break. If both keep all, it is with notably more goodput, or
    if it is quicker (`is_quicker`) and the limit that binds is no nearer, or not beyond `NEAR`. If
    both break limits, it is with notably more goodput and no limit that is broken by more.
    """
    if best.outcome.kept != default.outcome.kept:
        return best.outcome.kept
    before, after = (max(one.outcome.used.values(), default=0.0) for one in (default, best))
    no_nearer = after <= max(NOTABLE_GAIN * before, NEAR)
    if best.goodput_rps > NOTABLE_GAIN * default.goodput_rps:
        return best.outcome.kept or no_nearer
    return no_nearer and is_quicker(best, default)


def is_quicker(best: Evaluation, default: Evaluation, least: float = NO_LOSS) -> bool:
    """Whether `best` has a notably lower mean E2E, and at least this share of the goodput."""
    before_s, after_s = (one.metrics.get("e2e_mean_s", 0.0) for one in (default, best))
    lossless = best.goodput_rps >= least * default.goodput_rps
    return lossless and before_s > NOTABLE_GAIN * after_s
