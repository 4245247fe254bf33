"""A server before replicas that differ in how they stop and fail."""

import asyncio
import json
from typing import Any

import pytest
from test_pool import (
    Front,
    asked,
    behind,
    chatted,
    events_of,
    passing_chat,
    text_in,
)

from benchmarks.common.standin import StandIn, answer_of
from toolkit.openai.merge import MergedAnswer
from toolkit.openai.requests import CHAT, COMPLETIONS, GenerationCall


@pytest.mark.parametrize("chat", [True, False])
@behind({"token_s": 0.002}, {"token_s": 0.002})
async def test_a_stop_string_after_a_failure_ends_the_answer(
    front: Front, servers: list[StandIn], chat: bool
):
    body = chatted(temperature=0) if chat else asked(temperature=0)
    plain = answer_of(body, chat=chat)
    body |= {"stop": [plain[24:28]]}

    async def kill() -> None:
        max(servers, key=lambda each: len(each.served)).kill()

    told = await front.stream(body, chat=chat, at=12, act=kill)
    assert told.text == plain[:24]
    assert (told.finish, told.done) == ("stop", True)
    assert front.backend.continued == 1


def test_an_answer_does_not_go_on_where_a_stop_string_may_have_begun_in_it():
    """A stop string that is part of the answer is sent while it comes."""
    passing = passing_chat(stop=["exy"], temperature=0, include_stop_str_in_output=True)
    passing.request(speaks_ids=True)
    assert text_in(passing.feed(events_of("abcde", ids=True, hold=0))) == "abcde"
    assert not passing.goes_on


BLANK = b'data: {"choices":[{"index":0,"text":""}]}\n\n'


@pytest.mark.parametrize("event", [b":\n\n", b"data: {}\n\n", BLANK])
def test_events_that_bring_nothing_end_an_attempt(event: bytes):
    def fed(limit: int, *pieces: bytes) -> str:
        body = {"prompt": "a", "max_tokens": limit, "stream": True}
        passing = MergedAnswer(GenerationCall(COMPLETIONS, json.dumps(body).encode()))
        passing.request()
        for piece in pieces:
            passing.feed(piece)
        return passing.failure

    token = BLANK.replace(b'""', b'"x"')
    assert fed(5, event * 1000) == ""
    assert fed(5, event * 500, token, event * 500) == ""
    assert fed(5000, event * 6000) == "", "each may be a token that is not shown"
    assert fed(5, event * 1100)
    assert fed(5, token * 1100), "more than were asked for"


@pytest.mark.parametrize(
    "event",
    [
        b":\n" * 2000,
        b"data:\n" * 2000,
        b'data: {"choices":[{},{}]}\n',
        b'data: {"choices":[' + b"{}," * 200_000 + b"{}]}\n",
        b"data: {" + b",".join(b'"%d":1' % each for each in range(50_000)) + b"}\n",
    ],
    ids=["comments", "lines", "choices", "many choices", "fields"],
)
def test_an_event_that_takes_long_to_read_ends_an_attempt(event: bytes):
    body = {"prompt": "a", "max_tokens": 5, "stream": True}
    passing = MergedAnswer(GenerationCall(COMPLETIONS, json.dumps(body).encode()))
    passing.request(context=4096)
    passing.feed(event + b"\n")
    assert passing.failure


def test_log_probabilities_of_a_prompt_may_be_long():
    more = b'"logprobs":{"token_logprobs":[' + b"-1.5," * 100_000 + b"-1]}"
    event = BLANK.replace(b'""', b'"x",' + more)
    for asked_for, fits in (({}, False), ({"echo": True, "logprobs": 1}, True)):
        body = {"prompt": "a", "max_tokens": 5, "stream": True} | asked_for
        passing = MergedAnswer(GenerationCall(COMPLETIONS, json.dumps(body).encode()))
        passing.request(context=4096)
        passing.feed(event)
        assert (passing.failure == "") == fits, asked_for


IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]


@pytest.mark.parametrize(
    ("more", "goes_on"),
    [
        ({}, True),
        ({"metadata": {"a": "b"}, "user": "u", "vllm_xargs": {"x": 1}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}, "tools": []}, True),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, True),
        ({"nothing_known": 1}, False),
        ({"kv_transfer_params": {"a": 1}}, False),
        ({"messages": [{"role": "user", "content": IMAGE}]}, False),
        ({"truncate_prompt_tokens": 5}, False),
        ({"continue_final_message": True}, False),
        ({"thinking_token_budget": 5}, False),
    ],
)
def test_a_chat_goes_on_only_where_that_drops_no_field(more: dict[str, Any], goes_on: bool):
    body = chatted(stream=True) | more
    passing = MergedAnswer(GenerationCall(CHAT, json.dumps(body).encode()))
    passing.request(speaks_ids=True)
    passing.feed(events_of("abc", ids=True, hold=0))
    assert passing.goes_on is goes_on
    if goes_on:
        path, content = passing.request(speaks_ids=True)
        assert path == COMPLETIONS
        asked_for = json.loads(content)
        in_ids = ("messages", "chat_template_kwargs", "tools")
        kept = {name: value for name, value in more.items() if name not in in_ids}
        assert {name: asked_for[name] for name in kept} == kept


@pytest.mark.parametrize("delta", [{"reasoning": "hm"}, {"tool_calls": [{"index": 0}]}])
def test_reasoning_and_calls_of_tools_do_not_go_on(delta: dict[str, Any]):
    choice = {"index": 0, "delta": delta, "token_ids": [3], "prompt_token_ids": [1, 2]}
    passing = passing_chat(temperature=0)
    passing.request(speaks_ids=True)
    passing.feed(b"data: " + json.dumps({"id": "a", "choices": [choice]}).encode() + b"\n\n")
    assert passing.begun
    assert not passing.goes_on


@pytest.mark.slow
@pytest.mark.parametrize("status", [500, 400])
@behind({}, {}, hang_s=0.3)
async def test_an_error_after_a_hung_replica_is_no_second_answer(
    front: Front, servers: list[StandIn], status: int
):
    """Its client has no byte of an answer yet."""
    hangs, fails = servers
    hangs.hung = True
    fails.status = status
    front.pool.renew([hangs.url])
    asking = asyncio.create_task(front.stream(asked()))
    while not hangs.served.total():
        await asyncio.sleep(0.005)
    front.pool.renew([hangs.url, fails.url])
    while not fails.served.total():
        await asyncio.sleep(0.005)
    fails.status = 0
    told = await asking
    assert (told.status, told.done) == (status, False)


@pytest.mark.slow
@behind({"token_s": 0.01}, {"token_s": 0.01}, hang_s=0.3)
async def test_where_all_replicas_hang_in_turn_requests_get_503_at_once_until_one_is_back(
    front: Front, servers: list[StandIn]
):
    one, other = servers
    one.hung = True
    running = [asyncio.create_task(front.stream(asked())) for _ in range(4)]
    await front.until("hung", 1)
    other.hung = True
    running += [asyncio.create_task(front.stream(asked())) for _ in range(4)]
    await front.until("hung", 2)
    refused = await front.http.post("/v1/completions", json=asked())
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert (await front.http.get("/ready")).status_code == 503
    one.hung = False
    await front.until("up", 1)
    assert {told.text for told in await asyncio.gather(*running)} == {answer_of(asked())}
    other.hung = False
    await front.until("up", 2)
    assert (await front.stream(asked())).text == answer_of(asked())
