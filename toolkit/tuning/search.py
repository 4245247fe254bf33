"""The search: Optuna's TPE over the simulator, with the recipe's policy as trial 0.

The policy is a categorical choice, and each policy's parameters depend on it. On its own, TPE soon
tries only one policy, perhaps one that the recipe's engine cannot run. So half of the trials go to
the best policy that the engine can run, and half to each policy in turn. TPE suggests trials in
batches of a fixed size, which several processes may run in parallel, and gets their results in
order: the outcome depends only on the inputs and the seed, to the byte.

The search sees windows of the trace. Where none of its best keeps the limits on the whole trace,
`search_again` tells TPE what they gave there, and tries its next suggestions there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle

import optuna

from toolkit.files.tuning import ParameterValue, Sensitivity, Trial
from toolkit.tuning.evaluate import (
    SCREEN_SHARE,
    CandidateLimits,
    Evaluation,
    EvaluationSetup,
    Screen,
    Task,
    make_screen,
)
from toolkit.tuning.executor import Evaluate, Runner, collect
from toolkit.tuning.spaces import SWEEP_POINTS, PolicySpace, sweep, sweeps

BATCH = 8  # trials that are suggested at once, and can run in parallel
IMPORTANCE_TRIALS = 10  # the least number of trials from which importance is computed
HOPELESS = 4.0  # times the used share of a limit of the best trial, where none keeps all limits
POLICY = "policy"
LATENCY = "e2e_p95_s"  # beside goodput in the front, where no target binds
Progress = Callable[[float], None]  # called with the best goodput so far


@dataclass(slots=True, frozen=True)
class SearchSettings:
    """What to search and how. The first of `spaces` belongs to the recipe's own policy.

    `served` are the keys of the spaces with a policy that the recipe's engine can run.
    """

    spaces: Sequence[PolicySpace]
    trials: int
    seed: int
    served: frozenset[str]


@dataclass(slots=True, frozen=True)
class Found:
    """The evaluations in the order of the trials, and Optuna's record of them."""

    evaluations: list[Evaluation]
    study: optuna.Study
    setup: EvaluationSetup

    @property
    def limits(self) -> CandidateLimits:
        """The limits of a candidate."""
        return self.setup.limits

    def best(self, keys: Collection[str] | None = None) -> Evaluation | None:
        """The best trial, of all or of these spaces; None where they have none.

        Of equal ranks (`Evaluation.rank`), it is the earliest.
        """
        trials = [one for one in self.evaluations if keys is None or one.outcome.key in keys]
        return max(trials, key=lambda trial: trial.rank(self.limits), default=None)

    def keeping(self) -> list[str]:
        """The space of each trial that keeps every limit."""
        return [one.outcome.key for one in self.evaluations if one.feasible(self.limits)]

    def trials(self) -> list[Trial]:
        """The trials as tuning.json has them."""
        return [
            Trial(
                number=number,
                outcome=evaluation.outcome,
                feasible=evaluation.feasible(self.limits),
                screened_out=evaluation.screened_out,
                stopped_after=evaluation.stopped_after,
            )
            for number, evaluation in enumerate(self.evaluations)
        ]


