"""Workers that are kept busy with what is measured, and with the same unrecorded while it is not all done."""

from __future__ import annotations

import asyncio
from typing import Protocol

from toolkit.workers.protocol import WorkerEvent, Workers


class Feed(Protocol):
    """Gives each worker something to run whenever it has nothing, until what counts is `done`."""

    @property
    def done(self) -> asyncio.Event: ...

    def begin(self) -> None:
        """Once all workers are ready: something unrecorded for each, to warm up."""
        ...

    def on_event(self, event: WorkerEvent) -> None: ...


async def run_feed(workers: Workers, feed: Feed) -> None:
    """Start the workers, run the feed to its end, and stop them. `EngineError` where one cannot load."""
    try:
        await workers.start(feed.on_event)
        feed.begin()
        await feed.done.wait()
    finally:
        await workers.stop()
