"""When rows end: the same rules for every engine, and the record of what each row got."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

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


class LiveRow:
    """One row on its way: the tokens that it got since it came, and when it ends.

    Args:
        row: as it came.
        eos_ids: the model's; the first is what a row with `end_after` 'says' at its end.
    """

    __slots__ = ("_says", "_stops", "row", "tokens")

    def __init__(self, row: Row, eos_ids: Sequence[int]) -> None:
        self.row = row
        self.tokens: list[int] = []
        self._says = eos_ids[0] if eos_ids else 0
        self._stops = stop_tokens(row, eos_ids)

    @property
    def last_token(self) -> int:
        return self.tokens[-1] if self.tokens else self.row.tokens[-1]

    def advance(self, drawn: int) -> tuple[int, FinishReason]:
        """The token that it gets, where `drawn` was drawn, and whether it ends with it."""
        row = self.row
        token, finish = self._judge(row, drawn, row.generated + len(self.tokens) + 1)
        self.tokens.append(token)
        return token, finish

    def as_row(self) -> Row:
        """The row with what it got since."""
        row, new = self.row, self.tokens
        return msgspec.structs.replace(row, tokens=(*row.tokens, *new), generated=row.generated + len(new))

    def _judge(self, row: Row, token: int, count: int) -> tuple[int, FinishReason]:
        if row.end_after is not None and count >= row.end_after:
            return self._says, "stop"
        if token in self._stops and count > row.sampling.min_tokens:
            return token, "stop"
        return token, "length" if count >= row.max_new_tokens else ""


class SliceRecord:
    """Follows the rows of one slice step by step.

    Args:
        rows: the batch.
        eos_ids: the model's.
    """

    def __init__(self, rows: Sequence[Row], eos_ids: Sequence[int]) -> None:
        self._rows = [LiveRow(row, eos_ids) for row in rows]
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
            token, finish = self._rows[index].advance(drawn[index])
            tokens.append(token)
            if finish:
                self._finish[index] = finish
                ended.append((index, finish))
        if ended:
            self._live = tuple(index for index in live if not self._finish[index])
        return StepOutput(live, tuple(tokens), tuple(ended))

    def output(self) -> SliceOutput:
        return SliceOutput(tuple(tuple(row.tokens) for row in self._rows), tuple(self._finish))
