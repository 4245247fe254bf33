"""The sources that a plan names for its values are right, for every policy and parameter."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import samples
from commands import llmctl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from orders import changed
from said import says
from test_cli_render import tuning

from toolkit.deploy.plan import make_plan, with_workers
from toolkit.files.io import read_file
from toolkit.files.plan import Plan
from toolkit.files.recipe import Recipe
from toolkit.files.tuning import Settings, Tuning
from toolkit.sched.policies import KNOWN, ORACLES
from toolkit.sched.policies.parameters import Parameter, Value, declared, defaults
from toolkit.sched.policies.vllm import VllmPolicy

SERVED = [name for name in KNOWN if name not in ORACLES]


def engine_of(policy: str) -> str:
    """An engine that runs the policy."""
    return "vllm" if policy == VllmPolicy.name else "fake"


def values(limits: Parameter, default: Value) -> st.SearchStrategy[Value]:
    """Values of a parameter, its default among them."""
    if limits.choices:
        return st.sampled_from(list(limits.choices))
    if isinstance(default, bool):
        return st.booleans()
    low = limits.low
    high = min(limits.high, limits.low + 64)
    drawn = st.integers(int(low), int(high)) if isinstance(default, int) else st.floats(low, high)
    return st.just(default) | drawn


def some(policy: str) -> st.SearchStrategy[dict[str, Value]]:
    """Values for some of the parameters of `policy`."""
    known = declared(KNOWN[policy])
    of_code = defaults(KNOWN[policy])
    drawn = st.fixed_dictionaries(
        {}, optional={name: values(limits, of_code[name]) for name, limits in known.items()}
    )
    return drawn.map(lambda given: within(policy, given))


def within(policy: str, parameters: Mapping[str, Value]) -> dict[str, Value]:
    """The nearest parameters that the policy takes: some of vLLM's own bound each other."""
    return VllmPolicy.within(parameters) if policy == VllmPolicy.name else dict(parameters)


def recipe_of(policy: str, own: Mapping[str, Value]) -> Recipe:
    engine = engine_of(policy)
    workers = 1 if engine == "vllm" else 2
    return samples.recipe(
        policy={"name": policy, "parameters": dict(own)}, engine={"name": engine}, workers=workers
    )


def plan_of(recipe: Recipe, tuned: Tuning | None = None, chosen: Settings | None = None) -> Plan:
    fit = samples.fit(engine=recipe.engine.name, workers=recipe.workers)
    fit = changed(fit, engine__engine_version="0.33.0")  # it has all parameters
    return make_plan(recipe, fit, tuned, {}, chosen)


def tuned_to(recipe: Recipe, policy: str, trials: list[dict[str, Value]], *, keep: bool) -> Tuning:
    """A tuning in which trials of `policy` have these parameters; the last is the best."""
    start = defaults(KNOWN[recipe.policy.name]) | recipe.policy.parameters
    kept = {"ttft_p99_s": 0.5}
    found = [samples.evaluation(recipe.policy.name, start, {"goodput_rps": 1.0}, kept)]
    found += [samples.evaluation(policy, one, {"goodput_rps": 2.0}, kept) for one in trials]
    made = tuning({}, trials=found, defaults=found[0], best=found[-1], keep_defaults=keep)
    return made.model_copy(update={"workers": recipe.workers, **samples.HEAD})


EVERY = pytest.mark.parametrize("policy", SERVED)
QUICK = settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.slow
@EVERY
@QUICK
@given(data=st.data())
def test_a_recipe_sets_what_it_names_and_set_wins_over_it(policy: str, data: st.DataObject) -> None:
    own = data.draw(some(policy))
    by_hand = data.draw(some(policy))
    chosen = Settings(policy=policy, parameters=by_hand)
    by_recipe = plan_of(recipe_of(policy, own))
    by_set = plan_of(recipe_of(policy, own), chosen=chosen)
    assert by_recipe.explained["policy"].source == "recipe, not tuned"
    assert by_set.explained["policy"].source == "set by --policy"
    for plan, named, origin in ((by_recipe, own, "recipe"), (by_set, by_hand, "set by --set")):
        for name, value in plan.settings.parameters.items():
            source = plan.explained[name].source
            assert source == (origin if name in named else f"default of policy '{policy}'")
            assert value == named.get(name, defaults(KNOWN[policy])[name])


@pytest.mark.slow
@EVERY
@QUICK
@given(data=st.data())
def test_a_tuning_is_the_source_of_what_it_varied(policy: str, data: st.DataObject) -> None:
    """The trials begin with the recipe's settings, and the search moves some parameters."""
    own = data.draw(some(policy))
    moved = data.draw(some(policy))
    recipe = recipe_of(policy, own)
    start = defaults(KNOWN[policy]) | own
    tried = within(policy, start | moved)
    tuned = tuned_to(recipe, policy, [tried], keep=False)
    explained = plan_of(recipe, tuned).explained
    for name in start:
        source = explained[name].source
        if tried[name] != start[name]:
            assert source == "trial 1 of 2: +12.5 % goodput"
        else:
            assert source == ("recipe" if name in own else f"default of policy '{policy}'")
    kept = plan_of(recipe, tuned_to(recipe, policy, [tried], keep=True)).explained
    assert says(kept["policy"].source, "kept", "2")
    for name in start:
        assert kept[name].source == ("recipe" if name in own else f"default of policy '{policy}'")


@pytest.mark.parametrize(
    "policy", [name for name in SERVED if name not in ("slice", VllmPolicy.name)]
)
def test_another_policy_s_parameter_is_not_the_tuned_one(policy: str) -> None:
    """Only trials of the recommended policy say what its search moved."""
    recipe = recipe_of("slice", {"slice_tokens": 128, "memory_reserve": 0.3})
    plain = defaults(KNOWN[policy])
    explained = plan_of(recipe, tuned_to(recipe, policy, [dict(plain)], keep=False)).explained
    assert {explained[name].source for name in plain} <= {f"default of policy '{policy}'"}


def test_a_recipe_without_a_policy_is_not_named_as_its_source() -> None:
    bare = samples.recipe().model_dump(exclude={"policy"}, exclude_unset=True)
    plan = plan_of(Recipe.model_validate(bare))
    assert says(plan.explained["policy"].source, "default", "not tuned")


def test_another_number_of_workers_has_no_prediction() -> None:
    recipe = recipe_of("slice", {"slice_tokens": 64})
    plan = plan_of(recipe, tuned_to(recipe, "slice", [defaults(KNOWN["slice"])], keep=True))
    more = with_workers(plan, 3)
    assert more.explained["workers"].source == "set by --workers"
    assert more.explained["slice_tokens"].source == "recipe"
    assert (more.outcome.metrics, more.workload) == ({}, None)
    assert {one.kept for one in more.limits} == {None}


@pytest.mark.slow
def test_the_command_reports_what_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["render", "tiny-llama-cpu", "--fit", "tiny-llama-cpu"]
    assert llmctl(*words, "--policy", "sequence", "--set", "batch_size=12") == 0
    explained = read_file(Plan, "plan.json").explained
    assert says(explained["batch_size"].value, "12")
    assert explained["batch_size"].source == "set by --set"
    assert explained["slice_tokens"].source == "default of policy 'sequence'"
