"""What the scheduler does for every policy: lifecycle, loads, failures and cancellation."""

import math

import pytest
from said import says

from benchmarks.common.samples import bilinear_law
from toolkit.estimators.memory import ZetaMemory
from toolkit.sched.policies import make_policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Pass, PassResult, Request, Worker

LAW = bilinear_law(p=(1e-4, 1e-3, 0.0, 0.01), d=(1e-6, 1e-4, 0.0, 0.01))


def make(workers: int = 1, capacity: int = 1000, policy: str = "slice", **parameters) -> Scheduler:
    memory = ZetaMemory(capacity)
    return Scheduler(
        make_policy(policy, parameters), [Worker(k, LAW, memory) for k in range(workers)]
    )


def request(name: str, prompt: int = 10, limit: int = 100) -> Request:
    return Request(name, 0.0, prompt, limit)


def started(names: str, **given) -> tuple[Scheduler, Pass]:
    """A scheduler with requests of these names, and the batch of them that it has started."""
    scheduler = make(**given)
    for name in names.split():
        scheduler.submit(request(name), 0.0)
    (batch,) = scheduler.tick(0.0)
    return scheduler, batch


def ids(batch) -> list[str]:
    return [job.request_id for job in batch.jobs]


def done(batch, generated: int, finished: bool, failure: str = "") -> PassResult:
    ended = tuple(ids(batch)) if finished else ()
    return PassResult(batch.pass_id, batch.worker, generated, ended, failure=failure)


def test_a_request_goes_from_pool_to_worker_and_back_until_it_ends():
    scheduler, first = started("a", slice_tokens=8)
    assert (first.steps, first.input_length) == (8, 10)
    scheduler.complete(done(first, 8, finished=False), 1.0)
    (second,) = scheduler.tick(1.0)
    assert second.input_length == 18
    scheduler.complete(done(second, 3, finished=True), 2.0)
    assert scheduler.jobs == 0
    assert scheduler.tick(2.0) == []
    assert scheduler.wake_at_s == math.inf


def test_a_request_that_can_never_fit_is_refused_by_name():
    refusal = make(capacity=50).submit(request("big", prompt=40, limit=100), 0.0)
    assert refusal is not None
    assert says(refusal.reason, "max_tokens", "140", "50")


def test_a_batch_out_of_memory_is_tried_again_in_halves_on_its_worker():
    scheduler, batch = started("a b c")
    scheduler.complete(done(batch, 0, finished=False, failure="oom"), 1.0)
    (half,) = scheduler.tick(1.0)
    assert ids(half) == ["a", "b"]
    scheduler.complete(done(half, 1, finished=True), 2.0)
    (rest,) = scheduler.tick(2.0)
    assert ids(rest) == ["c"]
    assert scheduler.workers[0].oom_events == 1


@pytest.mark.parametrize(
    ("failure", "generated", "said"),
    [
        ("oom", [0, 0], "out of memory"),
        ("crashed", [1] * 5, "five"),
        ("crashed", [3, 3, 0], "three"),
    ],
)
def test_a_job_is_given_up_at_the_second_failure_without_a_token_between_or_at_the_fifth(
    failure, generated, said
):
    scheduler = make()
    scheduler.submit(request("a"), 0.0)
    for tokens in generated:
        assert scheduler.take_refusals() == []
        (batch,) = scheduler.tick(0.0)
        scheduler.complete(done(batch, tokens, finished=False, failure=failure), 1.0)
    (refusal,) = scheduler.take_refusals()
    assert refusal.request_id == "a"
    assert says(refusal.reason, said)
    assert scheduler.jobs == 0


