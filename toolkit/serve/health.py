"""What the server says of its own state.

`/health` is about the front alone: the loop that answers it turns, and nothing has ended the front. `/ready` says
whether requests should come here. A worker that dies or hangs is the server's own to replace, and its requests go on;
a manager that restarted the server for it would lose them.
"""

from __future__ import annotations

from toolkit.files.identity import identity
from toolkit.sched.footprint import footprint
from toolkit.sched.types import Worker
from toolkit.serve.driver import Driver
from toolkit.serve.live import Flight
from toolkit.serve.metrics import Gauges, WorkerGauges

NO_WORKER = "no worker is alive"


def failure(driver: Driver) -> str:
    """Why the front cannot go on and has to be started anew, or ''."""
    if driver.bug:
        return "the scheduler stopped at a bug"
    return "no worker can be loaded" if driver.failed else ""


def state(driver: Driver) -> str:
    """In a word or a few: "ready" where requests are welcome and some worker is loaded and alive."""
    if driver.leaving:
        return "leaving"
    if driver.state != "ready":
        return driver.state
    return "ready" if any(worker.alive for worker in driver.scheduler.workers) else NO_WORKER


def problem(driver: Driver) -> str:
    """What a person should know of: why nothing moves, or ''. While it loads or drains, nothing is wrong."""
    if failure(driver) or driver.state in ("loading", "stopped"):
        return failure(driver)
    alive = [worker.index for worker in driver.scheduler.workers if worker.alive]
    if not alive:
        return NO_WORKER
    hung = {one.worker: one for one in driver.silent()}
    return str(hung[alive[0]]) if hung.keys() >= set(alive) else ""


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
            worker.alive and worker.index in driver.facts,  # to the scheduler one that loads first is alive
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
