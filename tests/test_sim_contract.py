"""Contract tests over every policy: a new policy adds one line to CASES and is fully tested."""

from dataclasses import replace

import numpy as np
import pytest
from around import Around
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.common.samples import bilinear_law
from toolkit.errors import InputError
from toolkit.estimators.laws import LinearSwap
from toolkit.estimators.memory import ZetaMemory
from toolkit.sched.eventlog import RecordingScheduler, from_lines, replay, to_line
from toolkit.sched.policies import ORACLES, POLICIES, make_policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Moves, PassResult, Request, Worker
from toolkit.sim.api import requests_of, simulate, virtual_workers
from toolkit.sim.ledger import Ledger
from toolkit.sim.loop import run
from toolkit.sim.world import World
from toolkit.traces.types import Trace

CASES = {
    "slice": ("slice", {"slice_tokens": 8, "min_interval_s": 0.05}),
    "slice, as in the paper": (
        "slice",
        {"slice_tokens": 16, "min_interval_s": 0.5, "eager": False},
    ),
    "slice, in turn": (
        "slice",
        {"slice_tokens": 8, "max_min": False, "interval_factor": 0.0, "max_batch_size": 4},
    ),
    "sequence": ("sequence", {"batch_size": 4}),
    "sequence, sliced": ("sequence", {"batch_size": 4, "slice_tokens": 8}),
    "conservative": ("conservative", {}),
    "conservative, overcommitted": ("conservative", {"overcommit": 3.0, "interval_steps": 1}),
    "conservative, max-min": ("conservative", {"router": "max-min", "interval_steps": 3}),
    "aggressive": ("aggressive", {"watermark": 1.0, "interval_steps": 4}),
    "aggressive, overfilling": ("aggressive", {"watermark": 1.0, "overfill": True}),
    "aggressive, least-loaded": ("aggressive", {"router": "least-loaded"}),
    "past-future": ("past-future", {"reserve": 0.0, "interval_steps": 2}),
    "past-future, future-memory": (
        "past-future",
        {"router": "future-memory", "initial_count": 9, "initial_length": 5},
    ),
    "past-future, in chunks": ("past-future", {"chunk_tokens": 16, "max_prefill_tokens": 90}),
    "aggressive, in chunks": (
        "aggressive",
        {"watermark": 1.0, "interval_steps": 4, "chunk_tokens": 7},
    ),
    "past-future-sla, in chunks": (
        "past-future-sla",
        {"ttft_s": 0.3, "mtpot_s": 0.01, "chunk_tokens": 30},
    ),
    "slice-continuous, in chunks": (
        "slice-continuous",
        {"slice_tokens": 8, "interval_steps": 4, "chunk_tokens": 25},
    ),
    "mlfq, in chunks": (
        "mlfq",
        {"quantum_s": 0.01, "starvation_s": 0.2, "max_batch_size": 3, "chunk_tokens": 20},
    ),
    "mlfq, reactive, in chunks": (
        "mlfq",
        {"quantum_s": 0.005, "swap": "reactive", "chunk_tokens": 9},
    ),
    "baton, in chunks": (
        "baton",
        {"memory_threshold": 0.6, "headroom_steps": 1, "chunk_tokens": 15},
    ),
    "past-future-sla": ("past-future-sla", {"interval_steps": 2, "ttft_s": 0.3, "mtpot_s": 0.01}),
    "past-future-sla, all late": ("past-future-sla", {"ttft_s": 1e-6, "late_share": 0.5}),
    "slice-continuous": ("slice-continuous", {"slice_tokens": 8, "interval_steps": 4}),
    "slice-continuous, restless": (
        "slice-continuous",
        {"slice_tokens": 1, "interval_steps": 1, "margin": 0.0},
    ),
    "slice-continuous, in turn": (
        "slice-continuous",
        {"slice_tokens": 5, "router": "round-robin", "reserve": 0.2},
    ),
    "fcfs": ("fcfs", {"max_batch_size": 3, "max_prefill_tokens": 100}),
    "past-future-oracle": ("past-future-oracle", {"interval_steps": 1}),
    "mlfq": (
        "mlfq",
        {"quantum_s": 0.01, "starvation_s": 0.2, "max_batch_size": 3, "interval_steps": 8},
    ),
    "mlfq, reactive": (
        "mlfq",
        {"quantum_s": 0.005, "starvation_s": 0.1, "swap": "reactive", "queues": 3},
    ),
    "mlfq, naive": (
        "mlfq",
        {"quantum_s": 0.01, "skip_join": False, "free_share": 0.3, "router": "least-loaded"},
    ),
    "baton": ("baton", {"max_batch_size": 6, "headroom_steps": 4}),
    "baton, restless": (
        "baton",
        {"memory_threshold": 0.6, "headroom_steps": 1, "max_prefill_tokens": 60},
    ),
    "baton, to the edge": ("baton", {"memory_threshold": 1.0, "router": "least-loaded"}),
    "srpt-oracle": ("srpt-oracle", {"max_batch_size": 3}),
    "srpt-oracle, reactive": ("srpt-oracle", {"swap": "reactive", "max_prefill_tokens": 60}),
}
PREEMPTIVE = {"mlfq", "srpt-oracle", "baton"}
LAW = bilinear_law(p=(1e-5, 1e-4, 1e-6, 1e-3), d=(1e-7, 1e-5, 1e-7, 1e-3), prefill_emits_token=True)
CAPACITY = 400  # a few rows, so that memory binds
HOST_TOKENS = 300

