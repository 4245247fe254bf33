"""SCLS, Algorithms 1 and 2 and Eq. 8-12, against brute force and the figures of the paper."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.samples import bilinear_law
from toolkit.estimators.memory import ZetaMemory
from toolkit.sched.kernels import split_by_serving_time
from toolkit.sched.policies.slice import SlicePolicy, offload_in_turn, offload_max_min
from toolkit.sched.types import Job, Pass, Request, Worker
from toolkit.sched.view import LengthHistory, View

# Fig. 11: these laws give both of its times.
FIG_11 = bilinear_law(p=(1.3e-4, 1e-3, 1e-5, 0.03), d=(3.5421e-6, 2e-4, 5e-7, 0.022956))
ROOMY = ZetaMemory(capacity_tokens=1 << 40)


def job(length: int, ticket: int = 0) -> Job:
    return Job(Request(f"r{ticket}", 0.0, length, 1024), ticket, length)


def worker(index: int = 0, law=FIG_11, memory=ROOMY) -> Worker:
    return Worker(index, law, memory)


def batch(estimated_s: float) -> Pass:
    return Pass(-1, (job(1),), 1, 1, estimated_s)


def test_fig_11_is_split_15_and_1():
    pool = [job(10, k) for k in range(15)] + [job(1024, 15)]
    batches = SlicePolicy(slice_tokens=128).batch(pool, worker())
    assert sorted(len(b.jobs) for b in batches) == [1, 15]
    assert sum(b.estimated_s for b in batches) == pytest.approx(7.6, abs=0.05)


def brute_force_s(lengths: list[int], max_batch: list[int], serve_s) -> float:
    """The least total over every way to cut the sorted lengths into runs."""
    n = len(lengths)
    best = float("inf")
    for cuts in range(1 << (n - 1)):
        ends = [i + 1 for i in range(n - 1) if cuts >> i & 1] + [n]
        sizes = [end - start for start, end in pairwise([0, *ends])]
        if all(
            size == 1 or size <= max_batch[end - 1] for size, end in zip(sizes, ends, strict=True)
        ):
            total = sum(
                serve_s(size, lengths[end - 1]) for size, end in zip(sizes, ends, strict=True)
            )
            best = min(best, total)
    return best


coefficient = st.floats(0, 1e-2)


@pytest.mark.slow
@given(
    lengths=st.lists(st.integers(1, 2000), min_size=1, max_size=9).map(sorted),
    p=st.tuples(coefficient, coefficient, coefficient, coefficient),
    d=st.tuples(coefficient, coefficient, coefficient, coefficient),
    steps=st.integers(1, 64),
    capacity=st.integers(100, 9000),
    flat=st.sampled_from([0.0, 1e-3, 10.0]),
)
def test_algorithm_1_equals_brute_force(lengths, p, d, steps, capacity, flat):
    law = bilinear_law(p, d)
    law = replace(law, decode=replace(law.decode, flat_s=flat))

    def serve_s(size, length):
        """As the table has it, which is a little low for slices that begin flat."""
        if not flat:
            return law.serve_s(size, length, steps)
        linear = bilinear_law(p, d)
        flat_s = law.prefill_s(size, length) + steps * flat
        return max(linear.serve_s(size, length, steps), flat_s)

    max_batch = np.maximum(ZetaMemory(capacity).max_batch(np.array(lengths), steps, 0.0), 1)
    starts, total_s = split_by_serving_time(
        np.array(lengths), max_batch, law.serve_table(16, steps)
    )
    best_s = brute_force_s(lengths, max_batch.tolist(), serve_s)
    assert total_s[-1] == pytest.approx(best_s, rel=1e-9, abs=1e-12)
    end = len(lengths)
    while end:  # the walk back respects memory too
        assert end - starts[end] <= max_batch[end - 1]
        end = starts[end]


@given(
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=40),
    reserve=st.floats(0, 0.9),
    cap=st.integers(0, 8),
)
def test_batches_hold_every_job_once_within_memory(lengths, reserve, cap):
    pool = [job(length, k) for k, length in enumerate(lengths)]
    memory = ZetaMemory(4000, zeta=0.9)
    policy = SlicePolicy(slice_tokens=32, memory_reserve=reserve, max_batch_size=cap)
    batches = policy.batch(pool, worker(memory=memory))
    assert sorted(j.ticket for b in batches for j in b.jobs) == list(range(len(pool)))
    for b in batches:
        assert b.input_length == max(j.length for j in b.jobs)
        assert (
            len(b.jobs) == 1
            or len(b.jobs) * (b.input_length + 32) <= (1 - reserve) * 0.9 * 4000 + 1e-6
        )
        assert not cap or len(b.jobs) <= cap


def test_offloading_gives_the_longest_to_the_least_loaded():
    workers = [worker(0), worker(1)]
    workers[0].load_s = 4.0
    batches = [batch(1.0), batch(5.0), batch(2.0)]
    least_s = offload_max_min(batches, workers)
    assert [(b.estimated_s, b.worker) for b in batches] == [(5.0, 1), (2.0, 0), (1.0, 1)]
    assert least_s == 6.0


def test_equal_loads_starve_no_worker():
    workers = [worker(k) for k in range(3)]
    for _ in range(6):
        single = [batch(0.0)]
        offload_max_min(single, workers)
        workers[single[0].worker].assigned += 1
    assert [w.assigned for w in workers] == [2, 2, 2]


def test_offloading_in_turn_continues_after_the_last_call():
    workers = [worker(k) for k in range(3)]
    workers[0].assigned = workers[1].assigned = 2
    batches = [batch(1.0) for _ in range(3)]
    offload_in_turn(batches, workers)
    assert [b.worker for b in batches] == [1, 2, 0]


def view(workers: list[Worker], pool: list[Job], due_s: float = float("-inf")) -> View:
    return View(pool, workers, due_s, LengthHistory(1), np.random.default_rng(0))


def test_the_interval_adapts_to_the_least_load():
    busy = worker()
    busy.load_s = 100.0
    decision = SlicePolicy(interval_factor=0.5, min_interval_s=3.0).plan(
        view([busy], [job(10)]), now_s=7.0
    )
    expected_s = 7.0 + 0.5 * (100.0 + decision.batches[0].estimated_s)
    assert decision.wake_at_s == pytest.approx(expected_s)


def test_the_interval_is_at_least_gamma():
    decision = SlicePolicy(interval_factor=0.5, min_interval_s=60.0).plan(
        view([worker()], [job(10)]), now_s=7.0
    )
    assert decision.wake_at_s == 67.0


def test_eager_avoids_the_wait_of_an_idle_worker():
    early = view([worker()], [job(10)], due_s=5.0)
    assert not SlicePolicy(eager=False).plan(early, now_s=1.0).batches
    assert len(SlicePolicy(eager=True).plan(early, now_s=1.0).batches) == 1


def test_a_busy_worker_waits_for_the_interval():
    busy = worker()
    busy.batch = batch(1.0)
    early = view([busy], [job(10)], due_s=5.0)
    assert not SlicePolicy(eager=True).plan(early, now_s=1.0).batches
    assert len(SlicePolicy(eager=True).plan(early, now_s=5.0).batches) == 1
