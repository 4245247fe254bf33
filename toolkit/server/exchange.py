"""The answer of our own workers on its way to the client, whole or as events.

An event carries everything that arrived since the last one, so a slow reader gets fewer and larger
events.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.types import Receive, Send

from toolkit.openai.answers import AnswerWriter, Usage, error_event
from toolkit.openai.errors import ApiError
from toolkit.openai.events import DONE
from toolkit.server.background import while_connected
from toolkit.server.driver import SHUTTING_DOWN, TIMED_OUT, Driver
from toolkit.server.live import Delta, LiveRequest, Reply

STILL_WAITING = b": waiting\n\n"
JSON_HEADERS = [(b"content-type", b"application/json")]
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def request_failed(reason: str) -> ApiError:
    """Return the error of a request that failed. A client should retry only at a shutdown, because
    then another server answers.
    """
    timed_out = reason.startswith(TIMED_OUT)  # it would take as long again
    status, code = (504, "deadline_exceeded") if timed_out else (503, "request_failed")
    headers = {} if reason == SHUTTING_DOWN else {"x-should-retry": "false"}
    return ApiError(f"the request failed: {reason}", status=status, code=code, headers=headers)


@dataclass(slots=True)
class Exchange:
    """A submitted request: the source of its text, and the writer of its response.

    As events, the response is `data: ` lines of JSON, of which the last is `[DONE]`. A comment is
    sent after `keepalive_s` seconds without new output. If the client wants the usage, every event
    carries `usage: null`, and a last one without choices the usage.
    """

    driver: Driver
    reply: Reply
    writer: AnswerWriter
    prompt_tokens: int
    streams: bool
    keepalive_s: float
    choices: list[LiveRequest] = field(default_factory=list)

    def cancel(self) -> None:
        """Cancel all choices. It has no effect on ended ones."""
        for active in self.choices:
            self.driver.cancel(active)

    async def answer(self, receive: Receive, send: Send) -> None:
        """Send the response; cancel the request if its client leaves. Raises ApiError if it fails
        before anything was sent.
        """
        work = self._stream(send) if self.streams else self._send_whole(send)
        try:
            await while_connected(receive, work)
        finally:
            self.cancel()

    async def _send_whole(self, send: Send) -> None:
        choices: dict[int, Delta] = {}
        while self.reply.open or not choices:
            for delta in await self.reply.take(3600.0):
                if delta.failure:
                    raise request_failed(delta.failure)
                choices[delta.index] = delta
        made = [(index, choices[index].text, choices[index].finish) for index in sorted(choices)]
        usage = Usage(self.prompt_tokens, sum(choice.tokens for choice in choices.values()))
        content = self.writer.whole(made, usage)
        await send_whole(send, 200, JSON_HEADERS, content)

    async def _stream(self, send: Send) -> None:
        reply = self.reply
        writer = self.writer
        left = reply.choices
        tokens = 0
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        while left:
            deltas = await reply.take(self.keepalive_s)
            failed = next((delta.failure for delta in deltas if delta.failure), "")
            events = [
                writer.event(delta.index, delta.text, delta.finish)
                for delta in deltas
                if delta.tokens or not failed
            ]
            left = 0 if failed else left - sum(bool(delta.finish) for delta in deltas)
            tokens += sum(delta.tokens for delta in deltas)
            if failed:
                events.append(error_event(request_failed(failed)))
            elif not left and writer.shows_usage:
                events.append(writer.usage(Usage(self.prompt_tokens, tokens)))
            body = b"".join(events) or STILL_WAITING
            body += b"" if left else DONE
            await send({"type": "http.response.body", "body": body, "more_body": left > 0})


async def send_whole(
    send: Send, status: int, headers: list[tuple[bytes, bytes]], content: bytes
) -> None:
    """Send an answer in one piece."""
    headers = [*headers, (b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content, "more_body": False})
