"""A server that speaks vLLM's API without a model, for tests and benchmarks of the gateway.

A token is a letter, and each next one is a hash of all tokens before it, the prompt's included: a
token that was lost, doubled, or made from something else changes all that follow. Text and tokens
are the same thing (one byte each), so an answer can be continued by ids and by text. It can be
killed, hung, drained, made to answer errors, and started again on its port.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

import httptools

MODEL = "standin"
MASK = (1 << 61) - 1
MAX_MODEL_LEN = 4096
END_ONE_IN = 64  # tokens end an answer, unless it ignores that


def tokens_of(text: str) -> list[int]:
    return list(text.encode())


def prompt_of(body: dict[str, Any], *, chat: bool) -> list[int]:
    """The prompt's tokens."""
    if not chat:
        prompt = body["prompt"]
        return tokens_of(prompt) if isinstance(prompt, str) else list(prompt)
    *before, last = body["messages"]
    text = "".join(f"<{each['role']}>{each['content']}" for each in before)
    text += f"<{last['role']}>{last['content']}"
    return tokens_of(text if body.get("continue_final_message") else text + "<assistant>")


class Generation:
    """The tokens of one choice."""

    def __init__(self, prompt: list[int], limit: int, *, ignores_end: bool, seed: int = 0) -> None:
        self.state, self.left, self.ignores_end = seed, limit, ignores_end
        for token in prompt:
            self._add(token)
        self.finish = ""

    def next(self) -> int:
        """The next token; `finish` says whether it was the last."""
        token = 97 + self.state % 26
        if not self.ignores_end and self.state // 26 % END_ONE_IN == 0:
            self.finish = "stop"
        self._add(token)
        self.left -= 1
        if not self.left:
            self.finish = self.finish or "length"
        return token

    def _add(self, token: int) -> None:
        self.state = (self.state * 1_000_003 + token + 1) * 6_364_136_223_846_793_005 & MASK


def answer_of(
    body: dict[str, Any], *, chat: bool = False, max_model_len: int = MAX_MODEL_LEN
) -> str:
    """The text that an undisturbed server generates."""
    prompt = prompt_of(body, chat=chat)
    limit = limit_of(body, prompt, max_model_len)
    made = Generation(prompt, limit, ignores_end=bool(body.get("ignore_eos")))
    text = ""
    while not made.finish:
        text += chr(made.next())
        if (end := stopped_at(body, text)) >= 0:
            return text[:end]
    return text


def stopped_at(body: dict[str, Any], text: str) -> int:
    """Where a stop string ends a text; -1: nowhere."""
    for stop in body.get("stop") or []:
        if stop in text:
            kept = len(stop) if body.get("include_stop_str_in_output") else 0
            return text.index(stop) + kept
    return -1


def limit_of(body: dict[str, Any], prompt: list[int], max_model_len: int = MAX_MODEL_LEN) -> int:
    """The most tokens of the answer: without a limit of a chat, those that the context has left."""
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    return int(limit or (16 if "prompt" in body else max_model_len - len(prompt)))