requests = st.lists(
    st.tuples(st.floats(0, 2), st.integers(1, 100), st.integers(1, 80), st.integers(0, 80)),
    min_size=1,
    max_size=40,
)
cases = st.sampled_from(sorted(CASES))
memories = st.sampled_from(
    [None, "embed", "shape"]
)  # paged, or a slab that rows join in one of two ways


def trace_of(rows: list[tuple[float, int, int, int]]) -> Trace:
    arrival, prompt, output, limit = zip(*sorted(rows), strict=True)
    lengths = [np.array(column, dtype=np.int64) for column in (prompt, output, limit)]
    return Trace(np.array(arrival), *lengths)


def world(workers: int, runs_out=None, host_tokens: int = HOST_TOKENS, joining=None) -> World:
    memory = ZetaMemory(CAPACITY)
    link = LinearSwap(2e-3, 4e4, 8e4)
    return World(
        LAW,
        memory,
        workers,
        80,
        runs_out=runs_out,
        swap=link,
        host_tokens=host_tokens,
        joining=joining,
    )


def two_workers(joining=None) -> list[Worker]:
    return world(2, joining=joining).scheduled()


def test_every_policy_has_a_case():
    assert {policy for policy, _ in CASES.values()} == set(POLICIES)


class Watch(Around):
    """Checks what must hold for every policy."""

    def release(self, view, now_s):
        leaving = super().release(view, now_s)
        assert len(set(leaving)) == len(leaving)
        for job in leaving:
            worker = view.workers[job.home]
            assert worker.batch is None
            assert job in worker.running.jobs, "a job leaves that is not there"
        return leaving

    def plan(self, view, now_s):
        decision = super().plan(view, now_s)
        jobs = [job for batch in decision.batches for job in batch.jobs]
        assert len({id(job) for job in jobs}) == len(jobs), "a job in two batches"
        busy = {id(job) for w in view.workers for b in [w.batch, *w.queue] if b for job in b.jobs}
        assert not busy & {id(job) for job in jobs}, "a job that already runs"
        for batch in decision.batches:
            assert batch.steps >= 1
            assert batch.input_length == max([job.length for job in batch.jobs], default=0)
            if self.continuous:
                overfill = getattr(self._policy, "overfill", False)
                preempts = self.name in PREEMPTIVE
                check_round(batch, view.workers[batch.worker], overfill, preempts)
            else:
                assert batch.jobs
                assert batch.estimated_s > 0
        return decision


def check_round(batch, worker, overfill, preempts):
    residents = worker.running
    assert worker.batch is None
    there = residents.jobs | worker.paused.jobs | worker.swapped.jobs
    assert not there.keys() & set(batch.jobs), "a job enters that is there"
    assert set(batch.evict) <= there.keys(), "a job is evicted that is not there"
    moves = batch.moves or Moves()
    gone = {*batch.evict, *moves.pause, *moves.swap_out}
    stay = [job for job in residents.jobs if job not in gone]
    if not preempts:
        assert batch.moves is None
        assert list(batch.evict) == list(residents.jobs)[len(stay) :][::-1], (
            "the last admitted go first"
        )
    check_moves(moves, batch.evict, worker)
    running = [*stay, *moves.resume]
    assert running or batch.jobs
    arrived = 0 if moves.overlap else len(set(moves.swap_in) - set(moves.resume))
    assert not arrived, "a job waited for and not run"
    aside = {*worker.paused.jobs, *moves.pause, *moves.swap_out, *moves.swap_in} - {
        *moves.resume,
        *batch.evict,
    }
    aside -= set() if moves.overlap else set(moves.swap_out)
    used = sum(held(job, worker) for job in [*running, *batch.jobs, *aside])
    rows = len(running) + len(batch.jobs)
    emitted = len(batch.jobs) * worker.latency.prefill_emits_token
    if worker.padded and not overfill:
        check_slab(batch, worker, running, sum(held(job, worker) for job in aside))
    elif not overfill:
        assert used + emitted + rows * batch.steps <= worker.memory.usable_tokens, (
            "memory is passed"
        )


