"""What a server's front adds to latencies: HTTP, parsing and tokenizing on the way in, the stream on the way out.

A scheduler's clock begins when a request is submitted and its tokens end at the driver; clients see them later. The
delay is taken for the same with every request: all arrivals move alike, so nothing else changes. What is left out: that
it grows where the front is short of CPU.

Where workers compute on the front's own cores, it also takes time from the batches that run: taking in a request
costs each of them the same time. A crowd's batches are slower while it arrives than later.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolkit.errors import InputError
from toolkit.metrics import Served


@dataclass(slots=True, frozen=True)
class FrontDelay:
    """Seconds by which clients see a request's first and last token later than if they called the scheduler itself."""

    first_s: float = 0.0
    last_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.first_s >= 0.0 and self.last_s >= 0.0):
            raise InputError(f"front: delays of {self.first_s} and {self.last_s} s are not possible; both are >= 0")

    def seen(self, served: Served) -> Served:
        """The requests as their clients see them."""
        first_s, finish_s = served.first_token_s + self.first_s, served.finish_s + self.last_s
        return replace(served, first_token_s=first_s, finish_s=finish_s)


NO_DELAY = FrontDelay()


class Intake:
    """What taking in requests costs running batches.

    Args:
        arrivals_s: when requests arrive, in rising order.
        cost_s: seconds by which each makes every batch longer that runs then.
    """

    def __init__(self, arrivals_s: Sequence[float] = (), cost_s: float = 0.0) -> None:
        if not cost_s >= 0.0:
            raise InputError(f"an arrival that costs batches {cost_s} s is not possible; it is >= 0")
        self._arrivals_s = arrivals_s
        self._cost_s = cost_s

    def end_s(self, start_s: float, work_s: float) -> float:
        """When `work_s` seconds of a batch's own work are done that started at `start_s`."""
        end_s = start_s + work_s
        if not self._cost_s:
            return end_s
        arrivals_s, met = self._arrivals_s, 0
        first = bisect_right(arrivals_s, start_s)  # those that it waited for were taken in before it
        while (now_met := bisect_left(arrivals_s, end_s, first + met) - first) > met:
            met = now_met
            end_s = start_s + work_s + met * self._cost_s
        return end_s


NO_INTAKE = Intake()
