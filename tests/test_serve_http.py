"""HTTP on real sockets in front of a small application: order, timers, bounds."""

import asyncio
import gc
import re
import socket
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest
import uvloop
from within import within

from toolkit.openai.errors import ApiError
from toolkit.server import http as bounds
from toolkit.server import server as life
from toolkit.server.application import error_response
from toolkit.server.server import HttpServer

KEPT = b"GET /echo HTTP/1.1\r\nHost: x\r\n\r\n"
STREAM = b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n"
WAIT = b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n"
CLOSE = b"Connection: close"


class Desk:
    """The application. `go` ends waiting requests; `ended` lists how each ended."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.asked: list[str] = []
        self.seen: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.ended: list[str] = []

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        self.asked.append(scope["path"])
        try:
            await self._serve(scope, receive, send)
        except ApiError as error:
            await error_response(error)(scope, receive, send)

    async def _serve(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["path"] == "/early":
            await self._answer(send, b"early", 401)
        elif scope["path"] in ("/stream", "/wait"):
            await self._wait(scope, receive, send)
        else:
            body = b""
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    self.ended.append("gone")
                    return
                body = body + message["body"]
                more = message["more_body"]
            self.bodies.append(body)
            self.seen.append({name.decode(): value.decode() for name, value in scope["headers"]})
            await self._answer(send, b"%d bytes" % len(body))
            self.ended.append("answered")

    async def _answer(self, send: Callable, body: bytes, status: int = 200) -> None:
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": status, "headers": [length]})
        await send({"type": "http.response.body", "body": body})

    async def _wait(self, scope: dict, receive: Callable, send: Callable) -> None:
        streams = scope["path"] == "/stream"
        if streams:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"first ", "more_body": True})

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        gone = asyncio.create_task(watch())
        go = asyncio.create_task(self.go.wait())
        await asyncio.wait((gone, go), return_when=asyncio.FIRST_COMPLETED)
        self.ended.append("gone" if gone.done() else "answered")
        if streams:
            await send({"type": "http.response.body", "body": b"last"})
        elif not gone.done():
            await self._answer(send, b"waited")
        gone.cancel()
        go.cancel()


class Wire:
    """A server, and connections to it."""

    def __init__(self, server: HttpServer, port: int, desk: Desk) -> None:
        self.server = server
        self.port = port
        self.desk = desk
        self.peers: list[Peer] = []

    async def open(self, data: bytes = b"") -> "Peer":
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        self.peers.append(Peer(reader, writer))
        return self.peers[-1]

    async def say(self, data: bytes) -> bytes:
        """All that the server says to these bytes until it closes."""
        peer = await self.open(data)
        return await peer.rest()

    async def connections(self, count: int) -> None:
        await until(lambda: len(self.server.server_state.connections) == count)


class Peer:
    """The client's end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def rest(self) -> bytes:
        with suppress(ConnectionResetError):
            return await self.reader.read(-1)
        return b""

    async def has(self, text: bytes) -> bytes:
        return await self.reader.readuntil(text)

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def close(self) -> None:
        self.writer.close()


async def until(done: Callable[[], bool]) -> None:
    while not done():
        await asyncio.sleep(0.001)


@asynccontextmanager
async def serving(**limits: float) -> AsyncIterator[Wire]:
    """A server with these bounds in place of its own."""
    desk = Desk()
    raised: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in limits.items():
            patch.setattr(bounds if hasattr(bounds, name) else life, name, limit)
        server = HttpServer(desk)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await server.start(listener)
        wire = Wire(server, listener.getsockname()[1], desk)
        try:
            async with asyncio.timeout(30):
                yield wire
        finally:
            desk.go.set()
            for peer in wire.peers:
                peer.close()
            await server.stop()
        assert raised == []


wired = within(serving, "wire", loop_factory=uvloop.new_event_loop)


