"""Rounds in closed form equal a plain loop, one decode step at a time, to the last digit."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from around import Around
from hypothesis import given
from hypothesis import strategies as st

from toolkit.estimators.laws import LinearLaw
from toolkit.estimators.memory import ZetaMemory
from toolkit.laws.passes import PassLaw
from toolkit.sched.policies import make_policy
from toolkit.sim.api import simulate
from toolkit.sim.world import World
from toolkit.traces.types import Trace

CAPACITY = 160
LIMIT = 40


@dataclass(eq=False)
class Row:
    arrival_s: float
    prompt: int
    output: int
    limit: int
    generated: int = 0
    evictions: int = 0
    times: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.prompt + self.generated

    def token(self, now_s: float) -> None:
        self.generated += 1
        self.times.append(now_s)


def peak(rows: list[Row], capacity: int) -> int:
    """The most tokens at any future step, by running all steps."""
    highest = 0
    for step in range(1, max(row.output - row.generated for row in rows) + 1):
        highest = max(
            highest, sum(row.length + step for row in rows if row.output - row.generated >= step)
        )
    return highest


ADMITS = {
    "conservative": lambda rows: sum(row.prompt + row.limit for row in rows) <= 1.5 * CAPACITY,
    "aggressive": lambda rows: sum(row.length for row in rows) <= 0.75 * CAPACITY,
    "fcfs": lambda rows: sum(row.prompt + row.limit for row in rows) <= CAPACITY and len(rows) <= 3,
    "past-future-oracle": lambda rows: peak(rows, CAPACITY) < CAPACITY,
}
PARAMETERS = {
    "conservative": {"overcommit": 1.5},
    "aggressive": {"watermark": 0.75},
    "fcfs": {"max_batch_size": 3},
    "past-future-oracle": {},
}


def law(emits: bool, padded: bool) -> LinearLaw:
    """Coefficients and times that are multiples of 2^-18, so that no sum is rounded."""
    prefill = PassLaw({"token": 2**-14, "row": 2**-10, "length": 2**-13, "pass": 2**-6})
    decode = PassLaw({"cached": 2**-16, "row": 2**-12, "length": 2**-14, "pass": 2**-7})
    return LinearLaw(prefill, decode, emits, padded)


def plain(rows: list[Row], law: LinearLaw, admits, interval: int, max_prefill: int) -> None:
    """One worker, one step at a time. Fills in the times of each row's tokens."""
    emits = law.prefill_emits_token
    coming = deque(rows)
    waiting = deque()
    running = []
    now_s = 0.0
    steps = 0
    fresh = True
    across = max if law.padded else (lambda lengths: sum(lengths) / len(lengths))
    while coming or waiting or running:
        if not running and not waiting:
            now_s = max(now_s, coming[0].arrival_s)
        while coming and coming[0].arrival_s <= now_s:
            waiting.append(coming.popleft())
            fresh = True
        if fresh and sum(row.length + 1 for row in running) > CAPACITY:
            while sum(row.length + 1 for row in running) > CAPACITY:
                running[-1].evictions += 1
                waiting.appendleft(running.pop())
        elif fresh and waiting and (steps % interval == 0 or not running):
            entering: list[Row] = []
            while waiting and sum(row.length for row in entering) < max_prefill:
                all_rows = running + entering + [waiting[0]]
                fits = sum(r.length + 1 for r in all_rows) + emits * (len(entering) + 1) <= CAPACITY
                if all_rows[:-1] and not (fits and admits(all_rows)):
                    break
                entering.append(waiting.popleft())
            fresh = False
            if entering:
                now_s += law.prefill_s(len(entering), across([row.length for row in entering]))
                running += entering
                if emits:
                    for row in entering:
                        row.token(now_s)
                    fresh = any(row.generated == row.output for row in running)
                    running = [row for row in running if row.generated < row.output]
                continue
        if running:
            now_s += law.decode_s(len(running), across([row.length for row in running]) - emits, 1)
            steps += 1
            for row in running:
                row.token(now_s)
            running = [row for row in running if row.generated < row.output]
            fresh = True


