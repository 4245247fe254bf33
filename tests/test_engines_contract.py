"""The contract of every engine. A new engine needs only a name in `KINDS`."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import pytest
import tiny
from rounds import FREE, alone, free_row, generated_alone, go_on, random_rows
from slices import run_slice, tokens_of

from toolkit.engines.protocol import (
    Engine,
    OutOfMemory,
    Row,
    SamplingParams,
    StepOutput,
    make_engine,
)
from toolkit.engines.rebatch_engine import STEPS
from toolkit.engines.transformers_engine import TIMED_STEPS

pytestmark = pytest.mark.slow

KINDS = ["llama", "qwen3", "gpt2", "opt", "fixed", "rebatch", "deepspeed", "fake"]
ALL_STEPS = 10_000  # enough for any row


@dataclass
class Case:
    kind: str
    engine: Engine

    def alone(self, rows: Sequence[Row]) -> list[tuple[int, ...]]:
        """What each row gets alone: by transformers' own greedy `generate`, or from the fake engine
        in one slice.
        """
        if self.kind == "fake":
            return alone(self.engine, rows)
        return generated_alone(self.kind, rows)


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest) -> Case:
    kind = request.param
    if kind == "deepspeed":
        pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    return Case(kind, make_engine(tiny.model_spec(kind), tiny.engine_spec(kind), tiny.CPU))


def extended(row: Row, new: Sequence[int]) -> Row:
    return msgspec.structs.replace(
        row, tokens=(*row.tokens, *new), generated=row.generated + len(new)
    )


def serve_in_slices(engine: Engine, rows: Sequence[Row], seed: int) -> dict[str, tuple[int, ...]]:
    """Serve all rows to their ends in slices of random lengths, in batches of random rows."""
    rng = random.Random(seed)
    waiting = list(rows)
    done = {}
    while waiting:
        rng.shuffle(waiting)
        size = rng.randint(1, 5)
        batch = waiting[:size]
        waiting = waiting[size:]
        output = run_slice(engine, batch, rng.randint(1, 9), go_on)
        for row, tokens, finish in zip(batch, output.tokens, output.finish, strict=True):
            after = extended(row, tokens)
            if finish:
                done[row.request_id] = after.tokens[len(after.tokens) - after.generated :]
            else:
                waiting.append(after)
    return done


def test_tokens_in_slices_equal_those_of_each_request_alone(case: Case) -> None:
    rows = random_rows(0, 12)
    assert {*run_slice(case.engine, rows, ALL_STEPS, go_on).finish} == {"stop", "length"}
    alone = case.alone(rows)
    for seed in range(2):
        served = serve_in_slices(case.engine, rows, seed)
        assert [served[row.request_id] for row in rows] == alone


def test_sampled_tokens_in_slices_equal_those_in_one_piece(case: Case) -> None:
    sampling = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, repetition_penalty=1.1)
    rows = random_rows(11, 6, sampling)
    served = serve_in_slices(case.engine, rows, 11)
    assert [served[row.request_id] for row in rows] == alone(case.engine, rows)


def test_steps_are_what_the_output_says(case: Case) -> None:
    rows = random_rows(3, 5)
    steps: list[StepOutput] = []

    def keep(step: StepOutput) -> bool:
        steps.append(step)
        return True

    output = run_slice(case.engine, rows, 12, keep)
    assert tokens_of(len(rows), steps) == output
    assert max(map(len, output.tokens)) == len(steps)


def test_no_row_passes_its_limit(case: Case) -> None:
    rows = [free_row(3, 4), Row("b", (5,) * 30, 10, 13, FREE), free_row(1, 1)]
    output = run_slice(case.engine, rows, 50, go_on)
    assert [len(tokens) for tokens in output.tokens] == [4, 3, 1]
    assert output.finish == ("length",) * 3


def test_a_replayed_row_ends_at_its_length_and_no_earlier(case: Case) -> None:
    rows = [Row(str(end), (end, end + 1), 0, 25, end_after=end) for end in (1, 2, 7, 20, 25, 30)]
    done = serve_in_slices(case.engine, rows, 5)
    assert {key: len(tokens) for key, tokens in done.items()} == {
        str(end): min(end, 25) for end in (1, 2, 7, 20, 25, 30)
    }
    assert run_slice(case.engine, [rows[4]], ALL_STEPS, go_on).finish == ("stop",)
    assert run_slice(case.engine, [rows[5]], ALL_STEPS, go_on).finish == ("length",)


def test_a_slice_ends_when_all_rows_have(case: Case) -> None:
    rows = [Row("a", (1,), 0, 50, end_after=3), Row("b", (2,), 0, 50, end_after=5)]
    steps: list[StepOutput] = []
    run_slice(case.engine, rows, 40, lambda step: not steps.append(step))
    assert [step.rows for step in steps] == [(0, 1)] * 3 + [(1,)] * 2


def test_a_slice_stops_when_on_step_returns_false(case: Case) -> None:
    left = iter([True, True, False])
    rows = [free_row(2, 30), free_row(1, 30)]
    output = run_slice(case.engine, rows, 30, lambda step: next(left))
    assert [len(tokens) for tokens in output.tokens] == [3, 3]
    assert output.finish == ("", "")


def test_a_stop_token_ends_a_row(case: Case) -> None:
    row = free_row(3, 30, first=1)
    free = run_slice(case.engine, [row], 30, go_on).tokens[0]
    stop = free[10]
    sampling = SamplingParams(ignore_eos=True, stop_token_ids=(stop,))
    stopped = msgspec.structs.replace(row, sampling=sampling)
    output = run_slice(case.engine, [stopped], 30, go_on)
    assert output.tokens[0] == free[: free.index(stop) + 1]
    assert output.finish == ("stop",)


def test_nothing_ends_before_min_tokens(case: Case) -> None:
    rows = random_rows(0, 8, SamplingParams(min_tokens=9))
    output = run_slice(case.engine, rows, ALL_STEPS, go_on)
    assert [
        len(tokens) >= min(row.max_new_tokens, 9)
        for row, tokens in zip(rows, output.tokens, strict=True)
    ] == [True] * 8


def test_running_out_of_memory_leaves_the_engine_usable(case: Case) -> None:
    engine = make_engine(
        tiny.model_spec(case.kind), tiny.engine_spec(case.kind, budget_mib=0.25), tiny.CPU
    )
    capacity = engine.facts.capacity_tokens
    small = Row("small", (1, 2, 3), 0, 5)
    before = run_slice(engine, [small], 5, go_on)
    large = [Row(str(index), (index % 256,) * 60, 0, 20) for index in range(capacity // 80 + 1)]
    with pytest.raises(OutOfMemory):
        run_slice(engine, large, 20, go_on)
    if case.kind != "rebatch":  # it prefills fewer rows at a time if memory is short
        with pytest.raises(OutOfMemory):
            engine.time_prefill(len(large), 80, clock=Ticks())
    assert run_slice(engine, [small], 5, go_on) == before


class Ticks:
    """A clock that advances by a second at each reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def timed_steps(kind: str, length: int) -> int:
    """Decode steps that are timed together."""
    if kind == "fake":
        return 1
    return STEPS if kind == "rebatch" else min(TIMED_STEPS, max(length - 1, 1))


@pytest.mark.parametrize(("batch_size", "length"), [(1, 1), (1, 40), (3, 2), (4, 40)])
def test_timing_uses_the_given_clock(case: Case, batch_size: int, length: int) -> None:
    steps = timed_steps(case.kind, length)  # between two readings of the clock
    assert case.engine.time_prefill(batch_size, length, Ticks()) == 1.0
    assert case.engine.time_decode(batch_size, length, Ticks()) == 1.0 / steps


def test_timing_changes_no_tokens(case: Case) -> None:
    row = Row("a", (1, 2, 3), 0, 10)
    before = run_slice(case.engine, [row], 10, go_on)
    case.engine.time_decode(4, 30, Ticks())
    assert run_slice(case.engine, [row], 10, go_on) == before


def test_facts_are_consistent(case: Case) -> None:
    facts = case.engine.facts
    assert facts.capacity_tokens == facts.kv_budget_bytes // facts.kv_bytes_per_token
    assert facts.max_model_len == tiny.MAX_MODEL_LEN
    assert facts.prefill_emits_token
