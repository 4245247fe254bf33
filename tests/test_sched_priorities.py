"""A smaller priority is more urgent: it waits less, and less urgent rows are evicted for it."""

import pytest

from benchmarks.common.samples import bilinear_law
from toolkit.estimators.laws import LinearSwap, unit_step
from toolkit.estimators.memory import ZetaMemory
from toolkit.sched.policies import make_policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Pass, PassResult, Request, Worker

CONTINUOUS = {
    "conservative": {},
    "aggressive": {"watermark": 1.0},
    "past-future": {"reserve": 0.0},
    "past-future-sla": {"reserve": 0.0, "ttft_s": 1000.0, "mtpot_s": 1000.0},
    "fcfs": {"max_batch_size": 3},
    "slice-continuous": {"slice_tokens": 16},
}


def make(policy: str, capacity: int = 130, **parameters) -> Scheduler:
    return Scheduler(
        make_policy(policy, parameters), [Worker(0, unit_step(), ZetaMemory(capacity))]
    )


def submit(scheduler: Scheduler, name: str, priority: int = 0, prompt: int = 20) -> None:
    assert scheduler.submit(Request(name, 0.0, prompt, 20, priority), 0.0) is None


def start(scheduler: Scheduler, now_s: float) -> Pass:
    (batch,) = scheduler.tick(now_s)
    return batch


def finish(scheduler: Scheduler, batch: Pass, steps: int, now_s: float) -> None:
    scheduler.complete(PassResult(batch.pass_id, batch.worker, steps), now_s)


def ids(jobs) -> list[str]:
    return [job.request_id for job in jobs]


@pytest.mark.parametrize("policy", [*CONTINUOUS, "sequence", "baton"])
def test_the_most_urgent_waiting_job_enters_first(policy: str):
    scheduler = make(
        policy,
        **CONTINUOUS.get(policy, {"max_batch_size": 3} if policy == "baton" else {"batch_size": 3}),
    )
    for name, priority in (("a", 1), ("b", 0), ("c", -1), ("d", 1), ("e", 0)):
        submit(scheduler, name, priority)
    assert ids(start(scheduler, 0.0).jobs)[:2] == ["c", "b"]


@pytest.mark.parametrize("policy", CONTINUOUS)
def test_the_least_urgent_and_last_admitted_row_is_evicted_for_a_more_urgent_job(policy: str):
    scheduler = make(policy, capacity=3 * 41, interval_steps=4, **CONTINUOUS[policy])
    for name, priority in (("a", 1), ("b", 2), ("c", 2)):
        submit(scheduler, name, priority)
    first = start(scheduler, 0.0)
    assert ids(first.jobs) == ["a", "b", "c"]
    submit(scheduler, "urgent", prompt=50)
    assert scheduler.tick(0.5) == []
    assert scheduler.take_interrupts() == [0]
    finish(scheduler, first, 4, 4.0)
    second = start(scheduler, 4.0)
    assert (ids(second.evict)[:1], ids(second.jobs)) == (["c"], ["urgent"])
    residents = scheduler.workers[0].running
    assert ids(residents.jobs)[0] == "a"
    assert residents.used + len(residents.jobs) <= 3 * 41


@pytest.mark.parametrize("policy", CONTINUOUS)
def test_no_row_is_evicted_for_an_equally_urgent_job(policy: str):
    scheduler = make(policy, capacity=3 * 41, **CONTINUOUS[policy])
    for name in ("a", "b", "c"):
        submit(scheduler, name, 1)
    first = start(scheduler, 0.0)
    submit(scheduler, "later", 1, prompt=70)
    scheduler.tick(0.5)
    finish(scheduler, first, 10, 10.0)
    assert not start(scheduler, 10.0).evict


def test_no_row_is_evicted_if_that_does_not_make_enough_room():
    scheduler = make("conservative", capacity=100)
    submit(scheduler, "urgent", -1, prompt=40)
    submit(scheduler, "calm", 1)
    first = start(scheduler, 0.0)
    submit(scheduler, "large", 0, prompt=60)
    scheduler.tick(0.5)
    assert scheduler.take_interrupts() == []
    finish(scheduler, first, 10, 10.0)
    assert not start(scheduler, 10.0).evict


def test_when_memory_is_short_the_least_urgent_row_leaves_and_not_the_last_admitted():
    scheduler = make("aggressive", capacity=62, watermark=1.0)
    for name, priority in (("a", 0), ("b", 2), ("c", 0)):
        submit(scheduler, name, priority, prompt=10)
    finish(scheduler, start(scheduler, 0.0), 10, 10.0)
    assert ids(start(scheduler, 10.0).evict) == ["b"]


def test_an_urgent_job_preempts_under_feedback_queues_and_no_cache_is_lost():
    law = bilinear_law(p=(0.0, 0.0, 0.0, 0.1), d=(0.0, 0.0, 0.0, 1.0), prefill_emits_token=True)
    worker = Worker(0, law, ZetaMemory(1000), swap=LinearSwap(0.0, 1e6, 1e6), host_tokens=1000)
    scheduler = Scheduler(make_policy("mlfq", {"quantum_s": 50.0, "max_batch_size": 2}), [worker])
    for name in ("a", "b"):
        submit(scheduler, name)
    first = start(scheduler, 0.0)
    submit(scheduler, "calm", 1)
    scheduler.tick(0.4)
    assert scheduler.take_interrupts() == []
    submit(scheduler, "urgent", -1)
    scheduler.tick(0.5)
    assert scheduler.take_interrupts() == [0]
    scheduler.complete(PassResult(first.pass_id, 0, 1), 1.1)
    second = start(scheduler, 1.1)
    assert second.moves is not None
    assert (ids(second.jobs), ids(second.moves.pause), second.evict) == (["urgent"], ["b"], ())


def test_a_starving_job_comes_before_an_urgent_one():
    law = bilinear_law(p=(0.0, 0.0, 0.0, 0.1), d=(0.0, 0.0, 0.0, 1.0), prefill_emits_token=True)
    scheduler = Scheduler(
        make_policy("mlfq", {"max_batch_size": 1, "starvation_s": 10.0}),
        [Worker(0, law, ZetaMemory(1000))],
    )
    submit(scheduler, "calm", 5)
    submit(scheduler, "urgent", -5)
    first = start(scheduler, 0.0)
    assert ids(first.jobs) == ["urgent"]
    finish(scheduler, first, first.steps, 11.0)
    assert ids(start(scheduler, 11.0).jobs) == ["calm"]
