"""The ranked inbox against sorting all jobs at every query."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.samples import bilinear_law
from toolkit.estimators.memory import ZetaMemory
from toolkit.sched.policies import make_policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Job, PassResult, Request, Worker
from toolkit.sched.waiting import RankedJobs, Ranking

NOW_S = 10.0
PATIENCE_S = 4.0
jobs_that_wait = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.integers(1, 50),
        st.sampled_from([0.0, 2.0, 6.0, 6.5, 9.0]),
        st.booleans(),
    ),
    min_size=1,
    max_size=20,
)


class ByPriority(Ranking):
    def rank(self, job: Job, generated: int) -> float:
        return float(job.priority)


standing = ByPriority().rank


def filled(rows) -> tuple[RankedJobs, list[Job]]:
    inbox = RankedJobs(ByPriority())
    left = []
    jobs = [
        Job(Request(str(k), 0.0, length, 10, queue), k, length, k % 2, waiting_since_s=since_s)
        for k, (queue, length, since_s, _) in enumerate(rows)
    ]
    for job in jobs:
        (inbox.appendleft if job.ticket % 3 else inbox.append)(job)
    for job, (*_, leaves) in zip(jobs, rows, strict=True):
        if leaves:
            inbox.remove(job)
        else:
            left.append(job)
    return inbox, left


def rank(job: Job) -> tuple[float, float, int]:
    waits_s = NOW_S - job.waiting_since_s
    return (
        (-1.0, -waits_s, job.ticket)
        if waits_s >= PATIENCE_S
        else (standing(job, 0), 0.0, job.ticket)
    )


@given(jobs_that_wait)
def test_the_order_is_that_of_sorted_ranks(rows):
    inbox, left = filled(rows)
    found = [job for *_, job in inbox.starving(NOW_S, PATIENCE_S)] + [
        job for *_, job in inbox.others(NOW_S, PATIENCE_S)
    ]
    assert found == sorted(left, key=rank)
    assert not left or inbox.shortest == min(job.length for job in left)


def check_counts(inbox, left, now_s, queue, ticket):
    starves = {job: now_s - job.waiting_since_s >= PATIENCE_S for job in left}
    starving, standings, counts = inbox.ranks(now_s, PATIENCE_S)
    others = [job for job in left if not starves[job]]
    assert starving == sum(starves.values())
    assert standings == sorted({standing(job, 0) for job in others})
    assert counts == [sum(standing(job, 0) == value for job in others) for value in standings]
    before = [job for job in others if (standing(job, 0), job.ticket) < (queue, ticket)]
    assert inbox.others_before(float(queue), ticket) == len(before)


@pytest.mark.slow
@given(
    rows=jobs_that_wait,
    more=jobs_that_wait,
    times_s=st.lists(st.floats(0, 2 * NOW_S), min_size=1, max_size=4),
    queue=st.integers(0, 3),
    ticket=st.integers(0, 20) | st.just(101),
)
def test_it_counts_the_jobs_that_are_served_before_a_job_while_jobs_come_and_go(
    rows, more, times_s, queue, ticket
):
    inbox, left = filled(rows)
    coming = [
        Job(Request(f"more {k}", 0.0, length, 10, one), 100 + k, length, waiting_since_s=since_s)
        for k, (one, length, since_s, _) in enumerate(more)
    ]
    for now_s in sorted(times_s):
        check_counts(inbox, left, now_s, queue, ticket)
        if coming:
            left.append(coming.pop())
            inbox.append(left[-1])
        if left:
            job = left.pop(0)
            inbox.remove(job)
            assert job not in inbox.jobs
            assert all(other in inbox.jobs for other in left)


def test_no_job_enters_before_a_starving_job_without_room():
    law = bilinear_law(p=(0.0, 0.0, 0.01, 0.0), d=(0.0, 0.0, 0.0, 1.0))
    policy = make_policy("mlfq", {"quantum_s": 2.0, "starvation_s": 5.0})
    scheduler = Scheduler(policy, [Worker(0, law, ZetaMemory(1000))])
    for name, prompt in (("runs", 500), ("large", 600)):
        scheduler.submit(Request(name, 0.0, prompt, 50), 0.0)
    (first,) = scheduler.tick(0.0)
    scheduler.submit(Request("small", 6.0, 10, 50), 6.0)
    scheduler.complete(PassResult(first.pass_id, 0, 2), 8.0)
    (second,) = scheduler.tick(8.0)
    assert ([job.request_id for job in first.jobs], second.jobs, second.evict) == (["runs"], (), ())
    scheduler.complete(PassResult(second.pass_id, 0, 1, ("runs",)), 9.0)
    (third,) = scheduler.tick(9.0)
    assert [job.request_id for job in third.jobs] == ["large", "small"]
