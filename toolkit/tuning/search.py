"""The search: Optuna's TPE over the simulator, with the recipe's policy as trial 0.

The policy is a categorical choice, and each policy's parameters depend on it. On its own, TPE soon
tries only one policy, perhaps one that the recipe's engine cannot run. So half of the trials go to
the best policy that the engine can run, and half to each policy in turn. Trials are asked for in
batches of a fixed size, which several processes may run in parallel, and told in order: the result
depends only on the inputs and the seed, to the byte.

The parts, in order: the search, and what its trials show besides the best (sensitivity, importance,
the front of goodput and latency).
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
from toolkit.tuning.executor import Runner, collect
from toolkit.tuning.spaces import SWEEP_POINTS, PolicySpace, sweep, sweeps

BATCH = 8  # trials that are asked for before the first of them is told: so many can run in parallel
ALIKE = 10  # trials: TPE draws so many at random, and all kinds of servers have the same flags
IMPORTANCE_TRIALS = 10  # the least number of trials from which importance is computed
POLICY = "policy"
LATENCY = "e2e_p95_s"  # what goodput is weighed against, where no target binds
Numbers = optuna.distributions.IntDistribution | optuna.distributions.FloatDistribution
Progress = Callable[[float], None]  # called with the best goodput so far


@dataclass(slots=True, frozen=True)
class SearchSettings:
    """What to search and how. The first of `spaces` belongs to the recipe's own policy.

    `served` are the keys of the spaces with a policy that the recipe's engine can run. In the first
    `alike` trials every kind of a fleet's servers has the flags of the first kind.
    """

    spaces: Sequence[PolicySpace]
    trials: int
    seed: int
    limits: CandidateLimits
    served: frozenset[str]
    alike: int = ALIKE


@dataclass(slots=True, frozen=True)
class Found:
    """The evaluations in the order of the trials, and Optuna's record of them."""

    evaluations: list[Evaluation]
    study: optuna.Study
    limits: CandidateLimits

    def best(self, keys: Collection[str] | None = None) -> int | None:
        """The number of the best trial, of all or of these spaces; None where they have none.

        Feasible trials come first, then those on whole windows, then the highest score, then the
        lowest number.
        """
        numbers = [
            number
            for number, evaluation in enumerate(self.evaluations)
            if keys is None or evaluation.outcome.key in keys
        ]
        return max(
            numbers,
            key=lambda k: (self.fits(k), self.evaluations[k].whole, self.evaluations[k].score, -k),
            default=None,
        )

    def fits(self, number: int) -> bool:
        """Whether a trial keeps every limit."""
        return self.evaluations[number].feasible(self.limits)

    def trials(self) -> list[Trial]:
        """The trials as tuning.json has them."""
        return [
            Trial(
                number=number,
                outcome=evaluation.outcome,
                feasible=self.fits(number),
                screened_out=evaluation.screened_out,
                stopped_after=evaluation.stopped_after,
            )
            for number, evaluation in enumerate(self.evaluations)
        ]


class _AlikeFirst(optuna.samplers.TPESampler):  # type: ignore[misc]  # optuna says no types of it
    """TPE with a random start that gives all kinds of a fleet's servers the first kind's flags.

    So that start varies as few parameters as for one kind, and what it shows counts for each. Then
    TPE suggests each kind's own.

    Args:
        seed: of the draws.
        alike: so many trials at most have the same flags, as near as a kind's range allows.
        twins: the names of flags of further kinds, and of the first kind's.
    """

    def __init__(self, seed: int, alike: int, twins: Mapping[str, str]) -> None:
        super().__init__(seed=seed, constant_liar=True)
        self._alike, self._twins = alike, twins

    def sample_independent(
        self,
        study: optuna.Study,
        trial: optuna.trial.FrozenTrial,
        param_name: str,
        param_distribution: optuna.distributions.BaseDistribution,
    ) -> object:
        """See `BaseSampler.sample_independent`."""
        twin, among = self._twins.get(param_name), param_distribution
        if twin is not None and trial.number < self._alike:
            value = trial.params[twin]
            if isinstance(among, optuna.distributions.CategoricalDistribution):
                if value in among.choices:
                    return value
            else:
                assert isinstance(among, Numbers)
                return min(max(value, among.low), among.high)
        return super().sample_independent(study, trial, param_name, param_distribution)


