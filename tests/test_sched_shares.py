"""How `slice` divides its pool among kinds of workers, and which of the batches it starts."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.common.serving import LAW
from toolkit.estimators.laws import WithOverhead
from toolkit.estimators.memory import ZetaMemory
from toolkit.sched.memory import longest
from toolkit.sched.policies import make_policy
from toolkit.sched.policies.slice import SlicePolicy, offload_max_min, share_out
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Batch, Job, Request, Worker

POLICY = SlicePolicy(slice_tokens=16)


def worker(index: int, capacity: int, slowdown: float) -> Worker:
    memory = ZetaMemory(capacity)
    law = WithOverhead(LAW, 0.0, slowdown)
    made = Worker(index, law, memory)
    made.longest = longest(memory, continuous=False)
    return made


def three_kinds() -> list[list[Worker]]:
    """Workers by kind, the kind with the largest memory last, as in `View.kinds`."""
    return [
        [worker(0, 200, 1.0)],
        [worker(1, 400, 5.0), worker(2, 400, 5.0)],
        [worker(3, 900, 2.0)],
    ]


def pool(lengths: Sequence[int]) -> list[Job]:
    jobs = [Job(Request(str(k), 0.0, length, 16), k, length) for k, length in enumerate(lengths)]
    return sorted(jobs, key=lambda job: job.length)


def waits_s(batches: Sequence[Batch]) -> float:
    """The sum over all jobs of the seconds until each is done, on workers that were idle."""
    done_s: dict[int, float] = {}
    total = 0.0
    for batch in batches:
        done_s[batch.worker] = done_s.get(batch.worker, 0.0) + batch.estimated_s
        total += len(batch.jobs) * done_s[batch.worker]
    return total


@pytest.mark.slow
@given(lengths=st.lists(st.integers(1, 700), max_size=30))
@settings(deadline=None, max_examples=40)
def test_every_job_is_in_one_batch_on_a_worker_that_holds_it(lengths: list[int]) -> None:
    kinds = three_kinds()
    jobs = pool(lengths)
    workers = {one.index: one for kind in kinds for one in kind}
    batches = share_out(jobs, kinds, POLICY.batch, offload_max_min, 0.0)
    assert sorted(job.ticket for batch in batches for job in batch.jobs) == list(range(len(jobs)))
    assert all(workers[batch.worker].holds(job) for batch in batches for job in batch.jobs)


@pytest.mark.slow
@given(lengths=st.lists(st.integers(1, 150), min_size=1, max_size=30))
@settings(deadline=None, max_examples=40)
def test_no_kind_alone_would_give_a_shorter_total_wait(lengths: list[int]) -> None:
    kinds = three_kinds()[1:]
    jobs = pool(lengths)
    shared = waits_s(share_out(jobs, kinds, POLICY.batch, offload_max_min, 0.0))
    for kind in kinds:
        alone = POLICY.batch(jobs, kind[0])
        offload_max_min(alone, kind)
        assert shared <= waits_s(alone) + 1e-9


def test_busy_workers_get_nothing_and_an_idle_one_gets_the_batch_with_the_oldest_job() -> None:
    workers = [worker(0, 4000, 1.0), worker(1, 4000, 3.0)]
    tested = Scheduler(make_policy("slice", {"slice_tokens": 16, "memory_reserve": 0.0}), workers)
    lengths = [900, 20, 900, 20, 900, 20, 900, 900, 900, 20]
    for k, length in enumerate(lengths):
        tested.submit(Request(str(k), 0.0, length, 100), 0.0)
    started = tested.tick(0.0)
    assert started
    assert min(job.ticket for batch in started for job in batch.jobs) == 0
    assert not any(one.queue for one in workers)
    assert tested.waiting_jobs == len(lengths) - sum(len(batch.jobs) for batch in started) > 0
    assert tested.tick(100.0) == [], "Gamma is over, and no worker that should run is idle"


def test_without_eager_all_workers_get_batches_every_gamma() -> None:
    workers = [worker(0, 4000, 1.0), worker(1, 4000, 3.0)]
    tested = Scheduler(
        make_policy("slice", {"slice_tokens": 16, "eager": False, "min_interval_s": 5.0}), workers
    )
    for k, length in enumerate([900, 20] * 8):
        tested.submit(Request(str(k), 0.0, length, 100), 0.0)
    tested.tick(0.0)
    assert tested.waiting_jobs == sum(len(batch.jobs) for one in workers for batch in one.queue)
    tested.submit(Request("later", 1.0, 20, 100), 1.0)
    tested.tick(1.0)
    assert tested.wake_at_s == 5.0
