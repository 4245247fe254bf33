"""What else would serve the traffic: fewer requests, more workers, a policy of another engine."""

import pytest
import samples
from lean import without_capacity
from said import says
from test_tuning import trace

from toolkit.cli.arguments import open_recipe
from toolkit.files.shipped import recipe_path
from toolkit.files.tuning import Alternatives, Tuning
from toolkit.report.verdict import verdict
from toolkit.sched.policies import KNOWN, STARTED, engines_for, footnote, marked, refusal
from toolkit.tuning.evaluate import Task
from toolkit.tuning.executor import InProcessRunner
from toolkit.tuning.tune import tune
from toolkit.tuning.workload import TuneInputs, cut_trace

TWO = {"windows": 2, "held_out_windows": 2}  # of a trace of seconds
TUNE = {"trials": 2, "request_rate_rps": 60.0, "policies": ["own"], **TWO}


def inputs(sla: dict[str, float], **changes: object) -> TuneInputs:
    recipe = samples.recipe(
        sla=sla, **({"engine": {"name": "transformers"}, "tune": TUNE} | changes)
    )
    fit = (
        samples.paged_fit()
        if recipe.engine.name == "vllm"
        else samples.fit(engine=recipe.engine.name)
    )
    return TuneInputs(recipe, fit, cut_trace(recipe, fit, trace(500)))


def tuned(given: TuneInputs) -> tuple[Tuning, Alternatives]:
    result = tune(given, InProcessRunner(), samples.HEAD, lambda best: None)
    assert result.alternatives is not None
    return result, result.alternatives


@pytest.mark.slow
def test_where_limits_are_broken_workers_and_rate_are_searched() -> None:
    result, found = tuned(inputs({"ttft_p99_s": 0.5}))
    assert not result.keeps_limits
    assert found.workers is not None
    assert found.workers > result.workers
    most_rps = result.capacity.recommended_rps
    assert most_rps < result.request_rate_rps
    assert says(" ".join(verdict(result)), "workers", str(found.workers))
    fewer, _ = tuned(inputs({"ttft_p99_s": 0.5}, tune=TUNE | {"request_rate_rps": most_rps / 2}))
    assert fewer.keeps_limits, fewer.recommended.outcome.used


@pytest.mark.slow
def test_own_simulates_no_policy_and_no_engine_but_the_recipe_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where limits are broken, and shipped recipes serve the same model on the same GPU."""
    tried = set()
    real = Task.simulate

    def simulate(task: Task, window: int) -> object:
        tried.add((task.settings.policy, task.deployment.fit.steps is not None))
        return real(task, window)

    monkeypatch.setattr(Task, "simulate", simulate)
    shipped = open_recipe(recipe_path("llama-3.1-8b-h200-transformers"))
    given = inputs(
        {"ttft_p99_s": 0.01},
        model=shipped.model.model_dump(exclude_unset=True),
        hardware=shipped.hardware.model_dump(exclude_unset=True),
    )
    result, _ = tuned(given)
    assert not result.keeps_limits
    assert tried == {(given.recipe.policy.name, False)}


@pytest.mark.slow
@without_capacity()
def test_half_of_the_trials_are_for_the_best_served_policy_and_half_for_each_in_turn() -> None:
    result, _ = tuned(inputs({"ttft_p99_s": 2.0}, tune=TUNE | {"trials": 32, "policies": ["all"]}))
    trials = {one.best.settings.policy: one.trials for one in result.policies}
    served = sum(count for policy, count in trials.items() if policy in ("slice", "sequence"))
    assert served >= 14
    assert min(trials.values()) >= 2
    assert result.best.settings.policy in ("slice", "sequence")


def test_marked_policies_are_those_that_cannot_be_served() -> None:
    for policy in KNOWN:
        able = engines_for(policy)
        for engine in STARTED:
            assert (refusal(policy, engine) is None) == (engine in able)
            assert (marked(policy, engine) == policy) == (engine in able)
            assert (footnote([policy], engine) == "") == (engine in able)
    assert marked("past-future", "") == "past-future"
    assert says(footnote(["srpt-oracle"], ""), "srpt-oracle")
