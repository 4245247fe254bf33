"""Rounds with swapped caches in closed form equal a plain worker's, to the last digit."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_sim_continuous import law

from toolkit.estimators.laws import LinearSwap
from toolkit.estimators.memory import ZetaMemory
from toolkit.sched.policies import make_policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import RoundResult
from toolkit.sim.api import requests_of, simulate
from toolkit.sim.loop import run
from toolkit.sim.world import World
from toolkit.traces.types import Trace

CAPACITY = 160
HOST_TOKENS = 120
LIMIT = 40
LINK = LinearSwap(latency_s=2**-7, out_tokens_per_s=2.0**11, in_tokens_per_s=2.0**12)


@dataclass
class Cache:
    prompt: int
    output: int
    generated: int = 0
    place: str = "none"
    times: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.prompt + self.generated


class PlainWorker:
    """Runs rounds one token at a time, and checks its memory at every step."""

    def __init__(self, law, caches, link):
        self.law = law
        self.caches = caches
        self.link = link
        self.steps = self.swaps = self.evictions = 0
        self.swap_wait_s = 0.0

    def at(self, place):
        return [cache for cache in self.caches.values() if cache.place == place]

    def put(self, jobs, place):
        for job in jobs:
            self.caches[job.request_id].place = place

    def run(self, batch, now_s):
        self.batch = batch
        moves = batch.moves
        self.evictions += len(batch.evict)
        self.put(batch.evict, "none")
        begin_s = self.moved_s = now_s
        if moves:
            self.put(moves.pause + moves.swap_out, "device")
            for job in moves.swap_out:
                self.moved_s += LINK.out_s(self.caches[job.request_id].tokens)
            for job in moves.swap_in:
                self.moved_s += LINK.in_s(self.caches[job.request_id].tokens)
            if not (moves.overlap and self.link.overlaps):
                begin_s = self.moved_s
                self.swap_wait_s += self.moved_s - now_s
            if not moves.overlap:
                self.transfer()
            self.put(moves.resume, "runs")
        if batch.jobs:
            lengths = [self.caches[job.request_id].tokens for job in batch.jobs]
            begin_s += self.law.prefill_s(len(lengths), max(lengths))
            self.put(batch.jobs, "runs")
            if self.law.prefill_emits_token:
                for job in batch.jobs:
                    self.caches[job.request_id].generated += 1
                    self.caches[job.request_id].times.append(begin_s)
        self.ends_s = [begin_s, *self.step_ends(begin_s)]
        return max(self.ends_s[-1], self.moved_s)

    def step_ends(self, now_s):
        rows = self.at("runs")
        aside = sum(cache.tokens for cache in self.at("device"))
        if self.batch.moves and self.batch.moves.overlap:
            aside += sum(self.caches[job.request_id].tokens for job in self.batch.moves.swap_in)
        for step in range(
            min(self.batch.steps, *[cache.output - cache.generated for cache in rows])
        ):
            now_s += self.law.decode_s(
                len(rows), max(c.tokens for c in rows) + step - self.law.prefill_emits_token, 1
            )
            assert sum(cache.tokens + step + 1 for cache in rows) + aside <= CAPACITY
            yield now_s

    def interrupt(self, now_s):
        last = [end_s for end_s in self.ends_s if end_s < now_s]
        self.ends_s = self.ends_s[: len(last) + 1]
        return max(self.ends_s[-1], self.moved_s)

    def finish(self):
        for cache in self.at("runs"):
            cache.generated += len(self.ends_s) - 1
            cache.times += self.ends_s[1:]
        if self.batch.moves and self.batch.moves.overlap:
            self.transfer()
            self.swap_wait_s += max(self.moved_s - self.ends_s[-1], 0.0)
        ended = [
            name for name, c in self.caches.items() if c.place == "runs" and c.generated == c.output
        ]
        for name in ended:
            self.caches[name].place = "none"
        return RoundResult(
            self.batch.batch_id, self.batch.worker, len(self.ends_s) - 1, tuple(ended)
        )

    def transfer(self):
        self.put(self.batch.moves.swap_out, "host")
        assert sum(cache.tokens for cache in self.at("host")) <= HOST_TOKENS
        self.put(self.batch.moves.swap_in, "device")
        self.swaps += len(self.batch.moves.swap_out)


POLICIES = {
    "mlfq": ("mlfq", {"quantum_s": 2**-5, "starvation_s": 2**-1, "max_batch_size": 3}),
    "mlfq, naive": (
        "mlfq",
        {"quantum_s": 2**-6, "starvation_s": 2.0, "skip_join": False, "interval_steps": 7},
    ),
    "srpt-oracle": ("srpt-oracle", {"max_batch_size": 4}),
}
workloads = st.lists(
    st.tuples(st.integers(0, 64), st.integers(1, 90), st.integers(1, LIMIT), st.integers(0, 20)),
    min_size=1,
    max_size=25,
)


def both(work, policy, swap, emits, overlaps=True):
    """The simulation in closed form and the plain worker, after the same trace."""
    columns = zip(
        *[(at / 16, prompt, out, min(out + more, LIMIT)) for at, prompt, out, more in sorted(work)],
        strict=True,
    )
    trace = Trace(*[np.array(column) for column in columns])
    name, parameters = POLICIES[policy]
    chosen = make_policy(name, parameters | {"swap": swap})
    one = law(emits, padded=True)
    link = replace(LINK, overlaps=overlaps)
    world = World(one, ZetaMemory(CAPACITY), 1, LIMIT, swap=link, host_tokens=HOST_TOKENS)
    requests, outputs = requests_of(trace, LIMIT)
    told = dict(zip([request.request_id for request in requests], outputs, strict=True))
    plain = PlainWorker(
        one, {r.request_id: Cache(r.prompt_tokens, told[r.request_id]) for r in requests}, link
    )
    run(
        Scheduler(
            chosen.with_lengths(told) if name == "srpt-oracle" else chosen, [world.scheduled()[0]]
        ),
        requests,
        [plain],
    )
    return simulate(trace, chosen, world), plain


@pytest.mark.slow
@given(
    work=workloads,
    policy=st.sampled_from(sorted(POLICIES)),
    swap=st.sampled_from(["proactive", "reactive"]),
    emits=st.booleans(),
    overlaps=st.booleans(),
)
def test_the_closed_form_equals_single_steps_with_swaps(work, policy, swap, emits, overlaps):
    result, plain = both(work, policy, swap, emits, overlaps)
    caches = plain.caches.values()
    assert result.served.first_token_s.tolist() == [cache.times[0] for cache in caches]
    assert result.served.finish_s.tolist() == [cache.times[-1] for cache in caches]
    assert result.served.max_gap_s.tolist() == [
        max(np.diff(cache.times), default=0.0) for cache in caches
    ]
    assert [len(cache.times) for cache in caches] == result.served.output_tokens.tolist()
    counters = result.counters
    assert (counters["swaps_out"], counters["swap_wait_s"]) == (plain.swaps, plain.swap_wait_s)
    assert counters["evicted_percent"] == 100.0 * plain.evictions / len(caches)


def test_such_workloads_have_swaps_and_evictions():
    """Workloads like those above: in both modes caches are swapped, and some do not fit into host
    memory.
    """
    work = [(k, 20 + 60 * (k % 3 == 0), 40 - 2 * k, 0) for k in range(16)]
    for swap in ("proactive", "reactive"):
        _, plain = both(work, "mlfq", swap, emits=True)
        assert (plain.swaps > 5, plain.evictions > 0) == (True, True)
    assert plain.swap_wait_s > 0


def test_compute_waits_for_all_transfers_if_they_do_not_overlap():
    """On a CPU the computing cores copy: the same moves, and compute waits for every second."""
    work = [(k, 20 + 60 * (k % 3 == 0), 40 - 2 * k, 0) for k in range(16)]
    beside, before = (
        both(work, "mlfq", "proactive", True, overlaps)[0] for overlaps in (True, False)
    )
    assert before.counters["swap_wait_s"] > beside.counters["swap_wait_s"]
    moved_s = (
        before.counters["swaps_out"] * LINK.latency_s + before.counters["swaps_in"] * LINK.latency_s
    )
    assert before.counters["swap_wait_s"] > moved_s
