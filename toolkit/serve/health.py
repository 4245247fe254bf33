"""What the server says of its own state: alive means progress, not that the process exists."""

from __future__ import annotations

from toolkit.files.identity import identity
from toolkit.sched.footprint import footprint
from toolkit.sched.types import Worker
from toolkit.serve.driver import Driver
from toolkit.serve.live import Flight
from toolkit.serve.metrics import Gauges, WorkerGauges


def problem(driver: Driver) -> str:
    """Why the server is not healthy, or ''. Loading and draining are healthy, and so is one of whom some work."""
    if driver.bug:
        return "the scheduler stopped at a bug"
    if driver.state in ("loading", "stopped"):
        return ""
    alive = [worker.index for worker in driver.scheduler.workers if worker.alive]
    if not alive:
        return "no worker is alive"
    hung = {one.worker: one for one in driver.watch.silent()}
    return str(hung[alive[0]]) if hung.keys() >= set(alive) else ""


def is_ready(driver: Driver) -> bool:
    """All workers were loaded, and new requests are welcome."""
    return driver.state == "ready" and not driver.leaving


def gauges(driver: Driver) -> Gauges:
    """What metrics read at a scrape."""
    workers = worker_gauges(driver)
    capacity = sum(one.kv_capacity or 0 for one in workers)
    used = sum(one.kv_tokens for one in workers)
    return Gauges(
        driver.running,
        driver.waiting,
        min(used / capacity, 1.0) if capacity else 0.0,
        capacity,
        workers,
        driver.forecast.now(driver.now_s).ttft_s,
        identity(next(iter(driver.facts.values()))) if driver.facts else {},
    )


def worker_gauges(driver: Driver) -> list[WorkerGauges]:
    """Each worker, as metrics and the status page show it."""
    return [
        WorkerGauges(
            worker.alive,
            worker.load_s,
            _rows(worker, driver.flights.get(worker.index)),
            footprint(worker).taken + worker.held.tokens + _padded_tokens(driver.flights.get(worker.index)),
            driver.facts[worker.index].capacity_tokens if worker.index in driver.facts else None,
        )
        for worker in driver.scheduler.workers
    ]


def _rows(worker: Worker, flight: Flight | None) -> int:
    if flight is None or flight.batch.keep_cache:
        return len(worker.residents)
    return sum(not live.status for live in flight.lives)


def _padded_tokens(flight: Flight | None) -> int:
    """What a slice may fill at most: every row is padded to the longest, and runs for all steps (SCLS Eq. 5)."""
    if flight is None or flight.batch.keep_cache:
        return 0
    batch = flight.batch
    return batch.size * (batch.input_length + batch.steps)
