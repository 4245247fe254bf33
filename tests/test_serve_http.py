"""HTTP on real sockets in front of a small application: framing, order, timers, bounds.

The tests set the server's clock, and call `sweep` to apply timers that have run out.
"""

import asyncio
import gc
import json
import re
import socket
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest
import uvloop
from said import says

from toolkit.serve.http import HttpServer, WireLimits, client_of
from toolkit.serve.http_connection import MAX_PIPELINED_REQUESTS, SMALL_BODY_BYTES

KEPT = b"GET /echo HTTP/1.1\r\nHost: x\r\n\r\n"
STREAM = b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n"
WAIT = b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n"
LARGE = b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n"
LARGE_BYTES = 16 << 20


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
        if scope["path"] == "/early":
            await self._answer(send, b"early", 401)
        elif scope["path"] == "/raises":
            raise ValueError("a bug")
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
            await self._answer(
                send, b"x" * LARGE_BYTES if scope["path"] == "/large" else b"%d bytes" % len(body)
            )

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
    """A server with a clock that a test sets, and connections to it."""

    def __init__(
        self, server: HttpServer, port: int, clock: list[float], desk: Desk, shares: list[str]
    ) -> None:
        self.server = server
        self.port = port
        self.clock = clock
        self.desk = desk
        self.shares = shares  # the kinds of shares that clients exceeded
        self.peers: list[Peer] = []

    async def open(
        self, data: bytes = b"", *, receive_buffer: int = 0, client: str = "127.0.0.1"
    ) -> "Peer":
        sock = socket.socket()
        sock.bind((client, 0))
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=sock)
        writer.write(data)
        self.peers.append(Peer(reader, writer))
        return self.peers[-1]

    async def say(self, data: bytes, client: str = "127.0.0.1") -> bytes:
        """All that the server says to these bytes until it closes."""
        peer = await self.open(data, client=client)
        return await peer.rest()

    def pass_time(self, seconds: float) -> None:
        self.clock[0] += seconds
        self.server.sweep()

    async def connections(self, count: int) -> None:
        await until(lambda: len(self.server.total.connections) == count)


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

    def half_close(self) -> None:
        self.writer.write_eof()

    def close(self) -> None:
        self.writer.close()


async def until(done: Callable[[], bool]) -> None:
    while not done():
        await asyncio.sleep(0.001)


def serve(test: Callable[[Wire], Coroutine[Any, Any, None]], **limits: float) -> None:
    """Run a test with a server to which each local address is a client of its own."""

    async def run() -> None:
        clock = [0.0]
        desk = Desk()
        shares = list[str]()
        raised: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
        options = {"client_of": lambda address: address, "on_share": shares.append}
        server = HttpServer(desk, WireLimits(**limits), now_s=lambda: clock[0], **options)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            await server.start(listener)
            wire = Wire(server, listener.getsockname()[1], clock, desk, shares)
            try:
                async with asyncio.timeout(30):
                    await test(wire)
            finally:
                desk.go.set()
                for peer in wire.peers:
                    peer.close()
                await server.stop(1.0)
            assert not server.tasks
            assert server.total.body_bytes == 0
            assert server.clients == {}
            assert raised == []

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def post(path: str, body: bytes, *headers: bytes, version: bytes = b"1.1") -> bytes:
    lines = [b"POST %s HTTP/%s" % (path.encode(), version), b"Host: x", *headers]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", body])


def chunked(*pieces: bytes, trailer: bytes = b"") -> bytes:
    return (
        b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        + b"0\r\n"
        + trailer
        + b"\r\n"
    )


def statuses(received: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) [A-Z]", received)]


def error(received: bytes) -> dict:
    return json.loads(received.rpartition(b"\r\n\r\n")[2])["error"]


# Requests behind each other


def test_pipelined_upgrade_requests_are_answered_in_http_1_1():
    upgrade = (
        b"POST /echo HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: "
        b"h2c\r\nContent-Length: 3\r\n\r\nabc"
    )

    async def test(wire: Wire) -> None:
        peer = await wire.open(
            KEPT + upgrade + upgrade + post("/echo", b"last", b"Connection: close")
        )
        assert statuses(await peer.rest()) == [200] * 4
        assert wire.desk.bodies == [b"", b"abc", b"abc", b"last"]

    serve(test)


