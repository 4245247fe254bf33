"""The best settings of a tuning once more, in a world with another scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.errors import InputError
from toolkit.files.tuning import Confirmed, Trial
from toolkit.metrics import differences
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.tuning.evaluate import EvaluationSetup, Task


def best_trials(trials: Sequence[Trial], count: int) -> list[Trial]:
    """The best trials of policy `vllm` that were simulated whole, each of other settings.

    `InputError` where there is none.
    """
    found: list[Trial] = []
    whole = [one for one in trials if one.whole and one.outcome.policy == VllmPolicy.name]
    whole.sort(key=lambda one: (one.feasible, one.outcome.metrics["goodput_rps"]), reverse=True)
    for trial in whole:
        if len(found) < count and not any(trial.outcome.same_settings(o.outcome) for o in found):
            found.append(trial)
    if not found:
        raise InputError(
            "--confirm: no trial ran vLLM's own scheduler",
            f"leave it out, or search the policy '{VllmPolicy.name}'",
        )
    return found


def confirmed(trial: Trial, setup: EvaluationSetup) -> Confirmed:
    """A trial's settings in the world of `setup`: its windows are the search's."""
    evaluation = Task.of(setup, trial.outcome).run()
    before = trial.outcome.metrics
    after = evaluation.outcome.metrics
    different = differences(before, after)
    metric = max(different, key=lambda name: different[name], default=None)
    return Confirmed(
        trial=trial.number,
        goodput_rps=after["goodput_rps"],
        model_goodput_rps=before["goodput_rps"],
        feasible=evaluation.feasible(setup.limits),
        metric=metric,
        apart_percent=100.0 * different[metric] if metric else 0.0,
    )
