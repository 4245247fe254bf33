"""/v1/responses through a front: unchanged, charged, and at the replica that has the response."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from test_gateway import PROMPT, Front, behind
from test_gateway_keys import HEADERS, SHA, keyed, paid
from test_gateway_rogue import page

from benchmarks.common.standin import MODEL, StandIn
from toolkit.gateway.attempts import Attempted
from toolkit.gateway.replicas import LiveReplica
from toolkit.gateway.responses import MadeResponse, MadeResponses, PassingResponse, ResponsesCall
from toolkit.serve.access import ApiKey
from toolkit.serve.errors import ApiError

RESPONSES = "/v1/responses"


def wanted(max_output_tokens: int | None = 20, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "input": PROMPT, "max_output_tokens": max_output_tokens}
    return body | {"ignore_eos": True} | more


def named(content: str) -> str:
    """An answer without the name of the response, which differs at each server."""
    start = content.index('"resp_')
    name = content[start : content.index('"', start + 1) + 1]
    return content.replace(name, '"resp"')


def events_of(content: str) -> list[dict[str, Any]]:
    lines = [line for line in content.splitlines() if line.startswith("data: ")]
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
    assert named(answer.text) == named(there.text)
    assert servers[0].bodies[-1] == body
    told = (await front.http.get("/metrics")).text
    assert 'llmctl_requests_total{finish_reason="length"' in told


@behind()
async def test_a_stream_that_has_begun_stays_at_its_replica_and_ends_with_an_error(
    front: Front, servers: list[StandIn]
):
    for each in servers:
        each.cut_at = 400  # in the midst of an event of text
    answer = await front.http.post(RESPONSES, json=wanted(stream=True))
    events = events_of(answer.text)
    assert [events[0]["type"], events[-1]["type"]] == ["response.created", "error"]
    assert events[-1]["error"]["message"] == events[-1]["message"]
    numbers = [each["sequence_number"] for each in events]
    assert numbers == list(range(len(events)))
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


@pytest.mark.slow
@behind(router="round-robin")
async def test_what_names_a_response_goes_to_the_replica_that_made_it(
    front: Front, servers: list[StandIn]
):
    all_made = [(await front.http.post(RESPONSES, json=wanted())).json() for _ in range(4)]
    assert all(each.made for each in servers)
    for made in all_made:
        maker = next(each for each in servers if made["id"] in each.made)
        more = wanted(previous_response_id=made["id"], input="and then?")
        following = (await front.http.post(RESPONSES, json=more)).json()
        assert following["id"] in maker.made
        assert following["usage"]["input_tokens"] > len(PROMPT) + 20
        kept = await front.http.get(f"{RESPONSES}/{made['id']}?include[]=reasoning")
        assert (kept.status_code, kept.json()["output"]) == (200, made["output"])
        cancelled = await front.http.post(f"{RESPONSES}/{made['id']}/cancel")
        assert cancelled.status_code == 400  # it has ended, says the replica
        assert "synchronous" in cancelled.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "fields"),
    [
        ("POST", RESPONSES, wanted(previous_response_id="resp_1")),
        ("GET", f"{RESPONSES}/resp_1", None),
        ("GET", f"{RESPONSES}/%2e%2e", None),
        ("POST", f"{RESPONSES}/resp_1/cancel", None),
        ("POST", f"{RESPONSES}/resp_1", {}),
        ("GET", f"{RESPONSES}/resp_1/input_items", None),
        ("DELETE", f"{RESPONSES}/resp_1", None),
        ("GET", RESPONSES, None),
    ],
)
@behind({})
async def test_an_unknown_response_gets_404(
    front: Front, servers: list[StandIn], method: str, path: str, fields: dict[str, Any] | None
):
    answer = await front.http.request(method, path, json=fields)
    assert answer.status_code in (404, 405)  # 405: the path has other methods
    assert "\n" not in answer.json()["error"]["message"]
    assert servers[0].served.total() == 0


@behind()
async def test_a_response_of_a_replica_that_is_down_or_gone_is_out_of_reach(
    front: Front, servers: list[StandIn]
):
    made = (await front.http.post(RESPONSES, json=wanted())).json()["id"]
    maker = next(each for each in servers if made in each.made)
    other = next(each for each in servers if each is not maker)
    asked = wanted(previous_response_id=made)
    maker.kill()
    front.pool.failed(next(each for each in front.pool.up if each.url == maker.url), "killed")
    answer = await front.http.post(RESPONSES, json=asked)
    assert (answer.status_code, int(answer.headers["retry-after"]) > 0) == (503, True)
    front.pool.renew([other.url])
    assert (await front.http.post(RESPONSES, json=asked)).status_code == 404
    assert (await front.http.get(f"{RESPONSES}/{made}")).status_code == 404
    assert (await front.http.post(RESPONSES, json=wanted())).status_code == 200


@behind()
async def test_a_replica_that_goes_down_under_a_request_that_only_it_can_answer(
    front: Front, servers: list[StandIn]
):
    made = (await front.http.post(RESPONSES, json=wanted())).json()["id"]
    maker = next(each for each in servers if made in each.made)
    maker.first_s = 10.0
    body = wanted(previous_response_id=made)
    asking = asyncio.create_task(front.http.post(RESPONSES, json=body))
    while maker.served[RESPONSES] < 2:
        await asyncio.sleep(0.002)
    maker.kill()
    assert (await asking).status_code == 503


@behind({}, keys=[ApiKey(name="a", sha256=SHA), ApiKey(name="b", sha256="a" * 64)])
async def test_a_key_sees_its_own_responses_only(front: Front, servers: list[StandIn]):
    made = (await front.http.post(RESPONSES, json=wanted(), headers=HEADERS)).json()["id"]
    assert (await front.http.get(f"{RESPONSES}/{made}", headers=HEADERS)).status_code == 200
    assert (await front.http.get(f"{RESPONSES}/{made}")).status_code == 401
    with pytest.raises(ApiError):
        front.gateway.made.find("b", made)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [
        {"background": True},
        {"conversation": "conv_1"},
        {"request_id": "resp_of_another"},
        {"background": "true"},
        {"max_output_tokens": "60000"},
        {"max_output_tokens": 10**400},
        {"stream": "true"},
        {"priority": "-5"},
        {"input": 7},
        {"input": None},
        {"tools": "all"},
        {"previous_response_id": 7},
    ],
)
@behind({}, keys=keyed())
async def test_what_a_front_cannot_do_or_count_gets_400_with_its_name(
    front: Front, servers: list[StandIn], wrong: dict[str, Any]
):
    answer = await front.http.post(RESPONSES, json=wanted() | wrong, headers=HEADERS)
    assert answer.status_code == 400, answer.text
    (name,) = wrong
    assert answer.json()["error"]["param"] == name
    assert servers[0].used == await paid(front) == 0


@pytest.mark.parametrize("name", ["stream", "starting_after"])
@behind({})
async def test_events_that_only_the_background_keeps_are_refused(
    front: Front, servers: list[StandIn], name: str
):
    made = (await front.http.post(RESPONSES, json=wanted())).json()["id"]
    answer = await front.http.get(f"{RESPONSES}/{made}", params={name: "1"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("stream", [False, True])
@behind({"has_responses": False}, {}, router="round-robin")
async def test_a_server_without_the_route_gets_no_request_and_no_other_trouble(
    front: Front, servers: list[StandIn], stream: bool
):
    for _ in range(4):
        answer = await front.http.post(RESPONSES, json=wanted(stream=stream))
        assert answer.status_code == 200
    servers[1].has_responses = False
    answer = await front.http.post(RESPONSES, json=wanted(stream=stream), headers=HEADERS)
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert "vllm" in message
    assert "\n" not in message
    while not servers[0].asked["/v1/completions"]:  # asked whether it serves at all
        await asyncio.sleep(0.005)
    assert len(front.pool.up) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [10**400, 10**12, -5, 0, "7", None, {"a": 1}])
@behind({}, keys=keyed())
async def test_a_usage_that_cannot_be_is_not_believed(
    front: Front, servers: list[StandIn], count: Any, stream: bool
):
    usage = {"input_tokens": count, "output_tokens": count}
    response = {"id": "resp_x", "status": "completed", "usage": usage}
    delta = {"type": "response.output_text.delta", "delta": "hello"}
    last = {"type": "response.completed", "response": response}
    lines = b"".join(b"data: %s\n\n" % json.dumps(one).encode() for one in (delta, last))
    content = lines if stream else json.dumps(response).encode()
    servers[0].script = lambda *_: page(content)
    answer = await front.http.post(RESPONSES, json=wanted(stream=stream), headers=HEADERS)
    assert answer.status_code == 200
    cost = await paid(front)
    assert len(PROMPT) // 8 < cost < 500
    assert (await front.http.get("/metrics", headers=HEADERS)).status_code == 200


def test_what_a_server_counts_for_its_own_tools_is_believed():
    call = ResponsesCall(json.dumps(wanted(tools=[{"type": "code_interpreter"}])).encode())
    passing = PassingResponse(call)
    passing.request(Attempted(max_model_len=100))
    usage = {"input_tokens": 700, "output_tokens": 90}  # of several turns
    passing.whole(json.dumps({"id": "a", "status": "completed", "usage": usage}).encode())
    assert passing.usage is not None
    assert (passing.usage.prompt_tokens, passing.usage.completion_tokens) == (700, 90)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_events_pass_whole_whatever_pieces_they_come_in(size: int, ending: str):
    lines = [": waiting", "", "event: response.created", 'data: {"type": "response.created"}', ""]
    lines += ["event: x", 'data: {"type": "response.output_text.delta",', 'data: "delta": "ab"}']
    lines += ["", 'data: {"type": "response.completed"}', "", "data: [DONE]", "", ""]
    content = ending.join(lines).encode()
    passing = PassingResponse(ResponsesCall(json.dumps(wanted()).encode()))
    passing.request(Attempted())
    passed = []
    for at in range(0, len(content), size):
        passed.append(passing.feed(content[at : at + size]))
        assert passed[-1] == b"" or passed[-1].endswith(b"\n")
    assert b"".join(passed) == content
    assert (passing.tokens, passing.text_bytes, passing.finished) == (1, 2, True)


def test_the_memory_of_responses_is_bounded_for_each_key():
    replica: Any = object.__new__(LiveReplica)
    replica.state = "up"
    made = MadeResponses(limit=3)
    for number in range(10):
        made.add("a", f"resp_{number}", MadeResponse(replica, number))
    made.add("b", "resp_b", MadeResponse(replica, 1))
    made.add("b", "../x", MadeResponse(replica, 1))
    assert [made.find("a", f"resp_{number}").tokens for number in (7, 8, 9)] == [7, 8, 9]
    assert made.find("b", "resp_b").tokens == 1
    for key, name in (("a", "resp_6"), ("a", "resp_b"), ("b", "../x"), ("c", "resp_9")):
        with pytest.raises(ApiError) as caught:
            made.find(key, name)
        assert caught.value.status == 404


@pytest.mark.slow
@behind()
async def test_the_official_client(front: Front, servers: list[StandIn]):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{front.http.base_url}/v1", api_key="x", max_retries=0)
    asked = {"model": MODEL, "input": PROMPT, "max_output_tokens": 5, "store": True}

    def use() -> None:
        made = client.responses.create(**asked)
        assert len(made.output_text) == 5
        more = client.responses.create(**asked, previous_response_id=made.id)
        assert more.usage.input_tokens > made.usage.input_tokens
        assert client.responses.retrieve(made.id).output_text == made.output_text
        with pytest.raises(openai.BadRequestError):
            client.responses.cancel(made.id)
        kinds = [event.type for event in client.responses.create(**asked, stream=True)]
        assert kinds[-1] == "response.completed"
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve("resp_other")
        with pytest.raises(openai.BadRequestError):
            client.responses.create(**asked, background=True)
        for each in servers:
            each.cut_at = 400
        with pytest.raises(openai.APIError):
            list(client.responses.create(**asked | {"max_output_tokens": 40}, stream=True))

    await asyncio.to_thread(use)