def post(path: str, body: bytes, *headers: bytes, version: bytes = b"1.1") -> bytes:
    lines = [b"POST %s HTTP/%s" % (path.encode(), version), b"Host: x", *headers]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", body])


def chunked(*pieces: bytes, trailer: bytes = b"") -> bytes:
    framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return framed + b"0\r\n" + trailer + b"\r\n"


def statuses(received: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) [A-Z]", received)]


# Requests behind each other, and clients that leave


@wired()
async def test_answers_leave_in_the_order_of_their_requests(wire: Wire):
    peer = await wire.open(WAIT + post("/echo", b"second") + post("/early", b"", CLOSE))
    await until(lambda: wire.desk.asked == ["/wait"])
    wire.desk.go.set()
    received = await peer.rest()
    assert statuses(received) == [200, 200, 401]
    assert received.index(b"waited") < received.index(b"6 bytes") < received.index(b"early")


@pytest.mark.parametrize("first", [WAIT, STREAM])
@wired()
async def test_a_client_that_closes_or_resets_is_noticed(wire: Wire, first: bytes):
    for number, leave in enumerate(("close", "abort"), 1):
        peer = await wire.open(first)
        await until(lambda number=number: len(wire.desk.asked) == number)
        getattr(peer.writer.transport, leave)()
        await until(lambda number=number: wire.desk.ended == ["gone"] * number)
    await wire.connections(0)
    assert wire.desk.seen == []


