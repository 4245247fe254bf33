"""What a response reads: everything once, merged while nobody read it."""

import asyncio

from serving import turns

from toolkit.serve.live import Delta, Reply


def test_news_merge_while_nobody_reads():
    async def test() -> None:
        reply = Reply(2)
        for delta in (
            Delta(0, "a", 1),
            Delta(1, "x", 1),
            Delta(0, "b", 1),
            Delta(0, "", 0, "stop"),
        ):
            reply.put(delta)
        assert await reply.take(10.0) == [Delta(0, "ab", 2, "stop"), Delta(1, "x", 1)]
        assert reply.open == 1

    asyncio.run(test())


def test_a_waiting_reader_is_woken_by_news():
    async def test() -> None:
        reply = Reply(1)
        reader = asyncio.create_task(reply.take(3600.0))
        await turns()
        assert not reader.done()
        reply.put(Delta(0, "a", 1))
        assert await reader == [Delta(0, "a", 1)]

    asyncio.run(test())


def test_without_news_a_reader_gets_nothing_after_its_timeout():
    assert asyncio.run(Reply(1).take(0.0)) == []


def test_a_patient_reader_is_woken_once_all_has_ended():
    async def test() -> None:
        reply = Reply(2, patient=True)
        reader = asyncio.create_task(reply.take(3600.0))
        await turns()
        for delta in (Delta(0, "a", 1), Delta(0, "b", 1, "stop"), Delta(1, "x", 1)):
            reply.put(delta)
            await turns()
            assert not reader.done()
        reply.put(Delta(1, "y", 1, "length"))
        assert await reader == [Delta(0, "ab", 2, "stop"), Delta(1, "xy", 2, "length")]

    asyncio.run(test())


def test_a_failure_wakes_a_patient_reader_too():
    async def test() -> None:
        reply = Reply(2, patient=True)
        reply.put(Delta(1, failure="broke"))
        assert await reply.take(3600.0) == [Delta(1, failure="broke")]

    asyncio.run(test())


def test_closing_wakes_the_reader():
    async def test() -> None:
        reply = Reply(1)
        reader = asyncio.create_task(reply.take(3600.0))
        await turns()
        reply.close()
        assert await reader == []
        assert reply.closed

    asyncio.run(test())