def test_a_crash_moves_batch_and_queue_to_another_worker_with_tokens_kept():
    scheduler = make(workers=2)
    for name in "ab":
        scheduler.submit(request(name, prompt=10), 0.0)
        scheduler.tick(0.0)
    first, second = (worker.batch for worker in scheduler.workers)
    scheduler.submit(request("queued"), 0.0)
    scheduler.tick(100.0)  # past the interval: a batch in a queue
    scheduler.complete(done(first, 5, finished=False, failure="crashed"), 101.0)
    scheduler.worker_lost(0, 101.0)
    assert scheduler.tick(101.0) == []  # the other worker is busy
    scheduler.complete(done(second, 1, finished=True), 102.0)
    moved = []
    for now_s in (102.0, 103.0):
        (batch,) = scheduler.tick(now_s)
        assert batch.worker == 1
        moved.append((ids(batch), batch.input_length))
        scheduler.complete(done(batch, 1, finished=True), now_s)
    assert sorted(moved) == [(["a"], 15), (["queued"], 10)]


def test_with_no_worker_left_jobs_wait_for_one():
    scheduler, batch = started("a")
    scheduler.complete(done(batch, 0, finished=False, failure="crashed"), 1.0)
    scheduler.worker_lost(0, 1.0)
    scheduler.submit(request("b"), 1.0)
    assert scheduler.tick(50.0) == []
    scheduler.worker_ready(0, 60.0)
    (again,) = scheduler.tick(60.0)
    assert ids(again) == ["a"]


@pytest.mark.parametrize("policy", ["slice", "sequence"])
def test_a_job_cancelled_while_waiting_never_runs(policy):
    scheduler, batch = started("running", policy=policy)
    scheduler.submit(request("waiting"), 0.0)
    scheduler.tick(0.0)
    scheduler.cancel("waiting", 0.5)
    scheduler.cancel("unknown", 0.5)
    scheduler.complete(done(batch, 1, finished=True), 1.0)
    assert scheduler.tick(100.0) == []
    assert scheduler.jobs == 0


def test_a_job_cancelled_in_a_queue_is_removed_from_its_batch():
    scheduler, batch = started("running")
    for name in "ab":
        scheduler.submit(request(name), 0.0)
    scheduler.tick(100.0)
    scheduler.cancel("a", 100.5)
    scheduler.complete(done(batch, 1, finished=True), 101.0)
    (queued,) = scheduler.tick(101.0)
    assert ids(queued) == ["b"]


def test_a_job_cancelled_while_running_ends_with_its_batch():
    scheduler, batch = started("a")
    scheduler.cancel("a", 0.5)
    scheduler.complete(done(batch, 4, finished=False), 1.0)
    assert scheduler.jobs == 0
    assert scheduler.tick(100.0) == []


def test_sequence_routes_in_turn_and_runs_to_the_end():
    scheduler = make(workers=2, policy="sequence", batch_size=2)
    for name in "abcd":
        scheduler.submit(request(name, limit=77), 0.0)
    batches = scheduler.tick(0.0)
    assert [ids(batch) for batch in batches] == [["a", "c"], ["b", "d"]]
    assert {batch.steps for batch in batches} == {77}


def test_a_queued_batch_of_cancelled_jobs_delays_no_other_batch():
    scheduler, batch = started("a b", policy="sequence")
    scheduler.complete(done(batch, 0, finished=False, failure="oom"), 1.0)
    (half,) = scheduler.tick(1.0)
    scheduler.submit(request("c"), 1.5)
    scheduler.cancel("b", 1.5)
    scheduler.complete(done(half, 1, finished=True), 2.0)
    (following,) = scheduler.tick(2.0)
    assert ids(following) == ["c"]


def test_a_numbered_request_is_found_by_its_id_wherever_it_is():
    scheduler = make(slice_tokens=8, max_batch_size=1)
    for number, name in enumerate("ab"):
        assert scheduler.submit(request(name), 0.0, number) is None
    (running,) = scheduler.tick(0.0)  # a runs and b is queued
    scheduler.submit(request("c"), 0.0, 2)  # in the pool
    for name in "cba":
        scheduler.cancel(name, 0.5)
    assert scheduler.jobs == 1  # a ends with its batch
    scheduler.complete(done(running, 8, finished=False), 1.0)
    assert (scheduler.jobs, scheduler.waiting_jobs) == (0, 0)
    scheduler.submit(request("d"), 1.0, 3)
    with pytest.raises(ValueError, match="'d'"):
        scheduler.submit(request("d"), 1.0, 4)
