"""What the server says of its own state: alive means progress, not that the process exists."""

from __future__ import annotations

from toolkit.files.identity import identity
from toolkit.sched.footprint import footprint
from toolkit.serve.driver import Driver
from toolkit.serve.live import Flight
from toolkit.serve.liveness import silent
from toolkit.serve.metrics import Gauges


def problem(driver: Driver) -> str:
    """Why the server is not healthy, or ''. Loading and draining are healthy, and so is one of whom some work."""
    if driver.bug:
        return "the scheduler stopped at a bug"
    if driver.state in ("loading", "stopped"):
        return ""
    alive = [worker.index for worker in driver.scheduler.workers if worker.alive]
    if not alive:
        return "no worker is alive"
    hung = {one.worker: one for one in silent(driver.flights, driver.patience, driver.now_s)}
    return str(hung[alive[0]]) if hung.keys() >= set(alive) else ""


def is_ready(driver: Driver) -> bool:
    """All workers were loaded, and new requests are welcome."""
    return driver.state == "ready" and not driver.leaving


def gauges(driver: Driver) -> Gauges:
    """What metrics read at a scrape."""
    workers = driver.scheduler.workers
    capacity = sum(facts.capacity_tokens for facts in driver.facts.values())
    used = sum(kv_tokens(driver))
    return Gauges(
        driver.running,
        driver.waiting,
        min(used / capacity, 1.0) if capacity else 0.0,
        capacity,
        sum(worker.alive for worker in workers),
        [worker.load_s for worker in workers],
        driver.forecast.now(driver.now_s).ttft_s,
        identity(next(iter(driver.facts.values()))) if driver.facts else {},
    )


def kv_tokens(driver: Driver) -> list[int]:
    """What each worker's running batches may fill of its KV cache."""
    used = [footprint(worker).taken + worker.held.tokens for worker in driver.scheduler.workers]
    for worker, flight in driver.flights.items():
        used[worker] += 0 if flight.batch.keep_cache else _padded_tokens(flight)
    return used


def _padded_tokens(flight: Flight) -> int:
    """What the batch may fill at most: every row is padded to the longest, and runs for all steps (SCLS Eq. 5)."""
    batch = flight.batch
    return batch.size * (batch.input_length + batch.steps)
