"""One request to a server that may be anything: its answer is bounded in bytes and in time.

Every command that reads a server's pages does so here. Only event streams of tokens
(`toolkit.endpoints.load`) and the fronts (`toolkit.endpoints.upstream`) have readers of their own.
"""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import httpx

from toolkit.errors import InputError

MAX_ANSWER_BYTES = 32 << 20  # a page of metrics has some 100 KiB, Prometheus' series some MiB
PLAIN = ("", "identity")  # values of content-encoding
# httpcore names the moments at which it has a connection.
_CONNECTED = ("connection.connect_tcp.complete", "connection.start_tls.complete")


class PlainAnswer(NamedTuple):
    """A whole answer, with any status."""

    status: int
    body: bytes


def ask(
    url: str,
    fields: Mapping[str, object] | None = None,
    *,
    key: str = "",
    timeout_s: float,
    trusted: ssl.SSLContext | bool = False,
) -> PlainAnswer:
    """Return the answer to a POST of `fields` as JSON, or to a GET without any.

    No redirect is followed, and no proxy is used. `timeout_s` bounds the whole answer, however
    slowly its bytes come. `trusted` is httpx's argument `verify`.

    Raises `httpx.HTTPError` or `httpx.InvalidURL` where no answer comes in time, and `InputError`
    for a key that no header can hold, for an answer of more than `MAX_ANSWER_BYTES`, and for a
    compressed one: a few KiB of it may stand for gigabytes.
    """
    if not (key.isascii() and key.isprintable()):
        raise InputError("the key is not printable ASCII text", "give the key as it was issued")
    try:
        content = None if fields is None else json.dumps(fields, allow_nan=False).encode()
    except ValueError:  # NaN, infinity
        raise InputError(f"{url}: NaN and infinities are not sent", "give a number") from None
    headers = {"accept-encoding": "identity", "content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    end = _End(timeout_s)
    body = bytearray()
    try:
        with (
            end,
            httpx.Client(timeout=timeout_s, trust_env=False, verify=trusted) as client,
            client.stream(
                "GET" if fields is None else "POST",
                url,
                content=content,
                headers=headers,
                extensions={"trace": end.note},
            ) as response,
        ):
            encoding = response.headers.get("content-encoding", "").strip().lower()
            if encoding not in PLAIN:
                problem = f"{url}: its answer is compressed ({encoding[:40]})"
                raise InputError(problem, "llmctl asks for plain answers: turn compression off")
            for piece in response.iter_raw():
                body += piece
                if len(body) > MAX_ANSWER_BYTES:
                    most = f"{MAX_ANSWER_BYTES >> 20} MiB"
                    raise InputError(
                        f"{url}: its answer is longer than {most}", "is it the right server?"
                    )
            status = response.status_code
    except httpx.HTTPError:
        if not end.passed:
            raise
    if end.passed:  # an answer without a length looks whole where its connection was ended
        raise httpx.ReadTimeout(f"no whole answer within {timeout_s:g} s")
    return PlainAnswer(status, bytes(body))


class _End:
    """Ends a connection when the time is up: httpx's own limits start again with every byte."""

    def __init__(self, timeout_s: float) -> None:
        self.passed = False
        self._sockets: list[socket.socket] = []
        self._timer = threading.Timer(timeout_s, self._end)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._timer.join()  # a thread that still ends would run beside what comes next

    def note(self, event: str, info: dict[str, Any]) -> None:
        """Remember the socket of a new connection, as httpcore tells of it."""
        if event in _CONNECTED:
            self._sockets.append(info["return_value"].get_extra_info("socket"))
            if self.passed:
                self._end()

    def _end(self) -> None:
        self.passed = True
        for each in self._sockets:
            with suppress(OSError):  # it is closed
                # the method of an SSL socket would also drop its state under the reader
                socket.socket.shutdown(each, socket.SHUT_RDWR)
