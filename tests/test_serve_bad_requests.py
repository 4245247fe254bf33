"""Every bad request gets a 4xx with OpenAI's error body; none gets a 500 or a 422."""

import asyncio
import json
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
from toolkit.serve.errors import ApiError
from toolkit.serve.forms import MAX_DEPTH, parse_json

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}


def send(method: str, path: str, **options) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client(max_body_bytes=20_000) as http:
            response = await http.request(method, path, **options)
            await turns()
            assert http.driver.scheduler.jobs == 0
            return response

    return asyncio.run(run())


def error(response: httpx.Response) -> dict:
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    assert "Traceback" not in body["error"]["message"]
    return body["error"]


RAW = {
    "empty": (b"", "not JSON"),
    "torn": (b'{"prompt": "a"', "not JSON"),
    "two objects": (b'{"prompt": "a"}{}', "Extra data"),
    "not an object": (b'["prompt"]', "must be a JSON object"),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', "NaN is not a JSON number"),
    "Infinity": (b'{"prompt": "a", "top_p": -Infinity}', "-Infinity is not a JSON number"),
    "a key twice": (b'{"prompt": "a", "prompt": "b"}', "the key 'prompt' occurs twice"),
    "a byte order mark": (b'\xef\xbb\xbf{"prompt": "a"}', "BOM"),
    "not UTF-8": (b'{"prompt": "\xff"}', "not UTF-8: byte 12"),
    "UTF-16": ('{"prompt": "a"}'.encode("utf-16"), "not UTF-8"),
    "a lone surrogate": (b'{"prompt": "\\ud800"}', "half of a surrogate pair"),
    "a lone surrogate in a key": (b'{"prompt": "a", "\\udfff": 1}', "half of a surrogate pair"),
    "a lone surrogate in a message": (
        b'{"messages": [{"role": "user", "content": "\\uDC00"}]}',
        "half of a surrogate",
    ),
    "deep": (b'{"prompt": "a", "x": ' + b"[" * 40 + b"]" * 40 + b"}", "nests deeper than 32"),
    "very deep": (b'{"prompt": ' + b"[" * 9000 + b"]" * 9000 + b"}", "nests deeper than 32"),
    "a huge integer": (
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        "integer string conversion",
    ),
    "a raw line break in a string": (b'{"prompt": "a\nb"}', "not JSON"),
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("what", RAW)
def test_invalid_json_bodies_are_refused(path: str, what: str):
    body, message = RAW[what]
    response = send("POST", path, content=body, headers=JSON)
    assert response.status_code == 400
    assert message in error(response)["message"]


FIELDS = [
    ({}, "prompt", "Field required"),
    ({"prompt": 5}, "prompt", "string"),
    ({"prompt": ""}, "prompt", "no tokens"),
    ({"prompt": []}, "prompt", "string"),
    ({"prompt": [[]]}, "prompt", "no tokens"),
    ({"prompt": ["a", 5]}, "prompt", "alone"),
    ({"prompt": [1, True]}, "prompt", "alone"),
    ({"prompt": [1, 2.0]}, "prompt", "alone"),
    ({"prompt": [259]}, "prompt", "holds token 259; tokens here are 0 to 258"),
    ({"prompt": [-1]}, "prompt", "holds token -1"),
    ({"prompt": [10**30]}, "prompt", "too large a number"),
    ({"prompt": ["a"] * 257}, "prompt", "257 prompts; the limit is 256"),
    ({"prompt": ["a"] * 100, "n": 11}, "n", "1100 choices; the limit is 1024"),
    ({"prompt": "a" * 512}, "prompt", "512 tokens; the limit of prompt + output is 512"),
    ({"prompt": "a" * 412, "max_tokens": 101}, "max_tokens", "together 513; the limit is 512"),
    ({"prompt": "a", "max_tokens": 257}, "max_tokens", "max_tokens is 257; the limit is 256"),
    ({"prompt": "a", "max_tokens": 10**30}, "max_tokens", "too large a number; the limit is 256"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"prompt": "a", "max_tokens": "5"}, "max_tokens", "integer"),
    ({"prompt": "a", "max_tokens": 5.0}, "max_tokens", "integer"),
    ({"prompt": "a", "max_tokens": True}, "max_tokens", "integer"),
    ({"prompt": "a", "temperature": -0.1}, "temperature", "greater than or equal to 0"),
    ({"prompt": "a", "temperature": 2.1}, "temperature", "less than or equal to 2"),
    ({"prompt": "a", "temperature": 1e999}, "temperature", "finite"),
    ({"prompt": "a", "top_p": 0}, "top_p", "greater than 0"),
    ({"prompt": "a", "top_k": -2}, "top_k", "greater than or equal to -1"),
    ({"prompt": "a", "min_p": 1.5}, "min_p", "less than or equal to 1"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
    ({"prompt": "a", "n": 0}, "n", "greater than or equal to 1"),
    ({"prompt": "a", "n": 17}, "n", "less than or equal to 16"),
    ({"prompt": "a", "seed": 2**63}, "seed", "less than"),
    ({"prompt": "a", "seed": "x"}, "seed", "integer"),
    ({"prompt": "a", "stop": 5}, "stop", "list of strings"),
    ({"prompt": "a", "stop": [""]}, "stop", "1 to 256 characters"),
    ({"prompt": "a", "stop": "x" * 257}, "stop", "1 to 256 characters"),
    ({"prompt": "a", "stop": ["x"] * 17}, "stop", "17 strings; the limit is 16"),
    ({"prompt": "a", "stop_token_ids": [300]}, "stop_token_ids", "holds token 300"),
    ({"prompt": "a", "stop_token_ids": [1] * 65}, "stop_token_ids", "at most 64"),
    ({"prompt": "a", "min_tokens": 17}, "min_tokens", "min_tokens is 17; max_tokens is 16"),
    ({"prompt": "a", "stream": "yes"}, "stream", "boolean"),
    (
        {"prompt": "a", "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
        "boolean",
    ),
    ({"prompt": "a", "priority": 2**40}, "priority", "less than"),
    ({"prompt": "a", "llmctl_end_after": 5}, "llmctl_end_after", "--allow-end-after"),
    ({"prompt": "a", "logprobs": 0}, "logprobs", "not supported"),
    ({"prompt": "a", "echo": True}, "echo", "not supported"),
    ({"prompt": "a", "best_of": 2}, "best_of", "not supported"),
    ({"prompt": "a", "suffix": "z"}, "suffix", "not supported"),
    ({"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias", "not supported"),
    ({"prompt": "a", "presence_penalty": 0.5}, "presence_penalty", "not supported"),
    ({"prompt": "a", "frequency_penalty": -1}, "frequency_penalty", "not supported"),
]


@pytest.mark.parametrize(
    ("body", "param", "message"), FIELDS, ids=[json.dumps(one[0])[:60] for one in FIELDS]
)
def test_invalid_fields_are_refused(body: dict, param: str, message: str):
    response = send(
        "POST", COMPLETIONS, content=json.dumps(body).replace("Infinity", "1e999"), headers=JSON
    )
    assert response.status_code == 400
    said = error(response)
    assert said["type"] == "invalid_request_error"
    assert said["param"] == param
    assert message in said["message"]


CHATS = [
    ({}, "messages", "Field required"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": "hi"}, "messages", "list"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "Field required"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content", "string"),
    ({"messages": [{"role": "king", "content": "a"}]}, "messages.0.role", "'system'"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role", "'system'"),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ]
        },
        "messages.0.content",
        "not of type 'text'",
    ),
    (
        {"messages": USER, "max_completion_tokens": 0},
        "max_completion_tokens",
        "greater than or equal to 1",
    ),
    ({"messages": USER, "tools": [{"type": "function"}]}, "tools", "not supported"),
    ({"messages": USER, "tool_choice": "required"}, "tool_choice", "not supported"),
    (
        {"messages": USER, "response_format": {"type": "json_schema"}},
        "response_format",
        "not supported",
    ),
    ({"messages": USER, "logprobs": True}, "logprobs", "not supported"),
    ({"messages": USER, "top_logprobs": 2}, "top_logprobs", "not supported"),
    ({"messages": USER, "modalities": ["audio"]}, "modalities", "not supported"),
]


@pytest.mark.parametrize(
    ("body", "param", "message"), CHATS, ids=[json.dumps(one[0])[:60] for one in CHATS]
)
def test_invalid_chats_are_refused(body: dict, param: str, message: str):
    response = send("POST", CHAT, json=body)
    assert response.status_code == 400
    assert (error(response)["param"], message in error(response)["message"]) == (param, True)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/docs", 404),
        ("GET", "/v1/models/", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", COMPLETIONS, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
    ],
)
def test_unknown_routes_are_refused(method: str, path: str, status: int):
    response = send(method, path)
    assert response.status_code == status
    error(response)
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER})]
)
def test_an_unknown_model_is_refused(path: str, body: dict):
    response = send("POST", path, json={"model": "gpt-5", **body})
    assert response.status_code == 404
    assert error(response)["code"] == "model_not_found"


