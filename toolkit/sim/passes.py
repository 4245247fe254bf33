"""The scheduler of a paged engine as the simulator drives it: it plans passes, and knows no time.

`EngineScheduler` is what the models of vLLM's have in common: with one group of caches
(`toolkit.sim.paged`), with drafts (`toolkit.sim.drafts`) and with several groups
(`toolkit.sim.groups`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from toolkit.errors import InputError
from toolkit.estimators.steps import StepShape
from toolkit.sched.policies.parameters import Value
from toolkit.sim.blocks import BlockPool, PagedRequest, Pool

Row = TypeVar("Row")


class Chunk:
    """`new` tokens of an input that a row computes in a pass, after its `computed` ones."""

    __slots__ = ("computed", "new", "row")

    def __init__(self, row: PagedRequest, computed: int, new: int) -> None:
        self.row = row
        self.computed = computed
        self.new = new

    @property
    def completes(self) -> bool:
        """Whether the row gets a token in this pass."""
        return self.computed + self.new >= self.row.prompt


class RowsApart:
    """Decoding rows that a pass treats unlike the rest.

    Attributes:
        paused: rows that decode, but get no token in this pass as in those before.
        resumed: rows that decode again after such a pass.
        count: how many of the scheduler's decoding rows get no token, or are `resumed`.
    """

    __slots__ = ("count", "paused", "resumed")

    def __init__(self, paused: list[PagedRequest], resumed: list[PagedRequest], count: int) -> None:
        self.paused = paused
        self.resumed = resumed
        self.count = count


class PagedPass:
    """What the next forward pass computes, and the rows that were preempted for it. `apart`: None
    where each row that decodes gets its token.
    """

    __slots__ = ("apart", "chunks", "preempted", "rows", "shape")

    def __init__(
        self, shape: StepShape, chunks: list[Chunk], preempted: list[PagedRequest]
    ) -> None:
        self.shape = shape
        self.rows = shape.rows  # kept, because each pass reads it several times
        self.chunks = chunks
        self.preempted = preempted
        self.apart: RowsApart | None = None


class EngineScheduler(Generic[Row]):
    """The passes of one engine. `schedule` plans one, `commit` records that it was made (and more
    of the same rows), `settle` tells the scheduler the tokens of the oldest pass that it does not
    know yet: without a queue those of the last one, with a queue of two those of the one before.

    Attributes:
        pool: its blocks.
        waiting: requests that are not admitted.
        running: rows, in the order of their admission.
        decoding: of the next or the planned pass, rows with a complete input that get a token.
        accepted: drafts that became tokens with the last commit.
        drafted: drafts that its pass verified.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.waiting: deque[Row] = deque()
        self.running: dict[Row, None] = {}
        self.decoding = 0
        self.accepted = 0
        self.drafted = 0

    def add(self, row: PagedRequest) -> None:
        """A request arrives."""
        raise NotImplementedError

    def change(self, settings: Mapping[str, Value]) -> None:
        """New values of flags, from the next pass on. `InputError` where that is not modelled."""
        raise InputError(
            f"new settings of a running server ({', '.join(settings)}) are modelled with one group "
            "of caches, without drafts",
            "simulate each setting from its own start",
        )

    def schedule(self) -> PagedPass:
        """Plan the next pass and take its blocks. If the pass has no rows, every request has ended
        or waits, and the pass is not made.
        """
        raise NotImplementedError

    def ahead(self) -> int:
        """How many passes, the planned one included, decode the same rows whatever arrives, >= 1.

        Only the last of them may end a row, and all find the blocks that they need free.
        """
        return 1

    def commit(self, steps: int = 1) -> list[PagedRequest]:
        """Record the planned pass and `steps - 1` more of its rows; return those that ended."""
        raise NotImplementedError

    def settle(self, ended: Sequence[PagedRequest]) -> None:
        """The tokens of a pass are known; free the blocks of the rows that `ended` with it."""
        raise NotImplementedError


class PassScheduler(EngineScheduler[PagedRequest]):
    """A scheduler of rows that share one group of caches."""

    def __init__(self, pool: BlockPool) -> None:
        super().__init__(pool)
        self._pool = pool  # the same, by its own type

    def add(self, row: PagedRequest) -> None:
        self.waiting.append(row)
