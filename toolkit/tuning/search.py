"""The search: Optuna's TPE over the simulator, with the recipe's policy as trial 0.

The policy is a categorical choice, and each policy's parameters depend on it. On its own, TPE soon
tries only one policy, perhaps one that the recipe's engine cannot run. So half of the trials go to
the best policy that the engine can run, and half to each policy in turn. Trials are asked for in
batches of a fixed size, which several processes may run in parallel, and told in order: the result
depends only on the inputs and the seed, to the byte.

The parts, in order: the search space of each policy, the search, and what its trials show besides
the best (sensitivity, importance, the front of goodput and latency).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import TypeAlias

import numpy as np
import optuna

from toolkit.errors import InputError, nearest
from toolkit.files.recipe import PolicySpec, RouterSpec
from toolkit.files.tuning import Outcome, ParameterValue, Sensitivity, Trial, searched_key
from toolkit.routing.routers import (
    ROUTERS,
    refuse_unknown_router,
    router_defaults,
    router_knobs,
)
from toolkit.sched.policies import KNOWN, ORACLES, POLICIES, make_any, refuse_oracle
from toolkit.sched.policies.parameters import Knob, Value, defaults, knobs, parameters
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

BATCH = 8  # trials that are asked for before the first of them is told: so many can run in parallel
SWEEP_POINTS = 7
IMPORTANCE_TRIALS = 10  # the least number of trials from which importance is computed
POLICY = "policy"
LATENCY = "e2e_p95_s"  # what goodput is weighed against, where no target binds
ALL = "all"  # every policy that can be simulated, except the oracles
OWN = "own"  # the recipe's policy
ORDINARY = tuple(name for name in POLICIES if name not in ORACLES)

Distribution: TypeAlias = (
    optuna.distributions.IntDistribution
    | optuna.distributions.FloatDistribution
    | optuna.distributions.CategoricalDistribution
)
Distributions = dict[str, Distribution]
Narrowed = Mapping[str, Sequence[Value]]  # `tune.space` of a recipe
Progress = Callable[[float], None]  # called with the best goodput so far


@dataclass(slots=True, frozen=True)
class PolicySpace:
    """A policy, its parameters at the start, and the distributions of the searched ones.

    A logarithmic range cannot hold 0, which means no bound. Where a parameter starts at 0, the
    upper end of its range stands for 0.

    With a `router`, the policy runs on replicas behind it. The names of the router's searched
    parameters are `router.parameter`.
    """

    policy: str
    start: Mapping[str, Value]
    distributions: Distributions
    router: RouterSpec | None = None

    @property
    def key(self) -> str:
        """What is searched apart from other spaces; see `Outcome.key`."""
        return searched_key(self.policy, self.router.name if self.router else None)

    def first(self) -> dict[str, Value]:
        """The searched parameters at the start, as they would be drawn."""
        whole = parameters(make_any(self.policy, self.start)) | self._of_router()
        return {name: self._unbounded(name) or whole[name] for name in self.distributions}

    def task(self, setup: EvaluationSetup, values: Mapping[str, ParameterValue]) -> Task:
        """The candidate with these values of searched parameters, the others as at the start."""
        router, own = self.router, {k: v for k, v in values.items() if "." not in k}
        if router is not None:
            knobs_of_router = {k.rpartition(".")[2]: v for k, v in values.items() if "." in k}
            changed = {"parameters": router.parameters | knobs_of_router}
            router = router.model_copy(update=changed)
        return Task(setup, self.policy, {**self.start, **own}, router)

    def values(self, outcome: Outcome) -> dict[str, ParameterValue]:
        """All parameters of an outcome of this space, by the names that `task` takes."""
        router = outcome.replica_router
        return {**outcome.parameters, **(_named(router) if router else {})}

    def _of_router(self) -> dict[str, Value]:
        return _named(self.router) if self.router else {}

    def value_of(self, name: str, drawn: Value) -> Value:
        """The value of a searched parameter that was drawn as `drawn`."""
        return 0 if drawn == self._unbounded(name) else drawn

    def _unbounded(self, name: str) -> int:
        """The drawn value that stands for 0 (no bound); 0 where no value does."""
        distribution = self.distributions[name]
        if (
            not isinstance(distribution, optuna.distributions.IntDistribution)
            or not distribution.log
        ):
            return 0
        known = defaults(KNOWN[self.policy]) | dict(self.start) | self._of_router()
        return 0 if known[name] else int(distribution.high)


def _named(router: RouterSpec) -> dict[str, Value]:
    """A router's parameters by the names that they have in a search."""
    return {f"{router.name}.{name}": value for name, value in router.parameters.items()}


def router_spaces(
    space: PolicySpace,
    own: RouterSpec,
    routers: Sequence[str],
    narrowed: Narrowed,
    start_of: Callable[[str], RouterSpec],
) -> list[PolicySpace]:
    """The space behind the recipe's own router, then behind each of the other `routers`.

    In `routers`, "all" stands for all, "own" for the recipe's. `start_of` gives a router's
    parameters at the start. Keys of `narrowed` that are not `router.parameter` are left alone.
    Raises `InputError` for an unknown router or parameter, and a range that cannot be searched.
    """
    groups = {ALL: list(ROUTERS), OWN: [own.name]}
    for name in routers:
        if name not in groups:
            refuse_unknown_router(name, "tune.routers: ")
    wanted = [name for given in routers for name in groups.get(given, [given])]
    found = []
    for name in dict.fromkeys([own.name, *wanted]):
        router = start_of(name)
        given = {
            key.rpartition(".")[2]: values
            for key, values in narrowed.items()
            if key.rpartition(".")[0] == name
        }
        searched = _distributions(
            f"router '{name}'", router_knobs(ROUTERS[name]), router.parameters, given
        )
        named = {f"{name}.{parameter}": among for parameter, among in searched.items()}
        distributions = {**space.distributions, **named}
        found.append(replace(space, router=router, distributions=distributions))
    return found


