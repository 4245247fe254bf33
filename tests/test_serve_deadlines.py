"""Deadlines of requests: at its deadline a request gets 504 or a final error, and the scheduler
sees a cancellation.
"""

import asyncio

import httpx
import pytest
from said import says
from toy_server import LAW, events, turns
from within import with_server

from toolkit.estimators.memory import ZetaMemory
from toolkit.sched.eventlog import CancelCall, RecordingScheduler, replay
from toolkit.sched.policies import make_policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Worker

ASK = {"prompt": "a", "max_tokens": 8}


async def expire(http: httpx.AsyncClient) -> None:
    """Let the deadlines of all active requests pass now."""
    for active in list(http.driver._active.values()):
        assert active.deadline is not None
        active.deadline._run()
    await turns()


@with_server(hands=1)
async def test_a_waiting_request_gets_504_at_its_deadline_even_without_workers(
    http: httpx.AsyncClient,
) -> None:
    first = asyncio.create_task(http.post("/v1/completions", json=ASK | {"timeout": 5.0}))
    await turns(60)
    http.workers.crash()
    await turns()
    await expire(http)
    answer = await first
    assert (answer.status_code, answer.headers["x-should-retry"]) == (504, "false")
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("deadline_exceeded", "server_error")
    assert says(error["message"], "deadline", "5 s")
    assert http.driver.waiting == http.driver.running == 0


@with_server(hands=1)
async def test_a_running_stream_gets_a_final_error_at_its_deadline(http: httpx.AsyncClient) -> None:
    asking = asyncio.create_task(
        http.post("/v1/completions", json=ASK | {"stream": True, "timeout": 5})
    )
    await turns(60)
    http.workers.progress(steps=2)
    await turns()
    await expire(http)
    *_, error, done = events((await asking).text)
    assert (error["error"]["code"], done) == ("deadline_exceeded", "[DONE]")
    assert len(http.workers.unwanted) == 1  # its worker may stop


@with_server(hands=1)
async def test_the_timer_ends_a_request_at_its_deadline(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json=ASK | {"timeout": 0.01})
    assert answer.status_code == 504


@with_server(hands=1, request_timeout_s=60.0)
async def test_the_servers_deadline_is_the_default_and_the_longest(http: httpx.AsyncClient) -> None:
    asking = [
        asyncio.create_task(http.post("/v1/completions", json=ASK | more))
        for more in ({}, {"timeout": 500}, {"timeout": 2})
    ]
    waiting = http.driver._active.values()
    while len(waiting) < len(asking):
        await turns(1)
    assert sorted(active.timeout_s for active in waiting) == [2, 60, 60]
    await expire(http)
    assert [(await one).status_code for one in asking] == [504] * 3


@pytest.mark.parametrize("timeout", [0, -1, 1e9, "5", True])
@with_server(hands=1)
async def test_an_invalid_deadline_is_refused(http: httpx.AsyncClient, timeout: object) -> None:
    answer = await http.post("/v1/completions", json=ASK | {"timeout": timeout})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "timeout")


@with_server(hands=1)
async def test_a_deadline_is_logged_as_a_cancel_and_replays(http: httpx.AsyncClient) -> None:
    log = []
    policy = make_policy("slice", {"slice_tokens": 8})
    workers = [Worker(0, LAW, ZetaMemory(4096))]
    http.driver.scheduler = RecordingScheduler(policy, workers, log.append)
    asking = asyncio.create_task(http.post("/v1/completions", json=ASK | {"timeout": 5}))
    await turns(60)
    await expire(http)
    assert (await asking).status_code == 504
    assert [type(event) for event in log].count(CancelCall) == 1
    again = Scheduler(make_policy("slice", {"slice_tokens": 8}), [Worker(0, LAW, ZetaMemory(4096))])
    assert list(replay(log, again)) == []
