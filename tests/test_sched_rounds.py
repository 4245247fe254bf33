"""Continuous rounds in the scheduler: residents, failures, cancellation, interruption, routers."""

import pytest
from said import says

from benchmarks.common.samples import bilinear_law
from toolkit.errors import InputError
from toolkit.estimators.laws import unit_step
from toolkit.estimators.memory import ZetaMemory
from toolkit.sched.policies import ORACLES, make_policy, refuse_oracle
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Pass, PassResult, Request, Worker


def make(
    policy: str = "conservative", workers: int = 1, capacity: int = 1000, **parameters
) -> Scheduler:
    every = [Worker(k, unit_step(), ZetaMemory(capacity)) for k in range(workers)]
    return Scheduler(make_policy(policy, parameters), every)


def submit(scheduler: Scheduler, *names: str, prompt: int = 10, limit: int = 100) -> None:
    for name in names:
        scheduler.submit(Request(name, 0.0, prompt, limit), 0.0)


def started(*names: str, policy: str = "conservative", **given) -> tuple[Scheduler, Pass]:
    """A scheduler with these requests, and the round of them that it has started."""
    scheduler = make(policy, **given)
    submit(scheduler, *names)
    (batch,) = scheduler.tick(0.0)
    return scheduler, batch


def ids(jobs) -> list[str]:
    return [job.request_id for job in jobs]


def test_a_resident_continues_while_another_job_enters():
    scheduler, first = started("a", interval_steps=1)
    submit(scheduler, "b")
    assert scheduler.tick(0.5) == []
    assert scheduler.take_interrupts() == [0]
    scheduler.complete(PassResult(first.pass_id, 0, 3), 3.0)
    (second,) = scheduler.tick(3.0)
    residents = scheduler.workers[0].running
    assert (ids(second.jobs), ids(residents.jobs), residents.used) == (["b"], ["a", "b"], 13 + 10)
    scheduler.complete(PassResult(second.pass_id, 0, 2, ("a",)), 5.0)
    assert (ids(residents.jobs), residents.used, residents.committed) == (["b"], 12, 110)
    assert list(scheduler._view.finished.recent) == [5]


def test_no_round_is_interrupted_for_a_job_that_cannot_enter():
    scheduler = make(capacity=120)
    submit(scheduler, "a")
    scheduler.tick(0.0)
    submit(scheduler, "b")
    scheduler.tick(0.5)
    assert scheduler.take_interrupts() == []


def test_a_job_that_fills_the_memory_to_its_last_token_runs_alone():
    law = bilinear_law((0.0, 0.0, 0.0, 1.0), (0.0, 0.0, 0.0, 1.0), prefill_emits_token=True)
    scheduler = Scheduler(make_policy("conservative", {}), [Worker(0, law, ZetaMemory(10))])
    submit(scheduler, "a", prompt=9, limit=1)
    (batch,) = scheduler.tick(0.0)
    assert (ids(batch.jobs), batch.steps) == (["a"], 1)


def test_the_last_admitted_is_evicted_before_memory_is_exceeded_and_keeps_its_tokens():
    scheduler, first = started("a", "b", policy="aggressive", capacity=120, watermark=1.0)
    assert (ids(first.jobs), first.steps) == (["a", "b"], 50)
    scheduler.complete(PassResult(first.pass_id, 0, 50), 50.0)
    (second,) = scheduler.tick(50.0)
    (evicted,) = second.evict
    assert (evicted.request_id, evicted.generated, evicted.length, second.jobs) == ("b", 50, 60, ())


def test_after_a_failure_half_as_many_enter_until_the_failing_job_runs_alone():
    scheduler = make()
    submit(scheduler, "a", "b", "c", "killer")
    entered = []
    for now_s in range(40):
        for batch in scheduler.tick(float(now_s)):
            names = ids(scheduler.workers[0].running.jobs)
            entered.append(len(names))
            failure = "crashed" if "killer" in names else ""
            ended = () if failure else tuple(names)
            scheduler.complete(
                PassResult(batch.pass_id, 0, 1, ended, () if failure else None, failure),
                now_s + 0.5,
            )
    assert entered[:2] == [4, 2]
    assert scheduler.jobs == 0
    assert [refusal.request_id for refusal in scheduler.take_refusals()] == ["killer"]


def test_a_cancelled_resident_interrupts_and_leaves_with_the_round():
    scheduler, first = started("a", "b")
    scheduler.cancel("a", 1.0)
    assert scheduler.take_interrupts() == [0]
    scheduler.complete(PassResult(first.pass_id, 0, 10), 10.0)
    (second,) = scheduler.tick(10.0)
    assert (ids(second.evict), ids(scheduler.workers[0].running.jobs), scheduler.jobs) == (
        ["a"],
        ["b"],
        1,
    )


def test_a_lost_workers_residents_continue_elsewhere_with_their_tokens():
    scheduler, batch = started("a", workers=2)
    scheduler.complete(PassResult(batch.pass_id, 0, 7), 7.0)
    scheduler.worker_lost(0, 7.0)
    (again,) = scheduler.tick(7.0)
    assert (again.worker, ids(again.jobs), again.input_length) == (1, ["a"], 17)


