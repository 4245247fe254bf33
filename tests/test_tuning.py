"""The tuner: same bytes for the same seed, the defaults as trial 0, a verdict on the whole trace,
and a resumed search. What is recommended is in test_tuning_judge.
"""

from itertools import pairwise

import numpy as np
import pytest
import samples
from lean import without_capacity
from said import says

from toolkit.errors import InputError
from toolkit.files.tuning import Outcome, Tuning, breaks
from toolkit.report.verdict import verdict
from toolkit.sched.policies.parameters import defaults
from toolkit.sched.policies.past_future import PastFuturePolicy
from toolkit.sched.policies.slice import SlicePolicy
from toolkit.traces.types import Trace
from toolkit.traces.windows import prepare
from toolkit.tuning.capacity import rate_capacity
from toolkit.tuning.evaluate import (
    CandidateLimits,
    Evaluation,
    EvaluationSetup,
    Task,
    make_world,
)
from toolkit.tuning.executor import (
    InProcessRunner,
    Remembering,
    Runner,
    collect,
)
from toolkit.tuning.inputs import Inputs
from toolkit.tuning.journal import EvaluationJournal
from toolkit.tuning.spaces import search_space
from toolkit.tuning.tune import tune
from toolkit.tuning.workload import in_process, make_workload, own_settings, whole_setup

# just what the recipe's own settings keep up with
RATE = {"request_rate_rps": 36.386}
TUNE = {"trials": 12, "window_s": 4, "policies": ["own"]} | RATE


def trace(n: int = 2000, seed: int = 0) -> Trace:
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(0.1, n))
    prompts, outputs = (
        np.clip(rng.lognormal(m, 0.8, n), 1, 400).astype(np.int64) for m in (4.5, 3.5)
    )
    return Trace(arrival, prompts, outputs, np.zeros(n, np.int64), source="test")


@without_capacity()
def run(
    runner: Runner | None = None, sla: dict[str, float] | None = None, **changes: object
) -> Tuning:
    recipe = samples.recipe(
        engine={"name": "transformers"},
        tune=TUNE | changes,
        **({} if sla is None else {"sla": sla}),
    )
    inputs = Inputs(recipe, samples.fit(), make_workload(recipe, samples.fit(), trace()))
    return tune(inputs, runner or InProcessRunner(), samples.HEAD, lambda best: None)


@pytest.fixture(scope="module")
def tuned() -> Tuning:
    return run()


@pytest.fixture(scope="module")
def searched() -> Tuning:
    """Over three policies."""
    return run(policies=["sequence", "past-future"], trials=20)


@pytest.mark.slow
def test_same_seed_same_bytes(tuned):
    assert run().model_dump_json() == tuned.model_dump_json()


@pytest.mark.slow
def test_another_seed_gives_other_trials(tuned):
    assert [t.outcome.parameters for t in run(seed=1).trials] != [
        t.outcome.parameters for t in tuned.trials
    ]


@pytest.mark.slow
def test_trial_0_is_the_recipes_policy(searched):
    assert searched.trials[0].outcome.policy == "slice"
    assert searched.trials[0].outcome.parameters == defaults(SlicePolicy) | {"slice_tokens": 128}


@pytest.mark.slow
def test_the_other_policies_defaults_come_next(searched):
    assert [trial.outcome.policy for trial in searched.trials[1:3]] == ["sequence", "past-future"]
    assert searched.trials[2].outcome.parameters == defaults(PastFuturePolicy)


@pytest.mark.slow
def test_every_policy_is_searched_and_judged_on_the_whole_trace(searched):
    assert [one.policy for one in searched.policies] == ["slice", "sequence", "past-future"]
    assert sum(one.trials for one in searched.policies) == len(searched.trials)
    assert (searched.judged.whole, searched.judged.requests) == (True, 2000)
    tried = [trial.outcome for trial in searched.trials] + searched.further
    for one in searched.policies:
        assert one.judged_requests == one.outcome.metrics["requests"] == 2000
        assert any(other.same_settings(one.outcome) for other in tried)
    assert searched.best in [one.outcome for one in searched.policies]


@pytest.mark.slow
def test_a_policy_that_the_engine_cannot_serve_is_searched_with_its_refusal(searched):
    refusals = {one.policy: one.refusal for one in searched.policies}
    assert refusals["slice"] is None
    assert refusals["past-future"] is not None
    assert says(refusals["past-future"], "'past-future'", "re-batches")


@pytest.mark.slow
def test_no_trial_beats_a_trial_of_the_front(searched):
    points = {t.number: t.outcome.metrics for t in searched.trials}
    latency = searched.latency_metric
    assert searched.front
    for number in searched.front:
        mine = points[number]
        assert not any(
            one["goodput_rps"] > mine["goodput_rps"] and one[latency] < mine[latency]
            for one in points.values()
        )


@pytest.mark.slow
def test_the_best_is_feasible_if_any_trial_is_and_has_the_most_goodput(tuned):
    feasible = [t for t in tuned.trials if t.feasible] or tuned.trials
    best = [t for t in feasible if t.outcome.parameters == tuned.best.parameters]
    assert best[0].outcome.metrics["goodput_rps"] >= 0.999 * max(
        t.outcome.metrics["goodput_rps"] for t in feasible
    )


@pytest.mark.slow
def test_held_out_windows_are_not_search_windows(tuned):
    spans = sorted((w.start_s, w.end_s) for w in tuned.search_windows + tuned.held_out_windows)
    assert len(spans) == 8
    assert all(one[1] <= other[0] for one, other in pairwise(spans))


