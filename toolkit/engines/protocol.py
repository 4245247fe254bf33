"""The seam between a worker and what runs the model: serve a slice, and time one prefill or decode.

These types also travel between processes (`toolkit.workers.frames`), so they are msgspec structs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal, Protocol

import msgspec

from toolkit.files.profile import EngineFacts

FinishReason = Literal["", "stop", "length"]


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is drawn: keyed by (seed, position), so a row that is moved or run again
    draws the same.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request's share of a batch: all its tokens so far, and how far it may go in this slice or
    later ones.
    """

    request_id: str
    tokens: tuple[int, ...]  # prompt + generated
    generated: int  # how many of `tokens` were generated: the position of the next draw
    max_new_tokens: int  # of the whole request, so `max_new_tokens - generated` more at most
    sampling: SamplingParams = SamplingParams()
    # For replayed traces, unknown to the scheduler: the model 'says' EOS as its end_after-th token,
    # and no earlier.
    end_after: int | None = None


class SliceOutput(msgspec.Struct, frozen=True):
    """What a slice did, per row in order."""

    tokens: tuple[
        tuple[int, ...], ...
    ]  # new tokens; an EOS that ended the row is its last one, and counts
    finish: tuple[FinishReason, ...]  # "" where the row goes on


class StepOutput(msgspec.Struct, frozen=True):
    """One token per row that got one in this step, and the rows that ended with it. In rounds,
    `rows` are numbers.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    ended: tuple[tuple[int, FinishReason], ...] = ()


class Round(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker that keeps its rows' caches does next (`toolkit.sched.types.Batch` with
    `keep_cache`).

    Rows are evicted, paused, swapped out and in, resumed, and enter, in this order; then all who
    are not paused decode, `steps` times at most and until any ends. In rounds a row goes by a
    number that the caller chose when it entered.
    """

    steps: int
    enter: tuple[Row, ...] = ()  # to be prefilled
    numbers: tuple[int, ...] = ()  # theirs, which no other row has
    evict: tuple[
        int, ...
    ] = ()  # their caches are dropped, wherever they lie; unknown numbers have gone already
    pause: tuple[int, ...] = ()  # they keep their caches on the device and do not decode
    swap_out: tuple[int, ...] = ()  # running or paused: their caches go to host memory
    swap_in: tuple[int, ...] = ()  # they come back, and are paused
    resume: tuple[int, ...] = ()  # paused ones decode again, without a prefill
    # swaps go on beside the round's compute, where the device can; else it waits for them
    overlap: bool = False
    stop_every: int = (
        1  # a round that is told to stop does so where the count of steps is a multiple of this
    )
    chunk_tokens: int = (
        0  # of a pass of prefill while rows decode, at most, padding counted; 0: whole prefills
    )
    steps_before: int = (
        0  # decode steps that the scheduler has counted: the engine may have made others
    )


class RoundOutput(msgspec.Struct, frozen=True):
    """What a round did; its tokens went out step by step."""

    steps: int  # decode steps of those who were there all the time
    joined: tuple[
        tuple[int, int], ...
    ]  # whose prefill ended and gave a token: number, steps made until then
    ended: tuple[int, ...]
    tokens: int  # of KV cache that rows hold on the device now
    padded_tokens: int  # of KV cache that they take there, their padding counted
    dropped: tuple[
        int, ...
    ] = ()  # memory had no room for them, so they are gone; the last admitted first
    # passes that had no room, whatever else was given up for them, and were made again in parts
    ran_out: int = 0

    @property
    def is_short(self) -> bool:
        """Whether memory ran out, also where nobody had to go for it."""
        return bool(self.dropped or self.ran_out)


Part = Literal[
    "join", "leave", "grow", "swap_out", "swap_in"
]  # of a round, besides prefills and decode steps

OnStep = Callable[[StepOutput], bool]  # False: stop the slice at this step boundary


class Engine(Protocol):
    """A loaded model. An out-of-memory condition is `torch.OutOfMemoryError` inside, `OutOfMemory`
    at this seam.
    """

    facts: EngineFacts

    def run_slice(self, rows: Sequence[Row], steps: int, on_step: OnStep) -> SliceOutput:
        """Serve `rows` as one padded batch for at most `steps` tokens each, until all have ended.

        Raises `OutOfMemory` with nothing kept; what `on_step` got before stays valid.
        """
        ...

    def time_prefill(self, batch_size: int, input_length: int, clock: Callable[[], float]) -> float:
        """Seconds on `clock` of one prefill of [batch_size, input_length] tokens with real left
        padding.
        """
        ...

    def time_decode(self, batch_size: int, cached_length: int, clock: Callable[[], float]) -> float:
        """Seconds on `clock` of one decode iteration at `cached_length`."""
        ...


class RoundEngine(Engine, Protocol):
    """An engine that keeps rows and their caches between rounds: continuous batching."""

    def run_round(self, plan: Round, on_step: OnStep) -> RoundOutput:
        """Run one round. `on_step` sees the tokens as they come, and may ask to stop.

        A pass that memory has no room for may be made again in parts. Where that does not help, the
        round ends early, and `RoundOutput.dropped` names who was given up: a row whose move had no
        room, those who were to be prefilled, or, where a step has no room, the last admitted. All
        others are where the plan wanted them, with their caches. What was reported of a dropped row
        stays valid.
        """
        ...

    def time_part(
        self, part: Part, rows: int, length: int, others: int, clock: Callable[[], float]
    ) -> float:
        """Seconds on `clock` of a part of a round: `rows` rows, the longest of `length` tokens,
        beside `others` more.

        join: prefilled rows are embedded into the batch of the others; leave: they leave it. grow:
        the cache moves to where it has room for more steps, per step until it has to move again.
        swap_out: caches leave the batch and go to host memory; swap_in: they come back and go on.
        The engine holds no rows before or after.
        """
        ...


class OutOfMemory(Exception):  # noqa: N818  (it is a condition to handle, and the field's name for it)
    """A batch did not fit. The engine is usable again when this is raised, and rows that it keeps
    are still there.
    """

    def __init__(self, message: str = "", *, of_device: bool = False) -> None:
        super().__init__(message)
        self.of_device = (
            of_device  # it was the device's own memory that ended, not a ledger's budget
        )


# When rows end: the same rules for every engine, and the record of what each row got.


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
        return msgspec.structs.replace(
            row, tokens=(*row.tokens, *new), generated=row.generated + len(new)
        )

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