def search(
    setup: EvaluationSetup, runner: Runner, settings: SearchSettings, progress: Progress
) -> Found:
    """Run the search on `setup`.

    Trial 0 is the recipe's policy, then come the defaults of the other policies, then the
    suggestions of TPE. Once a trial keeps every limit, policies without such a trial are screened
    (`_evaluate`). Others may end early (`_may_end_early`), which changes no other trial.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    own = settings.spaces[0]
    twins = {f"{own.policy}.{name}": f"{own.policy}.{first}" for name, first in own.twins.items()}
    sampler = _AlikeFirst(settings.seed, settings.alike, twins)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    several = len(settings.spaces) > 1
    for space in settings.spaces:
        start = {f"{space.policy}.{name}": value for name, value in space.first().items()}
        study.enqueue_trial(({POLICY: space.key} if several else {}) | start)
    evaluations: list[Evaluation] = []
    found = Found(evaluations, study, settings.limits)
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
        early = _may_end_early(found, settings)
        tasks = [
            replace(task, stop_limits=settings.limits if task.key in early else None)
            for task in (_suggest(trial, settings.spaces, setup) for trial in batch)
        ]
        screened = _screened(found, settings) if screen else ()
        looks = [screen if task.key in screened else None for task in tasks]
        done = _evaluate(runner, tasks, looks, partial(progress, best_rps))
        for trial, evaluation in zip(batch, done, strict=True):
            # What was simulated of a window says how late requests are after that part of it: they
            # are later and later as the queue grows.
            part = SCREEN_SHARE if evaluation.screened_out else 1.0
            for key, share in evaluation.usage(settings.limits).items():
                trial.set_constraint(key, share / part - 1.0)
            study.tell(trial, evaluation.score * part)
        evaluations += done
        best_rps = max(evaluation.goodput_rps for evaluation in evaluations if evaluation.whole)
        size = BATCH if len(evaluations) > 1 else max(len(settings.spaces) - 1, 1)
    return found


def _screened(found: Found, settings: SearchSettings) -> set[str]:
    """The policies with screened candidates: those without a trial that keeps every limit, once the
    policies that the engine can run have one. The others would win in any case.
    """
    best = found.best(settings.served)
    if best is None or not found.fits(best):
        return set()
    fitting = {
        evaluation.outcome.key
        for number, evaluation in enumerate(found.evaluations)
        if found.fits(number)
    }
    return {space.key for space in settings.spaces} - fitting


def _may_end_early(found: Found, settings: SearchSettings) -> set[str]:
    """The policies of which a trial ends once it breaks a limit whatever the other windows give.

    Those with a trial that keeps every limit, once `most_good` trials do. Then a trial that breaks
    one is not the best of its policy. TPE asks of it only whether it is among its good ones, and it
    is not. So what is suggested, and the best of each policy, stay the same.
    """
    keeping = [
        evaluation.outcome.key
        for number, evaluation in enumerate(found.evaluations)
        if found.fits(number)
    ]
    return set(keeping) if len(keeping) >= most_good(settings.trials) else set()


def most_good(trials: int) -> int:
    """The most trials that TPE counts as good in a search of so many (Optuna's default gamma)."""
    return min(math.ceil(0.1 * trials), 25)


def _evaluate(
    runner: Runner,
    tasks: Sequence[Task],
    screens: Sequence[Screen | None],
    tick: Callable[[], None],
) -> list[Evaluation]:
    """The evaluations of `tasks`. A task with a screen is simulated on the first part of each
    window, and on the whole windows only if it is not hopeless there.
    """
    looks = {
        number: (screen, replace(task, setup=screen.setup))
        for number, (task, screen) in enumerate(zip(tasks, screens, strict=True))
        if screen
    }
    seen = collect(runner, [look for _, look in looks.values()])
    hopeless = {
        number: evaluation
        for (number, (screen, _)), look in zip(looks.items(), seen, strict=True)
        if (evaluation := screen.hopeless(look))
    }
    for _ in hopeless:
        tick()
    rest = [number for number in range(len(tasks)) if number not in hopeless]
    whole = dict(zip(rest, collect(runner, [tasks[k] for k in rest], tick), strict=True))
    return [hopeless.get(number) or whole[number] for number in range(len(tasks))]


def _next_policies(settings: SearchSettings, found: Found) -> Iterator[str]:
    """The policy of each trial after the starts: the best served one and each policy in turn."""
    for key in cycle(space.key for space in settings.spaces):
        best = found.best(settings.served)
        yield key if best is None else found.evaluations[best].outcome.key
        yield key


def _suggest(trial: optuna.Trial, spaces: Sequence[PolicySpace], setup: EvaluationSetup) -> Task:
    """The trial's candidate."""
    by_key = {space.key: space for space in spaces}
    name = trial.suggest_categorical(POLICY, list(by_key)) if len(spaces) > 1 else spaces[0].key
    space = by_key[name]
    found: dict[str, ParameterValue] = {}
    for key, among in space.distributions.items():
        value: ParameterValue
        drawn_as = f"{space.policy}.{key}"
        if isinstance(among, optuna.distributions.CategoricalDistribution):
            value = trial.suggest_categorical(drawn_as, among.choices)
        elif isinstance(among, optuna.distributions.IntDistribution):
            value = trial.suggest_int(drawn_as, among.low, among.high, log=among.log)
        else:
            value = trial.suggest_float(drawn_as, among.low, among.high, log=among.log)
        found[key] = space.value_of(key, value)
    return space.task(setup, found)


def sensitivity(
    setup: EvaluationSetup, runner: Runner, space: PolicySpace, best: Evaluation, progress: Progress
) -> list[Sensitivity]:
    """Sweep each parameter over its range, the others as in `best`; greatest swing first."""
    chosen, best_rps = space.values(best.outcome), best.goodput_rps
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
    prefix, key = f"{space.policy}.", space.key
    own = [number for number, one in enumerate(found.evaluations) if one.outcome.key == key]
    keeping = {number for number in own if found.fits(number)} or set(own)
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
    known = [t for t in trials if latency in t.outcome.metrics and t.whole]
    order = sorted(
        known,
        key=lambda t: (t.outcome.metrics[latency], -t.outcome.metrics["goodput_rps"], t.number),
    )
    kept: list[int] = []
    most = 0.0
    for trial in order:
        if trial.outcome.metrics["goodput_rps"] > most:
            most = trial.outcome.metrics["goodput_rps"]
            kept.append(trial.number)
    return kept
