"""Continuous re-batching: rows that come and go get the tokens that they get alone."""

import functools
import random

import msgspec
import pytest
import tiny
from rounds import (
    PAUSED,
    RUNS,
    SWAPPED,
    WAITS,
    Desk,
    free_row,
    generated_alone,
    random_rows,
    rebatch_engine,
)

from toolkit.engines.protocol import Row, SamplingParams
from toolkit.engines.rebatch_engine import RebatchEngine
from toolkit.errors import EngineError


def replace(row: Row, sampling: SamplingParams) -> Row:
    return msgspec.structs.replace(row, max_new_tokens=25, sampling=sampling)


ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral", "gpt2", "opt", "gpt_neox"]
ROWS = random_rows(0, 24)


@functools.cache
def alone(kind: str) -> list[tuple[int, ...]]:
    return generated_alone(kind, ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize(
    ("chunk_tokens", "changes"),
    [
        (0, {}),
        (9, {}),
        (0, {"joining": "shape"}),
        (0, {"kv_layout": "rows"}),
        (9, {"kv_layout": "rows"}),
    ],
    ids=["whole", "chunks", "shaped", "rows", "rows in chunks"],
)
def test_tokens_equal_those_of_each_request_alone(
    kind: str, chunk_tokens: int, changes: dict[str, object]
) -> None:
    desk = Desk(rebatch_engine(kind, **changes), ROWS, chunk_tokens=chunk_tokens)
    rng = random.Random(len(kind))
    for _ in range(25):
        desk.at_random(rng)
    assert desk.finish() == alone(kind)
    assert desk.engine.ledger.used_bytes == desk.engine.host_ledger.used_bytes == 0


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


@pytest.mark.parametrize("changes", [{}, {"joining": "shape"}], ids=["embedded", "shaped"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_sampled_tokens_equal_those_of_static_batches(
    sampling: str, changes: dict[str, object]
) -> None:
    engine = rebatch_engine(**changes)
    rows = random_rows(3, 12, SAMPLINGS[sampling])
    rows[::4] = random_rows(4, 12)[::4]  # greedy ones among them
    static = [engine.run_slice([row], 1000, lambda step: True).tokens[0] for row in rows]
    desk = Desk(engine, rows)
    rng = random.Random(9)
    for _ in range(25):
        desk.at_random(rng)
    assert desk.finish() == static


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_each_way_of_sampling_gives_another_text(sampling: str) -> None:
    plain, told = (
        random_rows(5, 12, how) for how in (SamplingParams(temperature=1.0), SAMPLINGS[sampling])
    )
    plain = random_rows(5, 12) if sampling == "temperature" else plain
    engine = rebatch_engine()
    texts = [
        [engine.run_slice([row], 1000, lambda step: True).tokens[0] for row in rows]
        for rows in (plain, told)
    ]
    assert texts[0] != texts[1]


def test_a_seed_gives_one_text_and_another_seed_another() -> None:
    desk = Desk(
        rebatch_engine(),
        [replace(random_rows(6, 1)[0], SamplingParams(1.0, seed=seed)) for seed in (1, 2, 1)],
    )
    first, second, third = desk.finish()
    assert first == third != second


def test_a_round_ends_when_any_row_does() -> None:
    desk = Desk(rebatch_engine(), [free_row(5, 9), free_row(30, 4), free_row(8, 4)])
    output = desk.run(100, enter=(0, 1, 2))
    assert (output.steps, set(output.ended), output.joined) == (3, {1, 2}, ((1, 0), (2, 0), (0, 0)))
    assert desk.run(100).ended == (0,)
    assert [len(tokens) for tokens in desk.got] == [9, 4, 4]


def test_a_row_that_ends_with_its_first_token_ends_the_round_before_a_step() -> None:
    desk = Desk(rebatch_engine(), [free_row(5, 9), free_row(6, 1)])
    output = desk.run(100, enter=(0, 1))
    assert (output.steps, output.ended) == (0, (1,))
    assert desk.having(RUNS) == [0]


def test_a_round_stops_where_it_may_when_it_is_told_to() -> None:
    desk = Desk(rebatch_engine(), [free_row(5, 40)])
    assert desk.run(2, enter=(0,)).steps == 2
    desk.stop_after = 1
    assert (
        desk.run(30, stop_every=8, steps_before=3).steps == 5
    )  # as the caller counts, whatever the engine made
    assert desk.run(30).steps == 1


def test_a_round_without_steps_prefills_and_moves() -> None:
    desk = Desk(rebatch_engine(), [free_row(5, 9), free_row(7, 9)])
    assert desk.run(0, enter=(0, 1)).joined == ((1, 0), (0, 0))
    assert desk.run(0, pause=(0,)).steps == 0
    assert [step.rows for step in desk.steps] == []
    assert desk.run(2, resume=(0,)).tokens == 5 + 2 + 7 + 2


def test_an_idle_round_does_nothing() -> None:
    desk = Desk(rebatch_engine(), [free_row(5, 5)])
    assert desk.run(5, evict=(0,)).steps == 0
    assert desk.steps == []


def test_with_chunks_those_who_run_get_tokens_while_a_long_prompt_is_prefilled() -> None:
    desk = Desk(rebatch_engine(), [free_row(4, 60), free_row(60, 20)], chunk_tokens=10)
    desk.run(3, enter=(0,))
    output = desk.run(30, enter=(1,))
    assert output.joined == ((1, 5),)  # six passes of ten tokens, and a step between each two
    assert output.ended == (1,)
    assert output.steps == 5 + 19


def test_a_round_ends_though_a_prefill_is_not_done_and_the_next_goes_on_with_it() -> None:
    desk = Desk(
        rebatch_engine(), [free_row(4, 6), free_row(60, 20), free_row(3, 50)], chunk_tokens=10
    )
    desk.run(3, enter=(0, 2))
    output = desk.run(30, enter=(1,))
    assert (output.ended, output.joined, output.steps) == ((0,), (), 2)
    assert desk.run(30).joined == ((1, 3),)


def test_a_pass_is_no_larger_than_a_chunk_where_others_wait_for_it(
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
    desk = Desk(engine, rows, chunk_tokens=40)
    desk.run(1, enter=(0,))
    desk.run(30, enter=range(1, 8))
    assert max(passes) <= 40
    assert len(desk.steps[-1].rows) == 8


def test_a_prompt_whose_pass_does_not_fit_is_cut_though_nobody_waits() -> None:
    row = free_row(90, 5)
    for chunk_tokens in (0, 20):
        desk = Desk(rebatch_engine(budget_mib=0.125), [row], chunk_tokens=chunk_tokens)
        output = desk.run(1, enter=(0,))
        assert (output.dropped, output.is_short) == ((), not chunk_tokens)
        assert desk.finish() == Desk(rebatch_engine(), [row]).finish()
        assert desk.engine.ledger.peak_bytes <= desk.engine.facts.kv_budget_bytes


def test_newcomers_of_like_length_are_prefilled_together() -> None:
    desk = Desk(rebatch_engine(), [free_row(length, 9) for length in (5, 80, 9, 30, 78)])
    output = desk.run(1, enter=range(5))
    assert [set(step.rows) for step in desk.steps[:2]] == [{0, 2, 3}, {1, 4}]
    assert len(output.joined) == 5


def test_memory_is_given_back_as_rows_leave() -> None:
    engine = rebatch_engine()
    long, short = [free_row(80, 10, first=k) for k in range(12)], [free_row(4, 90)]
    desk = Desk(engine, [*short, *long])
    desk.run(1, enter=range(13))
    full = engine.ledger.used_bytes
    desk.run(1, evict=tuple(range(1, 13)))
    assert 0 < engine.ledger.used_bytes < full / 4
    desk.finish()
    assert engine.ledger.used_bytes == 0


def test_what_is_swapped_is_charged_to_the_host_and_not_to_the_device() -> None:
    engine = rebatch_engine()
    desk = Desk(engine, [free_row(50, 30)])
    desk.run(4, enter=(0,))
    output = desk.run(4, swap_out=(0,))
    assert (output.tokens, engine.ledger.used_bytes) == (0, 0)
    assert engine.host_ledger.used_bytes == (50 + 4) * engine.facts.kv_bytes_per_token
    assert desk.run(4, swap_in=(0,)).tokens == 54  # on the device, paused
    assert engine.host_ledger.used_bytes == 0
    assert desk.run(4, resume=(0,)).steps == 4


def test_a_row_comes_back_from_host_memory_without_a_prefill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk(rebatch_engine(), [free_row(50, 30), free_row(5, 30)])
    desk.run(4, enter=(0, 1))
    desk.run(4, swap_out=(0,))
    monkeypatch.setattr(RebatchEngine, "_prefill_columns", None)
    desk.run(4, swap_in=(0,), resume=(0,))
    assert [len(tokens) for tokens in desk.got] == [9, 13]


def test_running_out_of_memory_drops_newcomers_and_those_who_run_go_on() -> None:
    engine = rebatch_engine(budget_mib=0.25)  # 1024 tokens
    rows = [free_row(60, 30, first=k) for k in range(40)]
    expected = Desk(rebatch_engine(), rows[:2]).finish()
    desk = Desk(engine, rows)
    desk.run(3, enter=(0, 1))
    desk.run(3, swap_out=(0,))
    output = desk.run(3, enter=range(2, 40))
    joined = {number for number, _ in output.joined}
    assert 2 <= len(joined) < 38
    assert set(range(2, 40)) - joined <= set(output.dropped)
    assert desk.having(SWAPPED) == [0]
    assert 1 in desk.having(RUNS)
    desk.run(1, evict=tuple(set(desk.having(RUNS)) - {1}))
    desk.state[2:] = ["given up"] * 38
    assert desk.finish()[:2] == expected


def test_the_ledger_stays_within_its_budget() -> None:
    engine = rebatch_engine(budget_mib=0.5)
    desk = Desk(engine, ROWS)
    rng = random.Random(2)
    for _ in range(40):
        if desk.having(WAITS) and len(desk.having(RUNS, PAUSED)) < 8:
            desk.run(3, enter=desk.having(WAITS)[:3])
        running = desk.having(RUNS)
        desk.run(3, pause=tuple(running[:1])) if rng.random() < 0.3 else desk.run(
            3, resume=tuple(desk.having(PAUSED))
        )
    assert desk.finish() == alone("llama")
    assert 0 < engine.ledger.peak_bytes <= engine.facts.kv_budget_bytes


def test_host_memory_has_a_budget_of_its_own() -> None:
    desk = Desk(rebatch_engine(swap_memory_mib=0.001), [free_row(50, 30)])
    desk.run(4, enter=(0,))
    assert desk.run(4, swap_out=(0,)).dropped == (0,)
    assert desk.engine.ledger.used_bytes == desk.engine.host_ledger.used_bytes == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounds_run_in_half_precision(dtype: str) -> None:
    desk = Desk(rebatch_engine(dtype=dtype), [free_row(length, 12) for length in (3, 50, 20)])
    rng = random.Random(4)
    for _ in range(10):
        desk.at_random(rng)
    assert [len(tokens) for tokens in desk.finish()] == [12, 12, 12]


@pytest.mark.parametrize(
    ("moves", "line"),
    [
        ({"pause": (7,)}, "row 7 is not here"),
        ({"resume": (1,)}, "in host memory"),
        ({"numbers": (0,)}, "row 0 is here"),
    ],
)
def test_moves_that_cannot_be_are_bugs_and_not_guesses(
    moves: dict[str, tuple[int, ...]], line: str
) -> None:
    desk = Desk(rebatch_engine(), [free_row(5, 30)] * 8)
    desk.run(2, enter=(0, 1))
    desk.run(2, swap_out=(1,))
    with pytest.raises(ValueError, match=line):
        desk.run(2, enter=moves.pop("numbers", ()), **moves)


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300}


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (
            {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 300},
            "'mamba'",
        ),
        (
            {"model_type": "mistral", "sliding_window": 50, "head_dim": 8, **SMALL},
            "'mistral' slides a window of 50",
        ),
        ({"model_type": "jamba", **SMALL}, "'jamba'"),
        ({"model_type": "qwen3_next", "num_key_value_heads": 2, **SMALL}, "'qwen3_next'"),
        ({"model_type": "t5", "vocab_size": 300}, "'t5' is not a causal language model"),
    ],
)
def test_models_whose_caches_do_not_fit_are_refused_by_name(
    config: dict[str, object], line: str
) -> None:
    with pytest.raises(EngineError) as raised:
        RebatchEngine(tiny.model_spec(config=config), tiny.engine_spec("rebatch"), tiny.CPU)
    assert line in raised.value.message
    assert "\n" not in raised.value.message
