"""Admission with time limits: MTPOT of running jobs, TTFT of waiting ones, and no starvation."""

import pytest

from benchmarks.common.samples import bilinear_law
from toolkit.errors import InputError
from toolkit.estimators.memory import ZetaMemory
from toolkit.sched.policies import make_policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Job, PassResult, Request, Worker
from toolkit.sched.waiting import RECALL_COUNT, WaitingJobs

LAW = bilinear_law(
    p=(0.001, 0.0, 0.0, 0.0), d=(0.0, 0.01, 0.0, 0.0)
)  # 1 ms per prompt token; a step: 10 ms per row


def make(capacity: int = 100_000, **parameters) -> Scheduler:
    policy = make_policy("past-future-sla", {"interval_steps": 1} | parameters)
    return Scheduler(policy, [Worker(0, LAW, ZetaMemory(capacity))])


def submit(
    scheduler: Scheduler, name: str, prompt: int = 10, arrival_s: float = 0.0, limit: int = 2000
) -> None:
    scheduler.submit(Request(name, arrival_s, prompt, limit), arrival_s)


def entered(scheduler: Scheduler, now_s: float) -> list[str]:
    (batch,) = scheduler.tick(now_s)
    scheduler.complete(PassResult(batch.pass_id, 0, 1), now_s)
    return [job.request_id for job in batch.jobs]


def test_as_many_jobs_enter_as_keep_a_step_within_mtpot():
    scheduler = make(mtpot_s=0.055)
    for k in range(9):
        submit(scheduler, str(k))
    assert len(entered(scheduler, 0.0)) == 5  # 6 rows would take 60 ms


def test_a_prefill_may_stall_running_jobs_for_at_most_mtpot():
    """A step of n rows takes n * 10 ms: with two of 100 tokens 200 + 30 ms, with three 300 + 40
    ms.
    """
    scheduler = make(mtpot_s=0.3)
    submit(scheduler, "runs")
    assert entered(scheduler, 0.0) == ["runs"]
    for name in "abc":
        submit(scheduler, name, prompt=100)
    assert entered(scheduler, 0.0) == ["a", "b"]


def test_the_time_since_the_last_token_counts():
    scheduler = make(mtpot_s=0.3)
    submit(scheduler, "runs")
    assert entered(scheduler, 0.0) == ["runs"]
    for name in "abc":
        submit(scheduler, name, prompt=100)
    assert entered(scheduler, 0.1) == ["a"]


def test_newcomers_do_not_delay_each_others_first_tokens_beyond_ttft():
    """Two are prefilled in 0.8 s and step in 20 ms; three would have their first tokens at 1.23
    s.
    """
    scheduler = make(ttft_s=1.0, mtpot_s=100.0)
    for name in "abc":
        submit(scheduler, name, prompt=400)
    assert entered(scheduler, 0.0) == ["a", "b"]


def late_and_in_time(late_share: float) -> tuple[Scheduler, list[str]]:
    """At 6 s a and b wait since 0 s and c since 5 s; TTFT is 3 s, and one more fits beside
    "runs".
    """
    scheduler = make(ttft_s=3.0, mtpot_s=0.025, late_share=late_share)
    submit(scheduler, "runs")
    assert entered(scheduler, 0.0) == ["runs"]
    scheduler.workers[0].stepped_s = 6.0
    submit(scheduler, "a", prompt=1)
    submit(scheduler, "b", prompt=1)
    submit(scheduler, "c", prompt=1, arrival_s=5.0)
    return scheduler, entered(scheduler, 6.0)


def test_late_jobs_wait_behind_jobs_in_time():
    scheduler, first = late_and_in_time(late_share=0.01)
    assert first == ["c"]
    assert [job.request_id for job in scheduler.workers[0].waiting.all_jobs()] == ["a", "b"]


def test_no_job_is_deferred_in_the_attempts_for_late_jobs():
    _, first = late_and_in_time(late_share=0.5)
    assert first == ["a"]


def test_a_cancelled_request_is_removed_from_the_deferred_jobs():
    scheduler, _ = late_and_in_time(late_share=0.01)
    assert scheduler.waiting_jobs == 2
    scheduler.cancel("b", 7.0)
    assert scheduler.waiting_jobs == 1


def test_deferred_jobs_come_forward_in_groups_in_order_of_arrival():
    inbox = WaitingJobs()
    jobs = [Job(Request(str(k), 0.0, 1, 1), k, 1) for k in range(RECALL_COUNT + 2)]
    for job in jobs:
        inbox.append(job)
    for job in reversed(jobs[:-1]):
        inbox.defer(job)
    assert (list(inbox.jobs), inbox.count, inbox.tokens) == (
        jobs[-1:],
        RECALL_COUNT + 2,
        RECALL_COUNT + 2,
    )
    assert inbox.popleft() is jobs[-1]
    assert list(inbox.jobs) == jobs[:RECALL_COUNT]
    assert list(inbox.behind) == jobs[RECALL_COUNT:-1]
    inbox.remove(jobs[RECALL_COUNT])
    assert (inbox.count, inbox.tokens) == (RECALL_COUNT, RECALL_COUNT)


def test_a_share_that_would_starve_is_refused():
    with pytest.raises(InputError, match=r"late_share.*0.*0\.01.*0\.5"):
        make_policy("past-future-sla", {"late_share": 0})
