"""A client that costs almost nothing: bytes made beforehand, a socket per request."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from contextlib import suppress

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


def free_port() -> int:
    """A port of this machine on which nothing listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_for(port: int) -> None:
    """Wait until something listens on the port. `SystemExit` if nothing does within a minute."""
    deadline_s = time.monotonic() + 60.0
    while time.monotonic() < deadline_s:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)
    raise SystemExit(f"nothing listens on port {port}")