@pytest.mark.parametrize("router", ["least-loaded", "max-min", "future-memory"])
def test_a_router_sends_the_next_request_where_less_is_outstanding(router):
    scheduler = make(workers=2, router=router)
    submit(scheduler, "long", prompt=500)
    scheduler.tick(0.0)
    submit(scheduler, "b", "c")
    scheduler.tick(0.0)
    assert [ids(worker.running.jobs) for worker in scheduler.workers] == [["long"], ["b", "c"]]


def test_an_unknown_router_is_named():
    with pytest.raises(InputError) as caught:
        make_policy("fcfs", {"router": "random"})
    assert says(caught.value.message, "'fcfs'", "'random'")


def test_no_server_runs_an_oracle():
    for name in ORACLES:
        with pytest.raises(InputError, match=f"'{name}'"):
            refuse_oracle(name)
    refuse_oracle("past-future")


def test_a_row_that_the_driver_ended_leaves_with_its_round_and_its_length_enters_the_history():
    scheduler, batch = started("a", "b")
    scheduler.end("a", 3, 1.0)
    scheduler.end("a", 3, 1.0)
    assert scheduler.take_interrupts() == [0]
    scheduler.complete(PassResult(batch.pass_id, 0, 10), 10.0)
    assert (scheduler.jobs, list(scheduler._view.finished.recent)) == (1, [3])
    (following,) = scheduler.tick(10.0)
    assert ids(following.evict) == ["a"]


def test_a_row_that_ends_in_the_round_in_which_the_driver_ended_it_counts_once():
    scheduler, batch = started("a", "b")
    scheduler.end("a", 9, 1.0)
    scheduler.complete(PassResult(batch.pass_id, 0, 10, ("a",)), 10.0)
    assert (scheduler.jobs, list(scheduler._view.finished.recent)) == (1, [9])
    (following,) = scheduler.tick(10.0)
    assert following.evict == ()


def test_the_driver_may_end_a_waiting_request():
    scheduler = make()
    submit(scheduler, "a")
    scheduler.end("a", 4, 1.0)
    assert (scheduler.jobs, list(scheduler._view.finished.recent)) == (0, [4])


def test_an_engine_s_slots_bound_the_residents_and_come_back_after_a_failure():
    scheduler = Scheduler(
        make_policy("aggressive", {}), [Worker(0, unit_step(), ZetaMemory(1000), slots=3)]
    )
    submit(scheduler, *"abcde")
    (first,) = scheduler.tick(0.0)
    assert ids(first.jobs) == ["a", "b", "c"]
    scheduler.complete(PassResult(first.pass_id, 0, 1, failure="oom", dropped=("c", "b", "a")), 1.0)
    limits = []
    for _ in range(3):
        limits.append(scheduler.workers[0].row_limit)
        (batch,) = scheduler.tick(1.0)
        scheduler.complete(PassResult(batch.pass_id, 0, 1), 2.0)
    assert limits == [1, 2, 3]


def test_a_job_is_given_up_after_it_ran_out_of_memory_twice_alone_and_never_beside_others():
    scheduler = make("aggressive")
    submit(scheduler, "a", "b")
    for _ in range(3):
        (batch,) = scheduler.tick(0.0)
        dropped = ("b",) if "b" in ids(scheduler.workers[0].running.jobs) else ()
        scheduler.complete(
            PassResult(batch.pass_id, 0, 1, failure="oom" if dropped else "", dropped=dropped),
            1.0,
        )
        assert ids(scheduler.workers[0].running.jobs) == ["a"]
    scheduler.end("a", 5, 1.0)
    refusals = []
    for _ in range(4):
        (batch,) = scheduler.tick(2.0)
        dropped = tuple(ids(scheduler.workers[0].running.jobs))
        scheduler.complete(PassResult(batch.pass_id, 0, 0, (), (), "oom", dropped=dropped), 2.0)
        refusals = scheduler.take_refusals()
        if refusals:
            break
    (refusal,) = refusals
    assert refusal.request_id == "b"
    assert "out of memory" in refusal.reason
    assert scheduler.jobs == 0


def test_a_resident_gets_no_tokens_for_steps_that_it_missed():
    scheduler, batch = started("a", "b")
    scheduler.complete(PassResult(batch.pass_id, 0, 5, missed=(("b", 2),)), 5.0)
    a, b = scheduler.workers[0].running.jobs
    (batch,) = scheduler.tick(5.0)
    scheduler.complete(PassResult(batch.pass_id, 0, 1, ("a", "b")), 6.0)
    assert (a.generated, b.generated) == (6, 4)


def test_a_job_that_an_engine_dropped_waits_before_all_others_with_its_tokens():
    scheduler, batch = started("a", "b", "c", policy="aggressive")
    scheduler.complete(
        PassResult(batch.pass_id, 0, 5, missed=(("c", 1), ("b", 2)), dropped=("c", "b")), 5.0
    )
    worker = scheduler.workers[0]
    assert (ids(worker.running.jobs), ids(worker.waiting.jobs)) == (["a"], ["b", "c"])
    assert [job.generated for job in worker.waiting.jobs] == [3, 4]
