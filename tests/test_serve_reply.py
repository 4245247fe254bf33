"""Replies: a client gets all output once, merged between two writes."""

import asyncio

import pytest
from toy_server import events, turns
from within import in_a_loop

from toolkit.engines.protocol import SamplingParams
from toolkit.openai.answers import AnswerWriter
from toolkit.openai.errors import ApiError
from toolkit.server.live import LiveRequest, Reply


class Client:
    """Reads a reply of two choices."""

    def __init__(self, *, streams: bool) -> None:
        writer = AnswerWriter({}, chat=False, shows_usage=True)
        self.reply = Reply(writer, 3, streams=streams, keepalive_s=10.0)
        for index in range(2):
            live = LiveRequest(str(index), (7,), 9, SamplingParams(), None, self.reply, index)
            self.reply.requests.append(live)
        self.bodies: list[bytes] = []
        self.reading = asyncio.create_task(self.reply.send(self._send))

    async def _send(self, message) -> None:
        self.bodies += [message["body"]] if "body" in message else []

    def add(self, index: int, text: str, status: str = "", failure: str = "") -> None:
        live = self.reply.requests[index]
        live.unsent += text
        live.tokens += text.encode()
        live.status = status
        live.failure = failure
        self.reply.tell(live)


def choices(body: bytes) -> list[tuple[int, str, str | None]]:
    """The index, text and finish reason of each choice in the events of a body."""
    return [
        (one["index"], one["text"], one["finish_reason"])
        for event in events(body.decode())
        if event != "[DONE]"
        for one in event["choices"]
    ]


@in_a_loop
async def test_output_merges_between_writes():
    client = Client(streams=True)
    await turns()
    client.add(0, "a")
    client.add(1, "x")
    client.add(0, "b", "stop")
    await turns()
    assert [choices(body) for body in client.bodies] == [[(0, "ab", "stop"), (1, "x", None)]]
    client.add(1, "y", "length")
    await client.reading
    assert choices(client.bodies[-1]) == [(1, "y", "length")]
    *_, usage, done = events(client.bodies[-1].decode())
    assert done == "[DONE]"
    assert (usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"]) == (3, 4)


@in_a_loop
async def test_a_whole_answer_is_sent_when_all_choices_have_ended():
    client = Client(streams=False)
    for index, text, status in ((0, "a", ""), (0, "b", "stop"), (1, "x", "")):
        client.add(index, text, status)
        await turns()
        assert not client.bodies
    client.add(1, "y", "length")
    await client.reading
    assert b'"ab"' in client.bodies[0]
    assert b'"xy"' in client.bodies[0]


@in_a_loop
async def test_a_failure_of_one_choice_ends_a_whole_answer():
    client = Client(streams=False)
    client.add(1, "", "failed", "it broke")
    with pytest.raises(ApiError, match="it broke"):
        await client.reading
    assert not client.bodies