def search(
    setup: EvaluationSetup, runner: Runner, settings: SearchSettings, progress: Progress
) -> Found:
    """Run the search on `setup`.

    Trial 0 is the recipe's policy, then come the defaults of the other policies, then the
    suggestions of TPE. Trials may be screened (`_screened`) or stop early (`_stops_above`).
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=settings.seed, constant_liar=True)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    several = len(settings.spaces) > 1
    for space in settings.spaces:
        start = {f"{space.policy}.{name}": value for name, value in space.first().items()}
        study.enqueue_trial(({POLICY: space.key} if several else {}) | start)
    evaluations: list[Evaluation] = []
    found = Found(evaluations, study, setup)
    next_policies = _next_policies(settings, found)
    screen = make_screen(setup)
    best_rps = 0.0
    size = 1  # trial 0 alone: if it keeps the limits, the other starts are screened
    while len(evaluations) < settings.trials:
        batch = []
        for number in range(len(evaluations), min(len(evaluations) + size, settings.trials)):
            if several and number >= len(settings.spaces):
                study.enqueue_trial({POLICY: next(next_policies)})  # TPE suggests the parameters
            batch.append(study.ask())
        suggested = [_suggest(trial, settings.spaces, setup) for trial in batch]
        tasks = [
            replace(task, stops_above=_stops_above(task.key, found, settings)) for task in suggested
        ]
        screened = _screened(found, settings)
        done = _evaluate(runner, tasks, screen, screened, partial(progress, best_rps))
        for trial, evaluation in zip(batch, done, strict=True):
            _tell(study, trial, evaluation, setup.limits)
        evaluations += done
        best_rps = max(evaluation.goodput_rps for evaluation in evaluations if evaluation.whole)
        size = BATCH if len(evaluations) > 1 else max(len(settings.spaces) - 1, 1)
    return found


def _tell(
    study: optuna.Study, trial: optuna.Trial, evaluation: Evaluation, limits: CandidateLimits
) -> None:
    # The queue of an overloaded server grows, so requests of a window's first part are less late
    # than those of the whole window, about by the share of the part.
    part = SCREEN_SHARE if evaluation.screened_out else 1.0
    for key, share in evaluation.usage(limits).items():
        trial.set_constraint(key, share / part - 1.0)
    study.tell(trial, evaluation.score * part)


def search_again(
    found: Found,
    settings: SearchSettings,
    judged: Mapping[int, Evaluation],
    judge: Callable[[Task], Task],
    evaluate: Evaluate,
) -> list[Evaluation]:
    """The next batch of TPE's suggestions for policies that the engine can run, on the whole trace.

    Args:
        found: its study gets the results, besides the trials that it has.
        judged: what trials of `found` gave on the whole trace, by their numbers. TPE gets these
            as further trials with the same parameters.
        judge: the same candidate on the whole trace.
    """
    study = found.study
    for number, evaluation in judged.items():
        trial = study.trials[number]
        usage = evaluation.usage(found.limits)
        study.add_trial(
            optuna.trial.create_trial(
                value=evaluation.score,
                params=trial.params,
                distributions=trial.distributions,
                constraints={key: share - 1.0 for key, share in usage.items()},
            )
        )
    best = found.best(settings.served)
    batch = []
    for _ in range(BATCH):
        if len(settings.spaces) > 1 and best is not None:
            study.enqueue_trial({POLICY: best.outcome.key})
        batch.append(study.ask())
    tasks = [judge(_suggest(trial, settings.spaces, found.setup)) for trial in batch]
    done = evaluate(tasks)
    for trial, evaluation in zip(batch, done, strict=True):
        _tell(study, trial, evaluation, found.limits)
    return done


def _screened(found: Found, settings: SearchSettings) -> set[str]:
    """The spaces with screened candidates: those without a trial that keeps every limit, once a
    policy that the engine can run has one. Feasible trials win over all others anyway.
    """
    keeping = set(found.keeping())
    if not keeping & settings.served:
        return set()
    return {space.key for space in settings.spaces} - keeping


def _stops_above(key: str, found: Found, settings: SearchSettings) -> float | None:
    """The used share of a limit above which a trial of this space ends early; None: it does not.

    It is 1 where the space has a trial that keeps every limit, and `most_good` trials of the search
    do. So a trial that breaks a limit is neither the best of its space nor among TPE's good ones,
    and TPE uses nothing else of it: its suggestions, and the best of each space, stay the same.

    Where no trial keeps every limit, trials that are further off by the factor `HOPELESS` than the
    best that the engine can run end early: an overloaded policy may take minutes to simulate.
    """
    keeping = found.keeping()
    if key in keeping and len(keeping) >= most_good(settings.trials):
        return 1.0
    best = found.best(settings.served)
    if keeping or best is None or key == best.outcome.key:
        return None
    return HOPELESS * max(best.usage(found.limits).values(), default=1.0)


def most_good(trials: int) -> int:
    """The most trials that TPE counts as good in a search of so many (Optuna's default gamma)."""
    return min(math.ceil(0.1 * trials), 25)


def _evaluate(
    runner: Runner,
    tasks: Sequence[Task],
    screen: Screen | None,
    screened: Collection[str],
    tick: Callable[[], None],
) -> list[Evaluation]:
    """The evaluations of `tasks`. A task of a `screened` space is simulated on the first part of
    each window, and on the whole windows only if it is not hopeless there.
    """
    hopeless: dict[int, Evaluation] = {}
    if screen:
        looks = {
            number: replace(task, setup=screen.setup)
            for number, task in enumerate(tasks)
            if task.key in screened
        }
        for number, look in zip(looks, collect(runner, [*looks.values()]), strict=True):
            if evaluation := screen.hopeless(look):
                hopeless[number] = evaluation
                tick()
    rest = [number for number in range(len(tasks)) if number not in hopeless]
    whole = dict(zip(rest, collect(runner, [tasks[k] for k in rest], tick), strict=True))
    return [hopeless.get(number) or whole[number] for number in range(len(tasks))]


def _next_policies(settings: SearchSettings, found: Found) -> Iterator[str]:
    """The space of each trial after the starts: the best served one and each space in turn."""
    for key in cycle(space.key for space in settings.spaces):
        best = found.best(settings.served)
        yield best.outcome.key if best else key
        yield key


def _suggest(trial: optuna.Trial, spaces: Sequence[PolicySpace], setup: EvaluationSetup) -> Task:
    """The trial's candidate."""
    by_key = {space.key: space for space in spaces}
    name = trial.suggest_categorical(POLICY, list(by_key)) if len(spaces) > 1 else spaces[0].key
    space = by_key[name]
    values: dict[str, ParameterValue] = {}
    for key, among in space.distributions.items():
        drawn: ParameterValue
        drawn_as = f"{space.policy}.{key}"
        if isinstance(among, optuna.distributions.CategoricalDistribution):
            drawn = trial.suggest_categorical(drawn_as, among.choices)
        elif isinstance(among, optuna.distributions.IntDistribution):
            drawn = trial.suggest_int(drawn_as, among.low, among.high, log=among.log)
        else:
            drawn = trial.suggest_float(drawn_as, among.low, among.high, log=among.log)
        values[key] = space.value_of(key, drawn)
    return space.task(setup, values)


def sensitivity(
    setup: EvaluationSetup, runner: Runner, space: PolicySpace, best: Evaluation, progress: Progress
) -> list[Sensitivity]:
    """Sweep each parameter over its range, the others as in `best`; greatest swing first."""
    chosen = space.values(best.outcome)
    best_rps = best.goodput_rps
    tasks = [space.task(setup, candidate) for candidate in sweeps(space, chosen)]
    evaluations = iter(collect(runner, tasks, lambda: progress(best_rps)))
    found = []
    for name, distribution in space.distributions.items():
        values = sweep(distribution, SWEEP_POINTS)
        goodput = [next(evaluations).goodput_rps for _ in values]
        most = max(goodput)
        swing = 100.0 * (most - min(goodput)) / most if most else 0.0
        found.append(
            Sensitivity(parameter=name, values=values, goodput_rps=goodput, swing_percent=swing)
        )
    return sorted(found, key=lambda swept: -swept.swing_percent)


def importance(found: Found, space: PolicySpace) -> dict[str, float]:
    """How much each searched parameter separates a space's best tenth of trials from the others.

    Trials that break a limit are equals where another keeps all. Shares by PED-ANOVA (Watanabe et
    al. 2023) on the space's own trials, greatest first. Empty for fewer than 10 trials, where
    nothing was searched, and where so many trials are equally good that the best tenth is all of
    them.
    """
    # With few trials, some starts are in the study but were never asked for.
    tried = found.study.trials[: len(found.evaluations)]
    prefix = f"{space.policy}."
    key = space.key
    own = [number for number, one in enumerate(found.evaluations) if one.outcome.key == key]
    keeping = [k for k in own if found.evaluations[k].feasible(found.limits)] or own
    trials = [
        optuna.trial.create_trial(
            state=optuna.trial.TrialState.COMPLETE,
            value=trial.value if trial.number in keeping else 0.0,
            params={k: value for k, value in trial.params.items() if k.startswith(prefix)},
            distributions={k: d for k, d in trial.distributions.items() if k.startswith(prefix)},
        )
        for trial in (tried[number] for number in own)
    ]
    values = sorted((trial.value for trial in trials), reverse=True)
    if (
        len(trials) < IMPORTANCE_TRIALS
        or not trials[0].params
        or values[len(values) // 10] == values[-1]
    ):
        return {}
    study = optuna.create_study(direction="maximize")
    study.add_trials(trials)
    shares = optuna.importance.get_param_importances(study)
    return {name.removeprefix(prefix): float(share) for name, share in shares.items()}


def front(trials: Sequence[Trial], latency: str) -> list[int]:
    """The trials that no other beats in both goodput and `latency`: numbers by rising latency."""
    known = [
        (trial.outcome.metrics[latency], -trial.outcome.metrics["goodput_rps"], trial.number)
        for trial in trials
        if latency in trial.outcome.metrics and trial.whole
    ]
    kept: list[int] = []
    most_rps = 0.0
    for _, minus_goodput_rps, number in sorted(known):
        if -minus_goodput_rps > most_rps:
            most_rps = -minus_goodput_rps
            kept.append(number)
    return kept
