"""What a request costs its key at a front: no less than it used, whatever its shape."""

import asyncio
import json
from typing import Any

import pytest
from test_gateway import PROMPT, USAGE, Front, asked, behind, chatted, run

from benchmarks.common.standin import StandIn
from toolkit.serve.access import ApiKey

SHA = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"  # of "secret"
HEADERS = {"authorization": "Bearer secret"}
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"
RESPONSES = "/v1/responses"


def keyed(**limits: Any) -> list[ApiKey]:
    return [ApiKey(name="a", sha256=SHA, **limits)]


async def paid(front: Front) -> int:
    """Tokens that the key paid."""
    told = (await front.http.get("/metrics", headers=HEADERS)).text
    found = [line for line in told.splitlines() if line.startswith("llmctl_key_tokens_total{")]
    return int(float(found[0].split()[-1]))


def responded(max_output_tokens: int | None = 40, **more: Any) -> dict[str, Any]:
    body = {"model": "standin", "input": PROMPT, "max_output_tokens": max_output_tokens}
    return body | {"ignore_eos": True} | more


SHAPES: list[tuple[str, str, dict[str, Any]]] = [
    ("plain", COMPLETIONS, asked()),
    ("stream", COMPLETIONS, asked(stream=True)),
    ("stream with usage", COMPLETIONS, asked(stream=True, **USAGE)),
    ("chat", CHAT, chatted()),
    ("chat stream", CHAT, chatted(stream=True)),
    ("without a limit", CHAT, {k: v for k, v in chatted().items() if k != "max_tokens"}),
    ("null for a limit", COMPLETIONS, asked(max_tokens=None)),
    ("both limits", CHAT, chatted(max_tokens=3, max_completion_tokens=30)),
    ("several texts", COMPLETIONS, asked(prompt=["a", "bcd"])),
    ("a text in a list", COMPLETIONS, asked(prompt=["a" * 300])),
    ("several prompts of ids", COMPLETIONS, asked(prompt=[[1, 2], [3, 4]])),
    ("ids in a list", COMPLETIONS, asked(prompt=[[1] * 300])),
    ("ids", COMPLETIONS, asked(prompt=[1] * 300)),
    ("several choices", COMPLETIONS, asked(n=4)),
    ("several choices of several prompts", COMPLETIONS, asked(prompt=["a", "b"], n=3)),
    ("several choices in a stream", COMPLETIONS, asked(n=4, stream=True)),
    ("a stop string", COMPLETIONS, asked(stop="q", stream=True)),
    ("token ids", COMPLETIONS, asked(stream=True, return_token_ids=True)),
    ("a field twice", COMPLETIONS, asked()),
    ("embeddings", EMBEDDINGS, {"model": "standin", "input": ["one", "two"]}),
    ("response", RESPONSES, responded()),
    ("response in a stream", RESPONSES, responded(stream=True)),
    ("response without a limit", RESPONSES, responded(max_output_tokens=None)),
    ("response in a stream without a limit", RESPONSES, responded(None, stream=True)),
    ("response with instructions", RESPONSES, responded(instructions="b" * 300)),
    ("response to items", RESPONSES, responded(input=[{"role": "user", "content": "a" * 300}])),
    ("response to another", RESPONSES, responded(previous_response_id="")),
    ("response to another in a stream", RESPONSES, responded(stream=True, previous_response_id="")),
    ("response that is not kept", RESPONSES, responded(store=False)),
    ("response by several tools", RESPONSES, responded(tools=[{"type": "code_interpreter"}])),
]


@pytest.mark.slow
@pytest.mark.parametrize("server", ["ids", "no ids", "no usage", "no usage, no ids"])
def test_no_shape_costs_a_key_less_than_it_used(server: str):
    async def test(front: Front, servers: list[StandIn]) -> None:
        for name, path, shape in SHAPES:
            fields = dict(shape)
            if "previous_response_id" in fields:
                fields["previous_response_id"] = next(reversed(servers[0].made))
            before = await paid(front)
            used = servers[0].used
            content = json.dumps(fields)
            if name == "a field twice":
                content = '{"max_tokens": 1, ' + content[1:]
            headers = HEADERS | {"content-type": "application/json"}
            answer = await front.http.post(path, content=content, headers=headers)
            assert answer.status_code == 200, (name, answer.text)
            cost = await paid(front) - before
            assert cost >= servers[0].used - used > 0, (name, cost, servers[0].used - used)
            if "no usage" not in server:
                assert cost == servers[0].used - used, name

    # Without usage a prompt is estimated by its bytes: four a token.
    counts = "no usage" not in server
    standin = StandIn(
        speaks_ids="no ids" not in server, gives_usage=counts, token_bytes=1 if counts else 4
    )
    run(test, standin, keys=keyed(), max_new_tokens=4096)


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (COMPLETIONS, {"stream": "true"}),
        (COMPLETIONS, {"stream": 1}),
        (COMPLETIONS, {"n": "64"}),
        (COMPLETIONS, {"n": 64.0}),
        (COMPLETIONS, {"n": 0}),
        (COMPLETIONS, {"n": 100_000}),
        (COMPLETIONS, {"best_of": "64"}),
        (COMPLETIONS, {"max_tokens": "60000"}),
        (COMPLETIONS, {"max_tokens": 10**400}),
        (COMPLETIONS, {"priority": "-5"}),
        (COMPLETIONS, {"temperature": "0"}),
        (COMPLETIONS, {"stop": 7}),
        (COMPLETIONS, {"stop": [7]}),
        (COMPLETIONS, {"model": 7}),
        (COMPLETIONS, {"prompt": {"a": 1}}),
        (COMPLETIONS, {"prompt": ["a", 1]}),
        (COMPLETIONS, {"prompt": ["a", [1]]}),
        (COMPLETIONS, {"prompt": [1, True]}),
        (COMPLETIONS, {"prompt": [10**400]}),
        (COMPLETIONS, {"prompt": ["a"] * 5000}),
        (COMPLETIONS, {"return_token_ids": "yes"}),
        (COMPLETIONS, {"stream_options": {"include_usage": "true"}}),
        (COMPLETIONS, {"stream_options": [1]}),
        (CHAT, {"max_completion_tokens": "9"}),
        (CHAT, {"messages": "hello"}),
        (RESPONSES, {"max_output_tokens": "9"}),
        (RESPONSES, {"stream": "true"}),
        (RESPONSES, {"background": "true"}),
    ],
)
@behind({}, keys=keyed())
async def test_a_field_of_another_type_gets_400_with_its_name(
    front: Front, servers: list[StandIn], path: str, wrong: dict[str, Any]
):
    body = {CHAT: chatted, RESPONSES: responded}.get(path, asked)() | wrong
    answer = await front.http.post(path, json=body, headers=HEADERS)
    assert answer.status_code == 400, answer.text
    (name,) = wrong
    assert answer.json()["error"]["param"].startswith(name)
    assert servers[0].used == await paid(front) == 0


