"""How a server starts and ends: on a real port, with signals to this process, and workers that the
tests move by hand.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import httpx
import pytest
from said import says
from toy_server import OPTIONS, HandWorkers, app_of, events, make_driver, text, turns

from toolkit.errors import EngineError, InputError
from toolkit.server.driver import Driver
from toolkit.server.process import check_exposure, is_loopback, listen
from toolkit.server.server import Server
from toolkit.workers.protocol import WorkersFailed

BODY = {"prompt": "hello", "temperature": 0, "max_tokens": 6, "stream": True}
Test = Callable[[httpx.AsyncClient, Driver, HandWorkers], Coroutine]


def run(test: Test, workers: HandWorkers | None = None, **options: Any) -> list[str]:
    """Run `test` and a server until both have ended. Returns the announced URLs."""
    announced: list[str] = []

    async def both() -> None:
        hands = workers or HandWorkers()
        driver = make_driver(hands)
        with listen("127.0.0.1", 0) as listener:
            server = Server(app_of(driver, replace(OPTIONS, **options)), listener)
            serving = asyncio.create_task(server.serve(announced.append))
            async with httpx.AsyncClient(base_url=server.url) as http:
                await test(http, driver, hands)
                await serving

    asyncio.run(both())
    return announced


async def until_ready(http: httpx.AsyncClient) -> None:
    while (await http.get("/ready")).status_code != 200:
        await asyncio.sleep(0.001)


async def until_not_ready(http: httpx.AsyncClient) -> httpx.Response:
    while (response := await http.get("/ready")).status_code == 200:
        await asyncio.sleep(0.001)
    return response


def interrupt(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.slow
def test_a_signal_lets_running_streams_finish_while_ready_says_no():
    async def test(http: httpx.AsyncClient, driver: Driver, hands: HandWorkers) -> None:
        await until_ready(http)
        async with http.stream("POST", "/v1/completions", json=BODY) as response:
            interrupt()
            assert (await until_not_ready(http)).json() == {"status": "leaving"}
            assert (await http.get("/health")).status_code == 200
            refused = await http.post("/v1/completions", json=BODY)
            assert refused.status_code == 503
            assert "draining" in refused.json()["error"]["message"]
            assert refused.headers["connection"] == "close"
            with pytest.raises(httpx.ConnectError):
                await http.get("/ready")  # the listener is closed, and no connection is left
            hands.finish()
            chunk, done = events((await response.aread()).decode())
        assert chunk["choices"][0]["text"] == text("hello", 6)
        assert done == "[DONE]"

    (announced,) = run(test)
    assert announced.startswith("http://127.0.0.1:")


@pytest.mark.slow
def test_requests_are_accepted_during_the_notice():
    async def test(http: httpx.AsyncClient, driver: Driver, hands: HandWorkers) -> None:
        await until_ready(http)
        interrupt()
        await until_not_ready(http)
        async with http.stream("POST", "/v1/completions", json=BODY) as response:
            assert response.status_code == 200
            hands.finish()
            await response.aread()
        interrupt()  # a second signal skips the rest of the notice

    run(test, notice_s=3600.0)


@pytest.mark.slow
def test_late_requests_get_a_final_error():
    async def test(http: httpx.AsyncClient, driver: Driver, hands: HandWorkers) -> None:
        await until_ready(http)
        async with http.stream("POST", "/v1/completions", json=BODY) as response:
            hands.progress(steps=2)
            interrupt(signal.SIGINT)
            *_, error, done = events((await response.aread()).decode())
        assert "shutting down" in error["error"]["message"]
        assert done == "[DONE]"

    run(test, timeout_s=0.01)


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once():
    async def test(http: httpx.AsyncClient, driver: Driver, hands: HandWorkers) -> None:
        await until_ready(http)
        async with http.stream("POST", "/v1/completions", json=BODY) as response:
            interrupt()
            await until_not_ready(http)
            interrupt()
            assert "shutting down" in (await response.aread()).decode()

    said = []
    run(test, timeout_s=3600.0, say=said.append)
    assert len(said) == 1
    assert says(said[0], "1 request", "3600 s")


class SlowLoaders(HandWorkers):
    """Workers that load until they are let go, or fail."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error
        self.loaded = asyncio.Event()

    async def start(self, on_event) -> None:
        await self.loaded.wait()
        if self.error:
            raise self.error
        await super().start(on_event)


@pytest.mark.slow
def test_a_loading_server_answers_not_ready():
    async def test(http: httpx.AsyncClient, driver: Driver, hands: SlowLoaders) -> None:
        ready = await http.get("/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "loading"})
        assert (await http.get("/health")).status_code == 200
        refused = await http.post("/v1/completions", json=BODY)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        hands.loaded.set()
        await until_ready(http)
        interrupt()

    assert len(run(test, workers=SlowLoaders())) == 1


@pytest.mark.slow
def test_a_signal_while_workers_load_ends_it():
    async def test(http: httpx.AsyncClient, driver: Driver, hands: SlowLoaders) -> None:
        await http.get("/ready")
        interrupt()

    workers = SlowLoaders()
    assert run(test, workers=workers) == []
    assert workers.stopped


def test_a_worker_that_cannot_load_ends_it_with_its_error():
    async def test(http: httpx.AsyncClient, driver: Driver, hands: SlowLoaders) -> None:
        hands.loaded.set()

    workers = SlowLoaders(EngineError("no such model"))
    with pytest.raises(EngineError, match="no such model"):
        run(test, workers=workers)
    assert workers.stopped


def test_a_bug_of_the_scheduler_ends_it_with_its_error():
    async def test(http: httpx.AsyncClient, driver: Driver, hands: HandWorkers) -> None:
        await until_ready(http)
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        driver.scheduler.policy = None
        response = await http.post("/v1/completions", json=BODY)
        assert "shutting down" in response.text
        await turns()

    with pytest.raises(AttributeError):
        run(test)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.0.7", False),
        ("localhost.example.com", False),
    ],
)
def test_loopback_addresses_are_recognised(host: str, expected: bool):
    assert is_loopback(host) == expected
    if not expected:
        with pytest.raises(InputError, match=f"host {host}"):
            check_exposure(host, asks_key=False, insecure=False)
    check_exposure(host, asks_key=True, insecure=False)
    check_exposure(host, asks_key=False, insecure=True)


def test_an_address_of_another_machine_is_an_input_error():
    with pytest.raises(InputError, match=r"203\.0\.113\.1.*80") as caught:
        listen("203.0.113.1", 80)
    assert says(caught.value.hint, "--host")


def test_a_server_that_can_load_no_worker_ends_and_says_why():
    async def test(http: httpx.AsyncClient, driver: Driver, hands: HandWorkers) -> None:
        await until_ready(http)
        async with http.stream("POST", "/v1/completions", json=BODY) as response:
            hands.crash()
            hands.on_event(WorkersFailed(EngineError("no worker left", "look at its device")))
            error, done = events((await response.aread()).decode())
        assert "shutting down" in error["error"]["message"]
        assert done == "[DONE]"

    with pytest.raises(EngineError, match="no worker left"):
        run(test)
