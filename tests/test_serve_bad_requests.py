"""Every bad request gets a 4xx with OpenAI's error body; none gets a 500 or a 422."""

import asyncio
import json
import math
import threading
from contextlib import suppress

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from said import says
from toy_server import HandWorkers, client, turns
from within import with_server

from toolkit.engines.tokenizer import ByteTokenizer
from toolkit.errors import InputError
from toolkit.openai.bodies import parse_json
from toolkit.openai.errors import ApiError
from toolkit.server import backend, engine

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}


def error(response: httpx.Response) -> dict:
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    assert "Traceback" not in body["error"]["message"]
    return body["error"]


RAW = [
    b"",
    b'{"prompt": "a"',
    b'{"prompt": "a"}{}',
    b'["prompt"]',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "top_p": -Infinity}',
    b'\xef\xbb\xbf{"prompt": "a"}',
    b'{"prompt": "\xff"}',
    '{"prompt": "a"}'.encode("utf-16"),
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "a", "\\udfff": 1}',
    b'{"messages": [{"role": "user", "content": "\\uDC00"}]}',
    b'{"prompt": "a", "x": ' + b"[" * 40 + b"]" * 40 + b"}",
    b'{"prompt": ' + b"[" * 9000 + b"]" * 9000 + b"}",
    b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    b'{"prompt": "a\nb"}',
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@with_server(max_body_bytes=20_000)
async def test_invalid_json_bodies_are_refused(http: httpx.AsyncClient, path: str):
    for body in RAW:
        response = await http.post(path, content=body, headers=JSON)
        assert response.status_code == 400, body
        error(response)
    assert http.driver.scheduler.jobs == 0


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
# By the field that the refusal names: what it does not take, beside a prompt or a message.
WRONG = {
    "prompt": [5, "", [], [[]], ["a", 5], [1, True], [1, 2.0], [259], [-1], [10**30]],
    "max_tokens": [0, "5", 5.0, True, 10**30],
    "temperature": [-0.1, 2.1, math.inf],
    "top_p": [0],
    "top_k": [-2],
    "min_p": [1.5],
    "repetition_penalty": [0],
    "n": [0, 17],
    "seed": [2**63, "x"],
    "stop": [5, [""], "x" * 257],
    "stop_token_ids": [[300]],
    "min_tokens": [17],
    "stream": ["yes"],
    "stream_options": [{"include_usage": 1}],
    "priority": [2**40],
    "llmctl_end_after": [5],
    "logprobs": [0],
    "echo": [True],
    "best_of": [2],
    "suffix": ["z"],
    "logit_bias": [{"5": 1}],
    "presence_penalty": [0.5],
    "frequency_penalty": [-1],
}
WRONG_CHATS = {
    "messages": [
        *([], "hi", [{"role": "user"}]),
        *([{"role": "user", "content": content}] for content in (None, [IMAGE])),
        *([{"role": role, "content": "a"}] for role in ("king", "tool")),
    ],
    "max_completion_tokens": [0],
    "tools": [[{"type": "function"}]],
    "tool_choice": ["required"],
    "response_format": [{"type": "json_schema"}],
    "logprobs": [True],
    "top_logprobs": [2],
    "modalities": [["audio"]],
}


@pytest.mark.parametrize(
    ("path", "good", "wrong"),
    [(COMPLETIONS, {"prompt": "a"}, WRONG), (CHAT, {"messages": USER}, WRONG_CHATS)],
    ids=["completions", "chats"],
)
@with_server()
async def test_invalid_fields_are_refused(
    http: httpx.AsyncClient, path: str, good: dict, wrong: dict
):
    (needed,) = good
    cases = [({}, needed)]
    cases += [(good | {name: value}, name) for name, values in wrong.items() for value in values]
    for body, name in cases:
        content = json.dumps(body).replace("Infinity", "1e999")
        response = await http.post(path, content=content, headers=JSON)
        assert response.status_code == 400, body
        said = error(response)
        assert (said["type"], said["param"].partition(".")[0]) == ("invalid_request_error", name)
    assert http.driver.scheduler.jobs == 0


