"""What a round costs besides its prefills and steps: dispatch and result, and rows that leave."""

from dataclasses import replace

import numpy as np
import pytest
import samples

from benchmarks.common.samples import bilinear_law
from toolkit.estimators.laws import LinearLaw
from toolkit.estimators.load import laws_from_fit
from toolkit.estimators.memory import ZetaMemory
from toolkit.files.fit import OverheadFit, RoundsFit
from toolkit.laws.passes import PassLaw
from toolkit.sched.policies import make_policy
from toolkit.sim.api import simulate
from toolkit.sim.world import World, world_from_fit
from toolkit.traces.types import Trace

LAW = bilinear_law(p=(1e-4, 0.0, 0.0, 1e-2), d=(0.0, 0.0, 0.0, 1e-2), prefill_emits_token=True)
ROUNDS = replace(LAW, round_s=0.5, leaving=(0.25, 0.125))


def trace(*outputs: int) -> Trace:
    count = len(outputs)
    return Trace(
        np.zeros(count), np.full(count, 8), np.array(outputs), np.zeros(count, dtype=np.int64), ()
    )


def makespan_s(law, *outputs: int) -> float:
    world = World(law, ZetaMemory(1000), 1, 64)
    return simulate(trace(*outputs), make_policy("fcfs", {}), world).metrics({})["makespan_s"]


def test_a_round_takes_its_dispatch_and_the_rows_that_leave():
    """One round: 8 tokens of prompt, a first token with the prefill, four steps, one row of 12
    tokens that leaves.
    """
    assert makespan_s(ROUNDS, 5) == pytest.approx(makespan_s(LAW, 5) + 0.5 + 0.25 + 12 * 0.125)


def test_each_round_has_its_dispatch():
    assert makespan_s(replace(LAW, round_s=0.5), 5, 9) == pytest.approx(
        makespan_s(LAW, 5, 9) + 2 * 0.5
    )


def test_a_slowdown_slows_all_of_it():
    assert makespan_s(ROUNDS.times(3.0), 5, 9) == pytest.approx(3.0 * makespan_s(ROUNDS, 5, 9))


FIT = samples.fit().model_copy(
    update={
        "rounds": RoundsFit(
            join=PassLaw({"pass": 1e-3, "row": 2e-3, "token": 3e-6}, error=samples.ERROR),
            leave=PassLaw({"row": 4e-3, "cached": 5e-6}, error=samples.ERROR),
            grow=PassLaw({"row": 6e-5}, error=samples.ERROR),
            overhead=OverheadFit(batch_s=7e-3, stretch=2.0, error=samples.ERROR),
            usable_share=0.75,
        )
    }
)


def test_the_law_of_rounds_is_the_parts_stretched():
    laws = laws_from_fit(FIT)
    engine = LinearLaw(FIT.prefill.law, FIT.decode.law, FIT.engine.prefill_emits_token)
    rounds = laws.rounds
    assert rounds.prefill_s(3, 50) == pytest.approx(
        2 * (engine.prefill_s(3, 50) + 1e-3 + 3 * 2e-3 + 150 * 3e-6)
    )
    assert rounds.decode_s(3, 50, 10) == pytest.approx(
        2 * (engine.decode_s(3, 50, 10) + 10 * 3 * 6e-5)
    )
    assert rounds.leave_s(50) == pytest.approx(2 * (4e-3 + 50 * 5e-6))
    assert rounds.round_s == 7e-3


def test_rounds_have_laws_and_memory_of_their_own():
    world = world_from_fit(FIT, workers=1, max_new_tokens=64)
    laws = laws_from_fit(FIT)
    rounds = world.under(make_policy("fcfs", {}))
    batches = world.under(make_policy("slice", {}))
    assert (rounds.latency, rounds.memory.usable_tokens) == (laws.rounds, int(0.75 * 8192))
    assert (batches.latency, batches.memory) == (laws.latency, laws.memory)


def test_without_measured_rounds_the_laws_of_batches_apply():
    world = world_from_fit(samples.fit(), workers=1, max_new_tokens=64)
    assert world.under(make_policy("fcfs", {})) == world
