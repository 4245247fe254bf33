"""The recorder as a process: listens, passes on until a signal ends it, lets what runs finish."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvloop

from toolkit.endpoints.upstream import Upstream
from toolkit.errors import InputError
from toolkit.serve.http import HttpServer, WireLimits
from toolkit.serve.recorder.proxy import MAX_BODY_BYTES, Recorder
from toolkit.serve.server import LAST_BYTES_S, Signals, first_of, is_loopback, listen, url
from toolkit.traces.log import TraceLog


@dataclass(frozen=True, slots=True)
class Recording:
    """What to record, and where. Times in seconds."""

    upstream: str
    host: str
    port: int
    out: Path
    max_bytes: int
    silence_s: float
    ending_s: float
    insecure: bool = False
    authorities: Path | None = None  # who may have signed the upstream's certificate; None: the system's


def record(order: Recording, on_ready: Callable[[str], None]) -> Counter[str]:
    """Record until a signal ends it; `on_ready` gets the URL. How requests for tokens ended.

    `InputError` for an address, an upstream or a file that cannot be used.
    """
    if not (order.insecure or is_loopback(order.host)):
        raise InputError(
            f"host {order.host} can be reached from other machines, and the recorder asks for no key of its own",
            "listen on 127.0.0.1, or add --insecure where the upstream asks for its key",
        )
    with (
        listen(order.host, order.port) as listener,
        TraceLog(order.out, order.max_bytes) as log,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_record(order, listener, log, on_ready))


async def _record(
    order: Recording, listener: socket.socket, log: TraceLog, on_ready: Callable[[str], None]
) -> Counter[str]:
    async with Upstream(order.upstream, order.silence_s, order.authorities) as upstream:
        host, port = listener.getsockname()[:2]
        if upstream.address[1] == port and (upstream.address[0] == host or is_loopback(upstream.address[0])):
            raise InputError(f"{upstream.shown} is the recorder itself", "name the server behind it as --upstream")
        await upstream.check_certificate()
        recorder = Recorder(upstream, log, local_hosts_only=is_loopback(order.host))
        await _serve(recorder, listener, order.ending_s, lambda: on_ready(url(listener)))
        return recorder.ended


async def _serve(recorder: Recorder, listener: socket.socket, ending_s: float, on_ready: Callable[[], None]) -> None:
    signals = Signals()
    server = HttpServer(recorder, WireLimits(body_bytes=MAX_BODY_BYTES, descriptors_each=2), dated=False)
    await server.start(listener)
    on_ready()
    await signals.first.wait()
    recorder.leaving = True
    await first_of(recorder.idle.wait(), signals.second.wait(), asyncio.sleep(ending_s))
    await server.stop(LAST_BYTES_S)
