"""A policy that preempts is one file of sixty lines: `tests/least_served.py`."""

import pytest
from least_served import LeastServedPolicy

from benchmarks.common.golden import rate_rps, trace_of, world_of
from toolkit.errors import InputError
from toolkit.sched.eventlog import RecordingScheduler, Tick, replay
from toolkit.sched.policies import make_policy
from toolkit.sched.policies.parameters import parameters
from toolkit.sched.scheduler import Scheduler
from toolkit.sim.api import requests_of, simulate, virtual_workers
from toolkit.sim.ledger import Ledger
from toolkit.sim.loop import run


def recorded(policy, trace, world):
    """All calls and decisions of a simulation, in which every request ends."""
    found = []
    requests, outputs = requests_of(trace, world.max_new_tokens)
    scheduler = RecordingScheduler(policy, world.scheduled(), found.append)
    ledger = Ledger(trace.arrival_s.tolist(), outputs, world.workers)
    run(scheduler, requests, virtual_workers(policy, world, ledger))
    assert all(each.ok for each in ledger.outcomes)
    return found


@pytest.mark.parametrize("joining", [None, "embed", "shape"])
@pytest.mark.parametrize("emits", [False, True])
def test_it_preempts_ends_every_request_and_replays(joining, emits):
    trace = trace_of(40, rate_rps(1.3, 2))
    world = world_of(2, joining=joining, emits=emits)
    policy = LeastServedPolicy()
    events = recorded(policy, trace, world)
    started = [batch for event in events if isinstance(event, Tick) for batch in event.started]
    paused = [name for batch in started for name in batch.paused]
    resumed = [name for batch in started for name in batch.resumed]
    assert paused
    assert resumed
    assert list(replay(events, Scheduler(policy, world.scheduled()))) == []


def test_short_outputs_end_sooner_than_in_order_of_arrival():
    trace = trace_of(60, rate_rps(1.3, 1))
    world = world_of(1)
    own = simulate(trace, LeastServedPolicy(), world).served
    fcfs = simulate(trace, make_policy("fcfs", {"max_batch_size": 4}), world).served
    short = trace.output_tokens < 30
    assert own.finish_s[short].mean() < fcfs.finish_s[short].mean()


def test_its_parameters_are_checked_as_those_of_a_policy_that_ships():
    assert parameters(LeastServedPolicy(quantum=3)) == {"max_batch_size": 4, "quantum": 3}
    with pytest.raises(InputError, match=r"'least-served'.*quantum.*0"):
        LeastServedPolicy(quantum=0)
