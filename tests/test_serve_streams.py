"""Streams over raw ASGI: clients that disconnect, stop reading, or wait long."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from starlette.types import ASGIApp
from toy_server import OPTIONS, HandWorkers, ToyWorkers, app_of, events, make_driver, text, turns
from within import within

from toolkit.server.driver import Driver


class Client:
    """One request at the server's socket: what was written; its reader may stall or disconnect."""

    def __init__(self, **body: object) -> None:
        self._body = json.dumps({"prompt": "hello", "temperature": 0, **body}).encode()
        self._asked = False
        self.gone = asyncio.Event()
        self.reading = asyncio.Event()
        self.reading.set()
        self.writes: list[bytes] = []
        self.complete = False

    @property
    def received(self) -> str:
        return b"".join(self.writes).decode()

    async def receive(self) -> dict:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict) -> None:
        await self.reading.wait()
        if message["type"] == "http.response.body":
            self.writes.append(message["body"])
            self.complete = not message.get("more_body", False)

    def start(self, app) -> asyncio.Task:
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
            "headers": [(b"host", b"x"), (b"content-type", b"application/json")],
        }
        return asyncio.create_task(app(scope, self.receive, self.send))


@asynccontextmanager
async def serving(
    workers: type[HandWorkers] = HandWorkers, **settings: float
) -> AsyncIterator[tuple[ASGIApp, Driver, HandWorkers]]:
    hands = workers(1)
    driver = make_driver(hands)
    await driver.start()
    yield app_of(driver, replace(OPTIONS, **settings)), driver, hands
    await driver.stop()


with_app = within(serving, "app", "driver", "hands")


@pytest.mark.parametrize("stream", [True, False])
@with_app()
async def test_a_disconnect_frees_the_row_with_its_batch(
    app, driver: Driver, hands: HandWorkers, stream: bool
):
    client = Client(stream=stream, max_tokens=100)
    answering = client.start(app)
    await turns()
    hands.progress(steps=2)
    await turns()
    client.gone.set()
    await answering
    assert driver.running == driver.waiting == 0
    assert len(hands.unwanted) == 1
    hands.finish(steps=3)
    await turns()
    assert not hands.running
    assert driver.scheduler.jobs == 0
    assert driver.stats.ended == {"cancelled": 1}


@with_app()
async def test_output_between_two_reads_is_one_event(app, driver: Driver, hands: HandWorkers):
    client = Client(stream=True, max_tokens=8)
    answering = client.start(app)
    await turns()
    client.reading.clear()
    for done in range(0, 8, 2):
        hands.progress(steps=2, done_before=done)
        await turns()
    client.reading.set()
    await answering
    first, rest, done = events(client.received)
    assert (first["choices"][0]["text"], rest["choices"][0]["text"]) == (
        text("hello", 2),
        text("hello", 8)[2:],
    )
    assert done == "[DONE]"


@with_app(ToyWorkers)
async def test_a_client_that_stops_reading_stalls_no_other(app, driver: Driver, hands: HandWorkers):
    stuck = Client(stream=True, max_tokens=100)
    fine = Client(stream=True, max_tokens=100)
    stuck.reading.clear()
    answering = [client.start(app) for client in (fine, stuck)]
    await answering[0]
    assert fine.complete
    assert not stuck.complete
    # as the connection says after its write timeout, when it also lets the last write go
    stuck.gone.set()
    stuck.reading.set()
    await answering[1]
    assert driver.waiting == 0


@with_app(keepalive_s=0.001)
async def test_comments_keep_a_waiting_stream_alive(app, driver: Driver, hands: HandWorkers):
    client = Client(stream=True, max_tokens=2)
    answering = client.start(app)
    while client.received.count(": waiting\n\n") < 3:
        await asyncio.sleep(0.001)
    hands.finish()
    await answering
    assert [one["choices"][0]["text"] for one in events(client.received)[:-1]] == [text("hello", 2)]


@with_app()
async def test_text_before_a_failure_is_delivered(app, driver: Driver, hands: HandWorkers):
    client = Client(stream=True, max_tokens=100)
    answering = client.start(app)
    await turns()
    hands.progress(steps=3)
    await driver.stop()  # in the same turn: the reader finds both at once
    await answering
    text_event, error, _ = events(client.received)
    assert text_event["choices"][0]["text"] == text("hello", 3)
    assert "error" in error
