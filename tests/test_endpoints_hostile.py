"""Servers that answer anything: what commands read of them is bounded, and ends in one line."""

import asyncio
import contextlib
import gzip
import socket
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from said import says

from toolkit.endpoints import ask as asking
from toolkit.endpoints import load, target
from toolkit.endpoints.ask import ask
from toolkit.endpoints.load import LoadClient, Sample, StreamedAnswer, make_request
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
READERS: dict[str, Callable[[str], object]] = {
    "bench, doctor": find_target,
    "dialect": lambda url: learn(Target(url, "", "m", None, own=False)),
    "metrics": lambda url: scrape(Target(url, "", "m", None, own=False)),
    "front": lambda url: front_state(Target(url, "", "m", None, own=False, front=True)),
    "set": lambda url: SettingsClient(url, "").get(),
}


@pytest.mark.parametrize("send", [BOMB, endless(bytes(1 << 16))], ids=["compressed", "endless"])
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_what_has_no_bound_is_refused(
    read: Callable[[str], object], send: Send, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(asking, "MAX_ANSWER_BYTES", 1 << 20)
    with hostile(send) as url, pytest.raises(InputError) as refused:
        read(url)
    assert says(refused.value.message, url.removeprefix("http://"))
    assert "compressed" in refused.value.message or says(refused.value.message, "1 MiB")


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 X\r\n\r\n", b"HTTP/1.1 200 X\r\nx: "])
def test_an_answer_that_comes_byte_by_byte_has_an_end(head: bytes):
    with hostile(dripping(head)) as url, pytest.raises(httpx.ReadTimeout):
        ask(url, timeout_s=0.2)


def test_readers_of_pages_give_each_answer_a_whole_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(target, "ANSWER_TIMEOUT_S", 0.2)
    with hostile(dripping(b"HTTP/1.1 200 X\r\n\r\n")) as url, pytest.raises(InputError):
        find_target(url)


def test_a_plain_answer_and_its_status_come_whole():
    with hostile(answer(b"{}" * 1000)) as url:
        assert ask(url, timeout_s=10.0) == (200, b"{}" * 1000)


@pytest.mark.parametrize("key", ["é", "a\nb", "\x1b[31m"])
def test_a_key_that_no_header_holds_is_one_line(key: str):
    with pytest.raises(InputError):
        ask("http://127.0.0.1:9", key=key, timeout_s=1.0)


def test_a_compressed_stream_is_a_failure_of_its_request():
    async def sent(url: str) -> str:
        sample = Sample(0.0, 1, 1)
        target = Target(url, "", "m", None, own=False)
        request = make_request(target, {})
        async with LoadClient(target) as client:
            await client.send(request, sample, time.perf_counter, 10.0)
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


def test_a_page_of_histograms_is_read():
    assert counted(PAGE) == 3


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('le="1"', 'le="one"'),
        ('le="1"', 'le="NaN"'),
        ('le="1"', 'le="-Inf"'),
        ('le="1",', ""),
        ("} 2\n", "} NaN\n"),
        ("} 2\n", "} +Inf\n"),
        ("} 9\n", "} -1e999\n"),
        ("} 2\n", "} 2 3 4\n"),
        ("} 2\n", "} 0x2\n"),
        ('"m"', '"m'),
        ('"m"', '"\\x"'),
        ("} 2\n", "} " + "9" * 5000 + "\n"),
        (PROMPT, PROMPT[:-1] + "\x00"),
    ],
)
def test_an_odd_page_of_histograms_is_one_line(old: str, new: str):
    odd = PAGE.replace(old, new, 1)
    with contextlib.suppress(InputError):
        assert counted(odd) >= 0


def test_a_page_of_too_many_lines_is_refused_by_their_number():
    with pytest.raises(InputError) as refused:
        page_metrics(b"a 1\n" * 1_000_000, "page")
    assert says(refused.value.message, "page", "1,000,000")
