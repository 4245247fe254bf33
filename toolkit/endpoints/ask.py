"""One request to a server that may be anything: its answer is bounded in bytes and in time.

Every command that reads a server's pages does so here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import aclosing

from yarl import URL

from toolkit.endpoints.upstream import TRUST_HINT, Upstream, UpstreamError, server_url
from toolkit.errors import InputError

MAX_ANSWER_BYTES = 32 << 20  # a page of metrics has some 100 KiB, Prometheus' series some MiB


def ask(
    url: str, fields: Mapping[str, object] | None = None, *, key: str = "", timeout_s: float
) -> tuple[int, bytes]:
    """Return the status, which may be any, and the body of the answer to a POST of `fields` as
    JSON, or to a GET without any.

    No redirect is followed, and no proxy is used. `timeout_s` bounds the whole answer, however
    slowly its bytes come.

    Raises `InputError` where no answer comes in time, for a URL or a key that cannot be used, for
    an answer of more than `MAX_ANSWER_BYTES`, and for a compressed one.
    """
    if not (key.isascii() and key.isprintable()):
        raise InputError("the key is not printable ASCII text", "give the key as it was issued")
    try:
        content = b"" if fields is None else json.dumps(fields, allow_nan=False).encode()
    except ValueError:  # NaN, infinity
        raise InputError(f"{url}: NaN and infinities are not sent", "give a number") from None
    headers = [(b"accept-encoding", b"identity"), (b"content-type", b"application/json")]
    if key:
        headers.append((b"authorization", b"Bearer " + key.encode()))
    where = server_url(url)
    method = "GET" if fields is None else "POST"
    try:
        return asyncio.run(_answer(where, method, headers, content, timeout_s))
    except UpstreamError as error:
        if error.untrusted:
            raise InputError(f"{where.origin()}: {error.untrusted}", TRUST_HINT) from None
        hint = "is the server running? start one: llmctl serve"
        raise InputError(f"{url} does not answer: {error}", hint) from None


async def _answer(
    url: URL, method: str, headers: list[tuple[bytes, bytes]], content: bytes, timeout_s: float
) -> tuple[int, bytes]:
    base = str(url.origin())
    target = url.raw_path_qs.encode()
    try:
        async with (
            asyncio.timeout(timeout_s),
            aclosing(Upstream(base, timeout_s)) as server,
            aclosing(await server.send(method, target, headers, content)) as answer,
        ):
            answer.refuse_compressed()
            body = await answer.read(MAX_ANSWER_BYTES)
    except TimeoutError:
        raise UpstreamError(f"no whole answer within {timeout_s:g} s") from None
    if len(body) > MAX_ANSWER_BYTES:
        most = f"{MAX_ANSWER_BYTES >> 20} MiB"
        raise InputError(f"{url}: its answer is longer than {most}", "is it the right server?")
    return answer.status, body
