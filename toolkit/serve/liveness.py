"""Alive means progress, not that a process exists: which workers have been silent for longer than a batch explains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from toolkit.serve.live import Flight

CHECK_EVERY_S = 1.0


@dataclass(slots=True, frozen=True)
class Patience:
    """How long a worker may say nothing: so many times its batch's estimate, and `grace_s` on top."""

    times: float = 10.0
    grace_s: float = 30.0


class Silent(NamedTuple):
    """A worker that has said nothing for too long."""

    worker: int
    silent_s: float
    estimated_s: float

    def __str__(self) -> str:
        said = f"worker {self.worker} has been silent for {self.silent_s:.0f} s"
        return f"{said} in a batch of {self.estimated_s:.2f} s"


def silent(flights: Mapping[int, Flight], patience: Patience, now_s: float) -> Iterator[Silent]:
    """Those among the workers that run something."""
    for worker, flight in flights.items():
        silent_s, estimated_s = now_s - flight.sign_s, flight.batch.estimated_s
        if silent_s > patience.times * estimated_s + patience.grace_s:
            yield Silent(worker, silent_s, estimated_s)
