"""The memory edge of simulated workers: certain far from the fitted edge, drawn near it, and the
same for every draw of the same batch.
"""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.scls_figures import DEEPSPEED_RULES
from toolkit.estimators.memory import DrawnEdge, RuleMemory, ZetaMemory

batch_ids = st.integers(0, 2**40)


@given(
    st.sampled_from([ZetaMemory(10_000, 0.9), RuleMemory(DEEPSPEED_RULES)]),
    st.integers(1, 1900),
    st.integers(1, 148),
    batch_ids,
)
def test_an_edge_known_exactly_is_the_memory_law(law, length, steps, batch):
    fits = int(law.max_batch(np.array([length]), steps, 0.0)[0])
    runs_out = DrawnEdge(law, 0.0, 0)
    assert not runs_out(batch, fits, length, steps)
    assert runs_out(batch, fits + 1, length, steps)


def test_half_of_the_batches_at_an_edge_run_out_of_memory_and_few_below_it():
    runs_out = DrawnEdge(ZetaMemory(1000, 0.9), 0.05, 0)
    assert 900 < sum(runs_out(batch, 9, 90, 10) for batch in range(2000)) < 1100
    assert 20 < sum(runs_out(batch, 8, 90, 10) for batch in range(2000)) < 80  # 2.3 %


def test_a_draw_depends_only_on_seed_and_batch():
    law = ZetaMemory(1000, 0.9)

    def drawn(seed: int) -> list[bool]:
        return [DrawnEdge(law, 0.05, seed)(batch, 9, 90, 10) for batch in range(50)]

    assert drawn(3) == drawn(3)
    assert len({tuple(drawn(seed)) for seed in range(20)}) == 20


@given(st.integers(-(2**70), 2**70), st.integers(-1, 2**70))
def test_any_seed_and_batch_give_an_edge(seed, batch):
    assert DrawnEdge(ZetaMemory(1000, 0.9), 0.01, seed)(batch, 20, 90, 10)
    assert not DrawnEdge(ZetaMemory(1000, 0.9), 0.01, seed)(batch, 1, 90, 10)