LIMITS = [
    ({"prompt": ["a"] * 257}, "prompt", "256"),
    ({"prompt": ["a"] * 100, "n": 11}, "n", "1024"),
    ({"prompt": "a" * 512}, "prompt", "512"),
    ({"prompt": "a" * 412, "max_tokens": 101}, "max_tokens", "512"),
    ({"prompt": "a", "max_tokens": 257}, "max_tokens", "256"),
    ({"prompt": "a", "stop": ["x"] * 17}, "stop", "16"),
    ({"prompt": "a", "stop_token_ids": [1] * 65}, "stop_token_ids", "64"),
]


@with_server()
async def test_what_is_beyond_a_limit_is_refused_with_the_limit(http: httpx.AsyncClient):
    for body, param, limit in LIMITS:
        response = await http.post(COMPLETIONS, json=body)
        assert response.status_code == 400
        assert error(response)["param"] == param
        assert says(error(response)["message"], limit)


TYPES = ["text/plain", "application/x-www-form-urlencoded", ""]


@pytest.mark.parametrize(
    ("method", "path", "options", "status"),
    [
        *[("GET", path, {}, 404) for path in ("/", "/docs", "/v1/models/")],
        ("POST", "/v1/embeddings", {}, 404),
        ("GET", COMPLETIONS, {}, 405),
        ("DELETE", "/v1/models", {}, 405),
        ("POST", "/health", {}, 405),
        ("POST", COMPLETIONS, {"json": {"model": "gpt-5", "prompt": "a"}}, 404),
        ("POST", CHAT, {"json": {"model": "gpt-5", "messages": USER}}, 404),
        ("POST", COMPLETIONS, {"headers": JSON, "content": b" " * 20_001}, 413),
        *[("POST", COMPLETIONS, {"content": b"{}", "headers": {"content-type": one}}, 415)
          for one in TYPES],
    ],
)  # fmt: skip
@with_server(max_body_bytes=20_000)
async def test_what_is_not_served_is_refused(
    http: httpx.AsyncClient, method: str, path: str, options: dict, status: int
):
    response = await http.request(method, path, **options)
    assert response.status_code == status
    assert ("allow" in response.headers) == (status == 405)
    assert error(response)["code"] == "model_not_found" or "gpt-5" not in str(options)


@with_server(max_body_bytes=20_000)
async def test_a_body_is_refused_once_it_is_too_large(http: httpx.AsyncClient):
    pieces = []

    async def body():
        for _ in range(100):
            pieces.append(1)
            yield b"x" * 1000

    response = await http.post(COMPLETIONS, content=body(), headers=JSON)
    assert response.status_code == 413
    assert len(pieces) == 21


@with_server()
async def test_large_bodies_are_refused_while_the_server_holds_too_much(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(backend, "MAX_HELD_BYTES", 1 << 20)
    reading = asyncio.Event()
    go = asyncio.Event()

    async def slow():
        yield b"x" * (1 << 20)
        reading.set()
        await go.wait()

    first = asyncio.create_task(http.post(COMPLETIONS, content=slow(), headers=JSON))
    await reading.wait()
    large = await http.post(COMPLETIONS, content=b"y" * (1 << 17), headers=JSON)
    assert (large.status_code, error(large)["code"]) == (503, "overloaded")
    assert "retry-after" in large.headers
    small = await http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 0})
    assert small.status_code == 400
    go.set()
    assert (await first).status_code == 400
    again = await http.post(COMPLETIONS, content=b"y" * (1 << 17), headers=JSON)
    assert again.status_code == 400