def test_answers_leave_in_the_order_of_their_requests():
    async def test(wire: Wire) -> None:
        peer = await wire.open(
            WAIT + post("/echo", b"second") + post("/early", b"", b"Connection: close")
        )
        await until(lambda: wire.desk.asked == ["/wait"])
        wire.desk.go.set()
        received = await peer.rest()
        assert statuses(received) == [200, 200, 401]
        assert received.index(b"waited") < received.index(b"6 bytes") < received.index(b"early")

    serve(test)


@pytest.mark.parametrize("first", [WAIT, STREAM])
def test_a_disconnect_is_noticed_behind_a_pipelined_request(first: bytes):
    async def test(wire: Wire) -> None:
        peer = await wire.open(first + KEPT)
        await until(lambda: bool(wire.desk.asked))
        peer.close()
        await until(lambda: wire.desk.ended == ["gone"])
        await wire.connections(0)
        assert wire.desk.seen == []

    serve(test)


@pytest.mark.parametrize("first", [WAIT, STREAM])
def test_a_client_that_resets_the_connection_is_noticed(first: bytes):
    async def test(wire: Wire) -> None:
        peer = await wire.open(first)
        await until(lambda: bool(wire.desk.asked))
        peer.writer.transport.abort()
        await until(lambda: wire.desk.ended == ["gone"])

    serve(test)


def test_garbage_after_a_request_is_answered_after_its_stream():
    async def test(wire: Wire) -> None:
        peer = await wire.open(STREAM + b"\x00\x01 garbage\r\n\r\n")
        await peer.has(b"first ")
        wire.desk.go.set()
        received = await peer.rest()
        assert received.startswith(b"\r\n4\r\nlast\r\n0\r\n\r\nHTTP/1.1 400 ")
        assert error(received)["type"] == "invalid_request_error"

    serve(test)


def test_a_whole_request_followed_by_garbage_is_answered():
    async def test(wire: Wire) -> None:
        received = await wire.say(post("/echo", b"abc") + b"\xff" * 40)
        assert statuses(received) == [200, 400]
        assert b"3 bytes" in received

    serve(test)


def test_a_truncated_pipelined_body_is_refused_in_order():
    async def test(wire: Wire) -> None:
        torn = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
        peer = await wire.open(WAIT + torn)
        await until(lambda: wire.desk.asked == ["/wait"])
        wire.desk.go.set()
        assert statuses(await peer.rest()) == [200, 400]

    serve(test)


def test_too_many_pipelined_requests_are_dropped():
    async def test(wire: Wire) -> None:
        peer = await wire.open(WAIT + KEPT * (MAX_PIPELINED_REQUESTS + 50))
        await until(lambda: wire.desk.asked == ["/wait"])
        wire.desk.go.set()
        assert statuses(await peer.rest()) == [200] * (MAX_PIPELINED_REQUESTS + 1)

    serve(test)


def test_a_large_pipelined_body_is_dropped():
    async def test(wire: Wire) -> None:
        peer = await wire.open(WAIT + post("/echo", b"x" * (4 * SMALL_BODY_BYTES)))
        await until(lambda: wire.desk.asked == ["/wait"])
        await until(lambda: not next(iter(wire.server.total.connections))._parses)
        assert wire.server.total.held_bytes == 0
        wire.desk.go.set()
        assert statuses(await peer.rest()) == [200]

    serve(test)


# The end of one side


@pytest.mark.parametrize(
    ("path", "probe", "last"),
    [
        ("/wait", b"HTTP/1.1 100 Continue\r\n\r\n", b"waited"),
        ("/stream", b"first \r\n0", b"4\r\nlast\r\n0\r\n\r\n"),  # the next chunk's size is 04
    ],
)
def test_a_half_closed_connection_gets_its_whole_response(path: str, probe: bytes, last: bytes):
    async def test(wire: Wire) -> None:
        peer = await wire.open(post(path, b""))
        peer.half_close()
        await peer.has(probe)
        wire.desk.go.set()
        assert (await peer.rest()).endswith(last)
        assert wire.desk.ended == ["answered"]

    serve(test)


def test_a_quick_response_to_a_half_closed_connection_has_no_100_continue():
    async def test(wire: Wire) -> None:
        peer = await wire.open(post("/echo", b"abc"))
        peer.half_close()
        assert statuses(await peer.rest()) == [200]

    serve(test)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (post("/echo", b"abc")[:-1], "the body ended early"),
        (KEPT[:-2], "the head ended early"),
    ],
)
def test_a_truncated_request_is_refused(sent: bytes, message: str):
    async def test(wire: Wire) -> None:
        peer = await wire.open(sent)
        peer.half_close()
        received = await peer.rest()
        assert statuses(received) == [400]
        assert error(received)["message"] == message

    serve(test)


