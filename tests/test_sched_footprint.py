"""The memory of rows: the scheduler's footprint against the simulated worker and plain sums."""

import numpy as np
import pytest
from around import Around
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.samples import bilinear_law
from toolkit.estimators.laws import LinearSwap
from toolkit.estimators.memory import ZetaMemory
from toolkit.sched.memory import footprint_of
from toolkit.sched.policies import make_policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Job, Request, Worker
from toolkit.sim.api import requests_of, virtual_workers
from toolkit.sim.ledger import Ledger
from toolkit.sim.loop import run
from toolkit.sim.world import World
from toolkit.traces.types import Trace

CAPACITY = 400
LAYOUTS = st.sampled_from([None, "embed", "shape"])
POLICIES = {
    "conservative": {"overcommit": 2.0},
    "aggressive": {"watermark": 1.0, "interval_steps": 2},
    "past-future": {"reserve": 0.0},
    "fcfs": {},
    "mlfq": {"quantum_s": 0.01, "starvation_s": 0.2, "max_batch_size": 4},
    "baton": {"memory_threshold": 0.8, "headroom_steps": 2},
}


def law(emits):
    return bilinear_law(
        p=(1e-5, 1e-4, 1e-6, 1e-3), d=(1e-7, 1e-5, 1e-7, 1e-3), prefill_emits_token=emits
    )


def job(length, limit=50):
    return Job(Request("any", 0.0, length, limit), 0, length)


class Audit(Around):
    """Compares footprints with what the simulated workers hold."""

    def __init__(self, policy):
        super().__init__(policy)
        self.workers = []
        self.audits = 0

    def plan(self, view, now_s):
        for worker in view.free:
            simulated = self.workers[worker.index]
            store = simulated._swap_store
            assert footprint_of(worker).taken == simulated.used
            assert worker.paused.tokens == store.device_tokens
            assert worker.swapped.tokens == store.host_tokens
            self.audits += 1
        return super().plan(view, now_s)


@pytest.mark.slow
@given(
    rows=st.lists(
        st.tuples(st.floats(0, 2), st.integers(1, 100), st.integers(1, 80)), min_size=1, max_size=30
    ),
    name=st.sampled_from(sorted(POLICIES)),
    joining=LAYOUTS,
    emits=st.booleans(),
    host_tokens=st.sampled_from([0, 300]),
)
def test_the_scheduler_counts_what_the_simulated_worker_holds(
    rows, name, joining, emits, host_tokens
):
    arrival, prompt, output = zip(*sorted(rows), strict=True)
    lengths = [np.array(column, dtype=np.int64) for column in (prompt, output, output)]
    link = LinearSwap(2e-3, 4e4, 8e4)
    world = World(
        law(emits), ZetaMemory(CAPACITY), 2, 80, swap=link, host_tokens=host_tokens, joining=joining
    )
    requests, outputs = requests_of(Trace(np.array(arrival), *lengths), 80)
    policy = Audit(make_policy(name, POLICIES[name]))
    ledger = Ledger(list(arrival), outputs, 2)
    policy.workers = virtual_workers(policy, world, ledger)
    run(Scheduler(policy, world.scheduled()), requests, policy.workers)
    assert all(each.ok for each in ledger.outcomes)
    assert policy.audits > 0


STEPS = 3  # after each row that joins


def worker_with(residents, joining, emits):
    worker = Worker(0, law(emits), ZetaMemory(CAPACITY), joining=joining)
    for length in residents:
        worker.running.join(job(length))
        worker.running.steps += STEPS
    return worker


def held_by(residents):
    """Tokens of each row of such a worker."""
    n = len(residents)
    return [length + STEPS * (n - k) for k, length in enumerate(residents)]


def plainly(worker, footprint, entering, steps):
    """The most tokens that rows `footprint` and rows `entering` take until `steps` are done."""
    emits = worker.emits
    n = len(footprint) + len(entering)
    shaped = worker.joining == "shape" and footprint and entering
    now = footprint + [length + (0 if shaped else emits) for length in entering]
    if not worker.padded:
        return sum(now) + n * steps
    beside = max(entering, default=0)
    passing = n * (max(now) + beside) if shaped else n * max(now) + beside
    return max(n * (max(now) + steps), passing if entering else 0)


lengths = st.lists(st.integers(1, 120), max_size=6)


@given(lengths, lengths, lengths, st.integers(1, 120), LAYOUTS, st.booleans())
def test_a_footprint_equals_the_plain_sum_over_rows(
    residents, back, entering, length, joining, emits
):
    worker = worker_with(residents, joining, emits)
    footprint = footprint_of(worker)
    held = held_by(residents) + back
    for one in back:
        footprint = footprint.joined(one)
    for one in entering:
        footprint = footprint.entered(job(one))
    assert footprint.rows == len(held) + len(entering)
    if footprint.rows:
        assert footprint.needs == plainly(worker, held, entering, 1)
    fits = plainly(worker, held, [*entering, length], 1) <= CAPACITY
    assert footprint.fits(length, CAPACITY) == fits
    joins = plainly(worker, [*held, length], entering, 1) <= CAPACITY
    assert footprint.fits(length, CAPACITY, enters=False) == joins
    assert (length + worker.emits + 1 <= footprint.widest(CAPACITY)) == fits
    footprint = footprint.prefilled()
    if footprint.rows:
        room = footprint.room(CAPACITY)
        after = plainly(worker, held + [one + emits for one in entering], [], 0)
        if not (joining == "shape" and held):
            grown = [
                room * (len(held) + len(entering)) + after,
                (room + 1) * (len(held) + len(entering)) + after,
            ]
            assert grown[0] <= CAPACITY < grown[1]


@given(lengths.filter(len), LAYOUTS, st.data())
def test_a_row_that_leaves_frees_its_tokens(residents, joining, data):
    worker = worker_with(residents, joining, True)
    gone = data.draw(st.sets(st.integers(0, len(residents) - 1)))
    footprint = footprint_of(worker, [list(worker.running.jobs)[k] for k in gone])
    stay = [k for k in range(len(residents)) if k not in gone]
    left = [held_by(residents)[k] for k in stay]
    assert footprint.rows == len(stay)
    assert footprint.taken == (len(stay) * max(left, default=0) if joining else sum(left))
    limits = [residents[k] + 50 for k in stay]
    assert footprint.promised_with(10) == (
        (len(stay) + 1) * max([10, *limits]) if joining else sum(limits) + 10
    )
