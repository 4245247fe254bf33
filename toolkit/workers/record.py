"""What a batch has given so far, put together from the steps that were reported."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.engines.protocol import FinishReason, SliceOutput, StepOutput


class BatchRecord:
    """The front's copy of a batch that runs on a worker: what is left when the worker dies."""

    def __init__(self, batch_id: int, size: int) -> None:
        self.batch_id = batch_id
        self._tokens: list[list[int]] = [[] for _ in range(size)]
        self._finish: list[FinishReason] = [""] * size

    def add(self, steps: Sequence[StepOutput]) -> None:
        for step in steps:
            for row, token in zip(step.rows, step.tokens, strict=True):
                self._tokens[row].append(token)
            for row, reason in step.ended:
                self._finish[row] = reason

    def output(self) -> SliceOutput:
        return SliceOutput(tuple(map(tuple, self._tokens)), tuple(self._finish))
