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
    memory_token_steps: int = 0  # tokens in the cache, padding included, summed over decode steps
    peak_tokens: int = 0  # the most tokens in one worker's cache
    attempts: int = 0  # static batches, or attempts to admit for which the peak to come was asked for
    future_token_attempts: int = 0  # that peak, by the true lengths, summed over them
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
