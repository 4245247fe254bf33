"""/v1/responses through a front: relayed to one replica, unchanged."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from said import says
from test_pool import PROMPT, Front, behind
from test_pool_rogue import metric, page

from benchmarks.common.standin import MODEL, StandIn
from toolkit.openai.merge import MergedAnswer
from toolkit.openai.requests import RESPONSES, GenerationCall


def wanted(max_output_tokens: int | None = 20, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "input": PROMPT, "max_output_tokens": max_output_tokens}
    return body | {"ignore_eos": True} | more


def events_of(content: str) -> list[dict[str, Any]]:
    lines = [line for line in content.splitlines() if line.startswith("data: {")]
    return [json.loads(line[6:]) for line in lines]


@pytest.mark.parametrize("stream", [False, True])
@behind({})
async def test_an_answer_passes_unchanged(front: Front, servers: list[StandIn], stream: bool):
    body = wanted(stream=stream, metadata={"a": "b"}, nothing_known={"x": [1]})
    servers[0].keeps_bodies = True
    async with httpx.AsyncClient() as direct:
        there = await direct.post(servers[0].url + RESPONSES, json=body)
    answer = await front.http.post(RESPONSES, json=body)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == there.headers["content-type"]
    assert answer.text == there.text
    assert servers[0].bodies[-1] == body
    assert await metric(front, 'llmctl_requests_total{finish_reason="stop"') == 1
    assert await metric(front, "llmctl_ttft_seconds_count") == stream
    assert not any(each.attempts for each in front.pool.replicas)


@behind()
async def test_a_stream_that_has_begun_stays_at_its_replica_and_ends_with_an_error(
    front: Front, servers: list[StandIn]
):
    for each in servers:
        each.cut_at = 400  # in the midst of an event of text
    answer = await front.http.post(RESPONSES, json=wanted(stream=True))
    events = events_of(answer.text)
    assert events[0]["type"] == "response.created"
    assert events[-1]["error"]["code"] == "replicas"
    assert sum(each.served.total() for each in servers) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", ["broken", "busy", pytest.param("hung", marks=pytest.mark.slow)])
@behind(hang_s=0.3, router="round-robin")
async def test_before_the_first_event_another_replica_takes_it(
    front: Front, servers: list[StandIn], end: str, stream: bool
):
    first = servers[0]
    first.cut_at = 0 if end == "broken" else -1
    first.status = 503 if end == "busy" else 0
    if end == "hung":
        first.script = lambda *_: b""
    if end == "broken" and not stream:
        first.script = lambda *_: b"no HTTP"
    for _ in range(3):
        answer = await front.http.post(RESPONSES, json=wanted(stream=stream), timeout=20)
        assert answer.status_code == 200
        assert '"error"' not in answer.text
    assert servers[1].served.total() >= 3


KEPT_BY_OTHERS = {
    "GET": ["", "/resp_1", "/%2e%2e", "/resp_1/input_items"],
    "POST": ["/resp_1", "/resp_1/cancel"],
    "DELETE": ["/resp_1"],
}


@behind({})
async def test_a_front_keeps_no_responses(front: Front, servers: list[StandIn]):
    for method, paths in KEPT_BY_OTHERS.items():
        for path in paths:
            answer = await front.http.request(method, RESPONSES + path)
            assert answer.status_code in (404, 405)  # 405: the path has other methods
            assert "\n" not in answer.json()["error"]["message"]
    assert not [path for path in servers[0].asked if path.startswith(RESPONSES)]


WRONG = [
    *[{"background": value} for value in (True, "true")],
    {"conversation": "conv_1"},
    *[{"previous_response_id": value} for value in ("resp_1", 7)],
    *[{"max_output_tokens": value} for value in ("60000", 10**400)],
    {"stream": "true"},
    {"priority": "-5"},
    *[{"input": value} for value in (7, None)],
]


@behind({})
async def test_what_a_front_cannot_do_or_read_gets_400_with_its_name(
    front: Front, servers: list[StandIn]
):
    for wrong in WRONG:
        answer = await front.http.post(RESPONSES, json=wanted() | wrong)
        assert answer.status_code == 400, (wrong, answer.text)
        (name,) = wrong
        assert answer.json()["error"]["param"] == name
    assert servers[0].served.total() == 0


@pytest.mark.parametrize("stream", [False, True])
@behind({"has_responses": False}, {}, router="round-robin")
async def test_a_server_without_the_route_gets_no_request_and_no_other_trouble(
    front: Front, servers: list[StandIn], stream: bool
):
    for _ in range(4):
        answer = await front.http.post(RESPONSES, json=wanted(stream=stream))
        assert answer.status_code == 200
    servers[1].has_responses = False
    answer = await front.http.post(RESPONSES, json=wanted(stream=stream))
    assert answer.status_code == 404
    while not servers[0].asked["/v1/completions"]:  # asked whether it serves at all
        await asyncio.sleep(0.005)
    assert len(front.pool.up) == 2


@pytest.mark.parametrize("content", [b"data: {}\n\ndata: x", b'{"status": "completed"}'])
@behind({})
async def test_what_no_event_ends_passes_too(front: Front, servers: list[StandIn], content: bytes):
    servers[0].script = lambda *_: page(content)
    answer = await front.http.post(RESPONSES, json=wanted(stream=True))
    assert (answer.status_code, answer.content) == (200, content)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_events_pass_whole_whatever_pieces_they_come_in(size: int, ending: str):
    lines = [": waiting", "", "event: response.created", 'data: {"type": "response.created"}', ""]
    lines += ["event: x", 'data: {"type": "response.output_text.delta",', 'data: "delta": "ab"}']
    lines += ["", 'data: {"type": "response.completed"}', "", "data: [DONE]", "", ""]
    content = ending.join(lines).encode()
    passing = MergedAnswer(GenerationCall(RESPONSES, json.dumps(wanted(stream=True)).encode()))
    assert passing.request(speaks_ids=True)[0] == RESPONSES
    passed = []
    for at in range(0, len(content), size):
        passed.append(passing.feed(content[at : at + size]))
        assert passed[-1] == b"" or passed[-1].endswith(b"\n")
    passed.append(passing.end())
    assert b"".join(passed) == content
    assert (passing.tokens, passing.ended) == (1, True)


@pytest.mark.slow
@behind()
async def test_the_official_client(front: Front, servers: list[StandIn]):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{front.http.base_url}/v1", api_key="x", max_retries=0)
    asked = {"model": MODEL, "input": PROMPT, "max_output_tokens": 5}

    def use() -> None:
        made = client.responses.create(**asked)
        assert len(made.output_text) == 5
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**asked, previous_response_id=made.id)
        assert says(str(caught.value), "previous_response_id", "input")
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)
        kinds = [event.type for event in client.responses.create(**asked, stream=True)]
        assert kinds[-1] == "response.completed"
        for each in servers:
            each.cut_at = 400
        with pytest.raises(openai.APIError):
            list(client.responses.create(**asked | {"max_output_tokens": 40}, stream=True))

    await asyncio.to_thread(use)
