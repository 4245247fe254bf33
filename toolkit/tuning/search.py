"""The search: Optuna's TPE over the simulator, the recipe's policy as trial 0.

Policies are a categorical choice, and each policy's parameters hang on it. Left to itself TPE soon
asks for one policy alone, perhaps one that the recipe's engine cannot run. So half of the trials go
to the best policy that it can, and half to each policy in turn. Trials are asked for in batches of a fixed
size, which several processes may run side by side, and told in order: the result depends on the inputs and the seed
alone, to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import optuna

from toolkit.files.tuning import Trial, Value
from toolkit.tuning.crew import Runner, collect
from toolkit.tuning.evaluate import Bench, Evaluation, Limits, Task
from toolkit.tuning.space import Distribution, PolicySpace

BATCH = 8  # trials that are asked for before the first of them is told: as many cores can help
POLICY = "policy"
Progress = Callable[[float], None]  # the best goodput so far


@dataclass(slots=True, frozen=True)
class Settings:
    """How to search, and what. `spaces` begins with that of the recipe's own policy.

    `served` are those policies that the recipe's engine can run.
    """

    spaces: Sequence[PolicySpace]
    trials: int
    seed: int
    limits: Limits
    served: frozenset[str]


@dataclass(slots=True, frozen=True)
class Found:
    """The evaluations in the trials' order, and Optuna's record of them."""

    evaluations: list[Evaluation]
    study: optuna.Study
    limits: Limits

    def best(self, policies: Collection[str] | None = None) -> int | None:
        """The number of the best trial (of these policies): of the feasible the highest score; of all, where none is.

        None where no trial is of them.
        """
        numbers = [k for k, one in enumerate(self.evaluations) if policies is None or one.outcome.policy in policies]
        return max(numbers, key=lambda k: (self.fits(k), self.evaluations[k].score, -k), default=None)

    def fits(self, number: int) -> bool:
        """Whether a trial keeps every limit."""
        return self.evaluations[number].feasible(self.limits)

    def trials(self) -> list[Trial]:
        """The trials, as they are written."""
        return [
            Trial(number=number, outcome=evaluation.outcome, feasible=self.fits(number))
            for number, evaluation in enumerate(self.evaluations)
        ]


def search(bench: Bench, runner: Runner, settings: Settings, progress: Progress) -> Found:
    """Trial 0 is the recipe's policy, then come the other policies' defaults, then what TPE suggests."""
    study = _study(settings)
    evaluations: list[Evaluation] = []
    found = Found(evaluations, study, settings.limits)
    turns = _turns(settings, found)
    top = 0.0
    size = len(settings.spaces)  # the first batch: all starts
    while len(evaluations) < settings.trials:
        asked = []
        for number in range(len(evaluations), min(len(evaluations) + size, settings.trials)):
            policy = next(turns) if number >= len(settings.spaces) > 1 else None
            if policy:
                study.enqueue_trial({POLICY: policy})  # TPE suggests the rest
            asked.append(study.ask())
        candidates = [_suggest(trial, settings.spaces) for trial in asked]
        tasks = [Task(bench, policy, parameters) for policy, parameters in candidates]
        done = collect(runner, tasks, partial(progress, top))
        for trial, evaluation in zip(asked, done, strict=True):
            for key, share in evaluation.usage(settings.limits).items():
                trial.set_constraint(key, share - 1.0)
            study.tell(trial, evaluation.score)
        evaluations += done
        top = max(one.goodput_rps for one in evaluations)
        size = BATCH
    return found


def _turns(settings: Settings, found: Found) -> Iterator[str]:
    """The policy of each trial after the starts."""
    for policy in cycle(space.policy for space in settings.spaces):
        best = found.best(settings.served)
        yield policy if best is None else found.evaluations[best].outcome.policy
        yield policy


def _study(settings: Settings) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=settings.seed, constant_liar=True)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for space in settings.spaces:
        start = {f"{space.policy}.{name}": value for name, value in space.first().items()}
        study.enqueue_trial(({POLICY: space.policy} if len(settings.spaces) > 1 else {}) | start)
    return study


def _suggest(trial: optuna.Trial, spaces: Sequence[PolicySpace]) -> tuple[str, dict[str, Value]]:
    """The policy and all its parameters that are not its defaults, as the trial wants them."""
    by_name = {space.policy: space for space in spaces}
    name = trial.suggest_categorical(POLICY, list(by_name)) if len(spaces) > 1 else spaces[0].policy
    space = by_name[name]
    drawn = {key: _value(trial, f"{name}.{key}", distribution) for key, distribution in space.distributions.items()}
    return name, {**space.start, **{key: space.meant(key, value) for key, value in drawn.items()}}


def _value(trial: optuna.Trial, name: str, distribution: Distribution) -> Value:
    value: Value
    if isinstance(distribution, optuna.distributions.CategoricalDistribution):
        value = trial.suggest_categorical(name, distribution.choices)
    elif isinstance(distribution, optuna.distributions.IntDistribution):
        value = trial.suggest_int(name, distribution.low, distribution.high, log=distribution.log)
    else:
        value = trial.suggest_float(name, distribution.low, distribution.high, log=distribution.log)
    return value
