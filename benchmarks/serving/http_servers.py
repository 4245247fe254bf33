"""Which HTTP servers keep the promises of the server, and their CPU time per event.

    python -m benchmarks.serving.http_servers [--with PYTHON] [--repeats 20]

Takes about a minute with two repeats. Needs nothing but the package for ours and uvicorn; granian
and hypercorn are measured where PYTHON, an interpreter that has them and uvicorn, is given.

The same raw ASGI application runs behind `toolkit/serve/http.py`, uvicorn with each of its parsers,
granian and hypercorn. Each gets its own limits, set to two seconds and 64 KiB where it has them.
Each line is one attack by clients; `ok` is what a server that strangers can reach should do, else
the line says what happened. Then 64 clients read streams of 64 events: CPU time of the server.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.common import ROOT
from benchmarks.common.command import make_parser
from benchmarks.common.raw_client import free_ports, listens
from benchmarks.common.serving import cpu_s

APP = """
import asyncio, json
ended = []
seen = []
async def answer(send, body, status=200):
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    path = scope["path"]
    if path == "/events":
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        event = b"data: 0123456789\\n\\n"
        for _ in range(64):
            await send({"type": "http.response.body", "body": event, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})
    elif path == "/wait":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first ", "more_body": True})
        async def gone():
            while (await receive())["type"] != "http.disconnect":
                pass
        waiting = asyncio.ensure_future(gone())
        await asyncio.wait([waiting], timeout=3)
        ended.append("gone" if waiting.done() else "stayed")
        waiting.cancel()
        with __import__("contextlib").suppress(Exception):
            await send({"type": "http.response.body", "body": b"last", "more_body": False})
    elif path == "/early":
        await answer(send, b"early", 401)
    elif path == "/large":
        await answer(send, b"x" * (64 << 20))
    elif path == "/log":
        await answer(send, json.dumps([ended, seen]).encode())
    else:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        seen.append([name.decode() for name, _ in scope["headers"]])
        await answer(send, b"%d bytes" % len(body))
"""
OURS = """
import asyncio, socket, sys, uvloop
from app import app
from toolkit.serve.http import HttpServer, WireLimits
async def main():
    with socket.create_server(("127.0.0.1", {port}), backlog=512) as listener:
        limits = WireLimits(head_timeout_s=2, body_timeout_s=2, idle_timeout_s=2,
                            write_timeout_s=2, linger_timeout_s=2)
        await HttpServer(app, limits).start(listener)
        await asyncio.Event().wait()
