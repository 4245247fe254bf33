"""The contract of every policy: checked parameters, and a registry with valid names."""

import pytest

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
    ("name", "given", "message", "hint"),
    [
        ("slices", {}, "there is no policy 'slices'", "did you mean 'slice'?"),
        (
            "slice",
            {"slice_token": 1},
            "policy 'slice' has no parameter 'slice_token'",
            "did you mean 'slice_tokens'?",
        ),
        (
            "slice",
            {"slice_tokens": 0},
            "policy 'slice': slice_tokens is 0; the limit is at least 1",
            "S: tokens per slice",
        ),
        (
            "slice",
            {"slice_tokens": 1.5},
            "policy 'slice': slice_tokens is 1.5; it is a whole number",
            None,
        ),
        ("slice", {"eager": 1}, "policy 'slice': eager is 1; it is true or false", None),
        (
            "slice",
            {"memory_reserve": 1.0},
            "policy 'slice': memory_reserve is 1.0; the limit is from 0 to 0.99",
            None,
        ),
        (
            "slice",
            {"min_interval_s": float("nan")},
            "policy 'slice': min_interval_s is nan; it is a number",
            None,
        ),
    ],
)
def test_bad_parameters_are_named(name, given, message, hint):
    with pytest.raises(InputError) as caught:
        make_policy(name, given)
    assert caught.value.message == message
    assert hint is None or caught.value.hint == hint
