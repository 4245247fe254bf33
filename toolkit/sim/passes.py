"""The scheduler of a paged engine as the simulator drives it: it plans passes, and knows no time.

`PassScheduler` is what all of them have in common: the model of vLLM's (`toolkit.sim.paged`), the
model of vLLM's with drafts (`toolkit.sim.drafts`), and the installed vLLM's own
(`toolkit.sim.installed`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from toolkit.errors import InputError
from toolkit.estimators.steps import StepShape
from toolkit.sched.policies.parameters import Value
from toolkit.sim.blocks import BlockPool, PagedRequest


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


NO_ROWS: list[PagedRequest] = []  # of passes where each row that decodes gets its token


class PagedPass:
    """What the next forward pass computes, and the rows that were preempted for it.

    Attributes:
        paused: rows that decode, but get no token in this pass as in those before.
        resumed: rows that decode again after such a pass.
        apart: how many of the scheduler's decoding rows get no token, or are `resumed`.
    """

    __slots__ = ("apart", "chunks", "paused", "preempted", "resumed", "rows", "shape")

    def __init__(
        self, shape: StepShape, chunks: list[Chunk], preempted: list[PagedRequest]
    ) -> None:
        self.shape = shape
        self.rows = shape.rows  # kept, because each pass reads it several times
        self.chunks = chunks
        self.preempted = preempted
        self.paused: list[PagedRequest] = NO_ROWS
        self.resumed: list[PagedRequest] = NO_ROWS
        self.apart = 0


class PassScheduler:
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

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.waiting: deque[PagedRequest] = deque()
        self.running: dict[PagedRequest, None] = {}
        self.decoding = 0
        self.accepted = 0
        self.drafted = 0

    def add(self, row: PagedRequest) -> None:
        """A request arrives."""
        self.waiting.append(row)

    def change(self, settings: Mapping[str, Value]) -> None:
        """New values of flags, from the next pass on. `InputError` where that is not modelled."""
        raise InputError(
            "settings of a running engine are modelled with one group of caches, without drafts",
            "simulate each setting on its own",
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

    def abort(self) -> list[PagedRequest]:
        """The engine dies: its unfinished requests. What they generated is off their `left`."""
        raise NotImplementedError

    def close(self) -> None:
        """It is needed no more."""
