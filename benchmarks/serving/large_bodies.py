"""The longest delay of `/health` while one request with a body of up to 8 MiB is read.

    python -m benchmarks.serving.large_bodies [--only NAME]

Takes two to three minutes. Needs nothing but the package: two workers with fake engines.

Each of the worst bodies is sent once, while another client asks `/health` every 2 ms. The table has
the slowest of those answers during the body, and during the second before it. The exit code is 1 if
one took longer than 100 ms.
"""

from __future__ import annotations

import http.client
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.common.command import make_parser
from benchmarks.common.raw_client import post
from benchmarks.common.serving import fake_server

LARGEST = 8 << 20
LIMIT_MS = 100.0


def items(item: bytes, size: int = LARGEST) -> bytes:
    """As many of these, separated by commas, as fit."""
    return b",".join([item] * ((size - 100) // (len(item) + 1)))


def bodies() -> dict[str, tuple[str, bytes]]:
    completions = "/v1/completions"
    chat = "/v1/chat/completions"
    keys = b",".join(b'"%x":0' % number for number in range(750_000))
    tokens = b",".join([b"[%s]" % items(b"1", 1000)] * 256)
    part = items(b'{"type":"text","text":"a"}')
    choices = json.dumps({"prompt": ["a"] * 64, "n": 16, "max_tokens": 1}).encode()
    surrogates = b"\\ud83d\\ude00" * (LARGEST // 12 - 10)
    return {
        "750,000 keys": (completions, b"{%s}" % keys),
        "750,000 keys, the first one twice": (completions, b'{%s,"0":0}' % keys),
        "a prompt of 4 million tokens": (completions, b'{"prompt":[%s]}' % items(b"1")),
        "-1, 2.8 million times": (completions, b'{"prompt":[%s]}' % items(b"-1")),
        "a text": (completions, b'{"prompt":"%s"}' % (b"a" * (LARGEST - 100))),
        "a text of 1 million tokens": (completions, b'{"prompt":"%s"}' % (b"a" * (1 << 20))),
        "escapes": (completions, b'{"prompt":"%s"}' % (b"\\n" * (LARGEST // 2 - 50))),
        "surrogate pairs": (completions, b'{"prompt":"%s"}' % surrogates),
        "brackets": (completions, b"[" * LARGEST),
        "numbers of 4,000 digits": (completions, b'{"prompt":[%s]}' % items(b"1" * 4000)),
        "numbers with a fraction": (completions, b'{"x":[%s]}' % items(b"0.5")),
        "empty strings": (completions, b'{"prompt":[%s]}' % items(b'""')),
        "65,000 empty lists": (completions, b'{"x":[%s]}' % items(b"[]", 3 * 65_000)),
        "250,000 keys": (completions, b"{%s}" % keys[:2_500_000].rpartition(b",")[0]),
        "commas": (completions, b'{"prompt":"%s"}' % (b"," * (LARGEST - 100))),
        "quotes": (completions, b'{"prompt":"%s"}' % (b'\\"' * (LARGEST // 2 - 50))),
        "empty lists": (completions, b'{"x":[%s]}' % items(b"[]")),
        "empty objects": (completions, b'{"x":[%s]}' % items(b"{}")),
        "empty messages": (chat, b'{"messages":[%s]}' % items(b"{}")),
        "300,000 parts of a message": (
            chat,
            b'{"messages":[{"role":"user","content":[%s]}]}' % part,
        ),
        "stop_token_ids": (completions, b'{"prompt":"a","stop_token_ids":[%s]}' % items(b"-1")),
        "30 KiB of wrong tokens": (completions, b'{"prompt":[%s]}' % items(b"-1", 30_000)),
        "30 KiB of keys": (completions, b"{%s}" % keys[:30_000].rpartition(b",")[0]),
        "30 KiB of messages": (chat, b'{"messages":[%s]}' % items(b"{}", 30_000)),
        "64 prompts of 16 choices": (completions, choices),
        "256 prompts of 450 tokens": (completions, b'{"max_tokens":1,"prompt":[%s]}' % tokens),
    }


def in_chunks_of_a_byte() -> bytes:
    body = b'{"prompt":"%s"}' % (b"a" * (LARGEST - 100))
    chunks = b"".join([b"1\r\n%c\r\n" % byte for byte in body])
    return post("/v1/completions", chunks + b"0\r\n\r\n", chunked=True)


def sent(address: tuple[str, int], request: bytes) -> bytes:
    """The answer, read to its end, while the client still writes."""
    with socket.create_connection(address, timeout=120) as one:
        writing = threading.Thread(target=lambda: one.sendall(request))
        writing.start()
        received = bytearray()
        while piece := one.recv(1 << 20):
            received += piece
        writing.join()
    return bytes(received)


@contextmanager
def health_latencies(address: tuple[str, int]) -> Iterator[list[float]]:
    """The latencies of `/health` in ms, one after the other."""
    took: list[float] = []
    stop = threading.Event()

    def ask() -> None:
        connection = http.client.HTTPConnection(*address)
        while not stop.is_set():
            begin_s = time.perf_counter()
            connection.request("GET", "/health")
            connection.getresponse().read()
            took.append(1e3 * (time.perf_counter() - begin_s))
            time.sleep(0.002)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield took
    finally:
        stop.set()
        asking.join()


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--only", default="", help="only bodies with this in their name")
    options = parser.parse_args()
    requests = {name: post(*body) for name, body in bodies().items()}
    requests["8 MiB in chunks of a byte"] = in_chunks_of_a_byte()
    slow = 0
    with fake_server() as server:
        address = ("127.0.0.1", server.port)
        processes = [server.front, *server.front.children()]
        memory = [one.memory_info().rss >> 20 for one in processes]
        print("memory before, front and children:", memory, "MiB")
        for name, request in requests.items():
            if options.only not in name:
                continue
            with health_latencies(address) as took:
                time.sleep(1.0)
                before_ms = max(took[1:])
                took.clear()
                begin_s = time.perf_counter()
                answer = sent(address, request)
                seconds = time.perf_counter() - begin_s
                time.sleep(0.1)
                slowest_ms = max(took)
            slow += slowest_ms > LIMIT_MS
            health = f"/health {slowest_ms:5.1f} ms (before {before_ms:4.1f})"
            print(f"{name:36} {answer[9:12].decode()}  {seconds:5.2f} s  {health}", flush=True)
        print("memory after: ", [one.memory_info().rss >> 20 for one in processes], "MiB")
        slow += bool(server.end())
    return bool(slow)


if __name__ == "__main__":
    sys.exit(main())
