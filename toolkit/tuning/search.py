"""The search: Optuna's TPE over the simulator, the recipe's policy as trial 0.

Policies are a categorical choice, and each policy's parameters hang on it. Left to itself TPE soon
asks for one policy alone, perhaps one that the recipe's engine cannot run. So half of the trials go
to the best policy that it can, and half to each policy in turn. Trials are asked for in batches of
a fixed size, which several processes may run side by side, and told in order: the result depends on
the inputs and the seed alone, to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import TypeAlias

import numpy as np
import optuna

from toolkit.errors import InputError, nearest
from toolkit.files.recipe import PolicySpec
from toolkit.files.tuning import ParameterValue, Sensitivity, Trial
from toolkit.sched.policies import KNOWN, ORACLES, POLICIES, make_any, refuse_oracle
from toolkit.sched.policies.parameters import Knob, Value, defaults, knobs, parameters
from toolkit.tuning.evaluate import CandidateLimits, Evaluation, EvaluationSetup, Task
from toolkit.tuning.executor import Runner, collect

# What there is to search: policies, and of each the parameters and ranges, as the recipe narrows
# or widens them.

Distribution: TypeAlias = (
    optuna.distributions.IntDistribution
    | optuna.distributions.FloatDistribution
    | optuna.distributions.CategoricalDistribution
)
Distributions = dict[str, Distribution]
Narrowed = Mapping[str, Sequence[Value]]
ALL = "all"  # every policy that can be simulated, but the oracles
OWN = "own"  # the recipe's
ORDINARY = tuple(name for name in POLICIES if name not in ORACLES)


@dataclass(slots=True, frozen=True)
class PolicySpace:
    """A policy, the parameters to begin with, and the distributions of those that are searched."""

    policy: str
    start: Mapping[str, Value]
    distributions: Distributions

    def first(self) -> dict[str, Value]:
        """The searched parameters at the start."""
        whole = parameters(make_any(self.policy, self.start))
        return {name: self._upper_end(name) or whole[name] for name in self.distributions}

    def meant(self, name: str, drawn: Value) -> Value:
        """The value of a searched parameter that was drawn as `drawn`."""
        return 0 if drawn == self._upper_end(name) else drawn

    def _upper_end(self, name: str) -> int:
        """What stands for 0, no bound, in the logarithmic range of a parameter that starts there;
        0: it does not.
        """
        distribution = self.distributions[name]
        if (
            not isinstance(distribution, optuna.distributions.IntDistribution)
            or not distribution.log
        ):
            return 0
        start = self.start.get(name, defaults(KNOWN[self.policy])[name])
        return 0 if start else int(distribution.high)


def make_spaces(
    own: PolicySpec,
    policies: Sequence[str],
    narrowed: Narrowed,
    workers: int,
    known: Sequence[str] = ORDINARY,
) -> list[PolicySpace]:
    """The recipe's own policy first, then the others of `policies` as named.

    "all" stands for the `known` ones, "own" for the recipe's. Keys of `narrowed` are `parameter`,
    of the recipe's own policy, or `policy.parameter`; those of policies that are not searched are
    checked and not used. `InputError` for an unknown policy or parameter, an oracle, or a range
    that cannot be searched.
    """
    names = list(dict.fromkeys([own.name, *_named(policies, own.name, known)]))
    for name in names:
        refuse_oracle(name)
    by_policy: dict[str, dict[str, Sequence[Value]]] = {name: {} for name in KNOWN}
    for key, values in narrowed.items():
        policy, dot, parameter = key.rpartition(".")
        if dot and policy not in KNOWN:
            raise InputError(
                f"tune.space: {key}: there is no policy '{policy}'", nearest(policy, KNOWN)
            )
        by_policy[policy or own.name][parameter] = values
    spaces = {
        name: search_space(name, {}, given, workers)
        for name, given in by_policy.items()
        if name != own.name
    }
    spaces[own.name] = search_space(own.name, own.parameters, by_policy[own.name], workers)
    return [
        PolicySpace(name, own.parameters if name == own.name else {}, spaces[name])
        for name in names
    ]


def _named(policies: Sequence[str], own: str, known: Sequence[str]) -> list[str]:
    meant = {ALL: known, OWN: [own]}
    for name in policies:
        if name not in meant and name not in KNOWN:
            raise InputError(
                f"tune.policies: there is no policy '{name}'", nearest(name, [*KNOWN, *meant])
            )
    return [name for given in policies for name in meant.get(given, [given])]


def search_space(
    policy: str, start: Mapping[str, Value], narrowed: Narrowed, workers: int = 2
) -> Distributions:
    """The distributions of the searched parameters of `policy`: those with a search range, and
    those in `narrowed`.

    A number's range is [low, high], a word's or a boolean's its choices. Ranges are widened where
    needed so that `start`, the parameters that the search starts from, lies within; but the 0 of
    one whose range is logarithmic, which means no bound, is searched as the upper end. With one
    worker, routers are all the same and are not searched. `InputError` for a name that is no
    parameter, or a range outside the parameter's limits.
    """
    known = knobs(KNOWN[policy])
    for name in narrowed:
        if name not in known:
            raise InputError(
                f"tune.space: policy '{policy}' has no parameter '{name}'", nearest(name, known)
            )
    first = defaults(KNOWN[policy]) | dict(start)
    found: Distributions = {}
    for name, knob in known.items():
        if knob.choices or isinstance(first[name], bool):
            values = narrowed.get(name, knob.choices if knob.choices and workers > 1 else ())
            distribution = _categories(name, knob, first[name], values)
        else:
            distribution = _range(name, knob, first[name], narrowed.get(name, knob.search))
        if distribution is not None:
            found[name] = distribution
    return found


def _categories(
    name: str, knob: Knob, first: Value, values: Sequence[Value]
) -> Distribution | None:
    known: tuple[Value, ...] = knob.choices or (False, True)
    for value in values:
        if value not in known or isinstance(value, bool) != (not knob.choices):
            listed = ", ".join(map(_word, known))
            raise InputError(
                f"tune.space: {name}: {_word(value)} is none of its choices", f"choices: {listed}"
            )
    choices = list(dict.fromkeys([first, *values]))
    return optuna.distributions.CategoricalDistribution(choices) if len(choices) > 1 else None


def _range(
    name: str, knob: Knob, first: Value, values: Sequence[Value] | None
) -> Distribution | None:
    if values is None:
        return None
    numbers = [float(value) for value in values if not isinstance(value, (bool, str))]
    shown = f"[{', '.join(map(_word, values))}]"
    if (
        len(values) != 2
        or len(numbers) != 2
        or not knob.low <= numbers[0] <= numbers[1] <= knob.high
    ):
        raise InputError(
            f"tune.space: {name}: {shown} is not a range within [{knob.low:g}, {knob.high:g}]",
            knob.doc,
        )
    start = float(first) or (numbers[1] if knob.log else 0.0)  # no logarithmic range has a 0
    low, high = min(numbers[0], start), max(numbers[1], start)
    log = knob.log and low > 0
    if isinstance(first, int):
        return optuna.distributions.IntDistribution(int(low), int(high), log=log)
    return optuna.distributions.FloatDistribution(low, high, log=log)


def _word(value: Value) -> str:
    return (
        str(value).lower()
        if isinstance(value, bool)
        else value
        if isinstance(value, str)
        else f"{value:g}"
    )


def sweep(distribution: Distribution, points: int) -> list[Value]:
    """`points` values from end to end of a range, spaced as it is searched; all choices where there
    is no range.
    """
    if isinstance(distribution, optuna.distributions.CategoricalDistribution):
        return list(distribution.choices)
    space = np.geomspace if distribution.log else np.linspace
    values = space(distribution.low, distribution.high, points)
    if isinstance(distribution, optuna.distributions.IntDistribution):
        return sorted(set(np.round(values).astype(int).tolist()))
    return [float(value) for value in values]


BATCH = 8  # trials that are asked for before the first of them is told: as many cores can help
POLICY = "policy"
Progress = Callable[[float], None]  # the best goodput so far


@dataclass(slots=True, frozen=True)
class SearchSettings:
    """How to search, and what. `spaces` begins with that of the recipe's own policy.

    `served` are those policies that the recipe's engine can run.
    """

    spaces: Sequence[PolicySpace]
    trials: int
    seed: int
    limits: CandidateLimits
    served: frozenset[str]


@dataclass(slots=True, frozen=True)
class Found:
    """The evaluations in the trials' order, and Optuna's record of them."""

    evaluations: list[Evaluation]
    study: optuna.Study
    limits: CandidateLimits

    def best(self, policies: Collection[str] | None = None) -> int | None:
        """The number of the best trial (of these policies): of the feasible the highest score; of
        all, where none is.

        None where no trial is of them.
        """
        numbers = [
            k
            for k, one in enumerate(self.evaluations)
            if policies is None or one.outcome.policy in policies
        ]
        return max(
            numbers, key=lambda k: (self.fits(k), self.evaluations[k].score, -k), default=None
        )

    def fits(self, number: int) -> bool:
        """Whether a trial keeps every limit."""
        return self.evaluations[number].feasible(self.limits)

    def trials(self) -> list[Trial]:
        """The trials, as they are written."""
        return [
            Trial(number=number, outcome=evaluation.outcome, feasible=self.fits(number))
            for number, evaluation in enumerate(self.evaluations)
        ]


def search(
    bench: EvaluationSetup, runner: Runner, settings: SearchSettings, progress: Progress
) -> Found:
    """Trial 0 is the recipe's policy, then come the other policies' defaults, then what TPE
    suggests.
    """
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


def _turns(settings: SearchSettings, found: Found) -> Iterator[str]:
    """The policy of each trial after the starts."""
    for policy in cycle(space.policy for space in settings.spaces):
        best = found.best(settings.served)
        yield policy if best is None else found.evaluations[best].outcome.policy
        yield policy


def _study(settings: SearchSettings) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=settings.seed, constant_liar=True)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for space in settings.spaces:
        start = {f"{space.policy}.{name}": value for name, value in space.first().items()}
        study.enqueue_trial(({POLICY: space.policy} if len(settings.spaces) > 1 else {}) | start)
    return study


def _suggest(
    trial: optuna.Trial, spaces: Sequence[PolicySpace]
) -> tuple[str, dict[str, ParameterValue]]:
    """The policy and all its parameters that are not its defaults, as the trial wants them."""
    by_name = {space.policy: space for space in spaces}
    name = trial.suggest_categorical(POLICY, list(by_name)) if len(spaces) > 1 else spaces[0].policy
    space = by_name[name]
    drawn = {
        key: _value(trial, f"{name}.{key}", distribution)
        for key, distribution in space.distributions.items()
    }
    return name, {**space.start, **{key: space.meant(key, value) for key, value in drawn.items()}}


def _value(trial: optuna.Trial, name: str, distribution: Distribution) -> ParameterValue:
    value: ParameterValue
    if isinstance(distribution, optuna.distributions.CategoricalDistribution):
        value = trial.suggest_categorical(name, distribution.choices)
    elif isinstance(distribution, optuna.distributions.IntDistribution):
        value = trial.suggest_int(name, distribution.low, distribution.high, log=distribution.log)
    else:
        value = trial.suggest_float(name, distribution.low, distribution.high, log=distribution.log)
    return value


# What a search found out besides its best: which parameters matter, and what goodput costs in
# latency.

SWEEP_POINTS = 7
IMPORTANCE_TRIALS = 10  # fewer say nothing
LATENCY = "e2e_p95_s"  # what goodput is weighed against, where no target binds


def sweeps(
    space: PolicySpace, chosen: Mapping[str, ParameterValue]
) -> list[dict[str, ParameterValue]]:
    """The candidates of `sensitivity`: each searched parameter over its range, the others as
    `chosen`.
    """
    return [
        {**chosen, name: value}
        for name, distribution in space.distributions.items()
        for value in sweep(distribution, SWEEP_POINTS)
    ]


def sensitivity(
    bench: EvaluationSetup, runner: Runner, space: PolicySpace, best: Evaluation, progress: Progress
) -> list[Sensitivity]:
    """Each searched parameter swept over its range with the others as in `best`, most sensitive
    first.
    """
    chosen, top = best.outcome.parameters, best.goodput_rps
    tasks = [Task(bench, space.policy, candidate) for candidate in sweeps(space, chosen)]
    evaluations = iter(collect(runner, tasks, lambda: progress(top)))
    found = []
    for name, distribution in space.distributions.items():
        values = sweep(distribution, SWEEP_POINTS)
        goodput = [next(evaluations).goodput_rps for _ in values]
        most = max(goodput)
        swing = 100.0 * (most - min(goodput)) / most if most else 0.0
        found.append(
            Sensitivity(parameter=name, values=values, goodput_rps=goodput, swing_percent=swing)
        )
    return sorted(found, key=lambda one: -one.swing_percent)


def importance(found: Found, policy: str) -> dict[str, float]:
    """Each searched parameter's share of what tells a policy's best tenth of trials from the
    others, most first.

    PED-ANOVA (Watanabe et al. 2023) on the policy's own trials; empty for fewer than 10, or where
    nothing was searched, or where so many are equally good that the best tenth is all of them.
    """
    tried = found.study.trials[
        : len(found.evaluations)
    ]  # with few trials, some starts were never asked for
    trials = [
        optuna.trial.create_trial(
            state=optuna.trial.TrialState.COMPLETE,
            value=trial.value,
            params={
                name: value for name, value in trial.params.items() if name.startswith(f"{policy}.")
            },
            distributions={
                name: d for name, d in trial.distributions.items() if name.startswith(f"{policy}.")
            },
        )
        for trial, evaluation in zip(tried, found.evaluations, strict=True)
        if evaluation.outcome.policy == policy
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
    return {name.removeprefix(f"{policy}."): float(share) for name, share in shares.items()}


def front(trials: Sequence[Trial], latency: str) -> list[int]:
    """The numbers of the trials that no other beats in both goodput and `latency`, by rising
    latency.
    """
    known = [trial for trial in trials if latency in trial.outcome.metrics]
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
