"""A client that costs almost nothing: bytes made beforehand, a socket per request."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from contextlib import ExitStack, suppress

HEAD = b"Host: localhost\r\nContent-Type: application/json\r\nConnection: close"


def post(path: str, body: bytes, *, chunked: bool = False) -> bytes:
    """The bytes of a request with a body; `chunked`: the body has the form of chunks."""
    size = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(body)
    return b"POST %s HTTP/1.1\r\n%s\r\n%s\r\n\r\n%s" % (path.encode(), HEAD, size, body)


def request(**fields: object) -> bytes:
    """The bytes of a completion request."""
    return post("/v1/completions", json.dumps(fields).encode())


async def send(port: int, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send it to a server on this machine; the reader gives the answer with its head."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    return reader, writer


def free_ports(count: int) -> list[int]:
    """Ports of this machine on which nothing listens."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def listens(port: int, patience_s: float) -> bool:
    """Wait until something listens on the port; False if nothing does in time."""
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return True
        time.sleep(0.05)
    return False


def wait_for(port: int) -> None:
    """As `listens`, for a minute. `SystemExit` if nothing listens then."""
    if not listens(port, 60.0):
        raise SystemExit(f"nothing listens on port {port}")
