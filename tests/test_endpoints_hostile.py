"""Servers that answer anything: what commands read of them is bounded, and ends in one line."""

import asyncio
import contextlib
import gzip
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from said import says

from toolkit.endpoints import ask as asking
from toolkit.endpoints import load
from toolkit.endpoints.ask import ask
from toolkit.endpoints.load import Sample, StreamedAnswer, load_client, send_timed
from toolkit.endpoints.settings import SettingsClient
from toolkit.endpoints.target import (
    Target,
    find_target,
    front_state,
    learn,
    page_metrics,
    scrape,
)
from toolkit.errors import InputError
from toolkit.traces.histograms import OUTPUT, PROMPT, lengths_of

Send = Callable[[socket.socket], None]


@contextlib.contextmanager
def hostile(send: Send) -> Iterator[str]:
    """The URL of a server that calls `send` with each connection, once it has sent its request."""

    def serve_one(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            send(connection)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=serve_one, args=[connection], daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def answer(body: bytes, more: bytes = b"") -> Send:
    head = b"HTTP/1.1 200 X\r\n%scontent-length: %d\r\nconnection: close\r\n\r\n"
    return lambda connection: connection.sendall(head % (more, len(body)) + body)


def endless(piece: bytes) -> Send:
    def send(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 X\r\n\r\n")
        while True:
            connection.sendall(piece)

    return send


def dripping(head: bytes) -> Send:
    """`head`, and then a byte now and then, for as long as the client listens."""

    def send(connection: socket.socket) -> None:
        connection.sendall(head)
        connection.settimeout(0.005)
        while True:
            connection.sendall(b"x")
            with contextlib.suppress(TimeoutError):
                if not connection.recv(1):
                    return

    return send


BOMB = answer(gzip.compress(bytes(1 << 20)), b"content-encoding: gzip\r\n")
READERS: list[Callable[[str], object]] = [
    find_target,
    lambda url: learn(Target(url, "", "m", None, own=False)),
    lambda url: scrape(Target(url, "", "m", None, own=False)),
    lambda url: front_state(Target(url, "", "m", None, own=False, front=True)),
    lambda url: SettingsClient(url, "").get(),
]


@pytest.mark.parametrize("send", [BOMB, endless(bytes(1 << 16))], ids=["compressed", "endless"])
def test_what_has_no_bound_is_refused(send: Send, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(asking, "MAX_ANSWER_BYTES", 1 << 20)
    with hostile(send) as url:
        for read in READERS:
            with pytest.raises(InputError) as refused:
                read(url)
            assert says(refused.value.message, url.removeprefix("http://"))
            assert "compressed" in refused.value.message or says(refused.value.message, "1 MiB")


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 X\r\n\r\n", b"HTTP/1.1 200 X\r\nx: "])
def test_an_answer_that_comes_byte_by_byte_has_an_end(head: bytes):
    with hostile(dripping(head)) as url, pytest.raises(InputError, match=r"0\.2 s"):
        ask(url, timeout_s=0.2)


@pytest.mark.parametrize("key", ["é", "a\nb", "\x1b[31m"])
def test_a_key_that_no_header_holds_is_one_line(key: str):
    with pytest.raises(InputError):
        ask("http://127.0.0.1:9", key=key, timeout_s=1.0)


def test_a_compressed_stream_is_a_failure_of_its_request():
    async def sent(url: str) -> str:
        sample = Sample(0.0, 1, 1)
        target = Target(url, "", "m", None, own=False)
        sample.write(target, {})
        async with contextlib.aclosing(load_client(target)) as server:
            await send_timed(server, sample, time.perf_counter, 10.0)
        return sample.failure

    with hostile(BOMB) as url:
        assert "compressed" in asyncio.run(sent(url))


def test_a_stream_has_a_most_of_bytes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(load, "MAX_STREAM_BYTES", 1000)
    stream = StreamedAnswer(Sample(0.0, 1, 1))
    for _ in range(11):
        stream.feed(b"data: {}\n\n" * 10, 0.0)
    assert stream.failure


PAGE = "".join(
    f'{name}_bucket{{le="1",model_name="m"}} 2\n{name}_bucket{{le="+Inf",model_name="m"}} 3\n'
    f'{name}_sum{{model_name="m"}} 9\n'
    for name in (PROMPT, OUTPUT)
)


def counted(page: str) -> float:
    prompts, _ = lengths_of(page_metrics(page.encode(), "page"), 4096, "page")
    return sum(prompts.counts)


ODD = [
    *[('le="1"', f'le="{value}"') for value in ("one", "NaN", "-Inf")],
    ('le="1",', ""),
    *[("} 2\n", f"}} {value}\n") for value in ("NaN", "+Inf", "2 3 4", "0x2", "9" * 5000)],
    ("} 9\n", "} -1e999\n"),
    *[('"m"', value) for value in ('"m', '"\\x"')],
    (PROMPT, PROMPT[:-1] + "\x00"),
]


def test_an_odd_page_of_histograms_is_one_line():
    assert counted(PAGE) == 3
    for old, new in ODD:
        with contextlib.suppress(InputError):
            assert counted(PAGE.replace(old, new, 1)) >= 0


def test_a_page_of_too_many_lines_is_refused_by_their_number():
    with pytest.raises(InputError) as refused:
        page_metrics(b"a 1\n" * 1_000_000, "page")
    assert says(refused.value.message, "page", "1,000,000")
