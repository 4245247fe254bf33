"""The search space: policies, their parameters and ranges, and refused ones."""

import pytest
import samples
from said import says

from toolkit.errors import InputError
from toolkit.files.recipe import PolicySpec
from toolkit.sched.policies import ORACLES, POLICIES
from toolkit.traces.generate import Lengths, backlog
from toolkit.tuning.spaces import PolicySpace, make_spaces, search_space

SLICE = PolicySpec(name="slice", parameters={"slice_tokens": 128})


def names(*policies: str) -> list[str]:
    return [space.start.policy for space in make_spaces(SLICE, policies, {}, 2)]


def test_by_default_only_the_recipes_own_policy_is_searched():
    assert names() == ["slice"]


def test_the_recipe_s_own_policy_is_first_and_no_policy_comes_twice():
    assert names("past-future", "slice", "past-future") == ["slice", "past-future"]


def test_all_means_all_but_the_oracles():
    assert set(names("all")) == set(POLICIES) - ORACLES


def test_parameters_of_a_policy_are_named_with_it_and_plain_ones_are_the_recipes_own():
    spaces = make_spaces(
        SLICE, ["sequence"], {"slice_tokens": [100, 200], "sequence.batch_size": [2, 4]}, 2
    )
    ranges = [(one.distributions[key].low, one.distributions[key].high) for one, key in
              zip(spaces, ("slice_tokens", "batch_size"), strict=True)]  # fmt: skip
    assert ranges == [(100, 200), (2, 16)]  # 16 is where sequence starts


def test_ranges_of_a_policy_that_is_not_searched_are_only_checked():
    assert len(make_spaces(SLICE, [], {"sequence.batch_size": [2, 4]}, 2)) == 1
    with pytest.raises(InputError):
        make_spaces(SLICE, [], {"sequence.batch": [2, 4]}, 2)


def test_routers_are_searched_where_there_are_several_workers():
    assert search_space("past-future", {}, {}, workers=2)["router"].choices[0] == "round-robin"
    assert "router" not in search_space("past-future", {}, {}, workers=1)


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - ORACLES))
def test_every_policy_can_be_searched(policy):
    assert search_space(policy, {}, {})


@pytest.mark.parametrize(
    ("policies", "narrowed", "named"),
    [
        ([], {"slice_token": [1, 2]}, ("tune.space", "'slice'", "'slice_token'")),
        ([], {"eager": [0, 1]}, ("tune.space: eager", "0")),
        ([], {"memory_reserve": [0.0, 2.0]}, ("memory_reserve", "[0, 2]", "[0, 0.99]")),
        ([], {"memory_reserve": [0.1]}, ("memory_reserve", "[0.1]", "[0, 0.99]")),
        ([], {"memory_reserve": ["a", True]}, ("memory_reserve", "[a, true]", "[0, 0.99]")),
        ([], {"past-future.router": ["x"]}, ("tune.space: router", "x")),
        ([], {"slices.eager": [True]}, ("tune.space: slices.eager", "'slices'")),
        (["slices"], {}, ("tune.policies", "'slices'")),
        (["past-future-oracle"], {}, ("'past-future-oracle'",)),
    ],
)
def test_an_impossible_search_names_the_problem(policies, narrowed, named):
    with pytest.raises(InputError) as caught:
        make_spaces(SLICE, policies, narrowed, 2)
    assert says(caught.value.message, *named)
    assert caught.value.hint


def test_the_0_of_a_logarithmic_range_is_searched_as_its_upper_end():
    narrowed = search_space("fcfs", {}, {"chunk_tokens": [16, 512]})
    space = PolicySpace(samples.chosen("fcfs"), narrowed)
    assert (space.distributions["chunk_tokens"].low, space.first()["chunk_tokens"]) == (16, 512)
    assert (space.value_of("chunk_tokens", 512), space.value_of("chunk_tokens", 511)) == (0, 511)
    start = {"chunk_tokens": 64}
    bounded = PolicySpace(samples.chosen("fcfs", **start), search_space("fcfs", start, {}))
    assert bounded.first()["chunk_tokens"] == 64
    assert bounded.value_of("chunk_tokens", 16_384) == 16_384


def test_vllm_s_flags_that_bound_each_other_are_moved_to_the_nearest_allowed_values() -> None:
    recipe = samples.recipe(engine={"name": "vllm"}, workers=1)
    drawn = samples.chosen("vllm", max_num_seqs=100, max_num_batched_tokens=32)
    requests = backlog(40, Lengths("fixed", 60), Lengths("fixed", 20), seed=0)
    own = samples.task(requests, settings=drawn, given=recipe, laws=samples.paged_fit())
    tried = own.run()
    taken = tried.settings.parameters
    assert taken["max_num_seqs"] == taken["max_num_batched_tokens"] == 32
    assert tried.metrics["throughput_rps"] > 0
