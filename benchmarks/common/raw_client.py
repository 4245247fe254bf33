"""A client that costs almost nothing: bytes made beforehand, a socket per request. `told` reads a
stream.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field

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


@dataclass
class Answer:
    """What a client was told."""

    status: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    stop_reason: list[str] = field(default_factory=list)
    usage: list[dict[str, int]] = field(default_factory=list)
    done: int = 0
    ids: int = 0
    created: int = 0
    roles: int = 0
    errors: list[str] = field(default_factory=list)


def told(status: int, body: bytes) -> Answer:
    """A streamed answer, read."""
    answer = Answer(status)
    names = set()
    times = set()
    for event in body.replace(b"\r\n", b"\n").split(b"\n\n"):
        if not event.startswith(b"data: "):
            continue
        if event == b"data: [DONE]":
            answer.done += 1
            continue
        fields = json.loads(event[6:])
        if "error" in fields:
            answer.errors.append(fields["error"]["message"])
            continue
        names.add(fields["id"])
        times.add(fields["created"])
        if fields.get("usage"):
            answer.usage.append(fields["usage"])
        for choice in fields["choices"]:
            delta = choice.get("delta") or {}
            answer.roles += "role" in delta
            answer.text += choice.get("text") or delta.get("content") or ""
            answer.token_ids += choice.get("token_ids") or []
            answer.finish += [choice["finish_reason"]] if choice.get("finish_reason") else []
            answer.stop_reason += [choice["stop_reason"]] if choice.get("stop_reason") else []
    answer.ids = len(names)
    answer.created = len(times)
    return answer
