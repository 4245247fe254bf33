"""The contract of every policy: checked parameters, and a registry with valid names."""

import pytest
from said import says

from toolkit.errors import InputError
from toolkit.sched.policies import POLICIES, make_policy
from toolkit.sched.policies.parameters import declared, defaults, parameters


@pytest.mark.parametrize("name", POLICIES)
def test_defaults_are_valid_and_documented(name):
    policy = make_policy(name, {})
    assert parameters(policy) == defaults(POLICIES[name])
    assert all(parameter.doc for parameter in declared(POLICIES[name]).values())


@pytest.mark.parametrize("name", POLICIES)
def test_search_ranges_are_within_the_limits(name):
    for key, parameter in declared(POLICIES[name]).items():
        if parameter.search:
            for value in parameter.search:
                kind = type(defaults(POLICIES[name])[key])
                make_policy(name, {key: kind(value)})


@pytest.mark.parametrize(
    ("parameter", "value", "limit"),
    [
        ("slice_tokens", 0, "1"),
        ("slice_tokens", 1.5, ""),
        ("eager", 1, ""),
        ("memory_reserve", 1.0, "0.99"),
        ("min_interval_s", float("nan"), ""),
    ],
)
def test_a_bad_parameter_is_named_with_its_limit(parameter, value, limit):
    with pytest.raises(InputError) as caught:
        make_policy("slice", {parameter: value})
    assert says(caught.value.message, "'slice'", parameter, str(value), limit)


def test_a_misspelt_name_gets_a_hint():
    with pytest.raises(InputError, match="'slices'") as caught:
        make_policy("slices", {})
    assert "'slice'" in caught.value.hint
    with pytest.raises(InputError, match="'slice_token'") as caught:
        make_policy("slice", {"slice_token": 1})
    assert "'slice_tokens'" in caught.value.hint
