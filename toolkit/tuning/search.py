"""The search: Optuna's TPE over the simulator, with the recipe's policy as trial 0.

The policy is a categorical choice, and each policy's parameters depend on it. On its own, TPE soon
tries only one policy, perhaps one that the recipe's engine cannot run. So half of the trials go to
the best policy that the engine can run, and half to each policy in turn. TPE suggests trials in
batches of a fixed size, which several processes may run in parallel, and gets their results in
order: the outcome depends only on the inputs and the seed, to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import optuna

from toolkit.errors import InputError
from toolkit.files.fit import Fit
from toolkit.files.recipe import Recipe
from toolkit.files.tuning import Evaluation, ParameterValue, Sensitivity, Settings
from toolkit.routing.routers import router_of
from toolkit.sched.policies import BUILT_IN, refusal
from toolkit.sched.policies.parameters import Value
from toolkit.sched.policies.vllm import FLAGS, VllmPolicy
from toolkit.sim.api import usual_policies
from toolkit.tuning.evaluate import SCREEN_SHARE, Screen, Task, make_screens, rank, score
from toolkit.tuning.executor import Runner, collect
from toolkit.tuning.spaces import (
    PolicySpace,
    drawn,
    make_spaces,
    over_drafts,
    router_spaces,
    sweep,
    values_of,
)

BATCH = 8  # trials that are suggested at once, and can run in parallel
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


def ranges_of_release(fit: Fit) -> dict[str, list[Value]]:
    """The ranges of flags that not every release of vLLM has, if the measured one has them."""
    if fit.engine.engine != VllmPolicy.engine:
        return {}
    return {
        f"{VllmPolicy.name}.{name}": list(flag.search)
        for name, flag in FLAGS.items()
        if flag.search and flag.is_in(fit.engine.engine_version)
    }


def search_settings(recipe: Recipe, fit: Fit) -> SearchSettings:
    """The recipe's settings of the search.

    "All" policies are the ones that the fit's laws can simulate. Raises `InputError` for wrong
    settings.
    """
    spec = recipe.tune
    workers = recipe.workers
    ranges = {**ranges_of_release(fit), **spec.space}
    spaces = make_spaces(recipe.policy, spec.policies, ranges, workers, usual_policies(fit))
    if fit.steps is not None:
        numbers = [steps.draft_tokens for steps in (fit.steps, *fit.drafts)]
        spaces = [over_drafts(space, numbers) for space in spaces]
    if router_of(recipe) is not None:
        if spaces[0].start.policy not in BUILT_IN:  # each replica has a scheduler of its own
            raise InputError(
                f"policy '{spaces[0].start.policy}' on {workers} replicas: only the policies of a "
                f"server's own scheduler ({', '.join(BUILT_IN)}) are simulated behind a router",
                "set policy.name to one of them, or workers to 1",
            )
        spaces = router_spaces(spaces[0], recipe)
    engine = recipe.engine.name
    served = frozenset(space.key for space in spaces if refusal(space.start.policy, engine) is None)
    # Policies that the engine can serve come first, in case there are few trials.
    own, *rest = spaces
    rest.sort(key=lambda space: space.key not in served)
    return SearchSettings([own, *rest], spec.trials, spec.seed, served)


def best_of(trials: Iterable[Evaluation], keys: Collection[str]) -> Evaluation | None:
    """The best trial of these spaces; None where they have none. Of equal ranks, it is the
    earliest.
    """
    return max((one for one in trials if one.settings.key in keys), key=rank, default=None)


def search(
    task: Task, runner: Runner, settings: SearchSettings, progress: Progress
) -> list[Evaluation]:
    """Search settings on the windows of `task`, which has the recipe's own. Returns the trials, in
    their order.

    Trial 0 is the recipe's policy, then come the defaults of the other policies, then the
    suggestions of TPE. Trials may be screened (`_screened`).
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=settings.seed, constant_liar=True)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    several = len(settings.spaces) > 1
    for space in settings.spaces:
        start = {f"{space.start.policy}.{name}": value for name, value in space.first().items()}
        study.enqueue_trial(({POLICY: space.key} if several else {}) | start)
    evaluations: list[Evaluation] = []
    next_policies = _next_policies(settings, evaluations)
    screens = make_screens(task)
    best_rps = 0.0
    size = 1  # trial 0 alone: if it keeps the limits, the other starts are screened
    while len(evaluations) < settings.trials:
        batch = []
        for number in range(len(evaluations), min(len(evaluations) + size, settings.trials)):
            if several and number >= len(settings.spaces):
                study.enqueue_trial({POLICY: next(next_policies)})  # TPE suggests the parameters
            batch.append(study.ask())
        tasks = [task.under(_suggest(trial, settings.spaces)) for trial in batch]
        screened = _screened(evaluations, settings)
        done = _evaluate(runner, tasks, screens, screened, partial(progress, best_rps))
        for trial, evaluation in zip(batch, done, strict=True):
            _tell(study, trial, evaluation)
        evaluations += done
        best_rps = max(one.goodput_rps for one in evaluations if not one.screened_out)
        size = BATCH if len(evaluations) > 1 else max(len(settings.spaces) - 1, 1)
    return evaluations