def test_a_refused_client_that_half_closes_is_disconnected():
    async def test(wire: Wire) -> None:
        peer = await wire.open(
            b"POST /wait HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
        )
        assert statuses(await peer.rest()) == [400]
        await wire.connections(1)  # it lingers, so that the client can read its answer
        peer.half_close()
        await wire.connections(0)
        assert wire.desk.ended == ["gone"]

    serve(test)


# Fields


@pytest.mark.parametrize("behind", [b"", KEPT])
def test_trailer_fields_are_not_headers(behind: bytes):
    async def test(wire: Wire) -> None:
        trailer = b"Authorization: Bearer stolen\r\nContent-Type: text/x\r\n"
        head = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        peer = await wire.open(head + chunked(b"abc", trailer=trailer) + behind)
        await until(lambda: len(wire.desk.seen) == 1 + bool(behind))
        peer.close()
        assert wire.desk.bodies[0] == b"abc"
        assert all(seen.keys() <= {"host", "transfer-encoding"} for seen in wire.desk.seen)

    serve(test)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /echo HTTP/1.1\r\n", 400),
        (b"GET /echo HTTP/1.1\r\nHost: a\r\nHost: b\r\n", 400),
        (b"GET /echo HTTP/1.1\r\nHost: a\r\nhost: a\r\n", 400),
        (b"GET /echo HTTP/1.0\r\nHost: a\r\nHost: b\r\n", 400),
        (b"GET /echo HTTP/1.0\r\n", 200),
        (b"GET /echo HTTP/1.1\r\nHost: a\r\n", 200),
    ],
)
def test_a_request_needs_exactly_one_host(head: bytes, status: int):
    async def test(wire: Wire) -> None:
        assert statuses(await wire.say(head + b"Connection: close\r\n\r\n")) == [status]

    serve(test)


