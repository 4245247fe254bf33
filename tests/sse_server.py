"""A tiny server for the load generator's tests: loopback, a port of its own, one answer per
connection, no model.

`Answer` functions get the request's body and return the bytes to send, or None to hold the
connection until the end.
"""

import asyncio
import contextlib
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from unittest.mock import patch

MODELS = {
    "object": "list",
    "data": [{"id": "tiny", "object": "model", "owned_by": "llmctl", "max_model_len": 128}],
}

Answer = Callable[[dict], bytes | None]


def head(status: int = 200, kind: str = "text/event-stream", extra: str = "") -> bytes:
    return (
        f"HTTP/1.1 {status} Whatever\r\nconnection: close\r\ncontent-type: {kind}\r\n{extra}\r\n"
    ).encode()


def chunked(*pieces: bytes) -> bytes:
    """An event stream in HTTP chunks, with its end."""
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return head(extra="transfer-encoding: chunked\r\n") + body + b"0\r\n\r\n"


def whole(content: object, status: int = 200) -> bytes:
    body = json.dumps(content).encode()
    return head(status, "application/json", f"content-length: {len(body)}\r\n") + body


def event(content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def tokens_event(text: str = "x") -> bytes:
    return event(
        {
            "id": "cmpl-1",
            "choices": [{"index": 0, "text": text, "finish_reason": None}],
            "usage": None,
        }
    )


def usage_event(count: int) -> bytes:
    usage = {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": count + 1}
    return event({"id": "cmpl-1", "choices": [], "usage": usage})


DONE = b"data: [DONE]\n\n"


def metrics(batch_s: tuple[float, float], more: str) -> bytes:
    names = ("llmctl_batch_seconds_total", "llmctl_predicted_batch_seconds_total")
    lines = [
        f'{name}{{model_name="tiny"}} {value}\n' for name, value in zip(names, batch_s, strict=True)
    ]
    body = "".join([*lines, more]).encode()
    return head(200, "text/plain", f"content-length: {len(body)}\r\n") + body


def serve_request(body: dict) -> bytes:
    """What a server does: as many tokens as the engine was told, one event each, and their
    count.
    """
    count = body.get("llmctl_end_after", body["max_tokens"])
    if not body["stream"]:
        return whole(
            {"choices": [{"index": 0, "text": "x" * count}], "usage": {"completion_tokens": count}}
        )
    return chunked(*[tokens_event()] * count, usage_event(count), DONE)


class Server:
    """The bodies that were posted, in order, and where the server listens."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict] = []
        self.heads: list[str] = []
        self.metrics = ""  # more lines of /metrics
        self.batch_s = (0.0, 0.0)  # what its batches took, and what its laws say


@contextlib.contextmanager
def sse_server(
    answer: Answer = serve_request, models: object = MODELS, tls: ssl.SSLContext | None = None
) -> Iterator[Server]:
    """A server in a thread of its own, gone when the block ends.

    Meanwhile no client counts as late: this thread takes Python's lock from it, and a busy machine
    may let the thread wait with it.
    """
    server = Server()
    started = threading.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(
            asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError
        ):
            text = (await reader.readuntil(b"\r\n\r\n")).decode()
            if text.startswith("GET"):
                scraped = text.split()[1] == "/metrics"
                reply: bytes | None = (
                    metrics(server.batch_s, server.metrics) if scraped else whole(models)
                )
            else:
                size = int(
                    next(
                        line
                        for line in text.lower().splitlines()
                        if line.startswith("content-length")
                    )[15:]
                )
                body = json.loads(await reader.readexactly(size))
                server.heads.append(text)
                server.bodies.append(body)
                reply = answer(body)
            if reply is None:
                await reader.read()  # until the client goes away
            else:
                writer.write(reply)
                await writer.drain()
        writer.close()

    async def main() -> None:
        nonlocal loop, stop
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        listening = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls)
        server.url = (
            f"{'https' if tls else 'http'}://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        )
        started.set()
        await stop.wait()
        listening.close()

    loop: asyncio.AbstractEventLoop
    stop: asyncio.Event
    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        with patch("toolkit.bench.client.LEAST_LATE_S", 3600.0):
            yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)


@contextlib.contextmanager
def late_client() -> Iterator[None]:
    """Count every client within this block as late, also beside `sse_server`, which counts none."""
    limits = {"LEAST_LATE_S": -1.0, "LATE_SHARE": -1.0, "BEATS_MIN": 0}
    with patch.multiple("toolkit.bench.client", **limits):
        yield