@pytest.mark.slow
def test_gain_and_binding_target_follow_from_the_verdict(tuned):
    before, after = (o.metrics["goodput_rps"] for o in (tuned.defaults, tuned.best))
    assert tuned.gain_percent == pytest.approx(100 * (after / before - 1))
    assert tuned.binding_sla in tuned.sla
    assert tuned.binding_ratio == tuned.usage[tuned.binding_sla]
    recommended = tuned.defaults if tuned.keep_defaults else tuned.best
    assert tuned.recommended == recommended
    kept = {limit.name: limit for limit in tuned.limits}
    for key, limit in tuned.sla.items():
        assert kept[key].predicted == pytest.approx(tuned.usage[key] * limit)


@pytest.mark.slow
def test_sensitivity_sweeps_every_searched_parameter(tuned):
    assert {one.parameter for one in tuned.sensitivity} == set(search_space("slice", {}, {}))
    assert [one.swing_percent for one in tuned.sensitivity] == sorted(
        (one.swing_percent for one in tuned.sensitivity), reverse=True
    )


def test_other_limits_than_targets_have_a_used_share():
    metrics = {
        "goodput_rps": 1.0,
        "oom_percent": 0.5,
        "evicted_percent": 3.0,
        "sla_attainment_lower_percent": 92.0,
    }
    one = Evaluation(
        Outcome(policy="aggressive", parameters={}, metrics=metrics), {"ttft_p99_s": 0.8}
    )
    assert one.usage(CandidateLimits(1.0)) == {"ttft_p99_s": 0.8, "oom_percent": 0.5}
    both = CandidateLimits(1.0, max_evicted_percent=2.0, min_attainment_percent=90.0)
    assert one.usage(both) == pytest.approx(
        one.usage(CandidateLimits(1.0)) | {"evicted_percent": 1.5, "sla_attainment_percent": 0.8}
    )
    assert one.feasible(CandidateLimits(1.0))
    assert not one.feasible(both)
    assert not one.feasible(CandidateLimits(0.0))


@pytest.mark.slow
def test_the_gain_varies_over_the_windows_that_the_search_did_not_see(tuned):
    found = tuned.held_out_gain
    assert found.windows == len(tuned.held_out_windows)
    for interval in (found.defaults_goodput_rps, found.best_goodput_rps, found.gain_percent):
        assert interval.low <= interval.median <= interval.high
    assert 0 < found.better <= found.windows


@pytest.mark.slow
def test_equal_settings_have_no_gain_to_vary():
    result = run(trials=1)
    assert result.best.same_settings(result.defaults)
    assert result.held_out_gain is None


def test_other_inputs_replace_the_journal(tmp_path):
    path = tmp_path / "memo"
    bench = EvaluationSetup(make_world(samples.recipe(), samples.fit()), [trace(50)], {})
    collect(
        Remembering(InProcessRunner(), EvaluationJournal(path, "one")),
        [Task(bench, "slice"), Task(bench, "slice")],
    )
    assert Remembering(InProcessRunner(), EvaluationJournal(path, "one")).remembered == 1
    assert Remembering(InProcessRunner(), EvaluationJournal(path, "two")).remembered == 0


def test_a_trace_without_requests_is_refused():
    empty = Trace(
        *(np.zeros(0, dtype) for dtype in (float, np.int64, np.int64, np.int64)),
        source="nothing.csv",
    )
    with pytest.raises(InputError) as caught:
        make_workload(samples.recipe(), samples.fit(), empty)
    assert says(caught.value.message, "nothing.csv")


def test_requests_that_arrive_at_once_cannot_be_cut_into_windows():
    at_once = Trace(np.zeros(9), *(np.full(9, 8) for _ in range(3)), source="burst.csv")
    with pytest.raises(InputError) as caught:
        make_workload(samples.recipe(tune={"trials": 1}), samples.fit(), at_once)
    assert says(caught.value.message, "burst.csv", "9")


@pytest.mark.slow
def test_load_is_relative_to_the_capacity_of_the_untuned_policy():
    recipe = samples.recipe(tune={"load": 0.5})
    fit = samples.fit()
    workload = make_workload(recipe, fit, trace())
    setup = whole_setup(make_world(recipe, fit), prepare(trace(), recipe), recipe, "slice")
    capacity = rate_capacity(setup, own_settings(recipe), in_process)
    assert workload.rate_rps == pytest.approx(0.5 * capacity.load, abs=1e-3)


@pytest.mark.slow
def test_where_no_request_is_served_the_targets_are_broken_and_it_says_so() -> None:
    recipe = samples.recipe(engine={"name": "transformers"}, tune=TUNE | {"request_rate_rps": 5.0})
    fit = samples.fit(capacity_tokens=64)
    count = 2000
    long = Trace(
        np.arange(count) / 5,
        np.full(count, 300),
        np.full(count, 9),
        np.zeros(count, np.int64),
        source="long",
    )
    inputs = Inputs(recipe, fit, make_workload(recipe, fit, long))
    with without_capacity():
        result = tune(inputs, InProcessRunner(), samples.HEAD, lambda best: None)
    assert not any(trial.feasible for trial in result.trials)
    assert not result.keeps_limits
    kept = {limit.name: limit.kept for limit in result.limits}
    assert {key: kept[key] for key in recipe.sla} == dict.fromkeys(recipe.sla, False)
    assert says(breaks(result.limits), "ttft_p99_s", "2")
    assert "no request is served" in " ".join(verdict(result))
    assert Tuning.model_validate_json(result.model_dump_json()) == result
