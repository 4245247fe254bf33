"""The contract of every policy: checked parameters, a registry with valid names, and no cycles."""

import gc

import pytest
from said import says
from synthetic_profiles import LAW

from benchmarks.common.golden import rate_rps, trace_of, world_of
from toolkit.errors import InputError
from toolkit.estimators.memory import ZetaMemory
from toolkit.sched.memory import footprint_of
from toolkit.sched.policies import POLICIES, make_policy
from toolkit.sched.policies.parameters import declared, defaults, parameters
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Job, Request, Worker
from toolkit.sim.api import requests_of, simulate, virtual_workers
from toolkit.sim.ledger import Ledger
from toolkit.sim.loop import run


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


@pytest.mark.parametrize(("capacity", "most"), [(20, 9), (21, 10), (2, 0)])
def test_past_future_takes_less_than_its_share(capacity, most):
    worker = Worker(0, LAW, ZetaMemory(1))
    worker.capacity_tokens = capacity
    policy = make_policy("past-future", {"reserve": 0.5})

    def may_join(tokens):
        job = Job(Request("any", 0.0, tokens, 1), 0, tokens)
        return policy.admissible(worker, job, footprint_of(worker))

    assert may_join(most)
    assert not may_join(most + 1)


@pytest.mark.slow
def test_a_simulation_makes_no_cycles_and_collects_none():
    trace = trace_of(60, rate_rps(1.3, 2))
    world = world_of(2)
    policy = make_policy("mlfq", {})
    simulate(trace, policy, world)
    gc.collect()
    requests, outputs = requests_of(trace, world.max_new_tokens)
    scheduler = Scheduler(policy, world.scheduled())
    ledger = Ledger(trace.arrival_s.tolist(), outputs, world.workers)
    workers = virtual_workers(policy, world, ledger)
    gc.collect()
    run(scheduler, requests, workers)
    assert gc.isenabled()
    assert gc.collect() < 10
