"""The interface between a worker and the engine that runs its model.

The structs also travel between processes (`toolkit.workers.protocol`), so they are msgspec structs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from toolkit.engine_traits import traits_of
from toolkit.files.profile import EngineFacts
from toolkit.files.recipe import EngineSpec, HardwareSpec, ModelSpec

if TYPE_CHECKING:
    import torch

FinishReason = Literal["", "stop", "length"]


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is drawn.

    A draw depends on (seed, position) only, so a row that moves or runs again draws the same
    tokens. `top_k` 0 keeps all tokens.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request's row in a batch: all its tokens so far, and how many more it may generate.

    Attributes:
        tokens: the prompt and the output so far.
        generated: how many of `tokens` were generated; also the position of the next draw.
        max_new_tokens: of the whole request, so at most `max_new_tokens - generated` more.
        end_after: for replayed traces, unknown to the scheduler: the row's end_after-th output
            token becomes EOS, and no earlier one.
    """

    request_id: str
    tokens: tuple[int, ...]
    generated: int
    max_new_tokens: int
    sampling: SamplingParams = SamplingParams()
    end_after: int | None = None

    @property
    def remaining(self) -> int:
        """Tokens that it may still generate."""
        return self.max_new_tokens - self.generated


class StepOutput(msgspec.Struct, frozen=True):
    """One token for each row that got one in this step, and the rows that ended with it.

    Rows are named by their numbers (`EnginePass.numbers`).
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    ended: tuple[tuple[int, FinishReason], ...] = ()


class EnginePass(msgspec.Struct, frozen=True, omit_defaults=True, tag="run"):
    """What an engine is told to do: a `toolkit.sched.types.Pass` with the tokens of its rows. It is
    also the frame that a worker gets (`toolkit.workers.protocol`).

    Rows are evicted, paused, swapped out, swapped in and resumed, and new rows enter, in this
    order. Then all rows that are not paused decode, at most `steps` times and until one of them
    ends. The caller chooses a number for each row when it enters.

    Without `keep_cache` the rows in `enter` are one padded batch. Each gets at most `steps` tokens,
    until all have ended, and their caches are dropped then. No other field is used, and rows that
    the engine keeps stay as they are.

    Attributes:
        enter: rows to prefill.
        numbers: the number of each row in `enter`; no other row has it.
        evict: rows to drop with their caches, wherever these are; an unknown number has gone.
        pause: rows that keep their caches on the device and do not decode.
        swap_out: running or paused rows that go to host memory with their caches.
        swap_in: swapped rows that return to the device and are paused.
        resume: paused rows that decode again, without a prefill.
        overlap: swaps run in parallel with the computation, if the device can do that; else the
            pass waits for them.
        stop_every: a pass that `on_step` stops ends where the count of steps is a multiple of this.
        chunk_tokens: the largest prefill while rows decode, in tokens with padding; 0: whole
            prefills.
        steps_before: decode steps that the scheduler has counted; the engine may have made a
            different number.
        pass_id: the scheduler's number of the pass, for the worker's reports.
    """

    steps: int
    enter: tuple[Row, ...] = ()
    numbers: tuple[int, ...] = ()
    evict: tuple[int, ...] = ()
    pause: tuple[int, ...] = ()
    swap_out: tuple[int, ...] = ()
    swap_in: tuple[int, ...] = ()
    resume: tuple[int, ...] = ()
    overlap: bool = False
    stop_every: int = 1
    chunk_tokens: int = 0
    steps_before: int = 0
    keep_cache: bool = True
    pass_id: int = 0


def slice_of(rows: Iterable[Row], steps: int, pass_id: int = 0) -> EnginePass:
    """Return the pass that serves `rows` as one padded batch and drops their caches."""
    enter = tuple(rows)
    numbers = tuple(range(len(enter)))
    return EnginePass(steps, enter, numbers, keep_cache=False, pass_id=pass_id)


class PassOutput(msgspec.Struct, frozen=True):
    """What a pass did. Its tokens were reported step by step.

    Attributes:
        steps: decode steps of the rows that were running throughout. Without `keep_cache`: the
            tokens of the longest row.
        joined: rows that ended their prefill and got a token: (number, steps made before that).
        ended: numbers of the rows that ended.
        tokens: tokens of KV cache that rows hold on the device now.
        padded_tokens: the same with padding.
        dropped: rows that are gone because memory had no room, the last admitted first.
        ran_out: forward passes that had no room even after all spare memory was freed, and were
            repeated in parts.
    """

    steps: int
    joined: tuple[tuple[int, int], ...] = ()
    ended: tuple[int, ...] = ()
    tokens: int = 0
    padded_tokens: int = 0
    dropped: tuple[int, ...] = ()
    ran_out: int = 0

    @property
    def is_short(self) -> bool:
        """Whether memory ran out, even if no row was dropped."""
        return bool(self.dropped or self.ran_out)


# Parts of a pass with kept caches other than prefills and decode steps.
Part = Literal["join", "leave", "grow", "swap_out", "swap_in"]

OnStep = Callable[[StepOutput], bool]  # False: stop at this step boundary


class Engine(Protocol):
    """A loaded model. Out of memory is `torch.OutOfMemoryError` inside, `OutOfMemory` outside."""

    facts: EngineFacts

    def run(self, plan: EnginePass, on_step: OnStep) -> PassOutput:
        """Run one pass. `on_step` receives the tokens of each step, and may stop the pass.

        Reported tokens stay valid, whatever happens after. If memory has no room for a pass that
        keeps no caches, `PassOutput.dropped` names the rows that had not ended.

        In a pass that keeps caches, a forward pass that does not fit into memory may be repeated in
        parts. If that does not help, the pass ends early and `dropped` names the rows that were
        given up: a row without room for its move, rows to be prefilled, or, if a step has no
        room, the last admitted row. All other rows are where the plan wanted them, with their
        caches. Raises ValueError if the engine keeps none (`EngineTraits.keeps_rows`).
        """
        ...

    def time_prefill(self, batch_size: int, input_length: int, clock: Callable[[], float]) -> float:
        """Seconds on `clock` of a prefill of [batch_size, input_length], left-padded as in use."""
        ...

    def time_decode(self, batch_size: int, cached_length: int, clock: Callable[[], float]) -> float:
        """Seconds on `clock` of one decode iteration at `cached_length`."""
        ...

    def time_part(
        self, part: Part, rows: int, length: int, others: int, clock: Callable[[], float]
    ) -> float:
        """Seconds on `clock` of a part of a pass that keeps caches: `rows` rows, the longest of
        `length` tokens, in a batch with `others` more rows.

        - join: prefilled rows are embedded into the batch of the others.
        - leave: they leave it.
        - grow: the cache moves to where it has room for more steps; per step until it moves again.
        - swap_out: caches leave the batch and go to host memory.
        - swap_in: caches return, and their rows decode again.

        The engine holds no rows before or after. Raises ValueError if it keeps none.
        """
        ...


class OutOfMemory(Exception):  # noqa: N818  (it is a condition to handle, and the field's name for it)
    """Memory had no room. The engine is usable again when this is raised, and the rows that it
    keeps are still there.
    """


def make_engine(model: ModelSpec, engine: EngineSpec, hardware: HardwareSpec) -> Engine:
    """Load the engine from the module of `EngineTraits.load`; no other engine's is imported.

    Raises `EngineError` or `InputError` if the engine cannot be loaded.
    """
    traits = traits_of(engine.name)
    traits.require()
    load = resolve_name(traits.load)
    loaded: Engine = load(model, engine, hardware)
    return loaded


def stop_tokens(row: Row, eos_ids: Collection[int]) -> frozenset[int]:
    """The tokens that end this row.

    A row with `end_after` is replayed to that length, so the model's own EOS does not end it.
    """
    own = () if row.sampling.ignore_eos or row.end_after is not None else eos_ids
    return frozenset(own) | frozenset(row.sampling.stop_token_ids)


class LiveRow:
    """A row that is being served: the tokens that it got since it came, when it ends, and its cache
    while it does not decode (`toolkit.engines.suspended`).

    The first of `eos_ids` is the last token of a row with `end_after`.

    Attributes:
        row: as it came.
        tokens: that it got since.
        block: its cache beside the batch, [values]; None: it decodes, or was never prefilled.
        on_host: whether the block is in host memory.
        arrival: the end of the block's transfer to the device, if there is one.
    """

    __slots__ = ("_eos_id", "_stops", "arrival", "block", "on_host", "row", "tokens")

    def __init__(self, row: Row, eos_ids: Sequence[int]) -> None:
        self.row = row
        self.tokens: list[int] = []
        self.block: torch.Tensor | None = None
        self.on_host = False
        self.arrival: torch.cuda.Event | None = None
        self._eos_id = eos_ids[0] if eos_ids else 0
        self._stops = stop_tokens(row, eos_ids)

    @property
    def block_bytes(self) -> int:
        """Bytes of its cache beside the batch."""
        return 0 if self.block is None else self.block.nbytes

    @property
    def last_token(self) -> int:
        return self.tokens[-1] if self.tokens else self.row.tokens[-1]

    def advance(self, drawn: int) -> tuple[int, FinishReason]:
        """The token that the row gets if `drawn` was drawn, and why the row ends with it, or ""."""
        row = self.row
        count = row.generated + len(self.tokens) + 1
        token = drawn
        finish: FinishReason = "length" if count >= row.max_new_tokens else ""
        if row.end_after is not None and count >= row.end_after:
            token = self._eos_id
            finish = "stop"
        elif drawn in self._stops and count > row.sampling.min_tokens:
            finish = "stop"
        self.tokens.append(token)
        return token, finish

    def as_row(self) -> Row:
        """The row with the tokens that it got since."""
        row = self.row
        new = self.tokens
        return msgspec.structs.replace(
            row, tokens=(*row.tokens, *new), generated=row.generated + len(new)
        )


def advance(rows: Sequence[tuple[int, LiveRow]], drawn: Sequence[int]) -> StepOutput:
    """One drawn token for each row, given with its number, and the rows that end with it."""
    tokens: list[int] = []
    ended: list[tuple[int, FinishReason]] = []
    for (number, live), draw in zip(rows, drawn, strict=True):
        token, finish = live.advance(draw)
        tokens.append(token)
        if finish:
            ended.append((number, finish))
    return StepOutput(tuple([number for number, _ in rows]), tuple(tokens), tuple(ended))


# A row of a slice: its place there, its number, and its state.
SliceRow = tuple[int, tuple[int, LiveRow]]


def rows_of_slice(plan: EnginePass, eos_ids: Sequence[int]) -> list[SliceRow]:
    """Return the rows of a pass that keeps no caches, in order."""
    rows = [LiveRow(row, eos_ids) for row in plan.enter]
    return list(enumerate(zip(plan.numbers, rows, strict=True)))


class PassRecord:
    """What a pass has done so far, and whether it goes on.

    Attributes:
        steps, joined, ended, dropped: as in `PassOutput`.
        is_short: memory has no room for more steps or newcomers, so the pass ends and the
            scheduler decides again.
        is_wanted: False once `on_step` has stopped the pass.
    """

    def __init__(self, plan: EnginePass, on_step: OnStep) -> None:
        self.plan = plan
        self.steps = 0
        self.joined: list[tuple[int, int]] = []
        self.ended: list[int] = []
        self.dropped: list[int] = []
        self.is_short = False
        self.is_wanted = True
        self._on_step = on_step

    def is_over(self) -> bool:
        """Whether the pass ends here."""
        plan = self.plan
        if not plan.keep_cache:
            all_ended = len(self.ended) == len(plan.enter)
            return all_ended or self.steps >= plan.steps or not self.is_wanted
        may_stop = (plan.steps_before + self.steps) % plan.stop_every == 0
        stopped = may_stop and not self.is_wanted
        if plan.chunk_tokens and not self.steps:
            stopped = False  # a chunk is followed by its step
        return self.is_short or bool(self.ended) or self.steps >= plan.steps or stopped

    def count_step(self, step: StepOutput) -> None:
        """Count a step of all rows, and report its tokens."""
        self.steps += 1
        self.report(step)

    def draw(self, live: Sequence[SliceRow], drawn: Sequence[int]) -> list[SliceRow]:
        """One more token for each row of a slice that is `live`, from `drawn` [N], which has one
        for every row. Returns the rows that go on.
        """
        step = advance([row for _, row in live], [drawn[index] for index, _ in live])
        self.count_step(step)
        ended = [number for number, _ in step.ended]
        return [entry for entry in live if entry[1][0] not in ended]

    def run_out(self) -> None:
        """Memory has no room for the rows of a slice that have not ended."""
        self.is_short = True
        self.dropped += [number for number in self.plan.numbers if number not in self.ended]

    def report(self, step: StepOutput) -> None:
        """Report tokens to the caller, which may stop the pass."""
        self.ended += [number for number, _ in step.ended]
        self.is_wanted = self._on_step(step) and self.is_wanted

    def count_joined(self, numbers: Sequence[int]) -> None:
        """Count rows that got their first token now."""
        self.joined += [(number, self.steps) for number in numbers]

    def output(self, tokens: int = 0, padded_tokens: int = 0, ran_out: int = 0) -> PassOutput:
        """Return what the pass did; the arguments are fields of `PassOutput`."""
        dropped = tuple(sorted(self.dropped, reverse=True))
        joined, ended = tuple(self.joined), tuple(self.ended)
        return PassOutput(self.steps, joined, ended, tokens, padded_tokens, dropped, ran_out)
