"""The process that reads large bodies: the same answers, bounded work, and its end."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest
import uvloop
from within import within

from toolkit.engines.tokenizer import VOCAB_SIZE
from toolkit.files.recipe import ModelSpec
from toolkit.serve.errors import ApiError
from toolkit.serve.helper import Helper

pytestmark = pytest.mark.slow

MODEL = ModelSpec(
    source="random",
    config={"model_type": "fake"},
    dtype="float32",
    max_model_len=512,
    tokenizer="bytes",
)
KEYS = b"{%s}" % b",".join(b'"k%d":0' % number for number in (*range(100_000), 99_999))
WORST = {
    "many keys, the last one twice": ("completion", KEYS, "the key 'k99999' occurs twice"),
    "many tokens that are none": (
        "detokenize",
        b'{"tokens":[%s]}' % b",".join([b"-1"] * 500_000),
        "500000 tokens",
    ),
    "many tokens": (
        "completion",
        b'{"prompt":[%s]}' % b",".join([b"1"] * 500_000),
        "has 500000 tokens",
    ),
    "a long text": ("completion", b'{"prompt":"%s"}' % (b"a" * 500_000), "has 500000 tokens"),
    "a text of more tokens than an answer holds": (
        "tokenize",
        b'{"prompt":"%s"}' % (b"a" * 1_100_000),
        "1100000 tokens",
    ),
    "many messages": (
        "chat",
        b'{"messages":[%s]}' % b",".join([b"{}"] * 500_000),
        "role.: Field required",
    ),
    "many stops": (
        "completion",
        b'{"prompt":"a","stop_token_ids":[%s]}' % b",".join([b"-1"] * 500_000),
        "ids.0",
    ),
    "many lists": ("chat", b'{"x":[%s]}' % b",".join([b"[]"] * 500_000), "Field required"),
    "deep": ("tokenize", b'{"prompt":' + b"[" * 500_000, "nests deeper than 32 levels"),
}


@asynccontextmanager
async def started() -> AsyncIterator[Helper]:
    helper = Helper(MODEL, VOCAB_SIZE, 512)
    await helper.start()
    try:
        yield helper
    finally:
        await helper.stop()


with_helper = within(started, "helper", loop_factory=uvloop.new_event_loop)


def process(helper: Helper) -> psutil.Process:
    return psutil.Process(helper._process.pid)


@with_helper()
async def test_the_worst_bodies_are_refused_while_the_loop_turns(helper: Helper):
    for kind, body, message in WORST.values():
        asking = asyncio.create_task(helper(kind, body))
        turns = 0
        while not asking.done():
            await asyncio.sleep(0.001)
            turns += 1
        with pytest.raises(ApiError, match=message):
            await asking
        assert turns > 1


@with_helper()
async def test_forms_carry_their_prompts_as_tokens(helper: Helper):
    body = {"prompt": ["hi", "yo"], "max_tokens": 3, "stop": "x", "stream": True}
    form, prompts = await helper("completion", json.dumps(body).encode())
    assert prompts == [tuple(b"hi"), tuple(b"yo")]
    assert (form.max_tokens, form.stop, form.stream, form.prompt) == (3, ["x"], True, ["", ""])
    assert json.loads(await helper("tokenize", b'{"prompt": "hi"}'))["tokens"] == [104, 105]


@with_helper()
async def test_a_dead_helper_is_started_again(helper: Helper):
    process(helper).kill()
    await helper._process.wait()
    assert json.loads(await helper("tokenize", b'{"prompt": "hi"}'))["count"] == 2


@with_helper()
async def test_a_helper_that_dies_while_reading_fails_one_request(helper: Helper):
    await helper("tokenize", b'{"prompt": "hi"}')
    process(helper).suspend()
    asyncio.get_running_loop().call_later(0.01, process(helper).kill)
    with pytest.raises(ApiError, match="could not be read") as caught:
        await helper("tokenize", b'{"prompt": "hi"}')
    assert (caught.value.status, caught.value.code) == (503, "request_failed")
    assert json.loads(await helper("tokenize", b'{"prompt": "hi"}'))["count"] == 2


@with_helper()
async def test_a_helper_that_hangs_is_killed_and_started_again(
    helper: Helper, monkeypatch: pytest.MonkeyPatch
):
    await helper("tokenize", b'{"prompt": "hi"}')
    process(helper).suspend()
    monkeypatch.setattr("toolkit.serve.helper.READING_TIMEOUT_S", 0.05)
    with pytest.raises(ApiError, match="could not be read"):
        await helper("tokenize", b'{"prompt": "hi"}')
    monkeypatch.undo()
    assert json.loads(await helper("tokenize", b'{"prompt": "hi"}'))["count"] == 2


@with_helper()
async def test_too_many_waiting_bodies_are_refused(helper: Helper, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("toolkit.serve.helper.MAX_WAITING_BODIES", 2)
    asking = [asyncio.create_task(helper("tokenize", b'{"prompt": "hi"}')) for _ in range(3)]
    found = await asyncio.gather(*asking, return_exceptions=True)
    assert [isinstance(one, bytes) for one in found] == [True, True, False]
    assert (found[2].status, found[2].headers) == (503, {"Retry-After": "5"})


@with_helper()
async def test_the_helper_ends_with_its_server_and_ignores_signals(helper: Helper):
    await helper("tokenize", b'{"prompt": "hi"}')
    one = process(helper)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(one.pid, number)
    assert json.loads(await helper("tokenize", b'{"prompt": "hi"}'))["count"] == 2
    helper._process.stdin.close()  # as the system does when the server is killed
    await helper._process.wait()
