"""Requests that try to get an undocumented answer, and the check of every answer.

Requests come near good bodies (`bodies`), by name (`RAW`) and as torn bytes (`torn`).
"""

import asyncio
import json
import random
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import msgspec
from hypothesis import strategies as st

from benchmarks.common import ROOT
from toolkit.openai.engine_requests import IGNORED, EngineChat, harmless_values

PRIVATE = ("Traceback", 'File "', "site-packages", sys.prefix, str(ROOT))
LEAKS = re.compile("|".join(map(re.escape, PRIVATE)))
SENT = ("/v1/completions", "/v1/chat/completions")
FIELDS = [*EngineChat.__struct_fields__, *IGNORED, *harmless_values(chat=True)]
ERROR_FIELDS = {"message", "type", "param", "code"}


def complaint(status: int, kind: str, body: bytes) -> str:
    """What is wrong with a response, or ''."""
    if status < 400:
        return ""
    if status >= 500 and status != 503:
        return f"status {status}"
    if LEAKS.search(body.decode(errors="replace")):
        return f"shows a path or a traceback: {body[:300]!r}"
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return f"no OpenAI error: {status} {body[:200]!r}"
    whole = json.loads(body).keys() == {"error"} and error.keys() == ERROR_FIELDS
    said = whole and isinstance(error["message"], str) and error["message"]
    fine = said and kind == "application/json"
    return "" if fine else f"no OpenAI error: {status} {kind} {body[:200]!r}"


def complaint_of(response: httpx.Response) -> str:
    kind = response.headers.get("content-type", "")
    return complaint(response.status_code, kind, response.content)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([10**400, -(2**63), 1e308]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=12,
)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """A route, and a valid body with changed fields or bytes."""
    path = draw(st.sampled_from(SENT))
    names = st.sampled_from([*FIELDS, "prompt"])
    fields = draw(st.dictionaries(names, VALUES, max_size=4))
    good: dict[str, Any] = {"prompt": "hello"}
    if path == SENT[1]:
        good = {"messages": [{"role": "user", "content": "hi"}]}
    body = bytearray(json.dumps(good | {"max_tokens": 3} | fields).encode())
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(body)))
        length = draw(st.integers(0, 3))
        body[place : place + length] = draw(st.binary(max_size=4) | st.sampled_from(PIECES))
    return path, bytes(body)


PIECES = [
    *(b'"\\ud800"', b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"\xef\xbb\xbf", b"\xff\xfe"),
    *(b"\x00", b"\\u0000", b"[" * 40, b"[" * 40 + b"]" * 40, b'{"a":' * 40),
    *(b'"prompt": "again",', b"\xed\xa0\x80", b"//", b",", b"0x10"),
]


def request(
    path: str, body: bytes, *headers: bytes, version: bytes = b"1.1", method: bytes = b"POST"
) -> bytes:
    """A request's bytes, as a client writes them, with `headers` replacing the usual ones."""
    stated = any(
        header.lower().startswith((b"content-length", b"transfer-encoding")) for header in headers
    )
    first = b"%s %s HTTP/%s" % (method, path.encode("latin-1"), version)
    lines = [first, b"Host: localhost", *headers]
    if not any(header.lower().startswith(b"content-type") for header in headers):
        lines.append(b"Content-Type: application/json")
    if not stated:
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


GOOD = b'{"prompt": "hello", "max_tokens": 2}'
CLOSE = b"Connection: close"
CHUNKED = b"Transfer-Encoding: chunked"


def get(path: str) -> bytes:
    return request(path, b"", CLOSE, method=b"GET")


def good(*headers: bytes) -> bytes:
    """A good request but for these headers."""
    return request(SENT[0], GOOD, CLOSE, *headers)


def chunks(body: bytes) -> bytes:
    return request(SENT[0], body, CLOSE, CHUNKED)


MODELS = request("/v1/models", b"", method=b"GET")  # its connection stays open
WHOLE_CHUNK = b"%x\r\n%s\r\n" % (len(GOOD), GOOD)
FORM = b"Content-Type: application/x-www-form-urlencoded"

