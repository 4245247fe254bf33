"""The tuner: same seed same bytes, defaults first, a verdict on other windows, an interrupted search goes on."""

from itertools import pairwise

import numpy as np
import pytest
import samples

from toolkit.errors import InputError
from toolkit.files.tuning import Tuning
from toolkit.sched.policies.parameters import defaults
from toolkit.sched.policies.slice import SlicePolicy
from toolkit.traces.prepare import prepare
from toolkit.traces.types import Trace
from toolkit.tuning.evaluate import Bench
from toolkit.tuning.memo import Remembering
from toolkit.tuning.space import search_space, sweep
from toolkit.tuning.tune import capacity_rps, make_workload, make_world, tune

HEAD = {"tool_version": "0", "environment": samples.ENVIRONMENT, "inputs": {}}


def trace(n: int = 2000, seed: int = 0) -> Trace:
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(0.1, n))
    prompts, outputs = (np.clip(rng.lognormal(m, 0.8, n), 1, 400).astype(np.int64) for m in (4.5, 3.5))
    return Trace(arrival, prompts, outputs, np.zeros(n, np.int64), source="test")


def run(recipe=None, **options) -> Tuning:
    recipe = recipe or samples.recipe()
    fit = samples.fit()
    workload = make_workload(recipe, fit, trace())
    return tune(recipe, workload, make_world(recipe, fit), HEAD, lambda done, of, best: None, **options)


@pytest.fixture(scope="module")
def tuned() -> Tuning:
    return run()


def test_same_seed_same_bytes(tuned):
    assert run().model_dump_json() == tuned.model_dump_json()


def test_another_seed_searches_elsewhere(tuned):
    changed = samples.recipe(tune={"trials": 8, "window_s": 10, "load": 1.0, "seed": 1})
    assert [t.outcome.parameters for t in run(changed).trials] != [t.outcome.parameters for t in tuned.trials]


def test_trial_0_is_the_recipes_policy(tuned):
    assert tuned.trials[0].outcome.parameters == defaults(SlicePolicy) | {"slice_tokens": 128}


def test_the_best_is_feasible_if_any_trial_is_and_has_the_most_goodput(tuned):
    feasible = [t for t in tuned.trials if t.feasible] or tuned.trials
    best = [t for t in feasible if t.outcome.parameters == tuned.best_held_out.parameters]
    assert best[0].outcome.metrics["goodput_rps"] >= 0.999 * max(t.outcome.metrics["goodput_rps"] for t in feasible)


def test_verdict_windows_are_not_search_windows(tuned):
    spans = sorted((w.start_s, w.end_s) for w in tuned.search_windows + tuned.held_out_windows)
    assert len(spans) == 4
    assert all(one[1] <= other[0] for one, other in pairwise(spans))


def test_gain_and_binding_target_follow_from_the_verdict(tuned):
    before, after = (o.metrics["goodput_rps"] for o in (tuned.defaults_held_out, tuned.best_held_out))
    assert tuned.gain_percent == pytest.approx(100 * (after / before - 1))
    assert tuned.binding_sla in tuned.sla
    assert tuned.keep_defaults == (
        tuned.best_held_out.parameters == tuned.defaults_held_out.parameters or after < before
    )


def test_sensitivity_sweeps_every_searched_parameter(tuned):
    assert {one.parameter for one in tuned.sensitivity} == set(search_space("slice", {}, {}))
    assert [one.swing_percent for one in tuned.sensitivity] == sorted(
        (one.swing_percent for one in tuned.sensitivity), reverse=True
    )


def test_an_interrupted_search_goes_on_and_ends_the_same(tuned, tmp_path):
    path = tmp_path / "tuning.json.partial"
    calls = []

    class Interrupted(Remembering):
        def evaluate(self, policy, given):
            calls.append(given)
            if len(calls) == 5:
                raise KeyboardInterrupt
            return super().evaluate(policy, given)

    with pytest.raises(KeyboardInterrupt):
        run(remember=lambda bench: Interrupted(bench, path, "same"))
    with path.open("a") as torn:
        torn.write('["half a li')
    kept: list[Remembering] = []

    def go_on(bench):
        kept.append(Remembering(bench, path, "same"))
        return kept[0]

    assert run(remember=go_on).model_dump_json() == tuned.model_dump_json()
    assert kept[0].remembered == 4


def test_other_inputs_forget_what_was_kept(tmp_path):
    path = tmp_path / "memo"
    world = make_world(samples.recipe(), samples.fit())
    bench = Bench(world, [trace(50)], {})
    Remembering(bench, path, "one").evaluate("slice", {})
    assert Remembering(bench, path, "one").remembered == 1
    assert Remembering(bench, path, "two").remembered == 0


def test_load_is_relative_to_what_the_untuned_policy_can_serve():
    recipe, fit = samples.recipe(), samples.fit()
    workload = make_workload(recipe, fit, trace())
    capacity = capacity_rps(recipe, make_world(recipe, fit), prepare(trace(), recipe))
    assert workload.rate_rps == pytest.approx(capacity, abs=1e-3)


@pytest.mark.parametrize(
    ("narrowed", "message"),
    [
        ({"slice_token": (1, 2)}, "tune.space: policy 'slice' has no searchable parameter 'slice_token'"),
        ({"eager": (0, 1)}, "tune.space: policy 'slice' has no searchable parameter 'eager'"),
        ({"memory_reserve": (0.0, 2.0)}, "tune.space: memory_reserve: [0, 2] is not a range within [0, 0.99]"),
    ],
)
def test_a_space_that_cannot_be_searched_is_named(narrowed, message):
    with pytest.raises(InputError) as caught:
        search_space("slice", {}, narrowed)
    assert caught.value.message == message


def test_a_range_is_widened_to_hold_the_start():
    space = search_space("slice", {"slice_tokens": 128}, {"slice_tokens": (4, 64)})
    assert sweep(space["slice_tokens"], 2) == [4.0, 128.0]
