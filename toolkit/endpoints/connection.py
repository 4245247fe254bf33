"""Requests as bytes, each on a connection of its own, and the wait for their ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec

from toolkit.endpoints.stream import Sample, StreamCall
from toolkit.endpoints.target import Target

INTERRUPTED = "interrupted"


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's where there is one: the client shares the machine with what it measures."""
    try:
        import uvloop
    except ImportError:  # Windows
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


class Connection:
    """How a target is reached. What is made before the clock starts costs nothing while it runs."""

    def __init__(self, target: Target) -> None:
        parts = urlsplit(target.url)
        self._tls = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._tls else 80)
        host = parts.netloc.rpartition("@")[2]
        lines = [f"POST {parts.path}/v1/completions HTTP/1.1", f"host: {host}", "connection: close"]
        lines += ["content-type: application/json", "accept: text/event-stream"]
        lines += [f"{name}: {value}" for name, value in target.headers.items()]
        self._head = "\r\n".join(lines).encode()

    def request(self, fields: dict[str, object]) -> bytes:
        """The bytes of one request, head and body."""
        body = msgspec.json.encode(fields)
        return b"%s\r\ncontent-length: %d\r\n\r\n%s" % (self._head, len(body), body)

    async def send(self, request: bytes, sample: Sample, clock: Callable[[], float], timeout_s: float) -> None:
        """Send one request and wait for its end, whatever it is; only `sample` tells."""
        call = StreamCall(request, sample, clock)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().create_connection(
                    lambda: call, self._host, self._port, ssl=self._tls or None
                )
                await call.closed.wait()
        except TimeoutError:
            call.end(f"no end within {timeout_s:g} s")
        except OSError as error:
            call.end(f"cannot connect: {error.strerror or error}")
        except asyncio.CancelledError:
            call.end(INTERRUPTED)
        await call.closed.wait()