@behind({}, keys=keyed(tokens_per_minute=600))
async def test_a_response_to_another_reserves_what_that_one_had(
    front: Front, servers: list[StandIn]
):
    made = await front.http.post(RESPONSES, json=responded(300), headers=HEADERS)
    body = responded(1, previous_response_id=made.json()["id"])
    answer = await front.http.post(RESPONSES, json=body, headers=HEADERS)
    assert answer.status_code == 429


FEW = {"tokens_per_minute": 100}
TWO = {"max_concurrent": 2}
LIMITED = "rate_limit_exceeded"


@pytest.mark.parametrize(
    ("path", "limits", "fields", "status", "code"),
    [
        (COMPLETIONS, TWO, {"n": 64}, 429, LIMITED),
        (COMPLETIONS, TWO, {"best_of": 64}, 429, LIMITED),
        (COMPLETIONS, TWO, {"prompt": ["a", "b", "c"]}, 429, LIMITED),
        (COMPLETIONS, TWO, {"prompt": [[1], [2], [3]]}, 429, LIMITED),
        (COMPLETIONS, FEW, {"max_tokens": 60_000}, 429, LIMITED),
        (COMPLETIONS, FEW, {"max_tokens": None}, 429, LIMITED),
        (COMPLETIONS, FEW, {"prompt": [[1] * 200]}, 429, LIMITED),
        (COMPLETIONS, {}, {"priority": -5}, 403, "priority_not_allowed"),
        (COMPLETIONS, {"urgent": True}, {"priority": -5}, 200, ""),
        (COMPLETIONS, {}, {"priority": 5}, 200, ""),
        (RESPONSES, FEW, {"max_output_tokens": 60_000}, 429, LIMITED),
        (RESPONSES, FEW, {"max_output_tokens": None}, 429, LIMITED),
        (RESPONSES, FEW, {"input": "a" * 800}, 429, LIMITED),
        (RESPONSES, FEW, {"instructions": "a" * 800}, 429, LIMITED),
        (RESPONSES, FEW, {"tools": [{"type": "a" * 800}]}, 429, LIMITED),
        (RESPONSES, {"requests_per_minute": 1}, {}, 200, ""),
        (RESPONSES, {}, {"priority": -5}, 403, "priority_not_allowed"),
        (RESPONSES, {"urgent": True}, {"priority": -5}, 200, ""),
    ],
)
def test_the_limits_of_a_key_hold(
    path: str, limits: dict[str, Any], fields: dict[str, Any], status: int, code: str
):
    body = (responded if path == RESPONSES else asked)() | fields

    async def test(front: Front, servers: list[StandIn]) -> None:
        answer = await front.http.post(path, json=body, headers=HEADERS)
        assert answer.status_code == status, answer.text
        if code:
            assert answer.json()["error"]["code"] == code
            assert servers[0].used == 0
        if "requests_per_minute" in limits:
            again = await front.http.post(path, json=body, headers=HEADERS)
            assert again.status_code == 429

    run(test, StandIn(), keys=keyed(**limits))


@pytest.mark.parametrize("path", [COMPLETIONS, RESPONSES])
@pytest.mark.parametrize("stream", [False, True])
@behind({"token_s": 0.002}, keys=keyed())
async def test_a_client_that_leaves_pays_for_what_it_used(
    front: Front, servers: list[StandIn], stream: bool, path: str
):
    front.gateway.gauge.bytes_per_token = 1.0  # as here
    body = (responded if path == RESPONSES else asked)(400, stream=stream)
    asking = asyncio.create_task(front.http.post(path, json=body, headers=HEADERS))
    while servers[0].used < len(PROMPT) + 20:
        await asyncio.sleep(0.002)
    asking.cancel()
    while front.gateway.running or not servers[0].is_idle:
        await asyncio.sleep(0.002)
    await asyncio.sleep(0)
    margin = 5 if stream else 0  # tokens on their way, which the front has not seen
    assert await paid(front) >= servers[0].used - margin


@behind({"status": 400}, keys=keyed())
async def test_what_a_replica_refuses_costs_nothing(front: Front, servers: list[StandIn]):
    for path, body in ((COMPLETIONS, asked()), (RESPONSES, responded())):
        answer = await front.http.post(path, json=body, headers=HEADERS)
        assert answer.status_code == 400
    assert await paid(front) == 0
