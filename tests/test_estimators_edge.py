"""The memory edge of simulated workers: sure far from it, drawn near it, and the same whenever it
is drawn again.
"""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from toolkit.estimators.memory import (
    PAPER_DEEPSPEED_RULES,
    RuleEdge,
    RuleMemory,
    ZetaEdge,
    ZetaMemory,
    uniform_draw,
)

draws = st.floats(0.0, 1.0, exclude_min=True, exclude_max=True)


@given(st.integers(1, 400), st.integers(1, 200), draws)
def test_an_edge_known_exactly_is_the_memory_law(length, steps, draw):
    fits = int(ZetaMemory(10_000, 0.9).max_batch(np.array([length]), steps, 0.0)[0])
    edge = ZetaEdge(10_000, 0.9, 0.0)
    assert not edge.runs_out(fits, length, steps, draw)
    assert edge.runs_out(fits + 1, length, steps, draw)


@given(st.integers(1, 1900), st.integers(1, 148), draws)
def test_exact_rules_are_the_rules(length, steps, draw):
    fits = int(RuleMemory(PAPER_DEEPSPEED_RULES).max_batch(np.array([length]), steps, 0.0)[0])
    edge = RuleEdge(PAPER_DEEPSPEED_RULES, 0.0)
    assert not edge.runs_out(fits, length, steps, draw)
    assert edge.runs_out(fits + 1, length, steps, draw)


def test_half_the_batches_at_an_uncertain_edge_run_out():
    edge = ZetaEdge(1000, 0.9, 0.05)
    ran_out = [edge.runs_out(9, 90, 10, uniform_draw(0, batch)) for batch in range(2000)]
    assert 900 < sum(ran_out) < 1100


def test_two_standard_deviations_below_few_do():
    edge = ZetaEdge(1000, 0.9, 0.05)
    ran_out = [edge.runs_out(8, 90, 10, uniform_draw(0, batch)) for batch in range(2000)]
    assert 20 < sum(ran_out) < 80  # 2.3 %


def test_a_draw_depends_on_seed_and_batch_alone():
    assert uniform_draw(3, 7) == uniform_draw(3, 7)
    assert len({uniform_draw(seed, batch) for seed in range(20) for batch in range(20)}) == 400


def test_draws_are_uniform():
    drawn = np.array([uniform_draw(1, batch) for batch in range(20_000)])
    counts, _ = np.histogram(drawn, bins=10, range=(0, 1))
    assert abs(counts - 2000).max() < 200


@given(st.integers(-(2**70), 2**70), st.integers(-1, 2**70))
def test_any_seed_and_key_give_a_draw_inside_0_and_1(seed, key):
    assert 0.0 < uniform_draw(seed, key) < 1.0
