"""A server that speaks vLLM's API without a model, for tests and benchmarks of the gateway.

A token is a letter, and each next one is a hash of all tokens before it, the prompt's included: a
token that was lost, doubled, or made from something else changes all that follow. Text and tokens
are the same thing (one byte each). It can be killed, hung, drained, made to answer errors, and
started again on its port. It can also be told to misbehave: `pages` and `script` send any bytes as
its answers, `cut_at` ends a stream at any byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import httptools

Script = Callable[[str, dict[str, Any]], "bytes | None"]
MODEL = "standin"
MASK = (1 << 61) - 1
MAX_MODEL_LEN = 4096
FLOOD_BYTES = 1 << 20  # that wait to be sent
END_ONE_IN = 64  # tokens end an answer, unless it ignores that
STREAM_HEAD = (
    b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


def tokens_of(text: str) -> list[int]:
    return list(text.encode())


def prompts_of(body: dict[str, Any], *, chat: bool) -> list[list[int]]:
    """The tokens of all prompts."""
    listed = None if chat else body["prompt"]
    if isinstance(listed, list) and listed and not isinstance(listed[0], int):
        return [prompt_of({"prompt": each}, chat=False) for each in listed]
    return [prompt_of(body, chat=chat)]


def prompt_of(body: dict[str, Any], *, chat: bool) -> list[int]:
    """The only prompt's tokens."""
    if not chat:
        prompt = body["prompt"]
        return tokens_of(prompt) if isinstance(prompt, str) else list(prompt)
    text = "".join(f"<{each['role']}>{each['content']}" for each in body["messages"])
    return tokens_of(text + "<assistant>")


def response_prompt(body: dict[str, Any]) -> str:
    """The prompt of a request to /v1/responses."""
    given = body["input"]
    texts = [given] if isinstance(given, str) else [str(each["content"]) for each in given]
    instructions = [body["instructions"]] if body.get("instructions") else []
    return "".join(f"<{text}>" for text in [*instructions, *texts])


class Generation:
    """The tokens of one choice."""

    def __init__(self, prompt: list[int], limit: int, *, ignores_end: bool, seed: int = 0) -> None:
        self.state = seed
        self.left = limit
        self.ignores_end = ignores_end
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
    for stop in stops_of(body):
        if stop in text:
            kept = len(stop) if body.get("include_stop_str_in_output") else 0
            return text.index(stop) + kept
    return -1


def stops_of(body: dict[str, Any]) -> list[str]:
    stops = body.get("stop") or []
    return [stops] if isinstance(stops, str) else stops


def limit_of(
    body: dict[str, Any],
    prompt: list[int],
    max_model_len: int = MAX_MODEL_LEN,
    default_tokens: int = 0,
) -> int:
    """The most tokens of the answer: without a limit, the server's default, or those that the
    context has left. Of text as a number, what pydantic makes of it.
    """
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if not limit and "prompt" in body and "max_tokens" not in body:
        return 16
    return int(limit or default_tokens or max_model_len - len(prompt))


@dataclass
class StandIn:
    """One server.

    Attributes:
        token_s: between two tokens of a stream; 0: all at once.
        speaks_ids: gives token ids where it is asked, as vLLM does.
        status: answers requests for tokens with this status; 0: serves them.
        hung: accepts requests, answers /health, and generates nothing.
        max_model_len: the context: a request that does not fit gets 400, as from vLLM.
        token_bytes: of a prompt's token in the usage: a token is one byte, and four in real text.
        default_tokens: of an answer without a limit by its client; 0: what the context has left.
        has_responses: serves /v1/responses.
        served: requests for tokens by path.
        used: tokens of prompts and answers that it computed.
        asked: all requests by path.
        cut_at: bytes of a streamed body after which the answer ends; -1: it does not.
        pages: whole HTTP answers to GETs by path, in place of its own.
        script: makes a whole HTTP answer to a POST with JSON; None: its own.
        flood: behind what `script` made, these bytes come again and again until the client closes.
    """

    token_s: float = 0.0
    speaks_ids: bool = True
    status: int = 0
    model: str = MODEL
    max_model_len: int = MAX_MODEL_LEN
    version: str = "0.32.0"
    hung: bool = False
    port: int = 0
    metrics: str = ""
    first_s: float = 0.0
    token_bytes: int = 1
    default_tokens: int = 0
    has_responses: bool = True
    used: int = 0
    cut_at: int = -1
    pages: dict[str, bytes] = field(default_factory=dict)
    script: Script | None = None
    flood: bytes = b""
    served: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keeps_bodies: bool = False
    connections: set[StandInConnection] = field(default_factory=set)
    _server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

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