def check_slab(batch, worker, running, aside):
    """Checks the memory of a padded engine: rows x the longest row, and the other caches. A pass
    that joins rows by shaping is a step.
    """
    rows = [held(job, worker) for job in running]
    entering = [job.length for job in batch.jobs]
    shaped = worker.joining == "shape" and rows
    capacity = worker.memory.usable_tokens - aside
    emitted = worker.latency.prefill_emits_token and not shaped
    width = max(rows + [length + emitted for length in entering])
    n = len(rows) + len(entering)
    assert n * (width + batch.steps) <= capacity, "the slab passes memory"
    if shaped and entering:
        assert n * (width + max(entering)) <= capacity, "the padded step passes memory"
    elif entering and n > 1:
        assert n * width + max(entering) <= capacity, (
            "a newcomer's cache has no room beside the slab"
        )


def held(job, worker):
    """Tokens of the job's cache before the round, with the token that its prefill will give."""
    return worker.running.holds(job) if job in worker.running.jobs else job.length


def check_moves(moves, evict, worker):
    device = worker.running.jobs | worker.paused.jobs
    leave = [*evict, *moves.pause, *moves.swap_out]
    assert not worker.running.prefilling.keys() & {*moves.pause, *moves.swap_out}, (
        "a half-done prefill is moved"
    )
    assert len(set(leave)) == len(leave), "a job leaves twice"
    assert set(moves.pause) <= worker.running.jobs.keys()
    assert set(moves.swap_out) <= device.keys()
    assert set(moves.swap_in) <= worker.swapped.jobs.keys()
    came = set() if moves.overlap else set(moves.swap_in)
    assert set(moves.resume) <= worker.paused.jobs.keys() | came
    assert not set(moves.resume) & set(leave)
    host = worker.swapped.tokens + sum(held(job, worker) for job in moves.swap_out)
    assert host <= worker.host_tokens, "host memory is passed"


@pytest.mark.slow
@given(
    rows=requests,
    case=cases,
    workers=st.integers(1, 3),
    seed=st.integers(0, 9),
    host_tokens=st.sampled_from([0, 60, HOST_TOKENS]),
    joining=memories,
)
@example(
    [(0.0, 65, 1, 0), (0.0, 65, 3, 0), (0.0, 100, 3, 0)], "aggressive", 1, 0, 0, None
)  # a failure freed no memory
def test_every_request_ends_once_with_its_own_length(
    rows, case, workers, seed, host_tokens, joining
):
    name, parameters = CASES[case]
    trace = trace_of(rows)

    def runs_out(
        pass_id, n, length, steps
    ):  # every fifth batch of several rows, whatever the law said
        return n > 1 and (pass_id + seed) % 5 == 0

    result = simulate(
        trace, Watch(make_policy(name, parameters)), world(workers, runs_out, host_tokens, joining)
    )
    served = result.served
    if name != "sequence" and not parameters.get(
        "overfill"
    ):  # SLS takes a fixed number of rows, whatever they hold
        assert result.counters.get("peak_memory_percent", 0.0) <= 100.0
    assert result.counters.get("peak_host_tokens", 0.0) <= host_tokens
    assert served.ok.all()
    assert (served.first_token_s > served.arrival_s).all()
    assert (served.finish_s >= served.first_token_s).all()
    limits = np.where(trace.max_tokens > 0, trace.max_tokens, 80)
    assert served.output_tokens.tolist() == np.minimum(trace.output_tokens, limits).tolist()


@pytest.mark.slow
@given(
    rows=requests,
    case=cases.filter(lambda case: not CASES[case][1].get("overfill")),
    host_tokens=st.sampled_from([0, 60, HOST_TOKENS]),
    joining=memories,
)
def test_no_round_runs_out_of_memory_by_itself(rows, case, host_tokens, joining):
    name, parameters = CASES[case]
    result = simulate(
        trace_of(rows), make_policy(name, parameters), world(1, None, host_tokens, joining)
    )
    assert result.counters["oom_percent"] == 0.0
    assert result.served.ok.all()