@with_server()
async def test_a_body_that_does_not_come_in_time_is_refused(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(backend, "BODY_S", 0.01)

    async def never():
        yield b"{"
        await asyncio.Event().wait()

    response = await http.post(COMPLETIONS, content=never(), headers=JSON)
    assert response.status_code == 408


@with_server()
async def test_what_the_tokenizer_refuses_is_the_clients_error(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> list[int]:
        raise InputError("messages: the model's chat template refuses them: roles must alternate")

    monkeypatch.setattr(ByteTokenizer, "encode_chat", refuse)
    said = error(await http.post(CHAT, json={"messages": USER}))
    assert (said["param"], "roles must alternate" in said["message"]) == ("messages", True)


LARGE = [
    (COMPLETIONS, {"prompt": "a" * 600}, 400),
    (COMPLETIONS, {"prompt": "a" * 40, "max_tokens": 2}, 200),
    (CHAT, {"messages": [{"role": "user", "content": "a" * 600}]}, 400),
    (CHAT, {"messages": USER, "max_tokens": 2, "n": 2}, 200),
    (COMPLETIONS, {"prompt": [104] * 513}, 400),
    (COMPLETIONS, {"prompt": [1] * 20 + [-1] * 20}, 400),
]


@with_server()
async def test_large_bodies_get_the_same_answers_from_a_thread(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
):
    for path, body, status in LARGE:
        answers = []
        for least_bytes in (engine.LARGE_BODY_BYTES, 1):
            with monkeypatch.context() as patch:
                patch.setattr(engine, "LARGE_BODY_BYTES", least_bytes)
                response = await http.post(path, json=body | {"temperature": 0})
            assert response.status_code == status
            answers.append(response.json() if status == 200 else error(response))
        small, large = answers
        differing = {name for name in small if small[name] != large[name]}
        assert differing <= {"id", "created"}


def test_long_prompts_at_once_do_not_exceed_the_queue(monkeypatch: pytest.MonkeyPatch):
    """All requests are accepted before the first body is read."""
    monkeypatch.setattr("toolkit.server.engine.LARGE_BODY_BYTES", 1)
    read = threading.Event()
    encode = ByteTokenizer.encode
    monkeypatch.setattr(
        ByteTokenizer, "encode", lambda *of, **how: (read.wait(60), encode(*of, **how))[1]
    )

    async def run() -> tuple[int, list[int]]:
        async with client(HandWorkers(1), max_waiting=3) as http:
            asking = [
                asyncio.create_task(http.post(COMPLETIONS, json={"prompt": "a" * 40}))
                for _ in range(12)
            ]
            await turns(60)
            read.set()
            while sum(
                task.done() for task in asking
            ) + http.driver.waiting + http.driver.running < len(asking):
                await asyncio.sleep(0.001)
            waiting = http.driver.waiting
            await http.driver.stop()
            return waiting, [
                response.json()["error"]["code"] for response in await asyncio.gather(*asking)
            ]

    waiting, codes = asyncio.run(run())
    assert waiting <= 3
    assert codes.count("overloaded") >= 1


def test_surrogate_pairs_are_accepted_and_halves_refused():
    assert parse_json(b'{"prompt": "\\ud83d\\ude00"}') == {"prompt": "\N{GRINNING FACE}"}


def test_deep_nesting_is_refused():
    for levels in (500, 5_000, 60_000):
        for deep in (b"[" * levels + b"]" * levels, b'{"a":' * levels + b"1" + b"}" * levels):
            with suppress(ApiError):
                parse_json(b'{"x": ' + deep + b"}")
    with pytest.raises(ApiError):
        parse_json(b'{"x": ' + b"[" * 5_000 + b"]" * 5_000 + b"}")


@given(
    st.binary(max_size=40)
    | st.text(alphabet='{}[]",:\\ud8eE0+-.NaInfity \n', max_size=40).map(str.encode)
)
def test_no_body_raises_anything_but_an_api_error(body: bytes):
    with suppress(ApiError):
        assert isinstance(parse_json(body), dict)
