"""The laws of latency, memory and swaps that policies decide by, and policies of engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from toolkit.sched.policies.base import Policy


class LatencyLaw(Protocol):
    """How long a pass and its parts take, in seconds (SCLS paper, Eq. 1-4).

    N is the batch size and L the batch's padded input length in tokens. Laws are values: equal laws
    give equal answers, so a law may cache what it derives.
    """

    def __hash__(self) -> int: ...

    @property
    def prefill_emits_token(self) -> bool:
        """Whether prefill gives the first output token; if so, S - 1 steps follow (Eq. 1-2)."""

    def prefill_s(self, batch_size: int, input_length: float) -> float:
        """T_prefill(N, L) in seconds, Eq. 3."""

    def decode_s(self, batch_size: int, input_length: float, steps: int) -> float:
        """Seconds of `steps` decode steps after L tokens: sum of tau(L + i, N), i >= 1 (Eq. 2)."""

    def serve_table(self, max_batch_size: int, steps: int) -> NDArray[np.float64]:
        """Coefficients t [3, max_batch_size + 1]: T_serve = t[0,N] + t[1,N] L + t[2,N] L^2.

        Column 0 is unused. Laws with a flat part have two rows more: T_serve is the larger of this
        and t[3,N] + t[4,N] L + t[2,N] L^2. A slice of S tokens takes S decode steps, or S - 1 if
        `prefill_emits_token`.
        """

    @property
    def padded(self) -> bool:
        """Whether every row costs as much as the longest. If not, L is the rows' mean length."""

    @property
    def round_s(self) -> float:
        """Seconds of a pass besides prefills and steps: dispatch, result. 0: not measured."""

    def pass_s(self, batch_size: int, start: float, end: float) -> float:
        """Seconds of a prefill pass over columns `start` to `end` of N rows after cached columns.

        It is T(N, end) - T(N, start) + T(N, 0): the first pass has the fixed cost of a batch.
        """

    def leave_s(self, length: float) -> float:
        """Seconds to remove a row of about `length` tokens from a batch; 0: not measured."""

    def times(self, factor: float) -> LatencyLaw:
        """Return the law of an engine on which everything takes `factor` times as long."""


class MemoryLaw(Protocol):
    """How many rows fit a worker's memory (SCLS paper, Eq. 5-9 and Algorithm 2)."""

    def max_batch(
        self, input_lengths: NDArray[np.int64], steps: int, reserve: float
    ) -> NDArray[np.int64]:
        """N_max for batches of `steps` steps, padded to each of `input_lengths` [n] tokens.

        The share `reserve` of the memory is kept free. 0 if not even one row fits.
        """

    @property
    def usable_tokens(self) -> int:
        """The tokens that all rows of a continuous batch may take together, padding included."""


class SwapLaw(Protocol):
    """How long a cache takes between device and host memory, each way, by its tokens."""

    @property
    def overlaps(self) -> bool:
        """Whether transfers can run beside compute; else passes wait despite `Moves.overlap`."""

    def out_s(self, tokens: int) -> float:
        """Seconds from the device to host memory."""

    def in_s(self, tokens: int) -> float:
        """Seconds from host memory to the device."""


@runtime_checkable
class BuiltIn(Protocol):
    """A scheduling policy of an engine: a frozen object with flags of that engine as fields.

    It is named, compared and tuned like the toolkit's policies, and simulated by a model of the
    engine. The toolkit's scheduler cannot run it.
    """

    name: ClassVar[str]
    continuous: ClassVar[bool]
    engine: ClassVar[str]  # `engine.name` of the recipes that have it


AnyPolicy: TypeAlias = "Policy | BuiltIn"
