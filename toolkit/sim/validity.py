"""Where the laws were measured, and how many batches of a simulation lie outside: their times are extrapolated.

Workers that count are subclasses, so that a simulation which cannot leave the range pays nothing for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.files.fit import Fit, Range
from toolkit.sched.types import Batch, Request, RoundResult
from toolkit.sim.continuous import RoundWorker
from toolkit.sim.slab import SlabWorker
from toolkit.sim.worker import SimWorker


@dataclass(slots=True, frozen=True)
class Validity:
    """The largest batch and the longest input or cached length at which each law was measured."""

    prefill: Range
    decode: Range

    @classmethod
    def of(cls, fit: Fit) -> Validity:
        """That of a fit."""
        return cls(fit.prefill.valid, fit.decode.valid)

    def __str__(self) -> str:
        return (
            f"prefill up to N {self.prefill.batch_size_max}, L {self.prefill.length_max:,}; "
            f"decode up to N {self.decode.batch_size_max}, l {self.decode.length_max:,}"
        )

    def holds(self, requests: Sequence[Request], outputs: Sequence[int]) -> bool:
        """Whether no batch of these can be outside. The prompt of who returns holds what was generated."""
        limit = min(self.prefill.length_max, self.decode.length_max)
        rows = min(self.prefill.batch_size_max, self.decode.batch_size_max)
        lengths = (request.prompt_tokens + output for request, output in zip(requests, outputs, strict=True))
        return len(requests) <= rows and all(length <= limit for length in lengths)

    def left_by(self, entering: int, input_length: int, rows: int, cached_length: float) -> bool:
        """Whether a prefill of `entering` rows, or decode steps of `rows` up to `cached_length`, are outside."""
        prefill, decode = self.prefill, self.decode
        return (
            rows > decode.batch_size_max
            or cached_length > decode.length_max
            or entering > prefill.batch_size_max
            or input_length > prefill.length_max
        )


class CountingSimWorker(SimWorker):
    """A worker of static batches that counts those outside `valid`."""

    def __init__(self, valid: Validity, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._valid = valid

    def _count(self, batch: Batch, generated: list[int], ran: int) -> None:
        super()._count(batch, generated, ran)
        size, length = len(batch.jobs), batch.input_length
        self._ledger.extrapolated += self._valid.left_by(size, length, size, length + ran)


class CountingRoundWorker(RoundWorker):
    """A worker of rounds that counts those outside `valid`."""

    def __init__(self, valid: Validity, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._valid = valid

    def finish(self) -> RoundResult:
        batch, rows = self._batch, len(self._resident)
        if batch is not None and rows:
            entering = self._prefilled_rows(batch)
            self._ledger.extrapolated += self._valid.left_by(
                entering, batch.input_length if entering else 0, rows, self._length() + self._ran
            )
        return super().finish()

    def _prefilled_rows(self, batch: Batch) -> int:
        return len(batch.jobs)


class CountingSlabWorker(CountingRoundWorker, SlabWorker):
    """A padded worker that counts rounds outside `valid`."""

    def _prefilled_rows(self, batch: Batch) -> int:
        return len(self._resident) if batch.jobs and self._shapes else len(batch.jobs)


def extrapolation_warning(percent: float, valid: object) -> str:
    """One line about `extrapolated_batches_percent`, with the range that was measured; empty where there is none."""
    if not percent:
        return ""
    return f"{percent:.3g} % of the batches are outside what the fit measured, so extrapolated: {valid}"
