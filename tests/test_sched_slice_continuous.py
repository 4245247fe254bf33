"""SCLS on continuous batching: promises, admission, and what a job does after its slice."""

import pytest

from toolkit.estimators.laws import unit_step
from toolkit.estimators.memory import ZetaMemory
from toolkit.sched.policies import make_policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Pass, PassResult, Request, Worker


def make(workers: int = 1, capacity: int = 1000, **parameters) -> Scheduler:
    every = [Worker(k, unit_step(), ZetaMemory(capacity)) for k in range(workers)]
    settings = {"slice_tokens": 20, "interval_steps": 10} | parameters
    return Scheduler(make_policy("slice-continuous", settings), every)


def submit(
    scheduler: Scheduler, name: str, prompt: int, limit: int = 100, now_s: float = 0.0
) -> None:
    scheduler.submit(Request(name, now_s, prompt, limit), now_s)


def done(scheduler: Scheduler, batch: Pass, now_s: float, *ended: str) -> None:
    scheduler.complete(PassResult(batch.pass_id, batch.worker, batch.steps, ended), now_s)


def residents(scheduler: Scheduler) -> list[list[str]]:
    return [[job.request_id for job in worker.running.jobs] for worker in scheduler.workers]


def test_admission_counts_a_slice_and_not_the_clients_limit():
    """Three rows of 30 + 20 fill the capacity of 150; with the limit of 100, one row would."""
    scheduler = make(capacity=150)
    for name in "abcd":
        submit(scheduler, name, prompt=30)
    (batch,) = scheduler.tick(0.0)
    assert [job.request_id for job in batch.jobs] == ["a", "b", "c"]


def test_rows_that_end_before_a_newcomers_slice_leave_their_room_to_it():
    """a holds 50 and has 10 steps left, b enters with 60: the peak is 60 + 70 = 130, not 60 +
    80.
    """
    scheduler = make(capacity=130)
    submit(scheduler, "a", prompt=40, limit=60)
    (first,) = scheduler.tick(0.0)
    submit(scheduler, "b", prompt=60, limit=60)
    assert scheduler.tick(5.0) == []
    assert scheduler.take_interrupts() == [0]
    scheduler.complete(PassResult(first.pass_id, 0, 10), 10.0)
    (second,) = scheduler.tick(10.0)
    assert [job.request_id for job in second.jobs] == ["b"]
    assert second.steps == 10  # a's slice is over then


def test_a_job_stays_with_its_cache_if_no_other_waits():
    scheduler = make(workers=2)
    submit(scheduler, "a", prompt=10)
    (first,) = scheduler.tick(0.0)
    done(scheduler, first, 20.0)
    (second,) = scheduler.tick(20.0)
    assert (second.worker, second.jobs, second.release, second.steps) == (0, (), (), 20)


def test_requests_go_where_the_least_is_promised_the_longest_first():
    scheduler = make(workers=2)
    for name, prompt in (("short", 10), ("long", 500), ("middle", 100)):
        submit(scheduler, name, prompt)
    scheduler.tick(0.0)
    assert residents(scheduler) == [["long"], ["short", "middle"]]


def crowded(workers: int, margin: float = 0.1) -> Scheduler:
    """On worker 0 the slices of a and b are over, and c waits; worker 1, if any, came back
    later.
    """
    scheduler = make(workers, capacity=200, margin=margin)
    if workers == 2:
        scheduler.worker_lost(1, 0.0)
    submit(scheduler, "a", prompt=80)
    submit(scheduler, "b", prompt=80)
    (batch,) = scheduler.tick(0.0)
    submit(scheduler, "c", prompt=50)
    scheduler.tick(1.0)
    if workers == 2:
        scheduler.worker_ready(1, 2.0)
    done(scheduler, batch, 20.0)
    return scheduler


def test_when_requests_queue_a_job_moves_to_the_worker_with_more_free_memory():
    scheduler = crowded(workers=2)
    rounds = scheduler.tick(20.0)
    assert residents(scheduler) == [["b", "c"], ["a"]]
    assert [[job.request_id for job in batch.release] for batch in rounds] == [["a"], []]
    assert [batch.input_length for batch in rounds] == [
        50,
        100,
    ]  # what it generated is prefilled with its prompt
    (moved,) = scheduler.workers[1].running.jobs
    assert moved.generated == 20


def test_a_job_makes_way_if_no_worker_has_more_room():
    """a has room for another slice, up to 120 of 200; b then has none, so it waits behind c."""
    scheduler = crowded(workers=1)
    (batch,) = scheduler.tick(20.0)
    assert residents(scheduler) == [["a", "c"]]
    assert [job.request_id for job in batch.release] == ["b"]
    assert [job.request_id for job in scheduler.workers[0].waiting.jobs] == ["b"]


@pytest.mark.parametrize(("margin", "moved"), [(0.95, "a"), (0.96, "b")])
def test_margin_decides_how_much_more_free_memory_is_worth_a_move(margin, moved):
    """With a, worker 1 has 200 - 120 free; worker 0 has 200 - 2 * 120 - 70: 0.95 of 200 less.

    If a stays, b has no room beside it, so it makes way and is routed again.
    """
    scheduler = crowded(workers=2, margin=margin)
    scheduler.tick(20.0)
    assert residents(scheduler)[1] == [moved]


def test_a_job_that_left_loses_its_cache_in_its_workers_next_round_only():
    scheduler = crowded(workers=2)
    first, _ = scheduler.tick(20.0)
    scheduler.complete(PassResult(first.pass_id, 0, 5, ("c",)), 25.0)
    (again,) = scheduler.tick(25.0)
    assert (again.worker, again.release) == (0, ())
