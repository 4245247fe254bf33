"""Runs slices on an engine, keeps the tokens of each row, and counts a slice's bytes. No torch."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from toolkit.engines.protocol import (
    Engine,
    FinishReason,
    OnStep,
    OutOfMemory,
    Row,
    StepOutput,
    slice_of,
)


class SliceTokens(NamedTuple):
    """The new tokens of each row of a slice, and why it ended; "" if it goes on."""

    tokens: tuple[tuple[int, ...], ...]
    finish: tuple[FinishReason, ...]


def tokens_of(rows: int, steps: Iterable[StepOutput]) -> SliceTokens:
    """The tokens of a slice of so many rows from its steps."""
    tokens: list[list[int]] = [[] for _ in range(rows)]
    finish: list[FinishReason] = [""] * rows
    for step in steps:
        for row, token in zip(step.rows, step.tokens, strict=True):
            tokens[row].append(token)
        for row, reason in step.ended:
            finish[row] = reason
    return SliceTokens(tuple(map(tuple, tokens)), tuple(finish))


def run_slice(engine: Engine, rows: Sequence[Row], steps: int, on_step: OnStep) -> SliceTokens:
    """Serve rows as one pass that keeps no caches. Raises OutOfMemory if memory ran out."""
    seen: list[StepOutput] = []

    def see(step: StepOutput) -> bool:
        seen.append(step)
        return on_step(step)

    output = engine.run(slice_of(rows, steps), see)
    found = tokens_of(len(rows), seen)
    assert output.steps == max(map(len, found.tokens))
    assert {*output.ended} == {row for row, reason in enumerate(found.finish) if reason}
    if output.is_short:
        raise OutOfMemory(f"rows {output.dropped} do not fit")
    return found


def slice_bytes(engine: Engine, rows: int, length: int, steps: int) -> int:
    """Return the peak bytes of a slice of equal rows, without an arena: slab and prefill."""
    slab = rows * (length + steps) * engine.facts.kv_bytes_per_token
    return slab + engine._shape.prefill_bytes(rows, length)
