"""Tasks beside the requests: one that raises is said, counted, and started again."""

import asyncio

import pytest
from said import logged_to
from within import in_a_loop

from toolkit.server import background
from toolkit.server.background import Background


def test_a_task_that_raises_starts_again_and_is_counted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(background, "PAUSE_S", 0.001)
    said: list[str] = []
    begun = 0

    async def main() -> None:
        async def work() -> None:
            nonlocal begun
            begun += 1
            if begun < 4:
                raise RuntimeError(f"fault {begun}")
            await asyncio.Event().wait()

        tasks = Background()
        tasks.start("work", work)
        while begun < 4:
            await asyncio.sleep(0.001)
        assert tasks.failures == {"work": 3}
        await tasks.stop()
        assert begun == 4

    with logged_to(said):
        asyncio.run(main())
    assert len(said) == 3
    assert all("fault" in line for line in said)


@in_a_loop
async def test_a_task_that_returns_or_is_cancelled_ends():
    async def returns() -> None:
        pass

    async def waits() -> None:
        await asyncio.Event().wait()

    tasks = Background()
    await tasks.start("returns", returns)
    waiting = tasks.start("waits", waits)
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert tasks.failures == {"returns": 0, "waits": 0}
