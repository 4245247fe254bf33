"""What the server says of its own state: alive means progress, not that the process exists."""

from __future__ import annotations

from toolkit.sched.footprint import footprint
from toolkit.serve.driver import Driver
from toolkit.serve.live import Flight
from toolkit.serve.metrics import Gauges

PATIENCE = 10.0  # a batch may take this many times its estimate
GRACE_S = 30.0  # and this long on top


def problem(driver: Driver) -> str:
    """Why the server is not healthy, or ''. Loading and draining are healthy."""
    if driver.bug:
        return "the scheduler stopped at a bug"
    if driver.state in ("loading", "stopped"):
        return ""
    if not any(worker.alive for worker in driver.scheduler.workers):
        return "no worker is alive"
    now_s = driver.now_s
    for worker, flight in driver.flights.items():
        silent_s = now_s - flight.sign_s
        if silent_s > PATIENCE * flight.batch.estimated_s + GRACE_S:
            return (
                f"worker {worker} has been silent for {silent_s:.0f} s in a batch of {flight.batch.estimated_s:.2f} s"
            )
    return ""


def is_ready(driver: Driver) -> bool:
    """All workers were loaded, and new requests are welcome."""
    return driver.state == "ready" and not driver.leaving


def gauges(driver: Driver) -> Gauges:
    """What metrics read at a scrape."""
    workers = driver.scheduler.workers
    capacity = sum(facts.capacity_tokens for facts in driver.facts.values())
    used = sum(_padded_tokens(flight) for flight in driver.flights.values() if not flight.batch.keep_cache)
    used += sum(footprint(worker).taken + worker.held.tokens for worker in workers)
    return Gauges(
        driver.running,
        driver.waiting,
        min(used / capacity, 1.0) if capacity else 0.0,
        capacity,
        sum(worker.alive for worker in workers),
        [worker.load_s for worker in workers],
    )


def _padded_tokens(flight: Flight) -> int:
    """What the batch may fill at most: every row is padded to the longest, and runs for all steps (SCLS Eq. 5)."""
    batch = flight.batch
    return batch.size * (batch.input_length + batch.steps)
