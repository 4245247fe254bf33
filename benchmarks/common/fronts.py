"""A front before replicas, on the caller's loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from socket import socket

from toolkit.routing.balancer import Balancer
from toolkit.routing.routers import make_router
from toolkit.routing.types import ReplicaTraits
from toolkit.server.application import Application
from toolkit.server.options import ServerOptions
from toolkit.server.pool import PoolBackend
from toolkit.server.process import listen
from toolkit.server.replicas import ReplicaNeeds, ReplicaPool
from toolkit.server.server import HttpServer


@asynccontextmanager
async def front_on(
    urls: Sequence[str], model: str, router: str, options: ServerOptions, hang_s: float
) -> AsyncIterator[tuple[ReplicaPool, socket]]:
    """A front before the replicas at these URLs, without keys: its pool, and where it listens."""
    balancer = Balancer(make_router(router, {}), [], block_tokens=64)
    pool = ReplicaPool(balancer, ReplicaTraits(100_000), ReplicaNeeds(model), hang_s=hang_s)
    app = Application(PoolBackend(pool, options), options)
    server = HttpServer(app, descriptors_each=2)
    with listen("127.0.0.1", 0) as listener:
        await server.start(listener)
        pool.renew(list(urls))
        try:
            yield pool, listener
        finally:
            await pool.stop()
            await server.stop()
