"""Replies: a reader gets all output once, merged between two reads."""

import asyncio

from toy_server import turns
from within import in_a_loop

from toolkit.server.live import Delta, Reply


@in_a_loop
async def test_output_merges_between_reads():
    reply = Reply(2)
    for delta in (Delta(0, "a", 1), Delta(1, "x", 1), Delta(0, "b", 1), Delta(0, "", 0, "stop")):
        reply.put(delta)
    assert await reply.take(10.0) == [Delta(0, "ab", 2, "stop"), Delta(1, "x", 1)]
    assert reply.open == 1


@in_a_loop
async def test_a_patient_reader_wakes_when_all_choices_have_ended():
    reply = Reply(2, patient=True)
    reader = asyncio.create_task(reply.take(3600.0))
    await turns()
    for delta in (Delta(0, "a", 1), Delta(0, "b", 1, "stop"), Delta(1, "x", 1)):
        reply.put(delta)
        await turns()
        assert not reader.done()
    reply.put(Delta(1, "y", 1, "length"))
    assert await reader == [Delta(0, "ab", 2, "stop"), Delta(1, "xy", 2, "length")]


@in_a_loop
async def test_a_failure_wakes_a_patient_reader_too():
    reply = Reply(2, patient=True)
    reply.put(Delta(1, failure="broke"))
    assert await reply.take(3600.0) == [Delta(1, failure="broke")]
