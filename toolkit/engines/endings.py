"""When the rows of a slice end: the same rules for every engine, and the record of what each row got."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from toolkit.engines.protocol import FinishReason, Row, SliceOutput, StepOutput


def remaining(row: Row) -> int:
    """Tokens that this row may still generate."""
    return row.max_new_tokens - row.generated


def stop_tokens(row: Row, eos_ids: Collection[int]) -> frozenset[int]:
    """The tokens that end this row.

    A row with `end_after` is replayed to that length, so the model's own EOS does not end it.
    """
    own = () if row.sampling.ignore_eos or row.end_after is not None else eos_ids
    return frozenset(own) | frozenset(row.sampling.stop_token_ids)


class SliceRecord:
    """Follows the rows of one slice step by step.

    Args:
        rows: the batch.
        eos_ids: the model's; the first is what a row with `end_after` 'says' at its end.
    """

    def __init__(self, rows: Sequence[Row], eos_ids: Sequence[int]) -> None:
        self._rows = rows
        self._says = eos_ids[0] if eos_ids else 0
        self._stops = [stop_tokens(row, eos_ids) for row in rows]
        self._tokens: list[list[int]] = [[] for _ in rows]
        self._finish: list[FinishReason] = ["" for _ in rows]
        self._live = tuple(range(len(rows)))

    @property
    def all_ended(self) -> bool:
        return not self._live

    def advance(self, drawn: Sequence[int]) -> StepOutput:
        """One more token per row, `drawn` [N]; what rows that have ended drew is dropped."""
        live, tokens = self._live, []
        ended: list[tuple[int, FinishReason]] = []
        for index in live:
            token, finish = self._judge(index, drawn[index])
            self._tokens[index].append(token)
            tokens.append(token)
            if finish:
                self._finish[index] = finish
                ended.append((index, finish))
        if ended:
            self._live = tuple(index for index in live if not self._finish[index])
        return StepOutput(live, tuple(tokens), tuple(ended))

    def _judge(self, index: int, token: int) -> tuple[int, FinishReason]:
        row = self._rows[index]
        count = row.generated + len(self._tokens[index]) + 1
        if row.end_after is not None and count >= row.end_after:
            return self._says, "stop"
        if token in self._stops[index] and count > row.sampling.min_tokens:
            return token, "stop"
        return token, "length" if count >= row.max_new_tokens else ""

    def output(self) -> SliceOutput:
        return SliceOutput(tuple(map(tuple, self._tokens)), tuple(self._finish))
