"""The laws of memory and swaps that policies decide by, and policies of engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from toolkit.sched.policies.base import Policy


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
