"""20,000 connections of clients that break every rule, and the server's state after them.

    python -m benchmarks.serving.fuzz_connections [--connections 20000] [--idle 2000] [--seed 0]

Takes two and a half minutes with 300 connections, most of them silence. Needs nothing but the
package: a server with two workers and fake engines.

Each connection is one of: pipelined requests, good, torn and streamed ones; upgrades; trailers; a
side that ends at a random place; answers left unread; a client that disconnects; one that stops in
the middle of a request; large bodies, torn as well. `--idle` connections stay open meanwhile. The
answers are parsed as strictly as HTTP allows.

Afterwards all clients stay silent, without closing, for longer than the longest timer. The exit
code is 1 for an answer that is not HTTP, or neither a 2xx, a 4xx nor a deliberate 503 in the API's
form; a line on the server's stderr; a connection that is still open; a request that still runs;
more than 50 MiB of growth.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

from benchmarks.common import fuzzing
from benchmarks.common.command import make_parser
from benchmarks.common.serving import fake_server, metric
from toolkit.serve.http import WireLimits

AT_ONCE = 100
# connections of silent clients at a time; beyond that the oldest is dropped
MAX_SILENT = 400
MEMORY_MIB = 50
LIMITS = WireLimits()
SILENCE_S = 10 + LIMITS.write_timeout_s
SILENCE_S += max(LIMITS.head_timeout_s, LIMITS.body_timeout_s, LIMITS.idle_timeout_s)

STREAM = b'{"prompt": "hello", "max_tokens": 64, "stream": true}'
LONG = b'{"prompt": "hello", "max_tokens": 250, "stream": true, "n": 16}'
TRAILERS = (
    b"Authorization: Bearer x\r\n",
    b"Content-Type: text/x\r\n",
    b"Content-Length: 3\r\n",
    b"a: b\r\n" * 50,
)


def chunks(rng: random.Random, body: bytes, trailer: bytes = b"") -> bytes:
    """A body in chunks of any size."""
    found: list[bytes] = []
    at = 0
    while at < len(body):
        size = rng.randint(1, max(1, len(body) // 2))
        found.append(b"%x\r\n%b\r\n" % (len(body[at : at + size]), body[at : at + size]))
        at += size
    return b"".join([*found, b"0\r\n", trailer, b"\r\n"])


def good(rng: random.Random) -> bytes:
    """A request that gets 200, with the connection kept."""
    kind = rng.randrange(5)
    path = fuzzing.SENT[0]
    if kind == 0:
        return fuzzing.MODELS
    if kind == 1:
        return fuzzing.request(path, STREAM)
    if kind == 2:
        body = chunks(rng, fuzzing.GOOD, rng.choice(TRAILERS))
        return fuzzing.request(path, body, fuzzing.CHUNKED)
    if kind == 3:
        return fuzzing.request(path, fuzzing.GOOD, b"Connection: Upgrade", b"Upgrade: h2c")
    return fuzzing.request(path, fuzzing.GOOD)


def large(rng: random.Random) -> bytes:
    """A body that is read outside the event loop."""
    text = b"a" * rng.randint(1 << 15, 1 << 18)
    tokens = b",".join([b"1"] * 20_000)
    body = rng.choice([b'{"prompt": "%b"}' % text, b'{"prompt": [%b]}' % tokens, b"[" * 40_000])
    whole = fuzzing.request(rng.choice(fuzzing.SENT), body)
    return whole if rng.random() < 0.5 else whole[: rng.randint(100, 40_000)]


def answers(received: bytes) -> list[tuple[int, str, bytes]]:
    """Status, type and body of each answer; the last may be cut off. `ValueError` for data that is
    not HTTP.
    """
    found: list[tuple[int, str, bytes]] = []
    while received:
        head, blank, rest = received.partition(b"\r\n\r\n")
        line = re.match(rb"HTTP/1\.1 (\d{3}) [ -~]*\r\n", head + b"\r\n")
        if not blank:
            return found
        if not line:
            raise ValueError(f"no HTTP: {received[:200]!r}")
        headers = dict(re.findall(rb"\r\n([^:\r\n]+): ([^\r\n]*)", head.lower()))
        status = int(line[1])
        if status < 200:
            received = rest
            continue
        if headers.get(b"transfer-encoding") == b"chunked":
            body, rest = unchunked(rest)
        elif b"content-length" in headers:
            size = int(headers[b"content-length"])
            body = rest[:size]
            rest = rest[size:]
        else:
            body = rest
            rest = b""
        found.append((status, headers.get(b"content-type", b"").decode(), body))
        received = rest
    return found


def unchunked(data: bytes) -> tuple[bytes, bytes]:
    """The body, and the data after it."""
    body = b""
    while data:
        line, end, rest = data.partition(b"\r\n")
        if not end:
            return body, b""
        if not re.fullmatch(rb"[0-9a-f]{1,16}", line):
            raise ValueError(f"no chunk: {data[:200]!r}")
        size = int(line, 16)
        if len(rest) >= size + 2 and rest[size : size + 2] != b"\r\n":
            raise ValueError(f"no end of a chunk: {rest[size : size + 40]!r}")
        if not size:
            return body, rest[2:]
        body = body + rest[:size]
        data = rest[size + 2 :]
    return body, b""


class Crowd:
    """Clients of every kind."""

    def __init__(self, port: int, seed: int) -> None:
        self.port = port
        self.rng = random.Random(seed)
        self.statuses: dict[str, Counter[int]] = {}
        self.wrong: list[str] = []
        self.silent: list[socket.socket] = []
        self.kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "pipelined": self.pipelined,
            "torn behind good": self.torn_behind_good,
            "torn": self.torn,
            "half-closed": self.half_closed,
            "left": self.left,
            "unread": self.unread,
            "stopped": self.stopped,
            "large": self.large,
        }

    async def one(self) -> None:
        kind = self.rng.choice(list(self.kinds))
        with suppress(OSError):
            await self.kinds[kind]()

    async def talk(
        self, kind: str, data: bytes, *, ends: bool = False, patience_s: float = 20.0
    ) -> None:
        """Send, close this side or not, read, and check the answers."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        received = b""
        try:
            writer.write(data)
            if ends:
                writer.write_eof()
            with suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(patience_s):
                    while piece := await reader.read(1 << 16):
                        received += piece
        finally:
            writer.close()
        self.look(kind, data, received)

    def look(self, kind: str, data: bytes, received: bytes) -> None:
        counts = self.statuses.setdefault(kind, Counter())
        try:
            found = answers(received) if b"HEAD" not in data else []
        except ValueError as error:
            self.wrong.append(f"{kind}: {error} after {data[:600]!r}")
            return
        counts.update([status for status, _, _ in found] or [0])
        for at, (status, type_, body) in enumerate(found):
            whole = at < len(found) - 1 or not body.startswith(b"{") or body.endswith(b"}")
            complaint = fuzzing.complaint(status, type_, body) if whole else ""
            if complaint:
                self.wrong.append(f"{kind}: {complaint} after {data[:600]!r}")

    async def pipelined(self) -> None:
        many = b"".join(good(self.rng) for _ in range(self.rng.randint(1, 6)))
        await self.talk("pipelined", many + fuzzing.get("/version"))

    async def torn_behind_good(self) -> None:
        await self.talk("torn behind good", good(self.rng) + fuzzing.torn(self.rng), patience_s=0.5)

    async def torn(self) -> None:
        await self.talk("torn", fuzzing.torn(self.rng), patience_s=0.3)

    async def half_closed(self) -> None:
        data = good(self.rng) * self.rng.randint(1, 3)
        if self.rng.random() < 0.4:
            data = data[: self.rng.randrange(len(data))]
        await self.talk("half-closed", data, ends=True)

    async def left(self) -> None:
        """Disconnect in the middle of the answer, in either way."""
        body = LONG if self.rng.random() < 0.1 else STREAM
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        behind = self.rng.choice([b"", good(self.rng)])
        writer.write(fuzzing.request(fuzzing.SENT[0], body) + behind)
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(5.0):
                await reader.read(self.rng.choice([1, 200, 2000]))
        if self.rng.random() < 0.5:
            writer.transport.abort()
        writer.close()
        self.statuses.setdefault("left", Counter())[0] += 1

    async def unread(self) -> None:
        many = b"".join(good(self.rng) for _ in range(self.rng.randint(1, 8)))
        await self.fall_silent("unread", many)

    async def stopped(self) -> None:
        data = good(self.rng)
        behind = self.rng.choice([b"", b"\r\n", good(self.rng)])
        await self.fall_silent("stopped", behind + data[: self.rng.randrange(len(data))])

    async def large(self) -> None:
        await self.talk("large", large(self.rng), patience_s=10.0, ends=True)

    async def fall_silent(self, kind: str, data: bytes) -> None:
        """Send this, and then neither write nor read."""
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        one.setblocking(False)
        self.silent.append(one)
        if len(self.silent) > MAX_SILENT:
            self.silent.pop(0).close()
        loop = asyncio.get_running_loop()
        await loop.sock_connect(one, ("127.0.0.1", self.port))
        await loop.sock_sendall(one, data)
        self.statuses.setdefault(kind, Counter())[0] += 1

    async def all_of_them(self, count: int, idle: int) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(idle):
            one = socket.socket()
            one.setblocking(False)
            await loop.sock_connect(one, ("127.0.0.1", self.port))
            self.silent.append(one)
        held = self.silent
        self.silent = []
        begin_s = time.monotonic()
        for start in range(0, count, AT_ONCE):
            await asyncio.gather(*[self.one() for _ in range(min(AT_ONCE, count - start))])
            if start % 2000 == 0:
                took_s = time.monotonic() - begin_s
                print(f"{start + AT_ONCE:6,} connections, {took_s:.0f} s", flush=True)
        self.silent += held


