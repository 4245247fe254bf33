"""Continuous re-batching: rows that join and leave a batch get the tokens that they get alone."""

import functools
import random

import pytest
from rounds import (
    RUNS,
    SWAPPED,
    RoundDriver,
    alone,
    free_row,
    generated_alone,
    kept_bytes,
    random_rows,
    rebatch_engine,
    step_logits,
)

from toolkit.engines.protocol import SamplingParams
from toolkit.engines.rebatch_engine import RebatchEngine

pytestmark = pytest.mark.slow

ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral", "gpt2", "opt", "gpt_neox"]
ROWS = random_rows(0, 24)


@functools.cache
def generated(kind: str) -> list[tuple[int, ...]]:
    return generated_alone(kind, ROWS)


WAYS: dict[str, tuple[int, dict[str, object]]] = {
    "chunks": (9, {}),
    "fixed in chunks": (9, {"cuda_graphs": True}),
    "whole": (0, {}),
    "shaped": (0, {"joining": "shape"}),
    "fixed": (0, {"cuda_graphs": True}),
}


@pytest.mark.parametrize(
    ("kind", "way"),
    # the other ways need nothing more of an architecture: rotary and learned positions suffice
    [
        (kind, way)
        for way in WAYS
        for kind in (ARCHITECTURES if way == "chunks" else ("llama", "opt"))
    ],
)
def test_tokens_equal_those_of_each_request_alone(kind: str, way: str) -> None:
    chunk_tokens, changes = WAYS[way]
    driver = RoundDriver(rebatch_engine(kind, **changes), ROWS, chunk_tokens=chunk_tokens)
    rng = random.Random(len(kind))
    for _ in range(25):
        driver.at_random(rng)
    assert driver.finish() == generated(kind)
    assert driver.engine.ledger.used_bytes == kept_bytes(driver.engine)
    assert driver.engine.host_ledger.used_bytes == 0


SAMPLINGS = {
    "temperature": SamplingParams(temperature=1.0),
    "top_p": SamplingParams(temperature=0.9, top_p=0.8),
    "top_k": SamplingParams(temperature=1.2, top_k=20),
    "min_p": SamplingParams(temperature=0.7, min_p=0.05),
    "repetition_penalty": SamplingParams(repetition_penalty=1.5),
    "stop_token_ids": SamplingParams(temperature=1.0, stop_token_ids=tuple(range(60))),
    "min_tokens": SamplingParams(temperature=1.0, min_tokens=12),
    "ignore_eos": SamplingParams(temperature=1.0, ignore_eos=True),
    "all": SamplingParams(
        1.1, 0.95, 50, 0.01, 1.2, ignore_eos=True, min_tokens=5, stop_token_ids=tuple(range(30))
    ),
}


@pytest.mark.parametrize(
    ("sampling", "changes"),
    [
        *((sampling, {}) for sampling in SAMPLINGS),
        ("all", {"joining": "shape"}),
        ("all", {"cuda_graphs": True}),
    ],
)
def test_sampled_tokens_equal_those_of_static_batches(
    sampling: str, changes: dict[str, object]
) -> None:
    engine = rebatch_engine(**changes)
    rows = random_rows(3, 12, SAMPLINGS[sampling])
    rows[::4] = random_rows(4, 12)[::4]  # greedy ones among them
    static = alone(engine, rows)
    driver = RoundDriver(engine, rows)
    rng = random.Random(9)
    for _ in range(25):
        driver.at_random(rng)
    assert driver.finish() == static


def test_a_round_ends_when_any_row_ends() -> None:
    driver = RoundDriver(rebatch_engine(), [free_row(5, 9), free_row(30, 4), free_row(8, 4)])
    output = driver.run(100, enter=(0, 1, 2))
    assert (output.steps, set(output.ended), output.joined) == (3, {1, 2}, ((1, 0), (2, 0), (0, 0)))
    assert driver.run(100).ended == (0,)
    assert [len(tokens) for tokens in driver.got] == [9, 4, 4]


def test_a_row_may_end_the_round_with_its_first_token() -> None:
    driver = RoundDriver(rebatch_engine(), [free_row(5, 9), free_row(6, 1)])
    output = driver.run(100, enter=(0, 1))
    assert (output.steps, output.ended) == (0, (1,))
    assert driver.having(RUNS) == [0]