class Row:
    """A choice that is generated; its text ends at a stop string."""

    def __init__(self, at: StandInConnection, body: dict[str, Any], prompt: list[int]) -> None:
        server = at.server
        ignores_end = bool(body.get("ignore_eos"))
        context = server.max_model_len or MAX_MODEL_LEN
        limit = limit_of(body, prompt, context, server.default_tokens)
        self.made = Generation(prompt, limit, ignores_end=ignores_end)
        self.text = ""
        self.sent = 0
        self.count = 0
        self._body = body
        self._server = server

    def step(self) -> int:
        """Generate a token, and return it."""
        token = self.made.next()
        self.text = self.text + chr(token)
        self.count = self.count + 1
        self._server.used += 1
        if (end := stopped_at(self._body, self.text)) >= 0:
            self.text = self.text[:end]
            self.made.finish = "stop"
        return token


class StandInConnection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, server: StandIn) -> None:
        self.server = server
        self.task = cast("asyncio.Task[None] | None", None)
        self.parser = httptools.HttpRequestParser(self)
        self.transport: asyncio.Transport | None = None
        self.path = b""
        self.body = b""
        self.aborted = False
        self.streamed = 0

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
        with contextlib.suppress(httptools.HttpParserError):
            self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.body = b""
        self.path = b""
        self.aborted = False
        self.streamed = 0

    def on_url(self, url: bytes) -> None:
        self.path += url

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        is_kept = self.parser.should_keep_alive()
        self._answer()
        if is_kept:
            return
        if self.task is None or self.task.done():
            self._end_after_answer()
        else:
            self.task.add_done_callback(lambda _: self._end_after_answer())

    def _end_after_answer(self) -> None:
        """Close once what was written is sent."""
        if self.transport is not None:
            self.transport.close()

    def _answer(self) -> None:
        server = self.server
        path = self.path.decode()
        server.asked[path] += 1
        if self.parser.get_method() == b"POST":
            try:
                self._post(path)
            except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError):
                self._whole({"error": {"message": "not a request", "code": 400}}, 400)
            return
        models = [{"id": server.model, "owned_by": "vllm" if server.speaks_ids else "x",
                   "max_model_len": server.max_model_len or None}]  # fmt: skip
        pages = {
            "/health": {},
            "/v1/models": {"object": "list", "data": models},
            "/version": {"version": server.version},
        }
        if path in server.pages:
            self._write(server.pages[path])
        elif path == "/metrics":
            self._write(http_answer(200, b"text/plain", server.metrics.encode()))
        else:
            self._whole(pages.get(path, {}), 200 if path in pages else 404)

    def _post(self, path: str) -> None:
        server = self.server
        body = json.loads(self.body)
        scripted = None if server.script is None else server.script(path, body)
        if scripted is not None:
            server.served[path] += 1
            self._write(scripted)
            if server.flood:
                self.task = asyncio.ensure_future(self._flood(server.flood))
            return
        if path == "/v1/embeddings":
            tokens = sum(map(len, prompts_of({"prompt": body["input"]}, chat=False)))
            server.used += tokens
            usage = _usage(tokens, 0)
            self._whole({"object": "list", "data": [], "usage": usage})
            return
        if path == "/v1/responses":
            self._respond(body)
            return
        if not path.endswith("/completions"):
            self._whole({"count": 1, "tokens": [1]})
            return
        chat = "chat" in path
        prompts = prompts_of(body, chat=chat)
        most = limit_of(body, prompts[0], self._context(), server.default_tokens)
        if body.get("min_tokens", 0) > most:  # vLLM's words
            given = body["min_tokens"]
            text = f"min_tokens must be less than or equal to max_tokens={most}, got {given}."
            self._whole({"error": {"message": text, "code": 400}}, 400)
            return
        server.served[path] += 1
        if server.status:
            error = {"error": {"message": "made so", "code": server.status}}
            self._whole(error, server.status)
            return
        if server.keeps_bodies:
            server.bodies.append(body)
        if why := self._too_long(body, prompts[0]):
            self._whole({"error": {"message": why, "code": 400}}, 400)
            return
        stops = stops_of(body)
        if any(not stop for stop in stops):
            self._whole({"error": {"message": "stop cannot contain an empty string"}}, 400)
            return
        self.task = asyncio.ensure_future(self._generate(body, prompts, chat=chat))

    def _respond(self, body: dict[str, Any]) -> None:
        """Answer a request for a response."""
        server = self.server
        server.served["/v1/responses"] += 1
        if not server.has_responses:
            self._whole({"detail": "Not Found"}, 404)
            return
        if server.keeps_bodies:
            server.bodies.append(body)
        if server.status:
            self._whole({"error": {"message": "made so", "code": server.status}}, server.status)
            return
        text = response_prompt(body)
        room = self._context() - len(text)
        limit = min(body.get("max_output_tokens") or room, room)
        stops = stops_of(body)
        if limit < 1 or not all(isinstance(stop, str) and stop for stop in stops):
            self._whole({"error": {"message": "not possible", "code": 400}}, 400)
            return
        wanted = {"max_tokens": limit, "stop": stops, "ignore_eos": body.get("ignore_eos")}
        row = Row(self, wanted, tokens_of(text))
        self.task = asyncio.ensure_future(self._make_response(body, text, row))

    async def _make_response(self, body: dict[str, Any], prompt: str, row: Row) -> None:
        server = self.server
        if server.first_s:
            await asyncio.sleep(server.first_s)
        counted = len(prompt) // server.token_bytes
        server.used += counted
        about: dict[str, Any] = {
            "id": f"resp_{server.port}",
            "object": "response",
            "model": server.model,
        }
        stream = bool(body.get("stream"))
        number = 0

        def event(kind: str, **fields: Any) -> None:
            nonlocal number
            whole = {"type": kind, "sequence_number": number, **fields}
            number += 1
            if stream:
                data = json.dumps(whole, separators=(",", ":"))
                self._payload(f"event: {kind}\ndata: {data}\n\n".encode())

        if stream:
            self._write(STREAM_HEAD)
        event("response.created", response=about | {"status": "in_progress", "usage": None})
        while not row.made.finish and not self.aborted:
            await self._pause()
            row.step()
            event("response.output_text.delta", delta=row.text[row.sent :], item_id="msg_1")
            row.sent = len(row.text)
        if self.aborted and stream:
            self._write(b"0\r\n\r\n")
            return
        ended = "completed" if row.made.finish == "stop" else "incomplete"
        status = "cancelled" if self.aborted else ended
        usage = {"input_tokens": counted, "output_tokens": row.count}
        parts = [{"type": "output_text", "text": row.text}]
        whole = about | {"status": status, "usage": usage}
        whole["output"] = [{"type": "message", "role": "assistant", "content": parts}]
        if status == "incomplete":
            whole["incomplete_details"] = {"reason": "max_output_tokens"}
        if not stream:
            self._whole(whole)
            return
        event("response.output_text.done", text=row.text, item_id="msg_1")
        event("response.completed", response=whole)
        self._write(b"0\r\n\r\n")

    async def _flood(self, data: bytes) -> None:
        while self.transport is not None and not self.transport.is_closing():
            if self.transport.get_write_buffer_size() < FLOOD_BYTES:
                self._write(data)
            await asyncio.sleep(0)

    def _context(self) -> int:
        return self.server.max_model_len or MAX_MODEL_LEN

    def end(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def abort_request(self) -> None:
        self.aborted = True

    def _too_long(self, body: dict[str, Any], prompt: list[int]) -> str:
        """Why a request does not fit; '' if it does."""
        most = self._context()
        known = len(prompt) // self.server.token_bytes
        limit = limit_of(body, prompt, most, self.server.default_tokens)
        if limit < 1:
            return f"max_tokens must be at least 1, got {limit}"
        wanted = known + max(limit if len(prompt) < most else 1, 1)
        return f"the context is {most} tokens, not {wanted}" if wanted > most else ""

    async def _generate(
        self, body: dict[str, Any], prompts: list[list[int]], *, chat: bool
    ) -> None:
        server = self.server
        if server.first_s:
            await asyncio.sleep(server.first_s)
        copies = int(body.get("n") or 1)
        rows = [Row(self, body, prompt) for prompt in prompts for _ in range(copies)]
        counted = sum(len(prompt) // server.token_bytes for prompt in prompts)
        server.used += counted
        if str(body.get("stream")).lower() == "true":  # as pydantic reads it
            await self._stream(body, prompts[0], rows, counted, chat=chat)
            return
        while running := [row for row in rows if not row.made.finish]:
            await self._pause()
            if self.aborted:  # its text ends here; a text that has ended was not aborted
                for row in running:
                    row.made.finish = "abort"
                break
            for row in running:
                row.step()
        choices = []
        for index, row in enumerate(rows):
            choice: dict[str, Any] = {"index": index, "finish_reason": row.made.finish}
            message = {"role": "assistant", "content": row.text}
            choices.append(choice | ({"message": message} if chat else {"text": row.text}))
        usage = {"usage": _usage(counted, sum(row.count for row in rows))}
        self._whole({"id": "whole", "choices": choices} | usage)

    async def _stream(
        self,
        body: dict[str, Any],
        prompt: list[int],
        rows: list[Row],
        counted: int,
        *,
        chat: bool,
    ) -> None:
        ids = bool(body.get("return_token_ids")) and self.server.speaks_ids
        stops = [] if body.get("include_stop_str_in_output") else stops_of(body)
        hold = max((len(stop) - 1 for stop in stops), default=0)
        about = {"id": f"cmpl-{id(rows):x}", "created": 1, "model": self.server.model,
                 "object": "chat.completion.chunk" if chat else "text_completion"}  # fmt: skip
        self._write(STREAM_HEAD)
        if chat:
            first = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
            self._event(about | first | ({"prompt_token_ids": prompt} if ids else {}))
        lines: list[dict[str, Any]] = []
        while running := [row for row in rows if not row.made.finish]:
            await self._pause()
            if self.aborted:
                break
            for row in running:
                token = row.step()
                to = len(row.text) if row.made.finish else max(len(row.text) - hold, row.sent)
                new = row.text[row.sent : to]
                index = rows.index(row)
                choice: dict[str, Any] = {"index": index, "finish_reason": row.made.finish or None}
                choice |= {"delta": {"content": new}} if chat else {"text": new}
                row.sent = max(to, row.sent)
                if ids:
                    choice["token_ids"] = [token]
                    if row.count == 1 and not chat:
                        choice["prompt_token_ids"] = prompt
                lines.append(about | {"choices": [choice]})
                if self.server.token_s:
                    self._event(lines.pop())
        for line in lines:
            self._event(line)
        if self.aborted:
            self._event(about | {"choices": [{"index": 0, "finish_reason": "abort"}]})
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = _usage(counted, sum(row.count for row in rows))
            self._event(about | {"choices": [], "usage": usage})
        self._payload(b"data: [DONE]\n\n")
        self._write(b"0\r\n\r\n")

    async def _pause(self) -> None:
        if self.server.token_s:
            await asyncio.sleep(self.server.token_s)
        while self.server.hung and not self.aborted:
            await asyncio.sleep(0.01)

    def _event(self, fields: dict[str, Any]) -> None:
        self._payload(b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n")

    def _payload(self, data: bytes) -> None:
        """Bytes of a streamed body, up to where it is cut."""
        cut = self.server.cut_at
        if cut >= 0:
            data = data[: max(cut - self.streamed, 0)]
            self.streamed += len(data)
            if self.streamed >= cut:
                self._write(_chunk(data) if data else b"")
                if self.transport is not None:
                    self.transport.close()
                return
        self._write(_chunk(data))

    def _whole(self, content: object, status: int = 200) -> None:
        self._write(http_answer(status, b"application/json", json.dumps(content).encode()))

    def _write(self, data: bytes) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)


def http_answer(status: int, kind: bytes, body: bytes) -> bytes:
    """A whole answer with a body of this content type."""
    head = b"HTTP/1.1 %d X\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n"
    return head % (status, kind, len(body)) + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
