"""A simulated worker's caches that wait: paused or in transfer on the device, and in host memory. In tokens, by job."""

from __future__ import annotations

from toolkit.sched.protocols import SwapLaw
from toolkit.sched.types import Job, Moves
from toolkit.sim.ledger import Ledger


class Shelves:
    """The books of what a worker keeps besides its residents' caches.

    Args:
        law: how long transfers take; None where there is no host memory, and nothing is ever swapped.
        ledger: where transfers are counted.
    """

    __slots__ = ("_host", "_ledger", "device", "device_tokens", "host_tokens", "law")

    def __init__(self, law: SwapLaw | None, ledger: Ledger) -> None:
        self.law = law
        self.device: dict[Job, int] = {}
        self.device_tokens = 0
        self.host_tokens = 0
        self._host: dict[Job, int] = {}
        self._ledger = ledger

    def put(self, job: Job, tokens: int) -> None:
        """A cache of so many tokens stays on the device while its job does not decode."""
        self.device[job] = tokens
        self.device_tokens += tokens

    def take(self, job: Job) -> int:
        """The job decodes again, or its cache on the device is dropped; the tokens that it holds."""
        tokens = self.device.pop(job)
        self.device_tokens -= tokens
        return tokens

    def drop(self, job: Job) -> bool:
        """The job's cache is dropped, if it is here; whether it was."""
        if job in self.device:
            self.take(job)
            return True
        tokens = self._host.pop(job, 0)
        self.host_tokens -= tokens
        return tokens > 0

    def duration_s(self, moves: Moves) -> float:
        """Seconds that the transfers of a round take, one after the other."""
        if not (moves.swap_out or moves.swap_in):
            return 0.0
        assert self.law is not None, "a policy swaps where there is no host memory"
        out_s = sum([self.law.out_s(self.device[job]) for job in moves.swap_out])
        return out_s + sum([self.law.in_s(self._host[job]) for job in moves.swap_in])

    def waits(self, moves: Moves) -> bool:
        """Whether a round's compute waits for its transfers."""
        return not (moves.overlap and self.law is not None and self.law.overlaps)

    def arriving(self, moves: Moves) -> int:
        """Tokens that what is swapped in will hold on the device."""
        return sum([self._host[job] for job in moves.swap_in])

    def transfer(self, moves: Moves) -> None:
        """The transfers of a round are done."""
        ledger, host = self._ledger, self._host
        for job in moves.swap_out:
            host[job] = tokens = self.take(job)
            self.host_tokens += tokens
            ledger.swapped_tokens += tokens
        ledger.peak_host_tokens = max(ledger.peak_host_tokens, self.host_tokens)
        for job in moves.swap_in:
            tokens = host.pop(job)
            self.host_tokens -= tokens
            self.put(job, tokens)
            ledger.swapped_tokens += tokens
        ledger.swaps_out += len(moves.swap_out)
        ledger.swaps_in += len(moves.swap_in)
