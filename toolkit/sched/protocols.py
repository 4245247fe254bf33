"""The interfaces of the scheduler: laws of latency, memory and swaps, and policies.

A policy has optional capabilities: `PlansRounds`, `UsesHistory`, `Reschedules`, `Ranks`,
`Reorders`, `Oracle`. `toolkit.sched.view` has what passes between the scheduler and a policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from toolkit.sched.types import Job
from toolkit.sched.view import Decision, LengthHistory, RoundPlanner, View


class SliceLaw(Protocol):
    """How long a static batch takes (SCLS paper, Eq. 1-4), in seconds.

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


class LatencyLaw(SliceLaw, Protocol):
    """A `SliceLaw` that also knows running batches: rows that join, leave and prefill in parts."""

    @property
    def padded(self) -> bool:
        """Whether every row costs as much as the longest. If not, L is the rows' mean length."""

    @property
    def round_s(self) -> float:
        """Seconds of a round besides prefills and steps: dispatch, result. 0: not measured."""

    def pass_s(self, batch_size: int, start: float, end: float) -> float:
        """Seconds of a prefill pass over columns `start` to `end` of N rows after cached columns.

        It is T(N, end) - T(N, start) + T(N, 0): the first pass has the fixed cost of a batch.
        """

    def leave_s(self, length: float) -> float:
        """Seconds to remove a row of about `length` tokens from a batch; 0: not measured."""


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
    """How long a cache of so many tokens takes between device and host memory, each way."""

    @property
    def overlaps(self) -> bool:
        """Whether transfers can run beside compute; else rounds wait despite `Moves.overlap`."""

    def out_s(self, tokens: int) -> float:
        """Seconds from the device to host memory."""

    def in_s(self, tokens: int) -> float:
        """Seconds from host memory to the device."""


class Policy(Protocol):
    """A scheduling policy: a frozen object with its parameters as fields.

    It keeps no state: everything that it may remember is in the `View`. So a decision depends only
    on what the scheduler saw, and a log of the calls replays exactly.
    """

    name: ClassVar[str]
    continuous: ClassVar[bool]  # whether its batches are rounds, which keep caches on the worker

    def route(self, view: View, now_s: float) -> Sequence[int] | None:
        """The index of each pooled job's worker; None: jobs stay in the pool until batched."""

    def plan(self, view: View, now_s: float) -> Decision:
        """What to run next. Called at every tick; an empty `Decision` starts nothing."""


@runtime_checkable
class BuiltIn(Protocol):
    """A scheduling policy of an engine: a frozen object with flags of that engine as fields.

    It is named, compared and tuned like the toolkit's policies, and simulated by a model of the
    engine. The toolkit's scheduler cannot run it.
    """

    name: ClassVar[str]
    continuous: ClassVar[bool]
    engine: ClassVar[str]  # `engine.name` of the recipes that have it


AnyPolicy: TypeAlias = Policy | BuiltIn


@runtime_checkable
class PlansRounds(Protocol):
    """A continuous policy with a planner, which the scheduler asks for each worker's rounds."""

    def planner(self, view: View) -> RoundPlanner | None:
        """The planner of one scheduler's workers; None: the scheduler calls `plan`."""


@runtime_checkable
class UsesHistory(Protocol):
    """A policy that sets the size and the start of the history of output lengths."""

    def first_history(self) -> LengthHistory:
        """The history before the first request ends."""


@runtime_checkable
class Reschedules(Protocol):
    """A policy that lets jobs leave their worker before they end and continue on another."""

    def release(self, view: View, now_s: float) -> Sequence[Job]:
        """Residents of idle workers that leave now: they lose their caches and keep their tokens.

        Called at every tick before `route`, which gives each of them a worker. There they wait
        behind the jobs that are already waiting.
        """


# Maps a job and its generated tokens to its standing; less is served first.
Standing = Callable[["Job", int], float]


@runtime_checkable
class Ranks(Protocol):
    """A policy that serves jobs in order of their standing: each worker gets a `RankedInbox`."""

    def standings(self, law: SliceLaw) -> Standing:
        """The standing of jobs under a worker's law. It must not change while a job waits."""


@runtime_checkable
class Reorders(Protocol):
    """A policy that changes the order in which jobs wait."""

    def reorder(self, view: View, now_s: float) -> tuple[Sequence[Job], Sequence[Job]]:
        """The jobs to defer behind all others at their worker, and the deferred jobs to advance.

        Called at every tick before `plan`.
        """


@runtime_checkable
class Oracle(Protocol):
    """A policy that needs the true output lengths, which only a simulation knows."""

    def with_lengths(self, output_tokens: Mapping[str, int]) -> Policy:
        """The same policy, with the true output length of each request id."""