uvloop.run(main())
"""
UVICORN = "-m uvicorn --log-level critical --no-access-log --timeout-keep-alive 2 --port {port}"
OTHERS = {
    "uvicorn, httptools": f"{UVICORN} --http httptools app:app",
    "uvicorn, h11": f"{UVICORN} --http h11 --h11-max-incomplete-event-size 65536 app:app",
    "uvicorn, zttp": f"{UVICORN} --http zttp app:app",
    "granian": "-m granian --interface asgi --no-log --http1-header-read-timeout 2000"
    " --http1-buffer-size 65536 --port {port} app:app",
    "hypercorn": "-m hypercorn -k uvloop --keep-alive 2 --read-timeout 2 --log-level CRITICAL"
    " -b 127.0.0.1:{port} app:app",
}
UPGRADE = b"GET /echo HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
ECHO = b"GET /echo HTTP/1.1\r\nHost: x\r\n\r\n"
WAIT = b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n"
PATIENCE_S = 7.0


class Peer:
    """A client's connection."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Peer:
        self.reader, self.writer = await asyncio.open_connection(
            "127.0.0.1", self._port, limit=1 << 26
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.transport.abort()

    async def read(self, seconds: float = PATIENCE_S) -> tuple[bytes, bool]:
        """The data until the server closes, and whether it closed in time."""
        received = b""
        try:
            async with asyncio.timeout(seconds):
                while piece := await self.reader.read(1 << 16):
                    received += piece
        except TimeoutError:
            return received, False
        except ConnectionResetError:
            pass
        return received, True


def statuses(received: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]


async def log(port: int) -> tuple[list[str], list[list[str]]]:
    async with Peer(port) as peer:
        peer.writer.write(b"GET /log HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        received, _ = await peer.read()
    ended, seen = json.loads(received.partition(b"\r\n\r\n")[2])
    return ended, seen


async def said(
    port: int, data: bytes, *, ends: bool = False, seconds: float = PATIENCE_S
) -> tuple[bytes, bool]:
    async with Peer(port) as peer:
        peer.writer.write(data)
        if ends:
            peer.writer.write_eof()
        return await peer.read(seconds)


async def upgrades(port: int) -> str:
    received, _ = await said(port, ECHO + UPGRADE + UPGRADE + ECHO)
    return "ok" if statuses(received) == [200] * 4 else f"{statuses(received)}"


async def leaves(port: int) -> str:
    before = (await log(port))[0].count("gone")
    async with Peer(port) as peer:
        peer.writer.write(WAIT + ECHO)
        await peer.reader.readuntil(b"first ")
    await asyncio.sleep(2)
    return "ok" if (await log(port))[0].count("gone") > before else "not noticed"


async def garbage(port: int) -> str:
    received, closed = await said(port, WAIT + b"\x00 garbage\r\n\r\n")
    body = received.partition(b"\r\n\r\n")[2]
    if b"HTTP/1.1 400" in body.partition(b"last")[0]:
        return "400 inside the body"
    return "ok" if b"last" in body and closed else "closed early" if closed else "not closed"


async def post_then_garbage(port: int) -> str:
    asked = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
    received, _ = await said(port, asked + b"\xff" * 40)
    return "ok" if statuses(received)[:1] == [200] else f"{statuses(received)}"


async def trailer(port: int) -> str:
    head = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    body = b"Connection: close\r\n\r\n3\r\nabc\r\n0\r\nAuthorization: x\r\n\r\n"
    await said(port, head + body)
    return "a header" if any("authorization" in one for one in (await log(port))[1]) else "ok"


async def dripped(port: int, first: bytes, drop: bytes) -> str:
    """A byte a second after `first`: does any timer end the connection?"""
    async with Peer(port) as peer:
        peer.writer.write(first)
        for _ in range(int(PATIENCE_S)):
            with suppress(ConnectionError):
                peer.writer.write(drop)
            if (await peer.read(1.0))[1]:
                return "ok"
    return "kept"


async def unread(port: int) -> str:
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    one.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(one, ("127.0.0.1", port))
    await loop.sock_sendall(one, b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
    await asyncio.sleep(PATIENCE_S)
    state = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    one.close()
    return "ok" if state != 1 else "kept"  # 1: established


async def long_head(port: int) -> str:
    head = b"GET / HTTP/1.1\r\nHost: x\r\nx: " + b"y" * (4 << 20)
    try:
        received, closed = await said(port, head, seconds=3)
    except ConnectionError:  # while it was sent
        return "ok"
    return "ok" if closed and statuses(received) in ([431], [400], []) else "kept"


async def hosts(port: int) -> str:
    first = b"GET /echo HTTP/1.1\r\n"
    last = b"Connection: close\r\n\r\n"
    none, _ = await said(port, first + last)
    two, _ = await said(port, first + b"Host: a\r\nHost: b\r\n" + last)
    found = statuses(none) + statuses(two)
    return "ok" if found == [400, 400] else f"{found}"


async def old_stream(port: int) -> str:
    received, _ = await said(port, b"GET /events HTTP/1.0\r\n\r\n")
    if b"chunked" in received.lower():
        return "chunks"
    return "ok" if b"data:" in received else "no answer"


async def half_closed(port: int) -> str:
    asked = b"POST /wait HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
    received, _ = await said(port, asked, ends=True)
    return "ok" if b"last" in received else "no answer"


HEAD = b"GET /echo HTTP/1.1\r\nHost: x\r\nx: "
BODY = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n"
EARLY = b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n"
CHECKS: dict[str, Callable[[int], Coroutine[None, None, str]]] = {
    "two upgrades behind a request": upgrades,
    "leaves behind a pipelined request": leaves,
    "garbage behind a stream": garbage,
    "garbage behind a whole POST": post_then_garbage,
    "a trailer named authorization": trailer,
    "a head, a byte a second": lambda port: dripped(port, HEAD, b"y"),
    "a body, a byte a second": lambda port: dripped(port, BODY, b"y"),
    "line ends after an answer": lambda port: dripped(port, ECHO, b"\r\n"),
    "a body after an early answer": lambda port: dripped(port, EARLY, b"y"),
    "a large answer, unread": unread,
    "a head of 4 MiB": long_head,
    "no Host, two Hosts": hosts,
    "HTTP/1.0 and a stream": old_stream,
    "a POST, then shutdown(WR)": half_closed,
}


async def attack(port: int) -> dict[str, str]:
    async def one(check: Callable[[int], Coroutine[None, None, str]]) -> str:
        try:
            return await check(port)
        except (OSError, asyncio.IncompleteReadError) as error:
            return type(error).__name__

    return dict(zip(CHECKS, await asyncio.gather(*map(one, CHECKS.values())), strict=True))


async def events(port: int, clients: int) -> int:
    asked = b"GET /events HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    found = await asyncio.gather(*[said(port, asked, seconds=60) for _ in range(clients)])
    return sum(received.count(b"data:") for received, _ in found)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--with", dest="python", default=sys.executable, help="an interpreter that has the others"
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--clients", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "app.py").write_text(APP)
        for name in ("ours", *OTHERS):
            (port,) = free_ports(1)
            if name == "ours":
                command = [sys.executable, "-c", OURS.format(port=port)]
            else:
                command = [options.python, *OTHERS[name].format(port=port).split()]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join((folder, str(ROOT)))}
            null = subprocess.DEVNULL
            process = psutil.Popen(command, cwd=folder, env=environment, stdout=null, stderr=null)
            try:
                if not listens(port, patience_s=10.0):
                    print(f"{name}: does not start")
                    continue
                found = asyncio.run(attack(port))
                count = 0
                begin_s = 0.0
                for repeat in range(options.repeats + 1):  # the first warms up
                    if repeat == 1:
                        begin_s = cpu_s(process)
                    count += asyncio.run(events(port, options.clients)) * (repeat > 0)
                cost_us = 1e6 * (cpu_s(process) - begin_s) / max(count, 1)
                wrong = [f"    {check}: {what}" for check, what in found.items() if what != "ok"]
                well = len(found) - len(wrong)
                print(f"{name}: {well} of {len(found)} ok, {cost_us:.1f} us of CPU per event")
                print("\n".join(wrong), flush=True)
            finally:
                process.kill()
                process.wait()


if __name__ == "__main__":
    main()
