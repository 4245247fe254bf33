"""Digests of the scheduler's decisions and the simulator's results, for many worlds.

A digest covers every decision (the event log, byte for byte) and every outcome (token times,
largest gaps, busy and completed times, counters). Changes that only make the scheduler or the
simulator faster must keep all digests. Traces are made with additions and products alone, which
every IEEE machine computes alike, so the digests are the same on all machines.

`matrix` and `variants` yield the cases, `digest` computes one, `Storm` runs a case with random
failures and cancellations.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush

import numpy as np

from benchmarks.common.samples import bilinear_law
from toolkit.estimators.laws import LinearSwap
from toolkit.estimators.memory import ZetaMemory
from toolkit.laws.passes import PassLaw, PassRange
from toolkit.sched.eventlog import Event, RecordingScheduler, to_line
from toolkit.sched.policies import BUILT_IN, POLICIES, make_any, make_policy
from toolkit.sched.policies.base import Policy
from toolkit.sched.policies.parameters import Value
from toolkit.sched.types import Joining, Pass, PassResult, Request
from toolkit.sim.api import requests_of, simulate, virtual_workers
from toolkit.sim.ledger import Ledger
from toolkit.sim.loop import run
from toolkit.sim.paged_engine import PagedEngine
from toolkit.sim.world import World
from toolkit.traces.types import Trace

CAPACITY = 3_000  # tokens: about ten requests of mean length, so that memory is the limit
LIMIT = 600  # tokens that an output may have
WORKERS = (8, 64)
REQUESTS = dict(zip(WORKERS, (60, 130), strict=True))  # of the test, by the number of workers
VARIANT_REQUESTS = 70
RATES = (0.4, 1.0, 1.35)
MEMORIES: tuple[Joining | None, ...] = (
    None,
    "embed",
    "shape",
)  # paged, or a slab with either joining
ROUTED = ("conservative", "past-future", "slice-continuous", "mlfq", "baton")
ROUTERS = ("least-loaded", "max-min", "future-memory", "round-robin")
SWAP = LinearSwap(2e-3, 1e5, 2e5)


@dataclass(frozen=True, slots=True)
class Case:
    """One world and one policy; `name` describes both."""

    name: str
    policy: str
    world: World
    trace: Trace
    parameters: dict[str, Value] = field(default_factory=dict)
    logged: bool = False  # whether the event log is part of the digest
    storm: int = 0  # the seed of random failures and cancellations; 0: the simulator's own workers


def trace_of(requests: int, rate_rps: float, *, seed: int = 0, prioritised: bool = False) -> Trace:
    """A made-up trace: bursts, mostly short prompts and outputs with a long tail, some with a
    limit.
    """
    rng = random.Random(seed)
    now_s = 0.0
    arrival = []
    prompts = []
    outputs = []
    limits = []
    priorities = []
    for _ in range(requests):
        if rng.random() < 0.7:  # otherwise it arrives together with the one before
            now_s += 2.0 * rng.random() / (0.7 * rate_rps)
        length = rng.random()
        output = rng.random()
        arrival.append(now_s)
        prompts.append(1 + int(500.0 * length * length * length))
        outputs.append(1 + int(450.0 * output * output * output))
        limits.append(0 if rng.random() < 0.5 else 150 + int(400.0 * rng.random()))
        priorities.append(int(3.0 * rng.random()) - 1)
    inputs, lengths, caps, ranks = (
        np.array(column, dtype=np.int64) for column in (prompts, outputs, limits, priorities)
    )
    return Trace(np.array(arrival), inputs, lengths, caps, priority=ranks if prioritised else None)


def world_of(
    workers: int, *, emits: bool = False, joining: Joining | None = None, seed: int = 5
) -> World:
    """The world of a case: a law with the costs of rounds and of leaving rows, and host memory."""
    law = bilinear_law(
        p=(2e-5, 1e-3, 1e-6, 5e-3), d=(2e-7, 1e-4, 1e-8, 0.02), prefill_emits_token=emits
    )
    latency = replace(law, padded=joining is not None, round_s=1e-3, leaving=(1e-4, 1e-7))
    paged = PagedEngine(
        PassLaw(
            {"pass": 0.02, "row": 1e-4, "chunk": 1e-3, "cached": 2e-7, "attended": 1e-9},
            (2e-5, 4e-5),
            (0, 256),
        ),
        187,
        16,
        ahead=emits,
    )
    return World(
        latency,
        ZetaMemory(CAPACITY),
        workers,
        LIMIT,
        swap=SWAP,
        host_tokens=2_000,
        joining=joining,
        seed=seed,
        paged=paged,
    )


def rate_rps(rate: float, workers: int) -> float:
    """Requests per second at `rate` times the approximate capacity of so many workers."""
    return 2.2 * rate * workers


def matrix(requests: dict[int, int]) -> Iterator[Case]:
    """Every policy, for each number of workers with its number of `requests`."""
    for workers, count in requests.items():
        for rate in RATES:
            trace = trace_of(count, rate_rps(rate, workers), seed=workers)
            for emits in (False, True):
                for policy in POLICIES:
                    for joining in MEMORIES:
                        world = world_of(workers, emits=emits, joining=joining)
                        memory = "paged" if joining is None else f"slab, {joining}"
                        name = (
                            f"{policy}, {workers} workers, rate {rate}, emits {int(emits)}, "
                            f"{memory}"
                        )
                        logged = workers == WORKERS[0] and rate == 1.0
                        yield Case(name, policy, world, trace, logged=logged)
                for policy in BUILT_IN:
                    name = f"{policy}, {workers} workers, rate {rate}, ahead {int(emits)}"
                    yield Case(name, policy, world_of(workers, emits=emits), trace)


def variants(requests: int) -> Iterator[Case]:
    """Cases that the matrix leaves out: routers, chunks, priorities, failures, counters, and
    parameters.
    """
    crowd = trace_of(requests, rate_rps(1.35, 8), seed=1)
    urgent = trace_of(requests, rate_rps(1.35, 8), seed=2, prioritised=True)
    plain = world_of(8)
    failing = replace(plain, runs_out=_runs_out, token_gaps=True)
    counting = replace(
        plain,
        prefill_range=PassRange(rows_max=4, length_max=300),
        decode_range=PassRange(rows_max=6, length_max=350),
        future_memory=True,
        drain=False,
        flush_s=0.05,
    )
    for policy in ROUTED:
        for router in ROUTERS:
            for joining in (None, "embed"):
                where = world_of(8, joining=joining)
                name = f"{policy} by {router}, {joining or 'paged'}"
                yield Case(name, policy, where, crowd, {"router": router}, logged=joining is None)
    for policy, kind in POLICIES.items():
        if not kind.continuous:
            yield Case(f"{policy}, memory runs out", policy, failing, crowd)
        yield Case(f"{policy}, counting", policy, counting, crowd)
        if kind.continuous:
            yield Case(
                f"{policy}, limits do not hold", policy, replace(plain, limits_hold=False), crowd
            )
            for joining in MEMORIES:
                where = world_of(8, emits=joining != "shape", joining=joining)
                layout = joining or "paged"
                yield Case(
                    f"{policy} in chunks, {layout}", policy, where, crowd, {"chunk_tokens": 48}
                )
                yield Case(
                    f"{policy} with priorities, {layout}",
                    policy,
                    where,
                    urgent,
                    logged=joining is None,
                )
        for seed in (1, 2):
            joinings: tuple[Joining | None, ...] = (None, "embed") if kind.continuous else (None,)
            for joining in joinings:
                where = world_of(4, emits=seed == 1, joining=joining)
                name = f"{policy}, storm {seed}, {joining or 'paged'}"
                yield Case(name, policy, where, urgent if seed == 1 else crowd, storm=seed)
    for name, parameters in OTHERS.items():
        yield Case(name, name.partition(":")[0], plain, crowd, parameters, logged=True)


OTHERS: dict[str, dict[str, Value]] = {
    "slice: as in the paper": {"eager": False, "slice_tokens": 64},
    "slice: in turn": {"max_min": False, "interval_factor": 0.0, "max_batch_size": 4},
    "sequence: in slices": {"slice_tokens": 32},
    "conservative: overcommitted": {"overcommit": 2.5, "interval_steps": 1},
    "aggressive: full": {"watermark": 1.0, "interval_steps": 3},
    "aggressive: overfilling": {"watermark": 1.0, "overfill": True},
    "past-future: with a history": {
        "initial_count": 9,
        "initial_length": 50,
        "reserve": 0.0,
        "samples": 2,
    },
    "past-future-sla: tight": {"ttft_s": 0.5, "mtpot_s": 0.1, "interval_steps": 2},
    "past-future-sla: all late": {"ttft_s": 1e-6, "late_share": 0.5},
    "slice-continuous: restless": {"slice_tokens": 16, "interval_steps": 1, "margin": 0.02},
    "mlfq: reactive": {"swap": "reactive", "quantum_s": 0.05, "starvation_s": 2.0},
    "mlfq: naive": {"skip_join": False, "free_share": 0.3, "queues": 3, "max_batch_size": 6},
    "baton: restless": {"memory_threshold": 0.6, "headroom_steps": 1, "max_prefill_tokens": 60},
    "srpt-oracle: reactive": {"swap": "reactive", "max_prefill_tokens": 400},
}


def digest(case: Case) -> str:
    """Sixteen hexadecimal digits: a hash of everything that happened in a case."""
    found = hashlib.sha256()
    if case.policy in BUILT_IN or not (case.logged or case.storm):
        result = simulate(case.trace, make_any(case.policy, case.parameters), case.world)
        served = result.served
        for column in (served.first_token_s, served.finish_s, served.max_gap_s):
            found.update(np.asarray(column, dtype="<f8").tobytes())
        found.update(np.asarray(served.ok, dtype="u1").tobytes())
        found.update(repr(sorted(result.counters.items())).encode())
        found.update(repr([refusal.reason for refusal in result.refusals]).encode())
        return found.hexdigest()[:16]
    requests, outputs = requests_of(case.trace, case.world.max_new_tokens)
    policy: Policy = make_policy(case.policy, case.parameters)
    if policy.knows_lengths:
        policy = policy.with_lengths(
            {one.request_id: tokens for one, tokens in zip(requests, outputs, strict=True)}
        )
    recorder = RecordingScheduler(
        policy, case.world.scheduled(), partial(_note, found), seed=case.world.seed
    )
    if case.storm:
        Storm(recorder, requests, outputs, case.storm).run()
        found.update(repr(recorder.take_refusals()).encode())
    else:
        ledger = Ledger(case.trace.arrival_s.tolist(), outputs, case.world.workers)
        run(recorder, requests, virtual_workers(policy, case.world, ledger))
        times = (
            [each.first_token_s for each in ledger.outcomes],
            [each.last_token_s for each in ledger.outcomes],
            [each.max_gap_s for each in ledger.outcomes],
            ledger.busy_s,
            ledger.completed_s,
        )
        for times_s in times:
            found.update(np.asarray(times_s, dtype="<f8").tobytes())
    return found.hexdigest()[:16]


def _note(found: hashlib._Hash, event: Event) -> None:
    found.update(to_line(event))


def _runs_out(pass_id: int, size: int, _length: int, _steps: int) -> bool:
    return size > 1 and pass_id % 7 == 3


class Storm:
    """Runs a scheduler's batches with random cancellations, early ends, out-of-memory failures and
    lost workers.
    """

    def __init__(
        self, scheduler: RecordingScheduler, requests: list[Request], outputs: list[int], seed: int
    ) -> None:
        self._scheduler = scheduler
        self._rng = random.Random(seed)
        self._requests = requests
        self._left = {one.request_id: tokens for one, tokens in zip(requests, outputs, strict=True)}
        self._events: list[tuple[float, int, str, object]] = []
        self._count = 0

    def run(self) -> None:
        """Run until every request has ended, in whatever way."""
        for request in self._requests:
            self._at(request.arrival_s, "arrives", request)
            if self._rng.random() < 0.15:
                self._at(
                    request.arrival_s + 3.0 * self._rng.random(), "cancelled", request.request_id
                )
            elif self._rng.random() < 0.1:
                self._at(request.arrival_s + 3.0 * self._rng.random(), "stops", request.request_id)
        scheduler = self._scheduler
        while self._events:
            now_s = self._events[0][0]
            while self._events and self._events[0][0] <= now_s:
                _, _, what, about = heappop(self._events)
                self._happens(what, about, now_s)
            for batch in scheduler.tick(now_s):
                self._at(now_s + 0.01 + 0.02 * self._rng.random() * batch.steps, "done", batch)
            scheduler.take_interrupts()
            wake_s = scheduler.wake_at_s
            if wake_s > now_s and wake_s < 1e9:
                self._at(wake_s, "wakes", None)
        assert not scheduler.jobs

    def _at(self, when_s: float, what: str, about: object) -> None:
        self._count += 1
        heappush(self._events, (when_s, self._count, what, about))

    def _happens(self, what: str, about: object, now_s: float) -> None:
        scheduler = self._scheduler
        if isinstance(about, Request):
            scheduler.submit(about, now_s)
        elif what == "cancelled":
            scheduler.cancel(str(about), now_s)
        elif what == "stops":
            scheduler.end(str(about), 5, now_s)
        elif isinstance(about, Pass):
            self._done(about, now_s)
        elif isinstance(about, int):
            scheduler.worker_ready(about, now_s)

    def _done(self, batch: Pass, now_s: float) -> None:
        chance = self._rng.random()
        result = self._round(batch, chance) if batch.keep_cache else self._slice(batch, chance)
        self._scheduler.complete(result, now_s)
        if result.failure == "crashed":
            self._scheduler.worker_lost(batch.worker, now_s)
            self._at(now_s + 2.0 * self._rng.random(), "ready", batch.worker)

    def _slice(self, batch: Pass, chance: float) -> PassResult:
        names = [job.request_id for job in batch.jobs]
        ran = batch.pass_id, batch.worker
        if chance < 0.1:
            return PassResult(*ran, 0, failure="oom" if chance < 0.05 else "crashed")
        tokens = [min(batch.steps, self._left[name]) for name in names]
        for name, count in zip(names, tokens, strict=True):
            self._left[name] -= count
        steps = max(tokens)
        ended = tuple([name for name in names if not self._left[name]])
        missed = tuple(
            [
                (name, steps - count)
                for name, count in zip(names, tokens, strict=True)
                if count < steps
            ]
        )
        return PassResult(*ran, steps, ended, missed=missed)

    def _round(self, batch: Pass, chance: float) -> PassResult:
        worker = self._scheduler.workers[batch.worker]
        rows = [job.request_id for job in worker.running.jobs]
        if chance < 0.05:
            return PassResult(batch.pass_id, batch.worker, 0, failure="crashed")
        if chance < 0.1:
            dropped = tuple(reversed(rows[len(rows) // 2 :]))
            joined = tuple([(name, 0) for name in rows])
            return PassResult(
                batch.pass_id, batch.worker, 0, joined=joined, failure="oom", dropped=dropped
            )
        if worker.emits:
            for job in batch.jobs:
                self._left[job.request_id] -= 1
        steps = min([batch.steps, *[max(self._left[name], 0) for name in rows]])
        if chance < 0.3:
            steps = min(steps, 1)
        for name in rows:
            self._left[name] -= steps
        ended = tuple([name for name in rows if self._left[name] <= 0])
        missed = tuple(
            [(name, 1) for name in rows[:1] if steps > 1 and chance > 0.95 and name not in ended]
        )
        for name, count in missed:
            self._left[name] += count
        return PassResult(batch.pass_id, batch.worker, steps, ended, missed=missed)