workloads = st.lists(
    st.tuples(st.integers(0, 64), st.integers(1, 60), st.integers(1, LIMIT), st.integers(0, 20)),
    min_size=1,
    max_size=25,
)


def rows_of(work) -> list[Row]:
    return [
        Row(at / 16, prompt, out, min(out + more, LIMIT)) for at, prompt, out, more in sorted(work)
    ]


def simulated(rows, policy, parameters, law, workers, wrap=lambda policy: policy):
    trace = Trace(
        np.array([row.arrival_s for row in rows]),
        np.array([row.prompt for row in rows]),
        np.array([row.output for row in rows]),
        np.array([row.limit for row in rows]),
    )
    return simulate(
        trace,
        wrap(make_policy(policy, parameters)),
        World(law, ZetaMemory(CAPACITY), workers, LIMIT),
    )


@pytest.mark.slow
@given(
    work=workloads,
    policy=st.sampled_from(sorted(ADMITS)),
    interval=st.integers(1, 12),
    max_prefill=st.sampled_from([1, 50, 1000]),
    emits=st.booleans(),
    padded=st.booleans(),
    workers=st.integers(1, 2),
)
def test_the_closed_form_equals_single_steps(
    work, policy, interval, max_prefill, emits, padded, workers
):
    rows = rows_of(work)
    one = law(emits, padded)
    parameters = PARAMETERS[policy] | {
        "interval_steps": interval,
        "max_prefill_tokens": max_prefill,
    }
    result = simulated(rows, policy, parameters, one, workers)
    for k in range(workers):
        plain(rows[k::workers], one, ADMITS[policy], interval, max_prefill)
    served = result.served
    equal = list if padded else (lambda values: pytest.approx(list(values), rel=1e-9))
    assert served.first_token_s.tolist() == equal(row.times[0] for row in rows)
    assert served.finish_s.tolist() == equal(row.times[-1] for row in rows)
    gaps = [max(np.diff(row.times), default=0.0) for row in rows]
    assert served.max_gap_s.tolist() == equal(gaps)
    assert result.counters["evicted_percent"] == 100.0 * sum(row.evictions for row in rows) / len(
        rows
    )


class Stepwise(Around):
    """A policy that decides after every step."""

    def plan(self, view, now_s):
        decision = super().plan(view, now_s)
        for batch in decision.batches:
            batch.steps = 1
        return decision


STEPWISE = {
    "slices": ("slice-continuous", {"slice_tokens": 7}),
    "slices that move": ("slice-continuous", {"slice_tokens": 5, "margin": 0.0}),
    "slices, in turn": (
        "slice-continuous",
        {"slice_tokens": 9, "router": "round-robin", "reserve": 0.1},
    ),
    "past-future": ("past-future", {"reserve": 0.0, "window": 5}),
    "in time": ("past-future-sla", {"reserve": 0.0, "window": 5, "ttft_s": 0.5, "mtpot_s": 0.08}),
}


@pytest.mark.slow
@given(
    work=workloads,
    case=st.sampled_from(sorted(STEPWISE)),
    interval=st.integers(1, 12),
    max_prefill=st.sampled_from([1, 50, 1000]),
    emits=st.booleans(),
    workers=st.integers(1, 3),
)
def test_no_decision_falls_within_a_round(work, case, interval, max_prefill, emits, workers):
    """A policy that decides after every step decides the same: rounds end wherever the policy has
    something to decide.
    """
    rows = rows_of(work)
    name, parameters = STEPWISE[case]
    parameters = parameters | {"interval_steps": interval, "max_prefill_tokens": max_prefill}
    one = law(emits, padded=True)
    leaps, steps = (
        simulated(rows, name, parameters, one, workers, wrap)
        for wrap in (lambda policy: policy, Stepwise)
    )
    assert leaps.served.first_token_s.tolist() == steps.served.first_token_s.tolist()
    assert leaps.served.finish_s.tolist() == steps.served.finish_s.tolist()
    assert leaps.served.max_gap_s.tolist() == steps.served.max_gap_s.tolist()
    for count in (
        "evicted_percent",
        "rerouted_percent",
        "decoding_steps",
        "consumed_memory_percent",
    ):
        assert leaps.counters[count] == steps.counters[count]
