"""What a request costs the scheduler and the simulator does not grow with the backlog.

Cost is counted in lines of Python that run, loops in comprehensions included: it is the same on
every machine. What numpy does in one call counts as one line.
"""

import sys

import numpy as np
import pytest

from benchmarks.common.golden import ROUTED, ROUTERS, trace_of, world_of
from toolkit.sched.policies import ORACLES, POLICIES, make_policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sim.api import requests_of, simulate, virtual_workers
from toolkit.sim.ledger import Ledger
from toolkit.sim.loop import run
from toolkit.traces.types import Trace

pytestmark = pytest.mark.skipif(
    not hasattr(Scheduler.tick, "__code__"),
    reason="lines of compiled code are not counted",
)
BACKLOGS = (100, 400)  # requests that come almost at once, for two workers
MOST = {  # times the lines with a longer backlog, where it is more than 1.2
    "past-future-sla": 2.0,  # it looks at up to 64 late requests at each attempt to admit
    "mlfq": 1.6,  # rounds end, and rows are preempted, more often while more wait
}
CASES = [(policy, "") for policy in sorted(POLICIES.keys() - ORACLES)]
CASES += [(ROUTED[0], router) for router in ROUTERS[:-1]]


def lines_per_request(policy: str, router: str, trace: Trace, workers: int) -> float:
    """Lines that the loop runs for each request."""
    world = world_of(workers)
    parameters = {"router": router} if router else {}
    # Compiles what is compiled, and fills the process's cache of feedback queues for this trace:
    # else the count would depend on the tests before.
    simulate(trace, make_policy(policy, parameters), world)
    requests, outputs = requests_of(trace, world.max_new_tokens)
    chosen = make_policy(policy, parameters)
    ledger = Ledger(trace.arrival_s.tolist(), outputs, workers)
    scheduler = Scheduler(chosen, world.scheduled())
    virtual = virtual_workers(chosen, world, ledger)
    lines = 0

    def count(frame, event, arg):
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        run(scheduler, requests, virtual)
    finally:
        sys.settrace(before)
    assert all(each.ok for each in ledger.outcomes)
    return lines / len(requests)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "router"), CASES)
def test_a_request_costs_as_much_behind_a_long_backlog(policy, router):
    found = []
    for requests in BACKLOGS:
        trace = trace_of(requests, 50.0)
        lengths = trace.prompt_tokens, trace.output_tokens, trace.max_tokens
        crowd = Trace(np.arange(requests) * 1e-3, *lengths)
        found.append(lines_per_request(policy, router, crowd, 2))
    assert found[1] <= MOST.get(policy, 1.2) * found[0]