@settings(max_examples=20, deadline=None)
@given(
    rows=requests,
    case=cases,
    joining=memories,
    priorities=st.lists(st.integers(-2, 2), min_size=1, max_size=5),
)
def test_under_any_priorities_all_requests_end_and_a_log_replays_to_the_same_decisions(
    rows, case, joining, priorities
):
    name, parameters = CASES[case]
    trace = trace_of(rows)
    lines: list[bytes] = []
    policy = make_policy(name, parameters)
    arrivals, outputs = requests_of(trace, 80)
    arrivals = [
        replace(one, priority=priorities[k % len(priorities)]) for k, one in enumerate(arrivals)
    ]
    if policy.knows_lengths:
        policy = policy.with_lengths(
            {request.request_id: k for request, k in zip(arrivals, outputs, strict=True)}
        )
    recorder = RecordingScheduler(
        policy, two_workers(joining), lambda event: lines.append(to_line(event)), seed=3
    )
    ledger = Ledger(trace.arrival_s.tolist(), outputs, 2)
    assert run(recorder, arrivals, virtual_workers(policy, world(2, joining=joining), ledger)) == []
    assert all(each.ok for each in ledger.outcomes)
    assert list(replay(from_lines(lines), Scheduler(policy, two_workers(joining), seed=3))) == []


def test_replay_notices_another_policy():
    lines: list[bytes] = []
    policy = make_policy("slice", {"slice_tokens": 8})
    recorder = RecordingScheduler(
        policy, two_workers()[:1], lambda event: lines.append(to_line(event))
    )
    recorder.submit(Request("a", 0.0, 10, 80), 0.0)
    (batch,) = recorder.tick(0.0)
    recorder.complete(PassResult(batch.pass_id, 0, 8), 1.0)
    recorder.tick(1.0)
    other = Scheduler(make_policy("slice", {"slice_tokens": 9}), two_workers()[:1])
    assert len(list(replay(from_lines(lines), other))) == 2


@settings(max_examples=20, deadline=None)
@given(
    rows=requests, case=cases.filter(lambda case: CASES[case][0] not in ORACLES), joining=memories
)
def test_no_policy_can_read_output_lengths(rows, case, joining):
    """The first decisions depend on the lengths so far, not on the outputs to come."""
    name, parameters = CASES[case]
    firsts = []
    for poison in (1, 80):
        arrivals, _ = requests_of(trace_of([(a, p, poison, m) for a, p, _, m in rows]), 80)
        scheduler = Scheduler(make_policy(name, parameters), world(1, joining=joining).scheduled())
        for request in arrivals:
            scheduler.submit(request, 2.0)
        (batch,) = scheduler.tick(2.0)
        firsts.append((batch.steps, [job.request_id for job in batch.jobs]))
    assert firsts[0] == firsts[1]


@pytest.mark.parametrize("name", sorted(ORACLES))
def test_an_oracle_without_output_lengths_is_refused(name):
    def decide():
        scheduler = Scheduler(make_policy(name, {}), two_workers())
        scheduler.submit(Request("a", 0.0, 10, 80), 0.0)
        scheduler.tick(0.0)

    with pytest.raises(InputError, match=f"'{name}'"):
        decide()


def step_by_step(law, lengths, remaining, steps):
    """A batch of padded rows, one token at a time: the times of each row's tokens, and the end of
    the batch.
    """
    n = len(lengths)
    width = max(lengths)
    now_s = law.prefill_s(n, width)
    ran = 0
    times: list[list[float]] = [[] for _ in lengths]
    while ran < steps and any(len(t) < r for t, r in zip(times, remaining, strict=True)):
        if ran or not law.prefill_emits_token:
            position = ran + (0 if law.prefill_emits_token else 1)
            now_s += law.decode_s(n, width + position - 1, 1)
        for t, r in zip(times, remaining, strict=True):
            if len(t) < r:
                t.append(now_s)
        ran += 1
    return times, now_s


@given(
    rows=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 40)), min_size=1, max_size=6),
    slice_tokens=st.integers(1, 50),
    emits=st.booleans(),
)
def test_the_closed_form_of_a_static_batch_equals_single_steps(rows, slice_tokens, emits):
    law = bilinear_law(
        p=(1e-5, 1e-4, 1e-6, 1e-3), d=(1e-6, 1e-5, 1e-6, 1e-3), prefill_emits_token=emits
    )
    lengths, outputs = zip(*rows, strict=True)
    trace = trace_of([(0.0, length, output, 40) for length, output in rows])
    one = World(law, ZetaMemory(10**9), 1, max_new_tokens=40)
    policy = make_policy("sequence", {"batch_size": 6, "slice_tokens": slice_tokens})
    served = simulate(trace, policy, one).served
    order = sorted(range(len(rows)), key=lambda k: (0.0, *rows[k], 40))
    times, ends_s = step_by_step(law, lengths, outputs, slice_tokens)
    for k, original in enumerate(order):
        assert served.first_token_s[k] == pytest.approx(times[original][0], rel=1e-12)
        if outputs[original] <= slice_tokens:
            assert served.finish_s[k] == pytest.approx(times[original][-1], rel=1e-12)
        else:
            assert served.finish_s[k] > ends_s
