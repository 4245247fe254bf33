"""The running batch, and the prefill of the rows that enter it.

`Prefiller` prefills newcomers apart from the running batch: rows of similar length together, in
bounded passes. Their caches are then embedded into the batch (BATON, section 4.2). A pass is one
forward call. The batch may decode between two passes, so that a long prompt does not delay running
rows. `toolkit.sched.prefills` decides which passes to make; this module makes them and ensures that
there is memory for them.

`RunningBatch` holds the rows that decode together, each at its own length. Rows join between two
steps, and leave when they end. If memory runs out in a step or while rows join, the batch stays as
it was, so that either can be repeated. Leaving needs no memory: the next step makes the tensors
that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from toolkit.engines.fixed_step import FixedSteps, Forward
from toolkit.engines.memory import ByteLedger, ModelShape
from toolkit.engines.protocol import LiveRow, Row, StepOutput, advance
from toolkit.engines.rebatch_cache import RebatchCache, RowKV
from toolkit.engines.sampling import Sampler
from toolkit.engines.slab import PaddedBatch
from toolkit.sched.prefills import PrefillChunk, PrefillChunks

Newcomer = tuple[int, LiveRow]  # the number of a row, and the row
CachedRow = tuple[Newcomer, RowKV]  # with all its tokens but the last in the cache


@dataclass(slots=True, eq=False)
class PrefillBatch:
    """Newcomers that are prefilled together, longest first, padded to one width."""

    newcomers: list[Newcomer]
    batch: PaddedBatch
    held_bytes: int

    def rows(self) -> list[CachedRow]:
        """The newcomers with views of their keys and values, without padding."""
        rows: list[CachedRow] = []
        for index, newcomer in enumerate(self.newcomers):
            columns = slice(self.batch.width - len(newcomer[1].row.tokens), self.batch.width)
            cached = [
                (layer.keys[index, :, columns], layer.values[index, :, columns])
                for layer in self.batch.cache.layers
            ]
            rows.append((newcomer, cached))
        return rows


@dataclass(eq=False)
class Prefiller:
    """Prefills newcomers before they join the batch.

    Attributes:
        forward: runs columns [from, to) of a padded batch and returns the last column's logits
            [N, V].
        make_batch: makes a `PaddedBatch` from rows and a width.
        shape, ledger: estimate and charge the memory of a group and its passes.
        cache: where newcomers will be embedded; the prefill leaves room for that.
        mixes: rows of any lengths share a pass, as in a static batch; else only rows of similar
            length do.
    """

    forward: Callable[[PaddedBatch, int, int], torch.Tensor]
    make_batch: Callable[[Sequence[Sequence[int]], int], PaddedBatch]
    shape: ModelShape
    ledger: ByteLedger
    cache: RebatchCache
    mixes: bool
    _group: PrefillBatch | None = None  # in prefill now

    def __post_init__(self) -> None:
        self._passes: PrefillChunks[Newcomer] = PrefillChunks(mixes=self.mixes)

    @property
    def busy(self) -> bool:
        return bool(self._passes)

    @property
    def tokens(self) -> int:
        """Tokens of KV cache that the group in prefill takes."""
        return self._group.batch.width * len(self._group.newcomers) if self._group else 0

    def add(self, newcomers: Iterable[Newcomer]) -> None:
        for newcomer in newcomers:
            self._passes.add(newcomer, len(newcomer[1].row.tokens))

    def remove(self, number: int) -> LiveRow | None:
        """Remove a newcomer and what was prefilled of it; None if it is not here."""
        for newcomer in self._passes.all_keys():
            if newcomer[0] == number:
                self._passes.remove(newcomer)
                if self._group is not None and self._passes.group is None:
                    self.release(self._group)
                    self._group = None
                return newcomer[1]
        return None

    def take_waiting(self) -> list[Newcomer]:
        """Remove and return all waiting newcomers; the caller prefills them in another way."""
        return self._passes.take_waiting()

    @property
    def numbers(self) -> list[int]:
        return [number for number, _ in self._passes.all_keys()]

    def advance(
        self, bound: int = 0, parts: int = 1, *, cuts: bool = False
    ) -> list[tuple[PrefillBatch, torch.Tensor]]:
        """Make one pass of at most `bound` tokens (0: no bound).

        Args:
            parts: make only the first of this number of parts of the pass.
            cuts: make a smaller pass if memory is too short for the whole one.

        Returns the group that the pass completes, if any, and the logits of each row's next token;
        the caller embeds the group and calls `release`. Raises `torch.OutOfMemoryError` if not even
        the first waiting newcomer fits; the caller then calls `clear`.
        """
        cuts = cuts or parts > 1
        group = self._group = self._group or self._begin(bound, cuts)
        planned = self._passes.next(bound)
        planned = planned.up_to(planned.start - (planned.start - planned.end) // parts)
        while cuts and planned.end - planned.start > 1:  # as much as memory has room for
            if self._pass_bytes(planned) <= self.ledger.free_bytes:
                break
            planned = planned.up_to((planned.start + planned.end + 1) // 2)
        group.batch.cache.keep(planned.start)
        with self.ledger.reserve(self._pass_bytes(planned)):
            logits = self.forward(group.batch, planned.start, planned.end)
        self._passes.made(planned)
        if not planned.completes:
            return []
        self._group = None
        return [(group, logits)]

    def release(self, group: PrefillBatch) -> None:
        """Free the group's caches."""
        self.ledger.take(-group.held_bytes)

    def clear(self) -> None:
        self._passes.clear()
        if self._group is not None:
            self.release(self._group)
            self._group = None

    def _begin(self, bound: int, cuts: bool) -> PrefillBatch:
        """A group of the first waiting newcomer and as many similar ones as the limits allow."""
        formed = self._passes.form(bound, lambda lengths: self._fits(lengths, bound, cuts))
        held = len(formed.keys) * formed.width * self.cache.bytes_per_token
        tokens = [live.row.tokens for _, live in formed.keys]
        with self.ledger.hold(held):
            return PrefillBatch(formed.keys, self.make_batch(tokens, formed.width), held)

    def _fits(self, lengths: Sequence[int], bound: int, cuts: bool) -> bool:
        """Whether memory has room for a group: its caches, and the larger of its largest pass and
        its rows' places in the batch. If memory is short, the batch frees its spare memory.
        """
        rows = len(lengths)
        width = max(lengths)
        columns = min(width, max(bound // rows, 1)) if bound else width
        if rows == 1 and cuts:
            columns = 1  # a pass that is too long can be cut
        pass_bytes = self.shape.prefill_bytes(rows, columns, width - columns)
        needed = rows * width * self.cache.bytes_per_token
        needed += max(pass_bytes, self.cache.growth_bytes(rows, width))
        if needed > self.ledger.free_bytes:
            self.cache.fit()
        return needed <= self.ledger.free_bytes

    def _pass_bytes(self, planned: PrefillChunk[Newcomer]) -> int:
        columns = planned.end - planned.start
        return self.shape.prefill_bytes(len(planned.group.keys), columns, planned.start)


MakeSampler = Callable[[Sequence[Row]], Sampler]
NOT_IN_SAMPLER = -1


@dataclass(eq=False)
class RunningBatch:
    """N rows in a cache, and their tokens.

    Attributes:
        make_sampler: makes a sampler for rows that have drawn nothing yet.
        masks_as: the type of masks that attention adds to its scores; None: the model makes its
            own from booleans.
        fixed: makes the steps in fixed shapes; None: each step in the shape that it has.
    """

    forward: Forward
    cache: RebatchCache
    make_sampler: MakeSampler
    masks_as: torch.dtype | None
    fixed: FixedSteps | None
    _rows: list[Newcomer] = field(default_factory=list)
    _draws: int = 0  # since the sampler was made
    _places: list[int] = field(default_factory=list)  # in the sampler, or NOT_IN_SAMPLER
    # [N] the tokens that the next step reads; None: rows have come or gone.
    _last: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self._sampler = self.make_sampler([])

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, number: int) -> bool:
        return number in self.numbers

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple([number for number, _ in self._rows])

    def first_tokens(self, newcomers: Sequence[Newcomer], logits: torch.Tensor) -> StepOutput:
        """The first tokens of newcomers that were prefilled apart, from `logits` [N, V]."""
        sampler = self.make_sampler([live.as_row() for _, live in newcomers])
        return advance(newcomers, sampler.draw(logits, 0).tolist())

    def join(self, rows: Sequence[CachedRow]) -> int:
        """Embed rows, which decode from the next step on. Returns their number.

        If memory runs out, none of them joins, and the error is raised.
        """
        if not rows:
            return 0
        longest = max(cached[0][0].shape[1] for _, cached in rows)
        self.cache.make_room(len(self) + len(rows), longest, ahead=1)
        try:
            for _, cached in rows:
                self.cache.join(cached)
        except RuntimeError:
            self.cache.leave(range(len(self), self.cache.rows))
            raise
        self._rows += [newcomer for newcomer, _ in rows]
        self._places += [NOT_IN_SAMPLER] * len(rows)
        self._last = None
        return len(rows)

    def peek(self, number: int) -> tuple[LiveRow, RowKV]:
        """A row and views of its cache, valid until rows come, go or step."""
        index = self.numbers.index(number)
        return self._rows[index][1], self.cache.read(index)

    def drop(self, number: int) -> None:
        self._drop([self.numbers.index(number)])

    def step(self, parts: int = 1) -> StepOutput:
        """Decode one more token for every row, in `parts` passes; rows that end leave."""
        cache = self.cache
        last = self._prepared()
        cache.make_room(len(self), 0, ahead=1)
        if parts == 1:
            logits = self._logits(last)
        else:  # a pass over fewer rows needs less memory besides the cache
            mask = cache.mask(self.masks_as)
            positions = cache.positions()
            pieces = []
            size = -(-len(self) // parts)
            for first in range(0, len(self), size):
                rows = slice(first, first + size)
                with cache.rows_from(first):
                    own = None if mask is None else mask[rows]
                    pieces.append(self.forward(last[rows, None], own, positions[rows], cache))
            logits = torch.cat(pieces)
        drawn = self._sampler.draw(logits, self._draws)
        tokens = drawn.tolist()
        cache.advance()
        return self._take(drawn, tokens)

    def warm_up(self, steps: int) -> None:
        """Do what the first of the next `steps` steps would do once for all of them, without a
        step: make room, and capture graphs.
        """
        last = self._prepared()
        self.cache.make_room(len(self), 0, ahead=steps)
        if self._fixed is not None:
            self._fixed.warm_up(last, steps)

    def step_with(self, newcomers: Sequence[Newcomer]) -> StepOutput:
        """Decode one more token for every row, and prefill newcomers in the same pass.

        This is BATON's vector shaping (section 4.1): the rows' single tokens are padded to the
        longest newcomer. The padding leaves the cache after the pass; the paper keeps it until all
        columns before it are released.
        """
        cache = self.cache
        old = len(self)
        last = self._prepared()
        tokens = [live.row.tokens for _, live in newcomers]
        lengths = [len(row) for row in tokens]
        width = max(lengths)
        cache.make_room(old + len(newcomers), width, ahead=width)
        cache.clear_behind(len(newcomers))
        device = last.device
        ids = torch.zeros(old + len(newcomers), width, dtype=torch.long, device=device)
        ids[:old, -1] = last
        for index, row in enumerate(tokens, old):
            ids[index, width - len(row) :] = torch.tensor(row, device=device)
        own = torch.tensor([1] * old + lengths, device=device)[:, None]
        column = torch.arange(width, device=device)[None, :] - (width - own)
        positions = column.clamp(min=0)
        positions[:old, -1:] = cache.positions()
        past = cache.mask(None)  # of the rows; newcomers attend to nothing in the window
        window = torch.zeros(len(ids), cache.width, dtype=torch.bool, device=device)
        window[:old] = True if past is None else past[:, :-1]
        mask = torch.cat([window, column >= 0], dim=1)
        logits = self.forward(ids, mask, positions, cache)
        sampler = self._sampler.regrouped(
            range(old), [live.as_row() for _, live in newcomers], self._draws
        )
        drawn = sampler.draw(logits, 0)
        tokens_drawn = drawn.tolist()
        cache.take_in(width, lengths)
        self._rows += newcomers
        self._sampler = sampler
        self._draws = 0
        self._places = list(range(len(self)))
        return self._take(drawn, tokens_drawn)

    def clear(self) -> None:
        """Drop all rows and their memory."""
        self._rows.clear()
        self._places.clear()
        self.cache.clear()
        self._sampler = self.make_sampler([])
        self._draws = 0
        self._last = None

    @property
    def _fixed(self) -> FixedSteps | None:
        """What makes the next steps in fixed shapes, if that is possible now."""
        return self.fixed if self.cache.is_flat else None

    def _logits(self, last: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of the tokens after `last` [N]."""
        if self._fixed is not None:
            return self._fixed.logits(last)
        cache = self.cache
        return self.forward(last[:, None], cache.mask(self.masks_as), cache.positions(), cache)

    def _prepared(self) -> torch.Tensor:
        """[N] the tokens that a step reads. If rows have come or gone since the last step, this
        makes them and a sampler.
        """
        if self._last is not None:
            return self._last
        kept = [place for place in self._places if place != NOT_IN_SAMPLER]
        new = [live.as_row() for _, live in self._rows[len(kept) :]]
        if self._places[: len(kept)] == kept:
            sampler = self._sampler.regrouped(kept, new, self._draws)
        else:  # rows left after others had joined, and new rows took their places
            sampler = self.make_sampler([live.as_row() for _, live in self._rows])
        tokens = [live.last_token for _, live in self._rows]
        self._last = torch.tensor(tokens, dtype=torch.long, device=self.cache.device)
        self._sampler = sampler
        self._draws = 0
        self._places = list(range(len(self)))
        return self._last

    def _take(self, drawn: torch.Tensor, tokens: Sequence[int]) -> StepOutput:
        """Give the rows their drawn tokens; from here on nothing can fail."""
        self._last = drawn
        self._draws += 1
        step = advance(self._rows, tokens)
        if step.ended:
            ended = {number for number, _ in step.ended}
            self._drop([index for index, (number, _) in enumerate(self._rows) if number in ended])
        return step

    def _drop(self, indices: Sequence[int]) -> None:
        order = self.cache.leave(indices)
        self._rows = [self._rows[index] for index in order]
        self._places = [self._places[index] for index in order]
        self._last = None
        if self._rows:
            self.cache.shrink()
        else:
            self.clear()