def test_a_stopped_round_ends_at_a_multiple_of_stop_every() -> None:
    driver = RoundDriver(rebatch_engine(), [free_row(5, 40)])
    assert driver.run(2, enter=(0,)).steps == 2
    driver.stop_after = 1
    # The caller's count of steps decides, not the engine's.
    assert driver.run(30, stop_every=8, steps_before=3).steps == 5
    assert driver.run(30).steps == 1


def test_a_round_without_steps_prefills_and_moves() -> None:
    driver = RoundDriver(rebatch_engine(), [free_row(5, 9), free_row(7, 9)])
    assert driver.run(0, enter=(0, 1)).joined == ((1, 0), (0, 0))
    assert driver.run(0, pause=(0,)).steps == 0
    assert [step.rows for step in driver.steps] == []
    assert driver.run(2, resume=(0,)).tokens == 5 + 2 + 7 + 2


def test_with_chunks_rows_run_beside_a_long_prefill() -> None:
    driver = RoundDriver(rebatch_engine(), [free_row(4, 60), free_row(60, 20)], chunk_tokens=10)
    driver.run(3, enter=(0,))
    output = driver.run(30, enter=(1,))
    assert output.joined == ((1, 5),)  # six passes of ten tokens, and a step between each two
    assert output.ended == (1,)
    assert output.steps == 5 + 19


def test_the_next_round_continues_a_prefill() -> None:
    driver = RoundDriver(
        rebatch_engine(), [free_row(4, 6), free_row(60, 20), free_row(3, 50)], chunk_tokens=10
    )
    driver.run(3, enter=(0, 2))
    output = driver.run(30, enter=(1,))
    assert (output.ended, output.joined, output.steps) == ((0,), (), 2)
    assert driver.run(30).joined == ((1, 3),)


def test_a_pass_is_no_larger_than_a_chunk_while_rows_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes: list[int] = []
    forward = RebatchEngine._forward
    monkeypatch.setattr(
        RebatchEngine,
        "_forward",
        lambda self, ids, *rest: passes.append(ids.numel()) or forward(self, ids, *rest),
    )
    engine = rebatch_engine()
    passes.clear()
    rows = [free_row(4, 80), *[free_row(length, 50) for length in (3, 17, 18, 19, 20, 45, 46)]]
    driver = RoundDriver(engine, rows, chunk_tokens=40)
    driver.run(1, enter=(0,))
    driver.run(30, enter=range(1, 8))
    assert max(passes) <= 40
    assert len(driver.steps[-1].rows) == 8


def test_a_prompt_is_cut_if_its_pass_does_not_fit() -> None:
    row = free_row(90, 5)
    for chunk_tokens in (0, 20):
        driver = RoundDriver(rebatch_engine(budget_mib=0.125), [row], chunk_tokens=chunk_tokens)
        output = driver.run(1, enter=(0,))
        assert (output.dropped, output.is_short) == ((), not chunk_tokens)
        assert driver.finish() == RoundDriver(rebatch_engine(), [row]).finish()
        assert driver.engine.ledger.peak_bytes <= driver.engine.facts.kv_budget_bytes


def test_newcomers_of_similar_length_are_prefilled_together() -> None:
    driver = RoundDriver(rebatch_engine(), [free_row(length, 9) for length in (5, 80, 9, 30, 78)])
    output = driver.run(1, enter=range(5))
    assert [set(step.rows) for step in driver.steps[:2]] == [{0, 2, 3}, {1, 4}]
    assert len(output.joined) == 5


def test_memory_is_freed_as_rows_leave() -> None:
    engine = rebatch_engine()
    long = [free_row(80, 10, first=k) for k in range(12)]
    short = [free_row(4, 90)]
    driver = RoundDriver(engine, [*short, *long])
    driver.run(1, enter=range(13))
    full = engine.ledger.used_bytes
    driver.run(1, evict=tuple(range(1, 13)))
    assert 0 < engine.ledger.used_bytes < full / 4
    driver.finish()
    assert engine.ledger.used_bytes == 0


