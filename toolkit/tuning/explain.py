"""What a search found out besides its best: which parameters matter, and what goodput costs in latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import optuna

from toolkit.files.tuning import Sensitivity, Trial, Value
from toolkit.tuning.crew import Runner, collect
from toolkit.tuning.evaluate import Bench, Evaluation, Task
from toolkit.tuning.search import Found, Progress
from toolkit.tuning.space import PolicySpace, sweep

SWEEP_POINTS = 7
IMPORTANCE_TRIALS = 10  # fewer say nothing
LATENCY = "e2e_p95_s"  # what goodput is weighed against, where no target binds


def sweeps(space: PolicySpace, chosen: Mapping[str, Value]) -> list[dict[str, Value]]:
    """The candidates of `sensitivity`: each searched parameter over its range, the others as `chosen`."""
    return [
        {**chosen, name: value}
        for name, distribution in space.distributions.items()
        for value in sweep(distribution, SWEEP_POINTS)
    ]


def sensitivity(
    bench: Bench, runner: Runner, space: PolicySpace, best: Evaluation, progress: Progress
) -> list[Sensitivity]:
    """Each searched parameter swept over its range with the others as in `best`, most sensitive first."""
    chosen, top = best.outcome.parameters, best.goodput_rps
    tasks = [Task(bench, space.policy, candidate) for candidate in sweeps(space, chosen)]
    evaluations = iter(collect(runner, tasks, lambda: progress(top)))
    found = []
    for name, distribution in space.distributions.items():
        values = sweep(distribution, SWEEP_POINTS)
        goodput = [next(evaluations).goodput_rps for _ in values]
        most = max(goodput)
        swing = 100.0 * (most - min(goodput)) / most if most else 0.0
        found.append(Sensitivity(parameter=name, values=values, goodput_rps=goodput, swing_percent=swing))
    return sorted(found, key=lambda one: -one.swing_percent)


def importance(found: Found, policy: str) -> dict[str, float]:
    """Each searched parameter's share of what tells a policy's best tenth of trials from the others, most first.

    PED-ANOVA (Watanabe et al. 2023) on the policy's own trials; empty for fewer than 10, or where nothing was searched,
    or where so many are equally good that the best tenth is all of them.
    """
    tried = found.study.trials[: len(found.evaluations)]  # with few trials, some starts were never asked for
    trials = [
        optuna.trial.create_trial(
            state=optuna.trial.TrialState.COMPLETE,
            value=trial.value,
            params={name: value for name, value in trial.params.items() if name.startswith(f"{policy}.")},
            distributions={name: d for name, d in trial.distributions.items() if name.startswith(f"{policy}.")},
        )
        for trial, evaluation in zip(tried, found.evaluations, strict=True)
        if evaluation.outcome.policy == policy
    ]
    values = sorted((trial.value for trial in trials), reverse=True)
    if len(trials) < IMPORTANCE_TRIALS or not trials[0].params or values[len(values) // 10] == values[-1]:
        return {}
    study = optuna.create_study(direction="maximize")
    study.add_trials(trials)
    shares = optuna.importance.get_param_importances(study)
    return {name.removeprefix(f"{policy}."): float(share) for name, share in shares.items()}


def front(trials: Sequence[Trial], latency: str) -> list[int]:
    """The numbers of the trials that no other beats in both goodput and `latency`, by rising latency."""
    known = [trial for trial in trials if latency in trial.outcome.metrics]
    order = sorted(known, key=lambda t: (t.outcome.metrics[latency], -t.outcome.metrics["goodput_rps"], t.number))
    kept: list[int] = []
    most = 0.0
    for trial in order:
        if trial.outcome.metrics["goodput_rps"] > most:
            most = trial.outcome.metrics["goodput_rps"]
            kept.append(trial.number)
    return kept