def test_a_body_that_says_it_is_too_large_is_refused_unread():
    response = send("POST", COMPLETIONS, content=b"", headers={**JSON, "content-length": "20001"})
    assert response.status_code == 413
    assert says(error(response)["message"], "20000")


def test_a_body_is_refused_once_it_is_too_large():
    pieces = []

    async def body():
        for _ in range(100):
            pieces.append(1)
            yield b"x" * 1000

    response = send("POST", COMPLETIONS, content=body(), headers=JSON)
    assert response.status_code == 413
    assert len(pieces) == 21


def test_what_the_tokenizer_refuses_is_the_clients_error(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> list[int]:
        raise InputError("messages: the model's chat template refuses them: roles must alternate")

    monkeypatch.setattr(ByteTokenizer, "encode_chat", refuse)
    said = error(send("POST", CHAT, json={"messages": USER}))
    assert (said["param"], "roles must alternate" in said["message"]) == ("messages", True)


LARGE = [
    (COMPLETIONS, {"prompt": "a" * 600}, 400, "600 tokens; the limit of prompt + output is 512"),
    (COMPLETIONS, {"prompt": "a" * 40, "max_tokens": 2}, 200, ""),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "a" * 600}]},
        400,
        "the limit of prompt + output is 512",
    ),
    (CHAT, {"messages": USER, "max_tokens": 2, "n": 2}, 200, ""),
    (COMPLETIONS, {"prompt": [104] * 513}, 400, "513 tokens; the limit of prompt + output is 512"),
    (COMPLETIONS, {"prompt": [1] * 20 + [-1] * 20}, 400, "'prompt' holds token -1"),
]