def test_a_swapped_row_is_charged_to_host_memory_only() -> None:
    engine = rebatch_engine()
    driver = RoundDriver(engine, [free_row(50, 30)])
    driver.run(4, enter=(0,))
    output = driver.run(4, swap_out=(0,))
    assert (output.tokens, engine.ledger.used_bytes) == (0, 0)
    assert engine.host_ledger.used_bytes == (50 + 4) * engine.facts.kv_bytes_per_token
    assert driver.run(4, swap_in=(0,)).tokens == 54  # on the device, paused
    assert engine.host_ledger.used_bytes == 0
    assert driver.run(4, resume=(0,)).steps == 4


def test_a_row_comes_back_from_host_memory_without_a_prefill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = RoundDriver(rebatch_engine(), [free_row(50, 30), free_row(5, 30)])
    driver.run(4, enter=(0, 1))
    driver.run(4, swap_out=(0,))
    monkeypatch.setattr(RebatchEngine, "_prefill_columns", None)
    driver.run(4, swap_in=(0,), resume=(0,))
    assert [len(tokens) for tokens in driver.got] == [9, 13]


def test_running_out_of_memory_drops_newcomers_alone() -> None:
    engine = rebatch_engine(budget_mib=0.25)  # 1024 tokens
    rows = [free_row(60, 30, first=k) for k in range(40)]
    expected = RoundDriver(rebatch_engine(), rows[:2]).finish()
    driver = RoundDriver(engine, rows)
    driver.run(3, enter=(0, 1))
    driver.run(3, swap_out=(0,))
    output = driver.run(3, enter=range(2, 40))
    joined = {number for number, _ in output.joined}
    assert 2 <= len(joined) < 38
    assert set(range(2, 40)) - joined <= set(output.dropped)
    assert driver.having(SWAPPED) == [0]
    assert 1 in driver.having(RUNS)
    driver.run(1, evict=tuple(set(driver.having(RUNS)) - {1}))
    driver.state[2:] = ["given up"] * 38
    assert driver.finish()[:2] == expected


def test_host_memory_has_a_budget_of_its_own() -> None:
    driver = RoundDriver(rebatch_engine(swap_memory_mib=0.001), [free_row(50, 30)])
    driver.run(4, enter=(0,))
    assert driver.run(4, swap_out=(0,)).dropped == (0,)
    assert driver.engine.ledger.used_bytes == driver.engine.host_ledger.used_bytes == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounds_run_in_half_precision(dtype: str) -> None:
    driver = RoundDriver(
        rebatch_engine(dtype=dtype), [free_row(length, 12) for length in (3, 50, 20)]
    )
    rng = random.Random(4)
    for _ in range(10):
        driver.at_random(rng)
    assert [len(tokens) for tokens in driver.finish()] == [12, 12, 12]


@pytest.mark.parametrize("changes", [{}, {"cuda_graphs": True}], ids=["slab", "fixed"])
def test_bfloat16_logits_are_float32_s_but_for_rounding(
    changes: dict[str, object],
) -> None:
    half = rebatch_engine("qwen3", dtype="bfloat16", **changes)
    whole = rebatch_engine("qwen3")
    whole._model.load_state_dict(half._model.state_dict())
    lengths = [5, 60, 33, 12]
    expected = step_logits(whole, lengths)
    found = step_logits(half, lengths)
    assert expected.std() > 0.1
    assert (found - expected).norm() / expected.norm() < 0.02
    # A mask that hides one column too few or too many is found: its logits are those of others.
    other = step_logits(whole, [length + 1 for length in lengths])
    assert (other - expected).norm() / expected.norm() > 0.1


@pytest.mark.parametrize(
    ("moves", "line"),
    [
        ({"pause": (7,)}, "row 7 is not here"),
        ({"resume": (1,)}, "in host memory"),
        ({"numbers": (0,)}, "row 0 is here"),
    ],
)
def test_impossible_moves_raise(moves: dict[str, tuple[int, ...]], line: str) -> None:
    driver = RoundDriver(rebatch_engine(), [free_row(5, 30)] * 8)
    driver.run(2, enter=(0, 1))
    driver.run(2, swap_out=(1,))
    with pytest.raises(ValueError, match=line):
        driver.run(2, enter=moves.pop("numbers", ()), **moves)