# Name to bytes and the allowed statuses; 0: no answer, since the client closes the connection.
RAW: dict[str, tuple[bytes, set[int]]] = {
    "good": (good(), {200}),
    "HTTP/1.0": (request(SENT[0], GOOD, version=b"1.0"), {200}),
    "HTTP/2.0": (request(SENT[0], GOOD, CLOSE, version=b"2.0"), {200, 400}),
    "HTTP/9.9": (request(SENT[0], GOOD, CLOSE, version=b"9.9"), {400}),
    "HTTP/2's preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400}),
    "not HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 60, {400}),
    "no method": (b" / HTTP/1.1\r\n\r\n", {400}),
    "unknown method": (request(SENT[0], GOOD, CLOSE, method=b"BREW"), {400}),
    "CONNECT": (b"CONNECT example.com:443 HTTP/1.1\r\nHost: localhost\r\n\r\n", {400, 404, 405}),
    "an absolute URL": (get("http://x/v1/models"), {200, 400, 404}),
    "a path with bytes above ASCII": (get("/v1/\xff\xfe"), {400, 404}),
    "a path with half of a surrogate": (get("/v1/%ED%A0%80"), {400, 404}),
    "a path with a zero byte": (get("/v1/models/%00"), {404}),
    "dots in the path": (get("/../../etc/passwd"), {404}),
    "a line break in the path": (get("/v1/%0d%0aX: y"), {400, 404}),
    "a long path": (get("/" + "a" * 70_000), {400}),
    "many headers": (good(*[b"x-%d: %s" % (n, b"y" * 90) for n in range(1000)]), {400}),
    "a long header": (good(b"x: " + b"y" * 100_000), {400}),
    "a header without an end": (b"GET / HTTP/1.1\r\nx: " + b"y" * 200_000, {0, 400}),
    "a header with a line break": (good(b"x: a\r\n b"), {200, 400}),
    "a header with a zero byte": (good(b"x: a\x00b"), {400}),
    "a request id that would inject": (good(b"x-request-id: a\x0b<script>"), {200, 400}),
    "two lengths": (good(b"Content-Length: 5", b"Content-Length: 36"), {400}),
    "a length and chunks": (
        request(SENT[0], b"0\r\n\r\n", CLOSE, b"Content-Length: 5", CHUNKED),
        {400},
    ),
    "a negative length": (good(b"Content-Length: -1"), {400}),
    "a length beyond 64 bits": (good(b"Content-Length: 99999999999999999999999"), {400}),
    "a length beyond the limit": (good(b"Content-Length: 999999999"), {413}),
    "a length in words": (good(b"Content-Length: many"), {400}),
    "a length that is too short": (request(SENT[0], GOOD, b"Content-Length: 5"), {0, 400}),
    "a length that is too long": (good(b"Content-Length: 500"), {0, 400}),
    "chunks": (chunks(WHOLE_CHUNK + b"0\r\n\r\n"), {200}),
    "chunks without an end": (chunks(WHOLE_CHUNK), {0, 400}),
    "a chunk of a negative size": (chunks(b"-5\r\nhello\r\n0\r\n\r\n"), {400}),
    "a chunk of a huge size": (chunks(b"ffffffffffffffffff\r\nhello"), {400}),
    "trailers": (chunks(WHOLE_CHUNK + b"0\r\nx: y\r\n\r\n"), {200, 400}),
    "gzip": (
        request(SENT[0], b"\x1f\x8b\x08\x00" + b"\x00" * 30, CLOSE, b"Content-Encoding: gzip"),
        {400, 415},
    ),
    "an upgrade": (request(SENT[0], GOOD, b"Connection: Upgrade, close", b"Upgrade: h2c"), {400}),
    "a websocket": (
        request("/", b"", b"Connection: Upgrade, close", b"Upgrade: websocket", method=b"GET"),
        {400},
    ),
    "expects 100": (good(b"Expect: 100-continue"), {100, 200}),
    "pipelined": (MODELS * 3 + good(), {200}),
    "rubbish after a request": (MODELS + b"\x00\x01\x02" * 9, {0, 200, 400}),
    "HEAD": (request("/health", b"", CLOSE, method=b"HEAD"), {200}),
    "a type in capitals": (good(b"Content-Type: Application/JSON; charset=utf-8"), {200}),
    "no type": (good(b"Content-Type: "), {415}),
    "a form": (request(SENT[0], b"prompt=a", CLOSE, FORM), {415}),
    "empty": (b"", {0}),
    "half a request": (request(SENT[0], GOOD)[:40], {0, 400}),
}


SEPARATORS = [b"\r\n", b"\r\n\r\n", b"\x00", b": ", b"\xff", b"HTTP/1.1"]


def torn(rng: random.Random) -> bytes:
    """The bytes of one of `RAW`, changed, dropped, doubled or cut off."""
    data = bytearray(rng.choice([raw for raw, _ in RAW.values() if len(raw) < 2000]))
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(data) + 1)
        length = rng.randint(0, 8)
        bytes_ = rng.randbytes(length)
        doubled = data[place : place + length] * 2
        changes = [b"", bytes_, doubled, rng.choice([*SEPARATORS, *PIECES])]
        data[place : place + length] = rng.choice(changes)
    return bytes(data)


async def converse(port: int, data: bytes, *, patience_s: float = 60.0) -> bytes:
    """The server's answer to these bytes until it closes; after `patience_s` the client closes its
    side.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        received = b""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while piece := await reader.read(1 << 16):
                    received += piece
                return received
        writer.write_eof()
        async with asyncio.timeout(60.0):
            return received + await reader.read(-1)
    except (ConnectionResetError, BrokenPipeError):
        return b""
    finally:
        writer.close()


def answers(received: bytes) -> Iterator[tuple[int, str, bytes]]:
    """Status, content type and body of each response; chunked bodies stay as they are."""
    while received.startswith(b"HTTP/"):
        head, _, rest = received.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:])
        status = int(lines[0].split(" ")[1])
        if "content-length" in headers:
            length = int(headers["content-length"])
            yield status, headers.get("content-type", ""), rest[:length]
            received = rest[length:]
        elif status < 200:
            yield status, "", b""
            received = rest
        else:
            yield status, headers.get("content-type", ""), rest
            return
    if received:
        raise ValueError(f"no HTTP: {received[:200]!r}")


def raw_complaint(sent: bytes, received: bytes) -> str:
    """What is wrong with all answers on a connection, or ''."""
    try:
        to_head = b"HEAD " in sent  # answers to HEAD have the headers of a body, and no body
        seen = [answer for answer in answers(received) if answer[2] or not to_head]
        return next(filter(None, (complaint(*answer) for answer in seen)), "")
    except (ValueError, msgspec.DecodeError) as error:
        return str(error)
