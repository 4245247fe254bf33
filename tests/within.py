"""Tests that are coroutines: what they are about is started before them, and ended behind them."""

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

from toy_server import Client, HandWorkers, client, make_driver

from toolkit.server.driver import Driver

Test = Callable[..., Coroutine[Any, Any, None]]


def within(
    start: Callable[..., AbstractAsyncContextManager[Any]],
    *names: str,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> Callable[..., Callable[[Test], Callable[..., None]]]:
    """A decorator for tests that run inside `start`, with the decorator's arguments.

    What `start` yields, a tuple except for one of `names`, a test gets under these names. Its other
    parameters are pytest's.
    """

    def given(*arguments: Any, **options: Any) -> Callable[[Test], Callable[..., None]]:
        def decorate(test: Test) -> Callable[..., None]:
            async def run(asked: dict[str, Any]) -> None:
                async with start(*arguments, **options) as about:
                    found = (about,) if len(names) == 1 else about
                    await test(**dict(zip(names, found, strict=True)), **asked)

            @functools.wraps(test)
            def plain(**asked: Any) -> None:
                with asyncio.Runner(loop_factory=loop_factory) as runner:
                    runner.run(run(asked))

            signature = inspect.signature(test)
            others = [
                one.replace(kind=one.KEYWORD_ONLY)
                for name, one in signature.parameters.items()
                if name not in names
            ]
            plain.__signature__ = signature.replace(parameters=others)
            return plain

        return decorate

    return given


@asynccontextmanager
async def server(hands: int = 0, **options: Any) -> AsyncIterator[Client]:
    """A server of the toy model in this process; with `hands`, a test moves so many workers."""
    async with client(HandWorkers(hands) if hands else None, **options) as http:
        yield http


@asynccontextmanager
async def driver_of(workers: int = 1, **options: Any) -> AsyncIterator[tuple[Driver, HandWorkers]]:
    """A driver, and its workers, which the test moves."""
    hands = HandWorkers(workers)
    driver = make_driver(hands, **options)
    await driver.start()
    try:
        yield driver, hands
        assert driver.error is None
    finally:
        await driver.stop()


with_server = within(server, "http")
with_driver = within(driver_of, "driver", "hands")
in_a_loop = within(lambda: nullcontext(()))()  # with nothing else
