"""The search: Optuna's TPE over the simulator, the defaults as trial 0, a verdict on windows it never saw.

The result depends on the inputs and the seed alone, to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import optuna

from toolkit.files.recipe import PolicySpec
from toolkit.files.tuning import Sensitivity, Trial, Value
from toolkit.sched.policies import make_policy
from toolkit.sched.policies.parameters import parameters
from toolkit.tuning.evaluate import Evaluation
from toolkit.tuning.space import as_value, search_space, sweep

SWEEP_POINTS = 7
Progress = Callable[[int, int, float], None]  # trials done, of, best goodput so far


class Evaluator(Protocol):
    """Where candidates are tried: `toolkit.tuning.evaluate.Bench`, or one that remembers."""

    def evaluate(self, policy: str, given: Mapping[str, Value]) -> Evaluation:
        """The candidate's metrics."""
        ...


@dataclass(slots=True, frozen=True)
class Settings:
    """How to search, and around what."""

    policy: PolicySpec
    narrowed: Mapping[str, tuple[float, float]]
    trials: int
    seed: int
    max_oom_percent: float


@dataclass(slots=True, frozen=True)
class Found:
    """The trials in order, and the best of them."""

    trials: list[Trial]
    best: Evaluation


def search(bench: Evaluator, settings: Settings, progress: Progress) -> Found:
    """Trial 0 is the recipe's policy; the best is the feasible trial of highest score, or the highest where none is."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    name, start = settings.policy.name, settings.policy.parameters
    space = search_space(name, start, settings.narrowed)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=settings.seed))
    study.enqueue_trial({key: value for key, value in parameters(make_policy(name, start)).items() if key in space})
    evaluations: list[Evaluation] = []
    for done in range(1, settings.trials + 1):
        trial = study.ask(space)
        evaluation = bench.evaluate(name, {**start, **trial.params})
        for key, violation in evaluation.constraints(settings.max_oom_percent).items():
            trial.set_constraint(key, violation)
        study.tell(trial, evaluation.score)
        evaluations.append(evaluation)
        progress(done, settings.trials, max(e.outcome.metrics["goodput_rps"] for e in evaluations))
    feasible = [evaluation.feasible(settings.max_oom_percent) for evaluation in evaluations]
    trials = [
        Trial(number=number, outcome=evaluation.outcome, feasible=fits)
        for number, (evaluation, fits) in enumerate(zip(evaluations, feasible, strict=True))
    ]
    best = max(range(len(evaluations)), key=lambda k: (feasible[k], evaluations[k].score, -k))
    return Found(trials, evaluations[best])


def sensitivity(bench: Evaluator, settings: Settings, best: Evaluation) -> list[Sensitivity]:
    """Each searched parameter swept over its range with the others as in `best`, most sensitive first."""
    name, chosen = best.outcome.policy, best.outcome.parameters
    space = search_space(name, settings.policy.parameters, settings.narrowed)
    found = []
    for parameter, distribution in space.items():
        values = sweep(distribution, SWEEP_POINTS)
        goodput = [
            bench.evaluate(name, {**chosen, parameter: as_value(distribution, value)}).outcome.metrics["goodput_rps"]
            for value in values
        ]
        top = max(goodput)
        swing = 100.0 * (top - min(goodput)) / top if top else 0.0
        found.append(Sensitivity(parameter=parameter, values=values, goodput_rps=goodput, swing_percent=swing))
    return sorted(found, key=lambda one: -one.swing_percent)
