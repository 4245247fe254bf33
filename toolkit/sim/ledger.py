"""What happened in a simulation: the books that its workers write and its metrics are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from toolkit.metrics import Served
from toolkit.sim.token_gaps import TokenGaps

RunsOut = Callable[[int, int, int, int], bool]  # batch id, N, L, S: does this batch run out of memory?


@dataclass(slots=True)
class Ledger:
    """What happened to each request (parallel lists, by request number) and to the workers, as it happens."""

    arrival_s: list[float]
    output_tokens: list[int]  # the truth, which no policy sees
    workers: int
    first_token_s: list[float] = field(init=False)
    last_token_s: list[float] = field(init=False)
    max_gap_s: list[float] = field(init=False)
    ok: list[bool] = field(init=False)
    batches: int = 0
    rows: int = 0
    pad_tokens: int = 0
    invalid_tokens: int = 0
    decoding_steps: int = 0
    early_returns: int = 0
    oom_batches: int = 0
    extrapolated: int = 0  # batches or rounds outside the range that the laws were measured in
    memory_token_steps: float = 0  # tokens in the cache, padding included, summed over decode steps
    peak_tokens: float = 0  # the most tokens in one worker's cache
    attempts: int = 0  # static batches, or attempts to admit for which the peak to come was asked for
    future_token_attempts: float = 0  # that peak, by the true lengths, summed over them
    token_gaps: TokenGaps | None = None  # where they are asked for
    evictions: int = 0
    reroutes: int = 0  # residents who left their worker after a slice
    rounds: int = 0  # of continuous workers, as are those below
    row_steps: int = 0  # residents, summed over decode steps
    swaps_out: int = 0
    swaps_in: int = 0
    swapped_tokens: int = 0  # both ways
    swap_wait_s: float = 0.0  # that workers waited for transfers and computed nothing
    peak_host_tokens: int = 0  # the most tokens in one worker's host memory
    busy_s: list[float] = field(init=False)
    completed_s: list[float] = field(init=False)

    def __post_init__(self) -> None:
        n = len(self.arrival_s)
        self.first_token_s = [-1.0] * n
        self.last_token_s = [0.0] * n
        self.max_gap_s = [0.0] * n
        self.ok = [False] * n
        self.busy_s = [0.0] * self.workers
        self.completed_s = [0.0] * self.workers

    def of_kind(self) -> Ledger:
        """Books for the workers of another kind: what happens to requests is written into the same lists.

        What is counted is counted anew, since tokens mean another share of another memory.
        """
        other = Ledger([], self.output_tokens, 0, token_gaps=self.token_gaps)
        for name in SHARED:
            setattr(other, name, getattr(self, name))
        return other

    def add(self, other: Ledger, usable_ratio: float) -> None:
        """Count what `other` has counted, whose workers' memory is 1 / `usable_ratio` of that of those here."""
        for name in COUNTED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in TOKENS:
            setattr(self, name, getattr(self, name) + getattr(other, name) * usable_ratio)
        self.peak_tokens = max(self.peak_tokens, other.peak_tokens * usable_ratio)
        self.peak_host_tokens = max(self.peak_host_tokens, other.peak_host_tokens)

    def served(self) -> Served:
        """The requests as arrays for `toolkit.metrics`."""
        ok = np.array(self.ok)
        return Served(
            arrival_s=np.array(self.arrival_s),
            first_token_s=np.array(self.first_token_s),
            finish_s=np.array(self.last_token_s),
            output_tokens=np.array(self.output_tokens, dtype=np.int64),
            max_gap_s=np.array(self.max_gap_s),
            ok=ok,
        )


SHARED = ("arrival_s", "first_token_s", "last_token_s", "max_gap_s", "ok", "busy_s", "completed_s")
TOKENS = ("memory_token_steps", "future_token_attempts")  # sums of them
COUNTED = (
    *("batches", "rows", "pad_tokens", "invalid_tokens", "decoding_steps", "early_returns", "oom_batches"),
    *("extrapolated", "attempts", "evictions", "reroutes", "rounds", "row_steps"),
    *("swaps_out", "swaps_in", "swapped_tokens", "swap_wait_s"),
)
