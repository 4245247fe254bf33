"""The proxy's client: requests and answers of a connection, kept connections, and failures."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from toolkit.endpoints.upstream import MAX_HELD_BYTES, Upstream, UpstreamError

WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Behind:
    """A server that answers each request with the next of `answers`; at an empty one it closes the
    connection.
    """

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.connections = 0
        self.serving: set[asyncio.Task] = set()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.serving.add(asyncio.current_task())
        try:
            while self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                answer = self.answers.pop(0)
                if not answer:
                    break
                self.heads.append(head)
                _, _, length = head.lower().partition(b"content-length: ")
                self.bodies.append(
                    await reader.readexactly(int(length.split(b"\r\n")[0] or 0)) if length else b""
                )
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def behind(
    server: Behind, use: Callable[[Upstream], Awaitable[None]], silence_s: float = 30.0
) -> None:
    async def run() -> None:
        listening = await asyncio.start_server(server, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        async with listening, Upstream(f"http://127.0.0.1:{port}", silence_s) as upstream:
            await use(upstream)
        await asyncio.wait(server.serving) if server.serving else None

    asyncio.run(run())


async def read(upstream: Upstream, method: str = "GET", body: bytes = b"") -> tuple[int, bytes]:
    answer = await upstream.send(method, b"/x", [(b"x-own", b"1")], body)
    content = b"".join([piece async for piece in answer.body()])
    await answer.aclose()
    return answer.status, content


def test_a_connection_is_kept_and_used_again():
    server = Behind(WHOLE, WHOLE, WHOLE)

    async def use(upstream: Upstream) -> None:
        for _ in range(3):
            assert await read(upstream) == (200, b"ok")

    behind(server, use)
    assert server.connections == 1


def test_content_length_is_the_length_of_the_body():
    server = Behind(WHOLE, WHOLE)

    async def use(upstream: Upstream) -> None:
        await read(upstream, "POST", b"12345")
        await read(upstream, "POST")

    behind(server, use)
    assert server.bodies == [b"12345", b""]
    assert [b"content-length: 0" in head.lower() for head in server.heads] == [False, True]


@pytest.mark.parametrize(
    ("method", "sent", "content"),
    [
        ("HEAD", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n", b""),
        ("GET", b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        ("GET", b"HTTP/1.1 200 OK\r\n\r\nuntil the end", b"until the end"),
        (
            "GET",
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + WHOLE,
            b"ok",
        ),
        (
            "GET",
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n",
            b"ok",
        ),
    ],
)
def test_an_answer_ends_where_http_says(method, sent, content):
    async def use(upstream: Upstream) -> None:
        assert (await read(upstream, method))[1] == content

    behind(Behind(sent), use)


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-",
        b"no HTTP at all\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nlong: " + b"x" * (1 << 19) + b"\r\n\r\n",
    ],
)
def test_a_cut_off_or_malformed_answer_is_an_error(sent):
    async def use(upstream: Upstream) -> None:
        with pytest.raises(UpstreamError, match="was lost"):
            await read(upstream)

    behind(Behind(sent), use)


def test_a_header_in_utf_8_is_passed_on_as_it_is():
    server = Behind(WHOLE)
    name = "x-user: Zoë".encode()

    async def use(upstream: Upstream) -> None:
        await (await upstream.send("GET", b"/x", [tuple(name.split(b": "))])).aclose()

    behind(server, use)
    assert name + b"\r\n" in server.heads[0]


def test_no_connection_is_kept_where_enough_are_in_use():
    server = Behind(WHOLE, WHOLE)

    async def use(upstream: Upstream) -> None:
        upstream._http.most_kept = 0
        for _ in range(2):
            assert await read(upstream) == (200, b"ok")

    behind(server, use)
    assert [b"connection: close" in head.lower() for head in server.heads] == [True, True]


def test_a_closed_kept_connection_costs_no_request():
    server = Behind(WHOLE, b"", WHOLE)

    async def use(upstream: Upstream) -> None:
        assert await read(upstream) == (200, b"ok")
        assert await read(upstream, "POST", b"once") == (200, b"ok")

    behind(server, use)
    assert (server.connections, server.bodies) == (2, [b"", b"once"])


def test_a_new_connection_that_is_closed_is_an_error_at_once():
    async def use(upstream: Upstream) -> None:
        with pytest.raises(UpstreamError, match="was lost"):
            await read(upstream)

    behind(Behind(b""), use)


def test_an_unread_answer_closes_its_connection():
    server = Behind(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nbegun", WHOLE)

    async def use(upstream: Upstream) -> None:
        answer = await upstream.send("GET", b"/x", [], b"")
        await answer.aclose()
        assert await read(upstream) == (200, b"ok")

    behind(server, use)
    assert server.connections == 2


def test_closing_breaks_off_answers_that_are_being_read():
    async def use(upstream: Upstream) -> None:
        answer = await upstream.send("GET", b"/x", [])
        begun = asyncio.Event()

        async def read_on() -> None:
            async for _ in answer.body():
                begun.set()

        reading = asyncio.create_task(read_on())
        await begun.wait()
        await upstream.close()
        with pytest.raises(UpstreamError, match="was lost"):
            async with asyncio.timeout(5):
                await reading
        await answer.aclose()

    part = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nbegun"
    behind(Behind(part, WHOLE), use)


def test_a_silent_server_is_awaited_for_the_given_time_only():
    async def use(upstream: Upstream) -> None:
        with pytest.raises(UpstreamError, match="silent") as caught:
            await read(upstream)
        assert caught.value.timed_out

    behind(Behind(b"HTTP/1.1 100 Continue\r\n\r\n", WHOLE), use, silence_s=0.01)


def test_a_large_answer_is_held_in_part_and_comes_whole():
    size = 64 * MAX_HELD_BYTES
    most = 0

    async def use(upstream: Upstream) -> None:
        nonlocal most
        answer = await upstream.send("GET", b"/x", [], b"")
        total = 0
        async for piece in answer.body():
            most = max(most, len(piece))
            total = total + len(piece)
            for _ in range(20):
                await asyncio.sleep(0)
        assert total == size

    behind(Behind(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + b"x" * size), use)
    assert most < 8 * MAX_HELD_BYTES


@pytest.mark.parametrize("target", [b"/x y", b"/x\r\nhost: other", b"/\0", b"*", b"@other/"])
def test_a_path_becomes_no_header_and_no_host(target):
    async def use(upstream: Upstream) -> None:
        with pytest.raises(UpstreamError, match="this path"):
            await upstream.send("GET", target, [], b"")

    behind(Behind(), use)