@pytest.mark.parametrize(
    "torn",
    [
        b"\xff" * 40,
        b"POST /wait HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
@wired()
async def test_what_is_not_http_gets_400(wire: Wire, torn: bytes):
    received = await wire.say(torn)
    assert statuses(received) == [400]
    assert b"is not valid HTTP/1.1" in received


UPGRADE = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk")
HIDDEN = post("/hidden", b"")


@pytest.mark.parametrize("before", [b"", KEPT], ids=["alone", "behind another"])
@pytest.mark.parametrize("is_chunked", [False, True])
@wired()
async def test_wherever_a_head_with_upgrade_is_cut_it_is_refused_with_its_body(
    wire: Wire, before: bytes, is_chunked: bool
):
    whole = post("/echo", HIDDEN, *UPGRADE)
    if is_chunked:
        lines = (b"POST /echo HTTP/1.1", b"Host: x", *UPGRADE, b"Transfer-Encoding: chunked")
        whole = b"\r\n".join((*lines, b"", chunked(HIDDEN)))
    end = whole.index(b"\r\n\r\n") + 4
    for at in range(end + 1):
        peer = await wire.open()
        await wire.connections(1)
        (connection,) = wire.server.server_state.connections
        if before:
            peer.send(before)
            await peer.has(b"HTTP/1.1 200")
        for segment in (whole[:at], whole[at:end], whole[end:], post("/early", b"", CLOSE)):
            connection.data_received(segment)
        received = await peer.rest()
        assert statuses(received)[-1:] == [400], at
        assert b"set your client to HTTP/1.1" in received
        await wire.connections(0)
    assert set(wire.desk.asked) <= {"/echo"}
    assert HIDDEN not in wire.desk.bodies


@wired()
async def test_connect_is_refused_with_what_comes_behind_it(wire: Wire):
    received = await wire.say(b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n" + KEPT)
    assert statuses(received) == [400]
    assert wire.desk.asked == []


@wired()
async def test_one_packet_of_many_requests_is_answered_in_order(wire: Wire):
    peer = await wire.open(WAIT + KEPT * 64)
    await until(lambda: wire.desk.asked == ["/wait"])
    wire.desk.go.set()
    for _ in range(65):
        await peer.has(b"HTTP/1.1 200")


@pytest.mark.parametrize("first", [WAIT, STREAM])
@wired()
async def test_a_refusal_is_no_part_of_an_answer_that_is_due_before(wire: Wire, first: bytes):
    peer = await wire.open(first)
    await until(lambda: len(wire.desk.asked) == 1)
    if first == STREAM:
        await peer.has(b"first ")
    peer.send(b"\x00\x01 garbage\r\n\r\n")
    assert b"HTTP/1.1" not in (await peer.rest()).partition(b"\r\n\r\n")[2]
    await until(lambda: wire.desk.ended == ["gone"])


# Fields


@pytest.mark.parametrize("behind", [b"", KEPT])
@wired()
async def test_trailer_fields_are_not_headers(wire: Wire, behind: bytes):
    trailer = b"Authorization: Bearer stolen\r\nContent-Type: text/x\r\n"
    head = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    peer = await wire.open(head + chunked(b"abc", trailer=trailer) + behind)
    await until(lambda: len(wire.desk.seen) == 1 + bool(behind))
    peer.close()
    assert wire.desk.bodies[0] == b"abc"
    assert all(seen.keys() <= {"host", "transfer-encoding"} for seen in wire.desk.seen)


# Timers


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", []),
        (b"\r\n\r\n", []),
        (b"GET /echo HTTP/1.1\r\nHo", []),
        (KEPT, [200]),
        (KEPT + b"\r\n\r\n", [200]),
        (KEPT + b"GET /echo HTTP/1.1\r\nHo", [200]),
    ],
    ids=[
        "nothing",
        "line ends",
        "half a head",
        "idle",
        "line ends behind an answer",
        "half a head behind an answer",
    ],
)
@pytest.mark.slow
@wired(IDLE_S=0.1)
async def test_a_connection_without_a_whole_head_ends(wire: Wire, sent: bytes, status: list[int]):
    assert statuses(await wire.say(sent)) == status
    await wire.connections(0)


# Bounds on bytes and connections


@wired()
async def test_a_head_has_a_bound(wire: Wire):
    for target, lines in ((b"/" + b"a" * 700_000, 0), (b"/", 90_000)):
        head = b"GET %b HTTP/1.1\r\nHost: x\r\n" % target + b"x-a: b\r\n" * lines
        peer = await wire.open(head)
        assert statuses(await peer.rest()) in ([400], [])  # it may be reset while it sends
    assert wire.desk.asked == []
    await wire.connections(0)


@wired()
async def test_a_trailer_without_end_takes_no_memory_and_ends_with_its_connection(wire: Wire):
    head = b"POST /early HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nlong: "
    peer = await wire.open(head + b"y" * 100_000)
    await peer.has(b"early")
    (connection,) = wire.server.server_state.connections
    assert connection.headers == [(b"host", b"x"), (b"transfer-encoding", b"chunked")]
    peer.close()
    await wire.connections(0)


@wired(CONNECTIONS=8)
async def test_of_many_at_once_each_too_many_gets_503_and_the_others_their_answers(wire: Wire):
    first = [await wire.open(STREAM) for _ in range(8)]
    for peer in first:
        await peer.has(b"first ")
    for _ in range(3):
        received = await wire.say(STREAM)
        assert statuses(received) == [503]
        assert b"connection: close\r\n" in received
    await wire.connections(8)
    wire.desk.go.set()
    for peer in first:
        await peer.has(b"last")
    first[0].close()
    await wire.connections(7)
    assert statuses(await wire.say(post("/early", b"", CLOSE))) == [401]


@pytest.mark.parametrize("sent", [STREAM, KEPT, b"\0\r\n\r\n", post("/echo", b"abc", *UPGRADE)])
@wired()
async def test_a_closed_connection_leaves_nothing_to_the_garbage_collector(wire: Wire, sent: bytes):
    peer = await wire.open()
    await wire.connections(1)
    connection = weakref.ref(next(iter(wire.server.server_state.connections)))
    gc.disable()
    try:
        peer.send(sent)
        await peer.has(b"HTTP/1.1 ")
        peer.close()
        await until(lambda: connection() is None)
    finally:
        gc.enable()