@pytest.mark.parametrize(("path", "body", "status", "message"), LARGE)
def test_large_bodies_get_the_same_answers_from_a_thread(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict, status: int, message: str
):
    body = {"temperature": 0, **body}
    small = send("POST", path, json=body)
    monkeypatch.setattr("toolkit.serve.forms.LARGE_BODY_BYTES", 1)
    large = send("POST", path, json=body)
    assert large.status_code == small.status_code == status
    if status == 200:
        assert large.json()["choices"] == small.json()["choices"]
    else:
        assert error(large) == error(small)
        assert message in error(large)["message"]


def test_long_prompts_at_once_do_not_exceed_the_queue(monkeypatch: pytest.MonkeyPatch):
    """All requests are accepted before the first body is read."""
    monkeypatch.setattr("toolkit.serve.forms.LARGE_BODY_BYTES", 1)
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
            await http.driver.drain(0.0)
            return waiting, [
                response.json()["error"]["code"] for response in await asyncio.gather(*asking)
            ]

    waiting, codes = asyncio.run(run())
    assert waiting <= 3
    assert codes.count("overloaded") >= 1


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_other_content_types_are_refused(kind: str):
    response = send("POST", COMPLETIONS, content=b'{"prompt": "a"}', headers={"content-type": kind})
    assert response.status_code == 415
    error(response)


def test_surrogate_pairs_are_accepted_and_halves_refused():
    assert parse_json(b'{"prompt": "\\ud83d\\ude00"}') == {"prompt": "\N{GRINNING FACE}"}


def test_nesting_is_limited_to_max_depth():
    def nested(levels: int) -> bytes:
        return b'{"x": ' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"

    parse_json(nested(MAX_DEPTH))
    with pytest.raises(ApiError, match="nests deeper"):
        parse_json(nested(MAX_DEPTH + 1))


@given(
    st.binary(max_size=40)
    | st.text(alphabet='{}[]",:\\ud8eE0+-.NaInfity \n', max_size=40).map(str.encode)
)
def test_no_body_raises_anything_but_an_api_error(body: bytes):
    with suppress(ApiError):
        assert isinstance(parse_json(body), dict)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
ONE_PATH = ("prompt", "messages")
NAMES = st.sampled_from(
    ["prompt", "messages", "max_tokens", "stop", "n", "stream_options", "seed", "stop_token_ids"]
)


@pytest.mark.slow
@given(fields=st.dictionaries(NAMES, VALUES, max_size=4))
@with_server()
async def test_no_field_gives_a_server_error(http: httpx.AsyncClient, fields: dict):
    for path, good in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER})):
        known = {name: value for name, value in fields.items() if name not in ONE_PATH}
        body = {**good, "max_tokens": 2, **known}
        body |= {name: fields[name] for name in good.keys() & fields.keys()}
        response = await http.post(path, content=json.dumps(body), headers=JSON)
        assert response.status_code in (200, 400)
        if response.status_code == 400:
            error(response)