def _tell(study: optuna.Study, trial: optuna.Trial, evaluation: Evaluation) -> None:
    # The queue of an overloaded server grows, so requests of a window's first part are less late
    # than those of the whole window, about by the share of the part.
    part = SCREEN_SHARE if evaluation.screened_out else 1.0
    for key, share in evaluation.outcome.used.items():
        trial.set_constraint(key, share / part - 1.0)
    study.tell(trial, score(evaluation) * part)


def _screened(trials: Sequence[Evaluation], settings: SearchSettings) -> set[str]:
    """The spaces with screened candidates: those without a trial that keeps every limit, once a
    policy that the engine can run has one. Feasible trials win over all others anyway.
    """
    keeping = {one.settings.key for one in trials if one.outcome.kept}
    if not keeping & settings.served:
        return set()
    return {space.key for space in settings.spaces} - keeping


def _evaluate(
    runner: Runner,
    tasks: Sequence[Task],
    screens: Sequence[Screen],
    screened: Collection[str],
    tick: Callable[[], None],
) -> list[Evaluation]:
    """The evaluations of `tasks`. A task of a `screened` space is simulated on the first part of
    one window, then of each, and on the whole windows only if it is hopeless on neither.
    """
    hopeless: dict[int, Evaluation] = {}
    for screen in screens:
        looks = {
            number: screen.task.under(task.settings)
            for number, task in enumerate(tasks)
            if task.settings.key in screened and number not in hopeless
        }
        for number, look in zip(looks, collect(runner, [*looks.values()]), strict=True):
            if evaluation := screen.hopeless(look):
                hopeless[number] = evaluation
                tick()
    rest = [number for number in range(len(tasks)) if number not in hopeless]
    whole = dict(zip(rest, collect(runner, [tasks[k] for k in rest], tick), strict=True))
    return [hopeless.get(number) or whole[number] for number in range(len(tasks))]


def _next_policies(settings: SearchSettings, trials: Sequence[Evaluation]) -> Iterator[str]:
    """The space of each trial after the starts: the best served one and each space in turn."""
    for key in cycle(space.key for space in settings.spaces):
        best = best_of(trials, settings.served)
        yield best.settings.key if best else key
        yield key


def _suggest(trial: optuna.Trial, spaces: Sequence[PolicySpace]) -> Settings:
    """The trial's candidate."""
    by_key = {space.key: space for space in spaces}
    name = trial.suggest_categorical(POLICY, list(by_key)) if len(spaces) > 1 else spaces[0].key
    space = by_key[name]
    values: dict[str, ParameterValue] = {}
    for key, among in space.distributions.items():
        values[key] = space.value_of(key, drawn(trial, f"{space.start.policy}.{key}", among))
    return space.settings(values)


def sensitivity(
    task: Task, runner: Runner, space: PolicySpace, best: Evaluation, progress: Progress
) -> list[Sensitivity]:
    """Sweep each parameter over its range, the others as in `best`; greatest swing first."""
    chosen = values_of(best.settings)
    best_rps = best.goodput_rps
    swept = {name: sweep(among) for name, among in space.distributions.items()}
    tasks = [
        task.under(space.settings({**chosen, name: value}))
        for name, values in swept.items()
        for value in values
    ]
    evaluations = iter(collect(runner, tasks, lambda: progress(best_rps)))
    found = []
    for name, values in swept.items():
        goodput = [next(evaluations).goodput_rps for _ in values]
        most = max(goodput)
        swing = 100.0 * (most - min(goodput)) / most if most else 0.0
        found.append(
            Sensitivity(parameter=name, values=values, goodput_rps=goodput, swing_percent=swing)
        )
    return sorted(found, key=lambda swept: -swept.swing_percent)


def front(trials: Sequence[Evaluation], latency: str) -> list[int]:
    """The trials that no other beats in both goodput and `latency`: numbers by rising latency."""
    known = [
        (trial.metrics[latency], -trial.goodput_rps, number)
        for number, trial in enumerate(trials)
        if latency in trial.metrics and not trial.screened_out
    ]
    kept: list[int] = []
    most_rps = 0.0
    for _, minus_goodput_rps, number in sorted(known):
        if -minus_goodput_rps > most_rps:
            most_rps = -minus_goodput_rps
            kept.append(number)
    return kept