def test_an_http_1_0_client_gets_no_chunks():
    async def test(wire: Wire) -> None:
        peer = await wire.open(b"GET /stream HTTP/1.0\r\n\r\n")
        head = await peer.has(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower()
        wire.desk.go.set()
        assert await peer.rest() == b"first last"

    serve(test)


# Bounds and timers


@pytest.mark.parametrize(
    ("sent", "seconds", "status"),
    [
        (b"", 60, []),
        (b"\r\n\r\n", 60, []),
        (b"GET /echo HTTP/1.1\r\nHo", 60, [408]),
        (post("/echo", b"abc")[:-1], 60, [408]),
        (KEPT, 60, [200]),
        (KEPT + b"\r\n\r\n", 60, [200]),
        (post("/early", b"abc")[:-2], 5, [401]),
    ],
    ids=[
        "nothing",
        "line ends",
        "half a head",
        "half a body",
        "idle",
        "line ends behind an answer",
        "early answer",
    ],
)
def test_each_phase_ends_with_its_timer(sent: bytes, seconds: float, status: list[int]):
    async def test(wire: Wire) -> None:
        peer = await wire.open(sent)
        if status in ([200], [401]):
            await peer.has(b" bytes" if status == [200] else b"early")
            wire.pass_time(seconds - 1)
            peer.send(b"\r\n" if status == [200] else b"c")  # neither begins a request
        else:
            await until(lambda: bool(wire.server.total.connections))
            await until(
                lambda: wire.desk.asked == ["/echo"] or status != [408] or b"POST" not in sent
            )
            await until(lambda: not sent.startswith(b"GET") or bool(wire.server.heads))
            wire.pass_time(seconds - 1)
        await wire.connections(1)
        wire.pass_time(2)
        if status == [408]:
            assert statuses(await peer.rest()) == status
            peer.close()
        await wire.connections(0)
        if status == [408] and b"POST" in sent:
            assert wire.desk.ended == ["gone"]

    serve(test)


def test_an_unread_response_is_aborted_after_the_write_timeout():
    async def test(wire: Wire) -> None:
        await wire.open(LARGE, receive_buffer=1 << 12)
        await until(lambda: bool(wire.desk.seen))
        wire.server.sweep()
        assert wire.server.total.unread_bytes > LARGE_BYTES // 4
        wire.pass_time(29)
        await wire.connections(1)
        wire.pass_time(2)
        await wire.connections(0)
        wire.server.sweep()
        assert wire.server.total.unread_bytes == 0

    serve(test)


def test_a_slow_reader_gets_its_whole_response():
    async def test(wire: Wire) -> None:
        peer = await wire.open(LARGE, receive_buffer=1 << 14)
        await peer.has(b"\r\n\r\n")
        received = 0
        while received < LARGE_BYTES:
            received += len(await peer.reader.readexactly(min(1 << 20, LARGE_BYTES - received)))
            wire.pass_time(20)
        await wire.connections(1)

    serve(test, idle_timeout_s=1e6)


def test_large_bodies_are_refused_while_the_server_holds_too_much():
    async def test(wire: Wire) -> None:
        first = await wire.open(post("/echo", b"x" * (1 << 20))[:-1])
        await until(lambda: wire.server.total.body_bytes == (1 << 20) - 1)
        received = await wire.say(post("/echo", b"y" * (1 << 19), b"Connection: close"))
        assert statuses(received) == [503]
        assert b"Retry-After: 5\r\n" in received
        assert error(received)["code"] == "overloaded"
        assert statuses(
            await wire.say(post("/echo", b"y" * SMALL_BODY_BYTES, b"Connection: close"))
        ) == [200]
        first.send(b"x")
        await first.has(b"1048576 bytes")
        assert wire.server.total.body_bytes == 0

    serve(test, held_bytes=1 << 20)


@pytest.mark.parametrize("framed", [True, False])
def test_a_body_is_refused_as_soon_as_it_is_too_large(framed: bool):
    async def test(wire: Wire) -> None:
        if framed:
            sent = (
                b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
                + b"1\r\nx\r\n" * 2000
            )
        else:
            sent = post("/echo", b"x" * 2000)
        received = await wire.say(sent)
        assert statuses(received) == [413]
        assert says(error(received)["message"], "1000")

    serve(test, body_bytes=1000)


def test_too_many_connections_close_the_one_that_is_idle_longest():
    async def test(wire: Wire) -> None:
        peers = []
        for _ in range(3):
            peers.append(await wire.open(KEPT))
            await peers[-1].has(b" bytes")
        peers[0].send(KEPT)  # so the second is idle longest
        await peers[0].has(b" bytes")
        fourth = await wire.open(STREAM)
        await fourth.has(b"first ")
        assert await peers[1].rest() == b""
        await wire.connections(3)
        peers[2].send(KEPT)
        await peers[2].has(b" bytes")

    serve(test, connections=3)


def test_a_connection_too_many_gets_503_if_none_is_idle():
    async def test(wire: Wire) -> None:
        streams = [await wire.open(STREAM) for _ in range(2)]
        for stream in streams:
            await stream.has(b"first ")
        received = await wire.say(KEPT)
        assert statuses(received) == [503]
        assert says(error(received)["message"], "2 connections")
        wire.desk.go.set()
        for stream in streams:
            await stream.has(b"last")

    serve(test, connections=2)


# Shares of clients

OTHER = "127.0.0.2"


def test_a_client_with_its_share_of_connections_gets_429_and_others_get_in():
    async def test(wire: Wire) -> None:
        streams = [await wire.open(STREAM) for _ in range(2)]
        for stream in streams:
            await stream.has(b"first ")
        received = await wire.say(KEPT)
        assert statuses(received) == [429]
        assert says(error(received)["message"], "127.0.0.1", "2 connections")
        assert b"Retry-After: 5\r\n" in received
        assert wire.shares == ["connections"]
        other = await wire.open(STREAM, client=OTHER)
        await other.has(b"first ")
        wire.desk.go.set()
        for stream in (*streams, other):
            await stream.has(b"last")

    serve(test, connections=4, client_share=0.5)


def test_a_client_with_its_share_loses_its_own_idle_connection_to_its_next_one():
    async def test(wire: Wire) -> None:
        idle = await wire.open(KEPT, client=OTHER)  # the longest
        mine = [await wire.open(KEPT) for _ in range(2)]
        for peer in (idle, *mine):
            await peer.has(b" bytes")
        third = await wire.open(KEPT)
        await third.has(b" bytes")
        assert await mine[0].rest() == b""
        for peer in (idle, mine[1]):
            peer.send(KEPT)
            await peer.has(b" bytes")
        assert wire.shares == []

    serve(test, connections=4, client_share=0.5)


def test_a_client_with_its_share_of_bytes_gets_429_and_others_are_heard():
    large = post("/echo", b"y" * (1 << 19), b"Connection: close")

    async def test(wire: Wire) -> None:
        first = await wire.open(post("/echo", b"x" * (1 << 20))[:-1])
        await until(lambda: wire.server.total.body_bytes == (1 << 20) - 1)
        received = await wire.say(large)
        assert statuses(received) == [429]
        assert error(received)["code"] == "client_share"
        assert wire.shares == ["bytes"]
        assert statuses(await wire.say(large, client=OTHER)) == [200]
        first.send(b"x")
        await first.has(b"1048576 bytes")

    serve(test, held_bytes=2 << 20, client_share=0.5)


@pytest.mark.slow
def test_a_client_that_leaves_more_than_its_share_unread_is_reset_and_others_are_not():
    async def test(wire: Wire) -> None:
        other = await wire.open(LARGE, receive_buffer=4096, client=OTHER)
        mine = [await wire.open(LARGE, receive_buffer=4096) for _ in range(2)]
        await until(lambda: wire.desk.bodies == [b""] * 3)
        wire.pass_time(1)
        assert len(wire.server.total.connections) == 2
        assert wire.shares == ["bytes"]
        await other.has(b"\r\n\r\n")
        assert len(await other.reader.readexactly(LARGE_BYTES)) == LARGE_BYTES
        del mine

    serve(test, held_bytes=50 << 20, client_share=0.4, write_timeout_s=1e6, idle_timeout_s=1e6)


def test_with_a_whole_share_one_client_may_have_all():
    async def test(wire: Wire) -> None:
        streams = [await wire.open(STREAM) for _ in range(4)]
        for stream in streams:
            await stream.has(b"first ")
        assert wire.server.clients == {}

    serve(test, connections=4, client_share=1.0)


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("127.0.0.1", None),
        ("::ffff:127.0.0.1", None),
        ("::1", None),
        ("", None),
    ],
)
def test_a_client_is_an_address_or_a_network_of_ipv6_and_never_this_machine(
    address: str, client: str | None
):
    assert client_of(address) == client