def make_spaces(
    own: PolicySpec,
    policies: Sequence[str],
    narrowed: Narrowed,
    workers: int,
    known: Sequence[str] = ORDINARY,
) -> list[PolicySpace]:
    """The spaces of the recipe's own policy, then of the other `policies` in their order.

    In `policies`, "all" stands for the `known` ones, "own" for the recipe's. Keys of `narrowed` are
    `parameter` (of the recipe's own policy), `policy.parameter`, or `router.parameter`
    (`router_spaces`); keys of policies that are not searched are only checked. Raises `InputError`
    for an unknown policy or parameter, an oracle, or a range that cannot be searched.
    """
    groups = {ALL: known, OWN: [own.name]}
    for name in policies:
        if name not in groups and name not in KNOWN:
            raise InputError(
                f"tune.policies: there is no policy '{name}'", nearest(name, [*KNOWN, *groups])
            )
    wanted = [name for given in policies for name in groups.get(given, [given])]
    names = list(dict.fromkeys([own.name, *wanted]))
    for name in names:
        refuse_oracle(name)
    by_policy: dict[str, dict[str, Sequence[Value]]] = {name: {} for name in KNOWN}
    for key, values in narrowed.items():
        policy, dot, parameter = key.rpartition(".")
        if policy in ROUTERS:
            _distributions(
                f"router '{policy}'",
                router_knobs(ROUTERS[policy]),
                router_defaults(ROUTERS[policy]),
                {parameter: values},
            )
            continue
        if dot and policy not in KNOWN:
            raise InputError(
                f"tune.space: {key}: there is no policy or router '{policy}'",
                nearest(policy, [*KNOWN, *ROUTERS]),
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


def search_space(
    policy: str, start: Mapping[str, Value], narrowed: Narrowed, workers: int = 2
) -> Distributions:
    """The distributions of the searched parameters of `policy`.

    Searched are those with a search range and those in `narrowed`. The range of a number is
    [low, high]; a word or a boolean has choices. Ranges are widened to hold `start`, the parameters
    that the search starts from, except for a 0 in a logarithmic range (see `PolicySpace`). With one
    worker all routers are the same, so they are not searched. Raises `InputError` for an unknown
    parameter, and for a range outside the parameter's limits.
    """
    known, first = knobs(KNOWN[policy]), defaults(KNOWN[policy]) | dict(start)
    return _distributions(f"policy '{policy}'", known, first, narrowed, workers)


def _distributions(
    owner: str,
    known: Mapping[str, Knob],
    first: Mapping[str, Value],
    narrowed: Narrowed,
    workers: int = 2,
) -> Distributions:
    """The distributions of the searched ones of `known` parameters, which start at `first`."""
    for name in narrowed:
        if name not in known:
            hint = nearest(name, known) if known else "it has no parameters"
            raise InputError(f"tune.space: {owner} has no parameter '{name}'", hint)
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
                f"tune.space: {name}: {_word(value)} is not one of its choices",
                f"choices: {listed}",
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
    """A value as YAML spells it."""
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else f"{value:g}"


def sweep(distribution: Distribution, points: int) -> list[Value]:
    """`points` values from end to end of a range, spaced as in the search; or all choices."""
    if isinstance(distribution, optuna.distributions.CategoricalDistribution):
        return list(distribution.choices)
    space = np.geomspace if distribution.log else np.linspace
    values = space(distribution.low, distribution.high, points)
    if isinstance(distribution, optuna.distributions.IntDistribution):
        return sorted(set(np.round(values).astype(int).tolist()))
    return [float(value) for value in values]


@dataclass(slots=True, frozen=True)
class SearchSettings:
    """What to search and how. The first of `spaces` belongs to the recipe's own policy.

    `served` are the keys of the spaces with a policy that the recipe's engine can run.
    """

    spaces: Sequence[PolicySpace]
    trials: int
    seed: int
    limits: CandidateLimits
    served: frozenset[str]


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


def search(
    setup: EvaluationSetup, runner: Runner, settings: SearchSettings, progress: Progress
) -> Found:
    """Run the search on `setup`.

    Trial 0 is the recipe's policy, then come the defaults of the other policies, then the
    suggestions of TPE. Once a trial keeps every limit, policies without such a trial are screened
    (`_evaluate`). Others may end early (`_may_end_early`), which changes no other trial.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=settings.seed, constant_liar=True)
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


def sweeps(
    space: PolicySpace, chosen: Mapping[str, ParameterValue]
) -> list[dict[str, ParameterValue]]:
    """The candidates of `sensitivity`: each parameter over its range, the rest `chosen`."""
    return [
        {**chosen, name: value}
        for name, distribution in space.distributions.items()
        for value in sweep(distribution, SWEEP_POINTS)
    ]


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
