"""What a server's front adds to latencies: HTTP, parsing and tokenizing on the way in, the stream on the way out.

A scheduler's clock begins when a request is submitted and its tokens end at the driver; clients see them later. The
delay is taken for the same with every request: all arrivals move alike, so nothing else changes. What is left out: that
it grows where the front is short of CPU.
"""

from __future__ import annotations

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
