"""Policies of third parties: they override what they need, of the rounds and of the plan."""

import gc
from dataclasses import dataclass
from typing import ClassVar

import pytest
from synthetic_profiles import LAW

from benchmarks.common.golden import rate_rps, trace_of, world_of
from toolkit.estimators.memory import ZetaMemory
from toolkit.sched.eventlog import RecordingScheduler
from toolkit.sched.memory import footprint_of
from toolkit.sched.policies import make_policy
from toolkit.sched.policies.continuous import ContinuousPolicy
from toolkit.sched.policies.parameters import parameter
from toolkit.sched.types import Job, Request, Worker
from toolkit.sim.api import requests_of, simulate, virtual_workers
from toolkit.sim.ledger import Ledger
from toolkit.sim.loop import run


def recorded(policy, trace, world):
    """All calls and decisions of a simulation, in which every request ends."""
    found = []
    requests, outputs = requests_of(trace, world.max_new_tokens)
    scheduler = RecordingScheduler(policy, world.scheduled(), found.append)
    ledger = Ledger(trace.arrival_s.tolist(), outputs, world.workers)
    run(scheduler, requests, virtual_workers(policy, world, ledger, requests))
    assert all(each.ok for each in ledger.outcomes)
    return found


@dataclass(frozen=True, slots=True)
class ShortFirst(ContinuousPolicy):
    """A policy of a third party: it admits short prompts alone, and few rows."""

    name: ClassVar[str] = "short-first"

    max_batch_size: int = parameter(3, low=1, doc="the most rows")

    def admissible(self, worker, job, footprint):
        if footprint.promised_with(job.limit_tokens) > worker.capacity_tokens:
            return False
        return job.prompt_tokens < 100 or not footprint.rows


@dataclass(frozen=True, slots=True)
class Idle(ShortFirst):
    """It overrides `plan`."""

    name: ClassVar[str] = "idle"

    def plan(self, view, now_s):
        decision = ContinuousPolicy.plan(self, view, now_s)
        for batch in decision.batches:
            batch.steps = min(batch.steps, 2)
        return decision


def test_a_policy_of_a_third_party_overrides_what_it_needs():
    trace = trace_of(30, rate_rps(1.0, 2))
    world = world_of(2)
    wide = recorded(ShortFirst(max_batch_size=8), trace, world)
    narrow = recorded(ShortFirst(max_batch_size=1), trace, world)
    assert wide != narrow
    assert recorded(ShortFirst(max_batch_size=8), trace, world) == wide
    started = [
        batch for event in recorded(Idle(), trace, world) for batch in getattr(event, "started", ())
    ]
    assert started
    assert max(batch.steps for batch in started) <= 2


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
    scheduler = RecordingScheduler(policy, world.scheduled(), lambda event: None)
    ledger = Ledger(trace.arrival_s.tolist(), outputs, world.workers)
    workers = virtual_workers(policy, world, ledger, requests)
    gc.collect()
    run(scheduler, requests, workers)
    assert gc.isenabled()
    assert gc.collect() < 10
