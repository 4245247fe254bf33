"""Static slices with decode steps of fixed shapes: the same tokens in memory that stays, and a law
of memory without a prefill's workspace. test_engines_contract.py holds the rest, as "fixed".
"""

from typing import Any

import pytest
import tiny
import torch
from rounds import Replay, free_row, go_on, random_rows, replayed
from slices import run_slice

from toolkit.engines.fixed_step import FixedShape
from toolkit.engines.protocol import OutOfMemory, Row, SamplingParams
from toolkit.engines.slab import Arena
from toolkit.engines.transformers_engine import TransformersEngine
from toolkit.errors import InputError
from toolkit.estimators.part_fits import fit_memory
from toolkit.files.recipe import ProfileSpec
from toolkit.profiling.measure import probe_memory, probe_shapes
from toolkit.profiling.process import LocalTimedEngine

pytestmark = pytest.mark.slow

SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, top_k=60, repetition_penalty=1.1)


def fixed_engine(
    kind: str = "llama", budget_mib: float = 16.0, **changes: Any
) -> TransformersEngine:
    spec = tiny.engine_spec(kind, budget_mib=budget_mib, cuda_graphs=True)
    return TransformersEngine(tiny.model_spec(kind, **changes), spec, tiny.CPU)


def plain_engine(kind: str = "llama") -> TransformersEngine:
    return TransformersEngine(tiny.model_spec(kind), tiny.engine_spec(kind), tiny.CPU)


def arena_of(engine: TransformersEngine) -> Arena:
    arena = engine._arena
    assert arena is not None
    return arena


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [
        *((kind, SamplingParams()) for kind in ("llama", "qwen2", "qwen3", "gpt2", "gpt_neox")),
        ("opt", SAMPLED),
    ],
)
def test_tokens_are_those_of_steps_that_keep_their_own_shapes(
    kind: str, sampling: SamplingParams
) -> None:
    fixed = fixed_engine(kind)
    plain = plain_engine(kind)
    rows = random_rows(7, 18, sampling)
    for size, steps in ((1, 30), (5, 12), (18, 30), (3, 1)):
        batch = rows[:size]
        assert run_slice(fixed, batch, steps, go_on) == run_slice(plain, batch, steps, go_on)


def test_slices_lie_in_memory_that_is_taken_once() -> None:
    engine = fixed_engine(budget_mib=1.0)
    arena = arena_of(engine)
    ledger = engine.ledger
    held = (arena.tokens + 1) * engine.facts.kv_bytes_per_token
    assert ledger.used_bytes == held
    pointers = [each.data_ptr() for pair in arena.flat() for each in pair]
    for rows in ([free_row(40, 9)] * 3, [free_row(5, 30)]):
        run_slice(engine, rows, 30, go_on)
        assert ledger.used_bytes == held
    assert [each.data_ptr() for pair in arena.flat() for each in pair] == pointers
    assert ledger.peak_bytes <= engine.facts.kv_budget_bytes


@pytest.mark.parametrize(("length", "steps"), [(60, 1), (60, 36), (8, 88), (95, 1)])
def test_a_slice_fits_if_its_tokens_do(length: int, steps: int) -> None:
    engine = fixed_engine(budget_mib=1.0)
    most = arena_of(engine).tokens // (length + steps)
    first = run_slice(engine, [free_row(length, steps)], steps, go_on)
    whole = run_slice(engine, [free_row(length, steps)] * most, steps, go_on)
    assert whole.tokens == first.tokens * most
    with pytest.raises(OutOfMemory, match="do not fit"):
        run_slice(engine, [free_row(length, steps)] * (most + 1), steps, go_on)
    assert run_slice(engine, [free_row(length, steps)], steps, go_on) == first


def test_a_prefill_is_cut_to_the_rest_of_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = fixed_engine(budget_mib=1.0)
    free = engine.ledger.free_bytes
    passes: list[tuple[int, int]] = []
    prefill = engine._prefill_columns

    def noted(batch: Any, start: int, end: int) -> torch.Tensor:
        passes.append((len(batch.input_ids), end))
        return prefill(batch, start, end)

    monkeypatch.setattr(engine, "_prefill_columns", noted)
    rows = random_rows(1, 24)
    together = run_slice(engine, rows, 8, go_on)
    width = max(len(row.tokens) for row in rows)
    assert len(passes) > 1
    assert sum(size for size, _ in passes) == 24
    assert {end for _, end in passes} == {width}
    most = max(size for size, _ in passes)
    assert engine._shape.prefill_bytes(most, width) <= free
    assert together == run_slice(plain_engine(), rows, 8, go_on)


def test_the_law_of_memory_that_probes_show_has_no_workspace() -> None:
    engine = fixed_engine(budget_mib=1.0)
    bench = LocalTimedEngine(engine, "wall")
    spec = ProfileSpec(
        batch_sizes=[1],
        input_lengths=[8],
        cached_lengths=[8],
        memory_lengths=[10, 40, 80],
        slice_tokens=[4, 16],
    )
    probes = [
        probe_memory(bench, length, steps, deadline_s=float("inf"))
        for length, steps in probe_shapes(spec, engine.facts)
    ]
    law = fit_memory(probes, engine.facts)
    share = arena_of(engine).tokens / engine.facts.capacity_tokens
    assert law.form == "zeta"
    assert law.workspace == 0.0
    assert law.zeta == pytest.approx(share, rel=0.03)
    assert 0.5 <= share < 1.0


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Replay]:
    """The graphs that engines have captured."""
    return replayed(monkeypatch)


def test_captured_steps_serve_slices_of_other_lengths(graphs: list[Replay]) -> None:
    engine = fixed_engine()
    plain = plain_engine()
    steps = engine._fixed
    assert steps is not None
    steps.captures = True
    for rows in ([free_row(30, 20), free_row(12, 20)], [free_row(21, 30), free_row(2, 30)]):
        assert run_slice(engine, rows, 30, go_on) == run_slice(plain, rows, 30, go_on)
    assert [graph.shape for graph in graphs] == [FixedShape(2, 128)]
    rows = [free_row(90, 6), free_row(3, 90)]  # the first stays in the batch when it has ended
    assert run_slice(engine, rows, 90, go_on) == run_slice(plain, rows, 90, go_on)
    assert [graph.shape for graph in graphs] == [FixedShape(2, 128), FixedShape(2, 256)]


def test_timed_steps_are_captured_before_they_are_timed(graphs: list[Replay]) -> None:
    engine = fixed_engine()
    assert engine._fixed is not None
    engine._fixed.captures = True
    during: list[int] = []

    def clock() -> float:
        during.append(len(graphs))
        return 0.0

    engine.time_decode(4, 128, clock)
    assert during == [2, 2]  # up to 128 tokens, and more


def test_a_model_that_cannot_attend_through_ours_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "toolkit.engines.transformers_engine.use_our_attention", lambda model: False
    )
    with pytest.raises(InputError, match=r"engine\.cuda_graphs"):
        fixed_engine()


def test_rows_of_one_slice_do_not_reach_the_next() -> None:
    engine = fixed_engine()
    rows = [free_row(50, 20), Row("short", (1, 2), 0, 20, SamplingParams(ignore_eos=True))]
    before = run_slice(engine, rows, 20, go_on)
    for pair in arena_of(engine).flat():
        for each in pair:
            each.fill_(torch.nan)
    assert run_slice(engine, rows, 20, go_on) == before
