"""What a plan may ask a server for."""

import pytest
import samples

from toolkit.errors import InputError
from toolkit.files.plan import Plan, PlannedPolicy
from toolkit.serve.assemble import make_scheduler


def plan(policy: str, engine: str = "transformers", **changes: object) -> Plan:
    return Plan(
        tool_version="0",
        environment=samples.ENVIRONMENT,
        inputs={},
        recipe=samples.recipe(engine={"name": engine} | changes),
        fit=samples.fit(),
        workers=2,
        policy=PlannedPolicy(name=policy, parameters={}),
        predicted={},
        explained={},
    )


@pytest.mark.parametrize("policy", ["past-future", "mlfq", "slice"])
def test_every_policy_that_needs_no_oracle_is_served_by_an_engine_that_keeps_its_rows(policy: str) -> None:
    assert make_scheduler(plan(policy, "rebatch")).policy.name == policy


@pytest.mark.parametrize("policy", ["slice", "sequence"])
def test_static_policies_are_served(policy: str) -> None:
    assert make_scheduler(plan(policy)).policy.name == policy


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("past-future", "policy 'past-future' needs an engine that re-batches; 'transformers' runs static batches"),
        ("past-future-oracle", "policy 'past-future-oracle' knows the true output lengths"),
    ],
)
def test_what_no_server_here_can_run_is_refused_by_name(policy: str, reason: str) -> None:
    with pytest.raises(InputError) as caught:
        make_scheduler(plan(policy))
    assert caught.value.message.startswith(reason)


@pytest.mark.parametrize(
    ("policy", "changes", "reason"),
    [
        (
            "baton",
            {"joining": "shape"},
            "policy 'baton' reckons with engine.joining 'embed', and the recipe has 'shape'",
        ),
        ("past-future", {"joining": "shape"}, "policy 'past-future' reckons with engine.joining 'embed'"),
        ("past-future", {"chunk_tokens": 64}, "engine.chunk_tokens is 64; schedulers count on whole prefills"),
    ],
)
def test_an_engine_that_would_join_otherwise_than_the_policy_reckons_is_refused(
    policy: str, changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(InputError) as caught:
        make_scheduler(plan(policy, "rebatch", **changes))
    assert caught.value.message.startswith(reason)
