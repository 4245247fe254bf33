"""The proxy's client: requests and answers of a connection, kept connections, and failures."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress

import pytest
from within import within

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


@asynccontextmanager
async def started(
    *answers: bytes, silence_s: float = 30.0
) -> AsyncIterator[tuple[Upstream, Behind]]:
    server = Behind(*answers)
    listening = await asyncio.start_server(server, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    upstream = Upstream(f"http://127.0.0.1:{port}", silence_s)
    async with listening, aclosing(upstream):
        yield upstream, server
    await asyncio.wait(server.serving) if server.serving else None


behind = within(started, "upstream", "server")


async def read(upstream: Upstream, method: str = "GET", body: bytes = b"") -> tuple[int, bytes]:
    answer = await upstream.send(method, b"/x", [(b"x-own", b"1")], body)
    content = b"".join([piece async for piece in answer.body()])
    await answer.aclose()
    return answer.status, content


@behind(WHOLE, WHOLE, WHOLE)
async def test_a_connection_is_kept_and_used_again(upstream: Upstream, server: Behind):
    for _ in range(3):
        assert await read(upstream) == (200, b"ok")
    assert server.connections == 1


@behind(WHOLE, WHOLE)
async def test_content_length_is_the_length_of_the_body(upstream: Upstream, server: Behind):
    await read(upstream, "POST", b"12345")
    await read(upstream, "POST")
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
@behind()
async def test_an_answer_ends_where_http_says(
    upstream: Upstream, server: Behind, method: str, sent: bytes, content: bytes
):
    server.answers.append(sent)
    assert (await read(upstream, method))[1] == content


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-",
        b"no HTTP at all\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nlong: " + b"x" * (1 << 19) + b"\r\n\r\n",
        b"",  # it closes the new connection
    ],
)
@behind()
async def test_a_cut_off_or_malformed_answer_is_an_error(
    upstream: Upstream, server: Behind, sent: bytes
):
    server.answers.append(sent)
    with pytest.raises(UpstreamError, match=r"was lost|is not HTTP"):
        await read(upstream)


@behind(WHOLE, b"", WHOLE)
async def test_a_closed_kept_connection_costs_no_request(upstream: Upstream, server: Behind):
    assert await read(upstream) == (200, b"ok")
    assert await read(upstream, "POST", b"once") == (200, b"ok")
    assert (server.connections, server.bodies) == (2, [b"", b"once"])


@behind(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nbegun", WHOLE)
async def test_an_unread_answer_closes_its_connection(upstream: Upstream, server: Behind):
    answer = await upstream.send("GET", b"/x", [], b"")
    await answer.aclose()
    assert await read(upstream) == (200, b"ok")
    assert server.connections == 2


@behind(b"HTTP/1.1 100 Continue\r\n\r\n", WHOLE, silence_s=0.01)
async def test_a_silent_server_is_awaited_for_the_given_time_only(
    upstream: Upstream, server: Behind
):
    with pytest.raises(UpstreamError, match="silent"):
        await read(upstream)


@behind()
async def test_a_large_answer_is_held_in_part_and_comes_whole(upstream: Upstream, server: Behind):
    size = 64 * MAX_HELD_BYTES
    server.answers.append(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + b"x" * size)
    answer = await upstream.send("GET", b"/x", [], b"")
    total = most = 0
    async for piece in answer.body():
        most = max(most, len(piece))
        total = total + len(piece)
        for _ in range(20):
            await asyncio.sleep(0)
    assert total == size
    assert most < 8 * MAX_HELD_BYTES


@pytest.mark.parametrize("target", [b"/x y", b"/x\r\nhost: other", b"/\0", b"*", b"@other/"])
@behind()
async def test_a_path_becomes_no_header_and_no_host(
    upstream: Upstream, server: Behind, target: bytes
):
    with pytest.raises(UpstreamError, match="this path"):
        await upstream.send("GET", target, [], b"")
