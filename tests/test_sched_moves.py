"""Pausing and swapping in the scheduler and the simulated worker: state, times and failures."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest

from tests.samples import fit
from toolkit.errors import InputError
from toolkit.estimators.laws import LinearSwap, unit_step
from toolkit.estimators.load import laws_from_fit
from toolkit.estimators.memory import ZetaMemory
from toolkit.files.fit import Fit, SwapFit
from toolkit.files.io import read_file, write_file
from toolkit.sched.eventlog import RecordingScheduler, from_lines, to_line
from toolkit.sched.policies.base import Policy
from toolkit.sched.types import Moves, Pass, PassResult, Request, Worker
from toolkit.sched.view import Decision
from toolkit.sim.continuous import ContinuousWorker
from toolkit.sim.ledger import Ledger
from toolkit.sim.world import World

LINK = LinearSwap(latency_s=0.5, out_tokens_per_s=16.0, in_tokens_per_s=8.0)
PROMPT = 10


@dataclass
class Script(Policy):
    """A policy that plans the next round as a test says, with jobs by name."""

    name: ClassVar[str] = "script"
    continuous: ClassVar[bool] = True
    jobs: dict = field(default_factory=dict)
    next: Pass | None = None

    def route(self, view, now_s):
        self.jobs |= {job.request_id: job for job in view.pool}
        return [0 if view.workers[0].alive else 1 for _ in view.pool]

    def plan(self, view, now_s):
        batch = self.next
        self.next = None
        return Decision([batch] if batch else [])


class Bench:
    """One scheduler with a script, and a simulated worker that runs what it starts."""

    def __init__(self, *names, output=100, link=LINK):
        self.policy = Script()
        self.log = []
        workers = [
            Worker(k, unit_step(), ZetaMemory(200), swap=link, host_tokens=100) for k in range(2)
        ]
        self.scheduler = RecordingScheduler(
            self.policy, workers, lambda event: self.log.append(to_line(event))
        )
        self.ledger = Ledger([0.0] * len(names), [output] * len(names), 2)
        self.engine = ContinuousWorker(
            0, self.ledger, World(unit_step(), ZetaMemory(200), 2, output, swap=link)
        )
        self.worker = workers[0]
        self.now_s = 0.0
        for number, name in enumerate(names):
            self.scheduler.submit(Request(name, 0.0, PROMPT, output), 0.0, number)
        self.scheduler.tick(0.0)

    def of(self, names):
        return tuple(self.policy.jobs[name] for name in names)

    def start(self, steps=1, enter="", evict="", overlap=False, **moves):
        moved = Moves(**{kind: self.of(names) for kind, names in moves.items()}, overlap=overlap)
        self.policy.next = Pass(
            0,
            self.of(enter),
            steps,
            PROMPT,
            0.0,
            True,
            evict=self.of(evict),
            moves=moved if moves else None,
        )
        (batch,) = self.scheduler.tick(self.now_s)
        return batch, self.engine.run(batch, self.now_s)

    def round(self, **what):
        _, self.now_s = self.start(**what)
        self.scheduler.complete(self.engine.finish(), self.now_s)

    def where(self):
        places = {
            "on": self.worker.running,
            "held": self.worker.paused,
            "host": self.worker.swapped,
        }
        return {
            place: "".join(job.request_id for job in jobs.jobs)
            for place, jobs in places.items()
            if jobs.jobs
        }


def test_a_paused_job_keeps_its_cache_and_resumes_without_a_prefill():
    bench = Bench("a", "b", output=11)
    bench.round(enter="ab", steps=4)
    bench.round(pause="b", steps=3)
    (b,) = bench.of("b")
    assert bench.where() == {"on": "a", "held": "b"}
    assert (b.generated, bench.worker.paused.tokens, b.waiting_since_s) == (4, PROMPT + 4, 4.0)
    bench.round(resume="b", steps=2)
    assert (bench.where(), bench.worker.running.used) == ({"on": "ab"}, 2 * PROMPT + 9 + 6)
    bench.round(steps=9)
    bench.round(steps=9)
    outcomes = bench.ledger.outcomes
    assert (bench.ledger.batches, [each.ok for each in outcomes]) == (1, [True, True])
    assert [each.max_gap_s for each in outcomes] == [1.0, 4.0]  # three steps without b, and its own


def test_a_round_waits_for_transfers_that_do_not_overlap():
    bench = Bench("a", "b")
    bench.round(enter="ab", steps=6)
    bench.round(swap_out="b", steps=2)
    assert (bench.where(), bench.worker.swapped.tokens) == ({"on": "a", "host": "b"}, 16)
    assert bench.now_s == 6 + (0.5 + 1.0) + 2
    bench.round(swap_in="b", resume="b", steps=2)
    assert bench.now_s == 9.5 + (0.5 + 2.0) + 2
    assert bench.where() == {"on": "ab"}
    assert (bench.ledger.swaps_out, bench.ledger.swaps_in, bench.ledger.swapped_tokens) == (
        1,
        1,
        32,
    )
    assert (bench.ledger.swap_wait_s, bench.ledger.peak_host_tokens) == (4.0, 16)
    assert bench.engine.used == bench.worker.running.used


def test_transfers_that_overlap_hold_device_memory_and_bound_the_round_from_below():
    bench = Bench("a", "b", "c")
    bench.round(enter="abc", steps=6)
    bench.round(swap_out="c", steps=1)
    _, ends_s = bench.start(swap_out="b", swap_in="c", overlap=True, steps=1)
    assert bench.where() == {"on": "a", "held": "b", "host": "c"}
    assert ends_s == bench.now_s + (0.5 + 17 / 16) + 2.5
    assert bench.engine.interrupt(bench.now_s + 0.1) == ends_s
    bench.scheduler.complete(bench.engine.finish(), ends_s)
    assert bench.where() == {"on": "a", "held": "c", "host": "b"}
    assert bench.ledger.peak_tokens == 18 + 17 + 16  # a's eighth token, what leaves, what comes
    assert bench.ledger.swap_wait_s == 1.5 + 17 / 16 + 2.0


@pytest.mark.parametrize(("overlaps", "now_s", "wait_s"), [(True, 15.0, 0.0), (False, 16.5, 1.5)])
def test_overlapped_transfers_cost_nothing_where_compute_takes_longer(overlaps, now_s, wait_s):
    """On a CPU the computing cores copy, so compute waits."""
    bench = Bench("a", "b", link=replace(LINK, overlaps=overlaps))
    bench.round(enter="ab", steps=6)
    bench.round(swap_out="b", overlap=True, steps=9)
    assert (bench.now_s, bench.ledger.swap_wait_s) == (now_s, wait_s)


@pytest.mark.parametrize("place", ["pause", "swap_out"])
def test_a_cancelled_job_is_forgotten_at_once_and_the_engine_is_told(place):
    bench = Bench("a", "b")
    bench.round(enter="ab")
    bench.round(**{place: "b"})
    bench.scheduler.cancel("b", bench.now_s)
    assert (bench.where(), bench.scheduler.jobs) == ({"on": "a"}, 1)
    batch, _ = bench.start()
    assert [job.request_id for job in batch.evict] == ["b"]


def test_a_job_that_is_cancelled_while_it_is_swapped_out_is_forgotten_after_the_swap():
    bench = Bench("a", "b")
    bench.round(enter="ab")
    _, ends_s = bench.start(swap_out="b", overlap=True)
    bench.scheduler.cancel("b", bench.now_s)
    bench.scheduler.complete(bench.engine.finish(), ends_s)
    bench.now_s = ends_s
    assert bench.where() == {"on": "a"}
    batch, _ = bench.start()
    assert [job.request_id for job in batch.evict] == ["b"]


def test_a_job_that_memory_has_no_room_for_waits_and_the_other_moves_still_happen():
    bench = Bench("a", "b", "c", "d")
    bench.round(enter="abcd", steps=2)
    bench.round(swap_out="c", pause="b")
    batch, ends_s = bench.start(swap_in="c", swap_out="d", overlap=True)
    bench.scheduler.complete(PassResult(batch.pass_id, 0, 0, (), (), "oom", dropped=("b",)), ends_s)
    assert bench.where() == {"on": "a", "held": "c", "host": "d"}
    assert [(job.request_id, job.generated) for job in bench.worker.waiting.jobs] == [("b", 2)]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_job_that_did_not_reach_host_memory_before_memory_ran_out_waits(overlap):
    bench = Bench("a", "b", "c")
    bench.round(enter="abc", steps=2)
    batch, ends_s = bench.start(swap_out="bc", overlap=overlap)
    bench.scheduler.complete(PassResult(batch.pass_id, 0, 0, (), (), "oom", dropped=("c",)), ends_s)
    assert bench.where() == {"on": "a", "host": "b"}
    assert [(job.request_id, job.generated) for job in bench.worker.waiting.jobs] == [("c", 2)]


def test_a_lost_worker_takes_its_host_memory_with_it():
    bench = Bench("a", "b", "c")
    bench.round(enter="abc")
    bench.round(swap_out="b", pause="c")
    bench.scheduler.worker_lost(0, 9.0)
    bench.scheduler.tick(9.0)
    inbox = bench.scheduler.workers[1].waiting.jobs
    assert (bench.where(), [job.request_id for job in inbox]) == ({}, ["a", "c", "b"])
    assert [job.waiting_since_s for job in inbox] == [9.0, 1.0, 1.0]


def test_a_promotion_is_remembered_from_where_the_job_was():
    bench = Bench("a", "b")
    bench.round(enter="ab", steps=5)
    bench.round(pause="a")
    bench.round(resume="a", promote="a")
    assert bench.of("a")[0].promoted_at == 5


def test_the_log_names_the_moved_jobs():
    bench = Bench("a", "b")
    bench.round(enter="ab")
    bench.round(swap_out="b", overlap=True)
    first, second = [
        event.started[0] for event in from_lines(bench.log) if getattr(event, "started", ())
    ]
    assert (first.swapped_out, first.overlap) == ((), False)
    assert (second.swapped_out, second.overlap) == (("b",), True)


def test_a_fit_with_a_link_gives_its_law_in_tokens():
    link = SwapFit(
        latency_s=0.01, out_bytes_per_s=4096e4, in_bytes_per_s=4096e3, host_bytes=4096 * 500
    )
    laws = laws_from_fit(fit().model_copy(update={"swap": link}))
    assert (laws.swap.out_s(100), laws.swap.in_s(100), laws.host_tokens) == (0.02, 0.11, 500)
    assert laws_from_fit(fit()).swap is None


@pytest.mark.parametrize("change", [{"latency_s": -1.0}, {"in_bytes_per_s": 0.0}])
def test_a_file_with_a_link_that_cannot_be_is_refused(tmp_path, change):
    link = SwapFit(latency_s=0.0, out_bytes_per_s=1.0, in_bytes_per_s=1.0, host_bytes=1)
    path = tmp_path / "fit.json"
    write_file(fit().model_copy(update={"swap": link.model_copy(update=change)}), path)
    with pytest.raises(InputError, match=f"swap.{next(iter(change))}"):
        read_file(Fit, path)