# What all connections hold


def test_answers_that_are_left_unread_have_a_cap_and_those_with_the_most_are_reset():
    async def test(wire: Wire) -> None:
        peers = [await wire.open(LARGE, receive_buffer=4096) for _ in range(3)]
        await until(lambda: wire.desk.bodies == [b""] * 3)
        wire.pass_time(1)
        assert 1 <= len(wire.server.total.connections) < 3
        assert 0 < wire.server.total.unread_bytes <= 28 << 20
        del peers

    serve(test, held_bytes=28 << 20, write_timeout_s=1e6)


def test_small_bodies_that_wait_their_turn_are_not_kept_once_too_much_is_held():
    async def test(wire: Wire) -> None:
        first = await wire.open(post("/echo", b"x" * (1 << 20))[:-1])
        await until(lambda: wire.server.total.body_bytes == (1 << 20) - 1)
        second = await wire.open(WAIT + post("/echo", b"y" * 1000))
        await until(lambda: "/wait" in wire.desk.asked)
        assert wire.server.total.body_bytes == (1 << 20) - 1
        wire.desk.go.set()
        assert statuses(await second.rest()) == [200]
        first.send(b"x")
        await first.has(b"1048576 bytes")

    serve(test, held_bytes=(1 << 20) + 500)


@pytest.mark.parametrize("sent", [STREAM, KEPT, b"\0\r\n\r\n"])
def test_a_closed_connection_leaves_nothing_to_the_garbage_collector(sent: bytes):
    async def test(wire: Wire) -> None:
        peer = await wire.open()
        await wire.connections(1)
        connection = weakref.ref(next(iter(wire.server.total.connections)))
        gc.disable()
        try:
            peer.send(sent)
            await peer.has(b"HTTP/1.1 ")
            peer.close()
            await until(lambda: connection() is None)
        finally:
            gc.enable()

    serve(test)


def test_an_exception_of_the_application_is_a_bare_500(caplog: pytest.LogCaptureFixture):
    async def test(wire: Wire) -> None:
        received = await wire.say(b"GET /raises HTTP/1.1\r\nHost: x\r\n\r\n")
        assert statuses(received) == [500]
        assert error(received)["message"] == "internal error"

    serve(test)
    assert "exception in the application" in caplog.text
