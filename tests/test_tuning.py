"""The tuner: the defaults as trial 0, and a verdict on the whole trace. What is recommended is in
test_tuning_judge.
"""

import numpy as np
import pytest
import samples
from lean import without_capacity
from said import says

from toolkit.errors import InputError
from toolkit.files.tuning import Tuning, breaks, recipe_limits
from toolkit.sched.policies.parameters import defaults
from toolkit.sched.policies.past_future import PastFuturePolicy
from toolkit.sched.policies.slice import SlicePolicy
from toolkit.traces.types import Trace
from toolkit.tuning.evaluate import share_of
from toolkit.tuning.executor import InProcessRunner
from toolkit.tuning.spaces import search_space
from toolkit.tuning.tune import tune
from toolkit.tuning.workload import TuneInputs, cut_trace

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


@pytest.fixture(scope="module")
@without_capacity()
def searched() -> Tuning:
    """Over three policies."""
    changes = {"policies": ["sequence", "past-future"], "trials": 12}
    recipe = samples.recipe(engine={"name": "transformers"}, tune=TUNE | changes)
    inputs = TuneInputs(recipe, samples.fit(), cut_trace(recipe, samples.fit(), trace(1000)))
    return tune(inputs, InProcessRunner(), samples.HEAD, lambda best: None)


@pytest.mark.slow
def test_the_recipe_s_policy_is_tried_first_and_then_the_others_defaults(searched):
    first, *others = searched.trials[:3]
    assert first.settings.policy == "slice"
    assert first.settings.parameters == defaults(SlicePolicy) | {"slice_tokens": 128}
    assert [trial.settings.policy for trial in others] == ["sequence", "past-future"]
    assert others[1].settings.parameters == defaults(PastFuturePolicy)


@pytest.mark.slow
def test_every_policy_is_searched_and_judged_on_the_whole_trace(searched):
    assert [one.best.settings.policy for one in searched.policies] == [
        "slice",
        "sequence",
        "past-future",
    ]
    assert sum(one.trials for one in searched.policies) == len(searched.trials)
    assert (searched.judged.whole, searched.judged.requests) == (True, 1000)
    tried = [trial.settings for trial in searched.trials + searched.further]
    for one in searched.policies:
        assert one.judged_requests == one.best.metrics["requests"] == 1000
        assert one.best.settings in tried
    assert searched.best in [one.best for one in searched.policies]


@pytest.mark.slow
def test_a_policy_that_the_engine_cannot_serve_is_searched_with_its_refusal(searched):
    refusals = {one.best.settings.policy: one.refusal for one in searched.policies}
    assert refusals["slice"] is None
    assert refusals["past-future"] is not None
    assert says(refusals["past-future"], "'past-future'", "re-batches")


@pytest.mark.slow
def test_no_trial_beats_a_trial_of_the_front(searched):
    points = {number: trial.metrics for number, trial in enumerate(searched.trials)}
    latency = searched.latency_metric
    assert searched.front
    for number in searched.front:
        mine = points[number]
        assert not any(
            one["goodput_rps"] > mine["goodput_rps"] and one[latency] < mine[latency]
            for one in points.values()
        )


@pytest.mark.slow
def test_gain_and_binding_target_follow_from_the_verdict(searched):
    before, after = (o.metrics["goodput_rps"] for o in (searched.defaults, searched.best))
    assert searched.gain_percent == pytest.approx(100 * (after / before - 1))
    assert searched.recommended.outcome.binding in searched.sla
    recommended = searched.defaults if searched.keep_defaults else searched.best
    assert searched.recommended == recommended
    kept = {limit.name: limit for limit in searched.limits}
    for key, limit in searched.sla.items():
        assert kept[key].predicted == pytest.approx(searched.recommended.outcome.used[key] * limit)


@pytest.mark.slow
def test_the_recommendation_is_also_judged_with_times_at_the_slow_end(searched):
    end = searched.slow_end
    assert end.law == samples.fit().law_range()
    assert end.law.slow > 1.0
    assert [limit.name for limit in end.limits] == [limit.name for limit in searched.limits]
    pairs = zip(end.limits, searched.limits, strict=True)
    assert all(slow.predicted >= own.predicted for slow, own in pairs if own.name in searched.sla)


@pytest.mark.slow
def test_sensitivity_sweeps_every_searched_parameter(searched):
    assert {one.parameter for one in searched.sensitivity} == set(
        search_space(searched.best.settings.policy, {}, {})
    )
    assert [one.swing_percent for one in searched.sensitivity] == sorted(
        (one.swing_percent for one in searched.sensitivity), reverse=True
    )


def test_other_limits_than_targets_have_a_used_share():
    metrics = {"oom_percent": 0.5, "evicted_percent": 3.0, "sla_attainment_lower_percent": 92.0}
    tune = {"max_oom_percent": 1.0, "max_evicted_percent": 2.0, "min_attainment_percent": 90.0}
    limits = {one.name: one for one in recipe_limits(samples.recipe(tune=tune))}
    used = {name: share_of(limits[name], value) for name, value in metrics.items()}
    assert used == pytest.approx(
        {"oom_percent": 0.5, "evicted_percent": 1.5, "sla_attainment_lower_percent": 0.8}
    )
    never = limits["oom_percent"].model_copy(update={"limit": 0.0})
    assert (share_of(never, 0.0), share_of(never, 0.5)) == (0.0, 1.5)


@pytest.mark.slow
def test_the_gain_varies_over_the_windows_that_the_search_did_not_see(searched):
    found = searched.held_out_gain
    assert found.windows == len(searched.held_out_windows)
    for interval in (found.defaults_goodput_rps, found.best_goodput_rps, found.gain_percent):
        assert interval.low <= interval.median <= interval.high
    assert 0 < found.better <= found.windows


def test_a_trace_without_requests_is_refused():
    empty = Trace(
        *(np.zeros(0, dtype) for dtype in (float, np.int64, np.int64, np.int64)),
        source="nothing.csv",
    )
    with pytest.raises(InputError) as caught:
        cut_trace(samples.recipe(), samples.fit(), empty)
    assert says(caught.value.message, "nothing.csv")


def test_requests_that_arrive_at_once_cannot_be_cut_into_windows():
    at_once = Trace(np.zeros(9), *(np.full(9, 8) for _ in range(3)), source="burst.csv")
    with pytest.raises(InputError) as caught:
        cut_trace(samples.recipe(tune={"trials": 1}), samples.fit(), at_once)
    assert says(caught.value.message, "burst.csv", "9")


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
    inputs = TuneInputs(recipe, fit, cut_trace(recipe, fit, long))
    with without_capacity():
        result = tune(inputs, InProcessRunner(), samples.HEAD, lambda best: None)
    assert not any(trial.outcome.kept for trial in result.trials)
    assert not result.keeps_limits
    kept = {limit.name: limit.kept for limit in result.limits}
    assert {key: kept[key] for key in recipe.sla} == dict.fromkeys(recipe.sla, False)
    assert says(breaks(result.limits), "ttft_p99_s", "2")
    assert Tuning.model_validate_json(result.model_dump_json()) == result
