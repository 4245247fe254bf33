"""BATON in closed form equals a plain loop over a padded slab, step by step, to the last digit."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sim_continuous import law

from toolkit.estimators.laws import LinearSwap
from toolkit.estimators.memory import ZetaMemory
from toolkit.sched.kernels import peak_to_come
from toolkit.sched.policies import make_policy
from toolkit.sched.prefills import groups_alike
from toolkit.sim.api import simulate
from toolkit.sim.world import World
from toolkit.traces.types import Trace

CAPACITY = 300
LIMIT = 40
LINK = LinearSwap(latency_s=2**-7, out_tokens_per_s=1024.0, in_tokens_per_s=2048.0)


@dataclass(eq=False)
class Row:
    ticket: int
    arrival_s: float
    prompt: int
    output: int
    times: list[float] = field(default_factory=list)

    @property
    def length(self):
        return self.prompt + len(self.times)

    @property
    def ended(self):
        return len(self.times) == self.output


class Plain:
    """One padded engine with a decision at every step."""

    def __init__(
        self,
        rows,
        law,
        host_tokens,
        *,
        decoupled,
        max_batch_size,
        memory_threshold,
        headroom_steps,
        max_prefill_tokens,
    ):
        self.law = law
        self.emits = int(law.prefill_emits_token)
        self.decoupled = decoupled
        self.most = max_batch_size
        self.headroom = headroom_steps
        self.max_prefill = max_prefill_tokens
        self.limit = int(memory_threshold * CAPACITY)
        self.host_tokens = host_tokens
        self.coming = deque(rows)
        self.waiting = deque()
        self.running = []
        self.host = []
        self.now_s = 0.0
        self.held = []
        self.evicted = 0
        self.swaps = 0

    def arrive(self):
        before = len(self.waiting)
        while self.coming and self.coming[0].arrival_s <= self.now_s:
            self.waiting.append(self.coming.popleft())
        return len(self.waiting) > before

    def across(self, lengths):
        return max(lengths) if self.law.padded else sum(lengths) / len(lengths)

    def token(self, rows):
        for row in rows:
            row.times.append(self.now_s)

    def go(self):
        while self.coming or self.waiting or self.running or self.host:
            if not (self.waiting or self.running or self.host):
                self.now_s = max(self.now_s, self.coming[0].arrival_s)
            self.arrive()
            if not self.leave():
                self.come_back()
                entering = self.entering()
                shaped = self.prefill(entering) if entering else False
                if shaped or self.arrive() or any(row.ended for row in self.running):
                    self.running = [row for row in self.running if not row.ended]
                    continue
            self.step()

    def leave(self):
        left = []
        while (
            len(self.running) > 1
            and len(self.running) * (max(row.length for row in self.running) + 1) > self.limit
        ):
            left.append(self.running.pop())
        for row in left:
            if sum(one.length for one in self.host) + row.length <= self.host_tokens:
                self.now_s += LINK.out_s(row.length)
                self.swaps += 1
                self.host.append(row)
            else:
                self.waiting.appendleft(row)
                self.evicted += 1
        return bool(left)

    def fits(self, lengths):
        return (
            len(lengths) <= self.most
            and len(lengths) * (max(lengths) + self.headroom) <= self.limit
        )

    def come_back(self):
        for row in sorted(self.host, key=lambda row: row.ticket):
            if self.running and not self.fits([one.length for one in [*self.running, row]]):
                return
            self.host.remove(row)
            self.now_s += LINK.in_s(row.length)
            self.running.append(row)

    def entering(self):
        if self.host:
            return []
        entering = []
        shapes = bool(self.running) and not self.decoupled
        for row in self.waiting:
            held = [one.length for one in self.running] + [
                one.length + (0 if shapes else self.emits) for one in [*entering, row]
            ]
            longest = max(one.length for one in [*entering, row])
            beside = longest * (len(held) if shapes else 1)
            if sum(one.length for one in entering) >= self.max_prefill:
                break
            if len(held) > 1 and not (
                self.fits(held) and len(held) * max(held) + beside <= CAPACITY
            ):
                break
            entering.append(row)
        for row in entering:
            self.waiting.remove(row)
        return entering

    def prefill(self, entering):
        """Prefill the rows; whether the pass was also a decode step."""
        lengths = [row.length for row in entering]
        there = len(self.running)
        shaped = there > 0 and not self.decoupled
        self.running += entering
        if shaped:
            before = max(max(lengths), *(row.length for row in self.running))
            self.now_s += self.law.prefill_s(len(self.running), max(lengths))
            if self.emits:
                self.held.append(len(self.running) * (before + max(lengths)))
                self.token(self.running)
            return bool(self.emits)
        for group in groups_alike(lengths) if self.decoupled else [range(len(lengths))]:
            self.now_s += self.law.prefill_s(
                len(group), self.across([lengths[index] for index in group])
            )
            self.token([entering[index] for index in group] if self.emits else [])
        return False

    def step(self):
        lengths = [row.length for row in self.running]
        self.now_s += self.law.decode_s(len(lengths), self.across(lengths) - self.emits, 1)
        self.token(self.running)
        self.held.append(len(lengths) * (max(lengths) + 1))
        self.running = [row for row in self.running if not row.ended]


def both(work, emits, padded, host_tokens, decoupled, parameters):
    """The rows of the plain loop, that loop, and the simulation of the same work."""
    rows = [Row(k, at / 16, prompt, output) for k, (at, prompt, output) in enumerate(sorted(work))]
    columns = np.array([[row.prompt, row.output, LIMIT] for row in rows], dtype=np.int64).T
    trace = Trace(np.array([row.arrival_s for row in rows]), *columns)
    swaps = {"swap": LINK, "host_tokens": host_tokens}
    joining = "embed" if decoupled else "shape"
    world = World(
        law(emits, padded),
        ZetaMemory(CAPACITY),
        1,
        LIMIT,
        **swaps,
        token_gaps=True,
        joining=joining,
    )
    result = simulate(trace, make_policy("baton", parameters), world)
    loop = Plain(rows, law(emits, padded), host_tokens, decoupled=decoupled, **parameters)
    loop.go()
    return rows, loop, result


@pytest.mark.slow
@given(
    work=st.lists(
        st.tuples(st.integers(0, 64), st.integers(1, 90), st.integers(1, LIMIT)),
        min_size=1,
        max_size=25,
    ),
    decoupled=st.booleans(),
    max_batch_size=st.integers(1, 6),
    memory_threshold=st.sampled_from([0.25, 0.5, 0.75, 1.0]),
    headroom_steps=st.sampled_from([1, 4, 20]),
    max_prefill_tokens=st.sampled_from([1, 60, 1000]),
    emits=st.booleans(),
    padded=st.booleans(),
    host_tokens=st.sampled_from([0, 60, 1000]),
)
def test_the_closed_form_equals_single_steps(
    work, emits, padded, host_tokens, decoupled, **parameters
):
    rows, loop, result = both(work, emits, padded, host_tokens, decoupled, parameters)
    served = result.served
    counters = result.counters
    equal = list if padded else (lambda values: pytest.approx(list(values), rel=1e-9))
    assert served.first_token_s.tolist() == equal(row.times[0] for row in rows)
    assert served.finish_s.tolist() == equal(row.times[-1] for row in rows)
    assert served.max_gap_s.tolist() == equal(max(np.diff(row.times), default=0.0) for row in rows)
    gaps = np.concatenate([np.diff(row.times) for row in rows])
    assert counters.get("itl_mean_s", 0.0) == pytest.approx(gaps.mean() if len(gaps) else 0.0)
    assert counters["decoding_steps"] == len(loop.held)
    assert counters["peak_memory_percent"] == 100.0 * max(loop.held, default=0) / CAPACITY <= 100.0
    held = sum(loop.held) / max(len(loop.held), 1)
    assert counters["consumed_memory_percent"] == pytest.approx(100.0 * held / CAPACITY)
    assert counters["evicted_percent"] == 100.0 * loop.evicted / len(rows)
    assert counters["swaps_out"] == counters["swaps_in"] == loop.swaps


@given(st.lists(st.integers(1, 3000), max_size=40))
def test_every_prompt_is_in_one_group(lengths):
    groups = groups_alike(lengths)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        low = min(lengths[index] for index in group)
        high = max(lengths[index] for index in group)
        assert high - low <= max(32, high / 4)


@pytest.mark.slow
@settings(deadline=None)  # the first call compiles
@given(st.lists(st.tuples(st.integers(1, 200), st.integers(1, 60)), min_size=1, max_size=12))
def test_the_peak_to_come_is_that_of_a_slab_step_by_step(rows):
    used, remaining = np.array(rows).T
    peaks = []
    for step in range(1, int(remaining.max()) + 1):
        lengths = [row + step for row, left in rows if left >= step]
        peaks.append(len(lengths) * max(lengths))
    assert peak_to_come(used, remaining, True) == max(peaks)
