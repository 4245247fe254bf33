"""Large bodies, which a thread reads: bounded work, while the event loop turns."""

import asyncio
import re
import threading
import time

import httpx
import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import models, pre_tokenizers
from within import in_a_loop, with_server

from toolkit.engines.tokenizer import FileTokenizer
from toolkit.openai.bodies import MAX_CONTAINERS, MAX_VALUES, parse_json
from toolkit.openai.engine_requests import EngineRequest, read_engine_request
from toolkit.openai.requests import CHAT, COMPLETIONS
from toolkit.server import engine

MANY = 200_000


def listed(item: bytes, count: int) -> bytes:
    return b",".join([item] * count)


KEYS = b"{%s}" % b",".join(b'"k%d":0' % number for number in (*range(50_000), 49_999))
TOO_MANY = "more than 524288 values"
WORST: dict[str, tuple[str, bytes, str]] = {  # paths, bodies, what the answers say
    "many unknown keys": (
        COMPLETIONS,
        KEYS.replace(b'{"k0":0', b'{"prompt":"a"').replace(b',"k49999":0}', b"}"),
        "'k1' is not a field",
    ),
    "more keys": (COMPLETIONS, b"{%s}" % listed(b'"k":0', MAX_VALUES // 2 + 1), TOO_MANY),
    "many tokens": (COMPLETIONS, b'{"prompt":[%s]}' % listed(b"1", MANY), "has 200000 tokens"),
    "more tokens": (COMPLETIONS, b'{"prompt":[%s]}' % listed(b"1", MAX_VALUES + 1), TOO_MANY),
    "numbers of 4,000 digits": (
        COMPLETIONS,
        b'{"prompt":[%s]}' % listed(b"1" * 4_000, 200),
        "more than 128 digits",
    ),
    "a long text": (COMPLETIONS, b'{"prompt":"%s"}' % (b"a" * 500_000), "has 500000 tokens"),
    "many messages": (CHAT, b'{"messages":[%s]}' % listed(b"{}", 60_000), "length <= 2048"),
    "many lists": (CHAT, b'{"x":[%s]}' % listed(b"[]", 60_000), "'x' is not a field"),
    "more lists": (
        CHAT,
        b'{"x":[%s]}' % listed(b"[]", MAX_CONTAINERS),
        "more than 65536 lists, objects and fields",
    ),
    "many strings": (COMPLETIONS, b'{"prompt":[%s]}' % listed(b'""', 150_000), "150000 prompts"),
    "strings one behind the other": (COMPLETIONS, b'""' * MAX_VALUES, TOO_MANY),
    "deep": (COMPLETIONS, b'{"prompt":' + b"[" * (MAX_CONTAINERS - 2), "not a JSON object|nests"),
    "deeper": (
        COMPLETIONS,
        b'{"prompt":[' + b"[" * MAX_CONTAINERS,
        "more than 65536 lists, objects and fields",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WORST)
@with_server()
async def test_the_worst_bodies_are_refused_while_the_loop_turns(
    http: httpx.AsyncClient, name: str
):
    path, body, message = WORST[name]
    begin_s = time.process_time()
    headers = {"content-type": "application/json"}
    asking = asyncio.create_task(http.post(path, content=body, headers=headers))
    turns = 0
    while not asking.done():
        await asyncio.sleep(0.001)
        turns += 1
    answer = await asking
    assert answer.status_code == 400
    assert re.search(message, answer.json()["error"]["message"])
    assert turns > 1 or time.process_time() - begin_s < 0.05


def test_a_long_run_of_digits_is_a_text_like_others():
    digits = "31415926" * 20_000
    assert parse_json(b'{"prompt":"%s"}' % digits.encode())["prompt"] == digits


def test_what_is_inside_strings_is_no_value():
    inside = r"[{,\",\\" * (MAX_VALUES // 4)
    text = parse_json(b'{"prompt":"%s"}' % inside.encode())["prompt"]
    assert text == inside.replace(r"\"", '"').replace(r"\\", "\\")
    listed = parse_json(b'{"a":[%s]}' % b",".join([b'"[,"'] * (MAX_VALUES // 4)))["a"]
    assert listed == ["[,"] * (MAX_VALUES // 4)


@with_server()
async def test_large_bodies_are_read_one_at_a_time(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
):
    reading: list[str] = []
    most = 0

    def read(body: bytes, *, chat: bool) -> EngineRequest:
        nonlocal most
        reading.append(threading.current_thread().name)
        most = max(most, len(reading))
        time.sleep(0.01)
        reading.pop()
        return read_engine_request(body, chat=chat)

    monkeypatch.setattr(engine, "read_engine_request", read)
    monkeypatch.setattr(engine, "LARGE_BODY_BYTES", 1)
    asking = [http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}) for _ in range(9)]
    assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}
    assert most == 1


@pytest.mark.slow
@in_a_loop
async def test_a_tokenizer_of_a_file_lets_the_loop_turn(tmp_path):
    vocabulary = {chr(code): number for number, code in enumerate(range(33, 127))}
    inner = Inner(models.BPE(vocab=vocabulary | {"Ġ": len(vocabulary)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    text = "ab cd ef," * 40_000
    encoding = asyncio.create_task(asyncio.to_thread(tokenizer.encode, text))
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert len(await encoding) == len(text)
    assert turns > 10