def established(front: psutil.Process, port: int) -> int:
    found = front.net_connections(kind="tcp")
    return sum(one.laddr.port == port and one.status != psutil.CONN_LISTEN for one in found)


def rss_mib(front: psutil.Process) -> float:
    return front.memory_info().rss / 2**20


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--connections", type=int, default=20_000)
    parser.add_argument("--idle", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="what was counted, as JSON")
    options = parser.parse_args()
    with fake_server("--admission", "queue") as server:
        front = server.front
        port = server.port
        warm = Crowd(port, options.seed + 1)
        asyncio.run(warm.all_of_them(300, 0))
        begin_mib = rss_mib(front)
        crowd = Crowd(port, options.seed)
        asyncio.run(crowd.all_of_them(options.connections, options.idle))
        most_mib = rss_mib(front)
        print(f"silence for {SILENCE_S:g} s, {established(front, port)} connections", flush=True)
        time.sleep(SILENCE_S)
        wrong = warm.wrong + crowd.wrong
        left = established(front, port)
        if left:
            wrong.append(f"{left} connections are older than the longest timer")
        for name in ("llmctl_requests_running", "llmctl_requests_waiting"):
            if value := metric(httpx.get(f"{server.url}/metrics").text, name):
                wrong.append(f"{name} is {value:g}")
        end_mib = rss_mib(front)
        if end_mib - begin_mib > MEMORY_MIB:
            wrong.append(f"memory: {begin_mib:.1f} MiB before, {end_mib:.1f} MiB after")
        server.process.terminate()
        lines = server.process.communicate(timeout=60)[1].splitlines()
        said = "\n".join(line for line in lines if not line.startswith("loading "))
        code = server.process.returncode
        if said or code:
            wrong.append(f"the server ended with {code} and said: {said[-2000:]}")
    for kind, counts in sorted(crowd.statuses.items()):
        print(f"{kind:18} {dict(sorted(counts.items()))}")
    most = f"{most_mib:.1f} at the last connection"
    memory = f"{begin_mib:.1f} MiB before, {most}, {end_mib:.1f} after"
    connections = f"{options.connections:,} connections, seed {options.seed}"
    print(f"{connections}: {len(wrong)} things that should not be; {memory}")
    print("\n".join(wrong[:20]))
    if options.out:
        found = {"statuses": crowd.statuses, "wrong": wrong, "memory": memory}
        options.out.write_text(json.dumps(found, indent=2))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
