"""What scheduling cost while a replay ran: read from a server of llmctl's, which counts it (docs/serving.md)."""

from __future__ import annotations

from pydantic import Field

from toolkit.endpoints.scrape import scrape
from toolkit.endpoints.target import Target
from toolkit.errors import InputError
from toolkit.files.envelope import Strict

COUNTED = {  # field of `Scheduling`, and the series it is the growth of
    "batches": "llmctl_batches_total",
    "steps": "llmctl_engine_steps_total",
    "engine_s": "llmctl_engine_seconds_total",
    "reporting_s": "llmctl_reporting_seconds_total",
    "deciding_s": "llmctl_deciding_seconds_sum",
    "hops": "llmctl_hop_seconds_count",
    "hop_s": "llmctl_hop_seconds_sum",
}


class Scheduling(Strict):
    """What a server spent beside running the model, over all its workers. Seconds are of wall time."""

    batches: int = Field(description="slices or rounds")
    steps: int
    engine_s: float = Field(description="inside the engines, reporting included")
    reporting_s: float = Field(description="between two steps, to send tokens and hear of cancellations")
    deciding_s: float = Field(description="in the scheduler, in the front's process")
    hops: int = Field(description="batches that followed one at once")
    hop_s: float = Field(description="from the end of the batch before to their start, deciding included")

    def text(self) -> str:
        """One line for people. Shares are of the engine's time, which the front's other work is not part of."""
        shares = [100.0 * value / self.engine_s for value in (self.deciding_s, self.hop_s, self.reporting_s)]
        each_ms = [1e3 * self.deciding_s / self.batches, 1e3 * self.hop_s / max(self.hops, 1)]
        step = f"{self.steps / self.batches:.1f} steps of {1e3 * self.engine_s / max(self.steps, 1):.2f} ms"
        parts = f"deciding {shares[0]:.2f} %, hop {shares[1]:.2f} %, reporting {shares[2]:.2f} % of engine time"
        return f"scheduler: {parts}; per batch of {step}: {each_ms[0]:.3f} and {each_ms[1]:.3f} ms"


def counts(target: Target) -> dict[str, float]:
    """What a server of llmctl's counts, by series, and sums of several kinds by `name:kind`.

    `InputError` where it does not answer.
    """
    return {
        f"{sample.name}:{sample.labels['of']}" if "of" in sample.labels else sample.name: sample.value
        for sample in scrape(target)
    }


def counts_or_none(target: Target) -> dict[str, float]:
    """The same; empty where it is silent."""
    try:
        return counts(target)
    except InputError:
        return {}


def scheduling(before: dict[str, float], after: dict[str, float]) -> Scheduling | None:
    """What it cost between two looks; None where nothing ran, or the server does not count it."""
    if not set(COUNTED.values()) <= before.keys() & after.keys():
        return None
    grown = {field: after[series] - before[series] for field, series in COUNTED.items()}
    return Scheduling.model_validate(grown) if grown["batches"] and grown["engine_s"] else None