@dataclass
class StandIn:
    """One server.

    Attributes:
        token_s: between two tokens of a stream; 0: all at once.
        speaks_ids: gives token ids where it is asked, as vLLM does.
        status: answers requests for tokens with this status; 0: serves them.
        hung: accepts requests, answers /health, and generates nothing.
        dead: accepts connections and answers nothing at all.
        max_model_len: the context: a request that does not fit gets 400, as from vLLM.
        token_bytes: of a prompt's token in the usage: a token is one byte, and four in real text.
        kind: by which a list of replicas names it; '': by none.
        served: requests for tokens by path.
    """

    token_s: float = 0.0
    speaks_ids: bool = True
    status: int = 0
    model: str = MODEL
    max_model_len: int = MAX_MODEL_LEN
    version: str = "0.32.0"
    hung: bool = False
    dead: bool = False
    port: int = 0
    metrics: str = ""
    first_s: float = 0.0
    token_bytes: int = 1
    kind: str = ""
    served: Counter[str] = field(default_factory=Counter)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keeps_bodies: bool = False
    connections: set[StandInConnection] = field(default_factory=set)
    _server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def listed(self) -> str:
        """The replica as a list of replicas has it."""
        return f"{self.kind}={self.url}" if self.kind else self.url

    @property
    def is_idle(self) -> bool:
        """Whether it has no request."""
        return all(each.is_idle for each in self.connections)

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: StandInConnection(self), "127.0.0.1", self.port, backlog=1024
        )
        self.port = self._server.sockets[0].getsockname()[1]

    def kill_listener(self) -> None:
        """Refuse new connections."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def kill(self) -> None:
        """End at once, as by SIGKILL: the listener and all connections."""
        self.kill_listener()
        for connection in list(self.connections):
            connection.end()

    def abort_requests(self) -> None:
        """End all answers as vLLM does when it shuts down."""
        for connection in list(self.connections):
            connection.abort_request()


class StandInConnection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, server: StandIn) -> None:
        self.server, self.task = server, cast("asyncio.Task[None] | None", None)
        self.parser = httptools.HttpRequestParser(self)
        self.transport: asyncio.Transport | None = None
        self.path, self.body = b"", b""
        self.aborted = False

    @property
    def is_idle(self) -> bool:
        """Whether it has no request."""
        return self.task is None or self.task.done()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.connections.discard(self)
        if self.task is not None:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        if self.server.dead:
            return
        with contextlib.suppress(httptools.HttpParserError):
            self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.body, self.aborted = b"", False

    def on_url(self, url: bytes) -> None:
        self.path = url

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        server, path = self.server, self.path.decode()
        if path.endswith("/completions"):
            server.served[path] += 1
            if server.status:
                error = {"error": {"message": "made so", "code": server.status}}
                self._whole(error, server.status)
                return
            body = json.loads(self.body)
            if server.keeps_bodies:
                server.bodies.append(body)
            prompt = prompt_of(body, chat="chat" in path)
            if why := self._too_long(body, prompt):
                self._whole({"error": {"message": why, "code": 400}}, 400)
                return
            self.task = asyncio.ensure_future(self._generate(body, prompt, chat="chat" in path))
            return
        models = [{"id": server.model, "owned_by": "vllm" if server.speaks_ids else "x",
                   "max_model_len": server.max_model_len}]  # fmt: skip
        pages = {
            "/health": {},
            "/v1/models": {"object": "list", "data": models},
            "/version": {"version": server.version},
        }
        if path == "/metrics":
            self._send(200, b"text/plain", server.metrics.encode())
        else:
            self._whole(pages.get(path, {}), 200 if path in pages else 404)

    def end(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def abort_request(self) -> None:
        self.aborted = True

    def _too_long(self, body: dict[str, Any], prompt: list[int]) -> str:
        """Why a request does not fit; '' if it does."""
        most, known = self.server.max_model_len, len(prompt) // self.server.token_bytes
        wanted = known + max(limit_of(body, prompt, most) if len(prompt) < most else 1, 1)
        return f"the context is {most} tokens, not {wanted}" if wanted > most else ""

    async def _generate(self, body: dict[str, Any], prompt: list[int], *, chat: bool) -> None:
        server = self.server
        if server.first_s:
            await asyncio.sleep(server.first_s)
        limit = limit_of(body, prompt, server.max_model_len)
        made = Generation(prompt, limit, ignores_end=bool(body.get("ignore_eos")))
        if body.get("stream"):
            await self._stream(body, prompt, made, chat=chat)
            return
        text = ""
        while not made.finish:
            await self._pause()
            if self.aborted:  # its text ends here; a text that has ended was not aborted
                made.finish = "abort"
                break
            text += chr(made.next())
            if (end := stopped_at(body, text)) >= 0:
                text, made.finish = text[:end], "stop"
        choice = {"index": 0, "finish_reason": made.finish}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        usage = _usage(len(prompt) // server.token_bytes, len(text))
        self._whole({"id": "whole", "choices": [choice], "usage": usage})

    async def _stream(
        self, body: dict[str, Any], prompt: list[int], made: Generation, *, chat: bool
    ) -> None:
        ids = bool(body.get("return_token_ids")) and self.server.speaks_ids
        stops = [] if body.get("include_stop_str_in_output") else body.get("stop") or []
        hold = max((len(stop) - 1 for stop in stops), default=0)
        about = {"id": f"cmpl-{id(made):x}", "created": 1, "model": self.server.model,
                 "object": "chat.completion.chunk" if chat else "text_completion"}  # fmt: skip
        self._head(200, b"text/event-stream", b"transfer-encoding: chunked\r\n")
        if chat:
            first = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
            self._event(about | first | ({"prompt_token_ids": prompt} if ids else {}))
        text, sent, count, all_at_once = "", 0, 0, not self.server.token_s
        lines: list[dict[str, Any]] = []
        while not made.finish:
            await self._pause()
            if self.aborted:
                made.finish = "abort"
                break
            token = made.next()
            text, count = text + chr(token), count + 1
            if (end := stopped_at(body, text)) >= 0:
                text, made.finish = text[:end], "stop"
            to = len(text) if made.finish else max(len(text) - hold, sent)
            choice: dict[str, Any] = {"index": 0, "finish_reason": made.finish or None}
            choice |= {"delta": {"content": text[sent:to]}} if chat else {"text": text[sent:to]}
            sent = max(to, sent)
            if ids:
                choice["token_ids"] = [token]
                if count == 1 and not chat:
                    choice["prompt_token_ids"] = prompt
            lines.append(about | {"choices": [choice]})
            if not all_at_once:
                self._event(lines.pop())
        for line in lines:
            self._event(line)
        if made.finish == "abort":
            self._event(about | {"choices": [{"index": 0, "finish_reason": "abort"}]})
        if (body.get("stream_options") or {}).get("include_usage"):
            self._event(
                about
                | {"choices": [], "usage": _usage(len(prompt) // self.server.token_bytes, count)}
            )
        self._write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async def _pause(self) -> None:
        if self.server.token_s:
            await asyncio.sleep(self.server.token_s)
        while self.server.hung and not self.aborted:
            await asyncio.sleep(0.01)

    def _event(self, fields: dict[str, Any]) -> None:
        data = json.dumps(fields, separators=(",", ":")).encode()
        self._write(_chunk(b"data: " + data + b"\n\n"))

    def _whole(self, content: object, status: int = 200) -> None:
        self._send(status, b"application/json", json.dumps(content).encode())

    def _send(self, status: int, kind: bytes, body: bytes) -> None:
        self._head(status, kind, b"content-length: %d\r\n" % len(body))
        self._write(body)

    def _head(self, status: int, kind: bytes, more: bytes) -> None:
        self._write(b"HTTP/1.1 %d X\r\ncontent-type: %s\r\n%s\r\n" % (status, kind, more))

    def _write(self, data: bytes) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
