"""What scheduling cost while a replay ran: read from a server of llmctl's, which counts it (docs/serving.md)."""

from __future__ import annotations

from toolkit.endpoints.scrape import scrape
from toolkit.endpoints.target import Target
from toolkit.errors import InputError
from toolkit.files.bench import Scheduling

COUNTED = {  # field of `Scheduling`, and the series it is the growth of
    "batches": "llmctl_batches_total",
    "steps": "llmctl_engine_steps_total",
    "engine_s": "llmctl_engine_seconds_total",
    "reporting_s": "llmctl_reporting_seconds_total",
    "deciding_s": "llmctl_deciding_seconds_sum",
    "hops": "llmctl_hop_seconds_count",
    "hop_s": "llmctl_hop_seconds_sum",
}


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
