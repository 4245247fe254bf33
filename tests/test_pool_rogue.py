"""Replicas that misbehave, and clients: none of it reaches the requests of others.

A replica here is a stand-in that is told what to send: any bytes as a page, an answer, or a part of
one. The tests speak HTTP to the front.
"""

import asyncio
import json
import os
import resource
from typing import Any

import httpx
import pytest
from said import says
from test_pool import PROMPT, USAGE, Front, Told, asked, behind, chatted, run

from benchmarks.common.standin import MODEL, StandIn, answer_of
from toolkit.server import replicas as pools

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HUGE = 10**400
DEEP = b'{"data":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def page(body: bytes, status: int = 200, more: bytes = b"") -> bytes:
    """A whole HTTP answer."""
    return b"HTTP/1.1 %d X\r\n%scontent-length: %d\r\n\r\n%s" % (status, more, len(body), body)


def endless_trailers() -> bytes:
    """An answer with trailers of 32 MiB."""
    head = b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    return head + b"".join(b"x-%d: %s\r\n" % (k, b"y" * 1000) for k in range(32_000))


def streamed(
    *events: dict[str, Any] | bytes, done: bool = True, kind: bytes = b"text/event-stream"
) -> bytes:
    """A whole HTTP answer with these events; `kind` is its content type."""
    lines = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in events]
    lines += [b"[DONE]"] if done else []
    body = b"".join(b"data: %s\n\n" % line for line in lines)
    return page(body, more=b"content-type: %s\r\n" % kind)


def text_event(text: str, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": None} | more
    return {"id": "first", "created": 1, "model": MODEL, "choices": [choice]}


def first_event(text: str) -> dict[str, Any]:
    """An event with the ids of the prompt and of a token."""
    ids = {"token_ids": [ord(text)], "prompt_token_ids": list(PROMPT.encode())}
    return text_event(text, **ids)


async def metric(front: Front, name: str) -> float:
    """The sum of a metric over its labels."""
    told = (await front.http.get("/metrics")).text
    return sum(float(line.split()[-1]) for line in told.splitlines() if line.startswith(name))


@pytest.mark.parametrize("stream", [False, True])
@behind()
async def test_several_prompts_are_answered(front: Front, servers: list[StandIn], stream: bool):
    for prompt in (["a", "b"], [[1, 2], [3, 4]], [[1, 2]], ["a"]):
        body = asked(5, prompt=prompt, stream=stream)
        answer = await front.http.post(COMPLETIONS, json=body)
        assert answer.status_code == 200
        lines = answer.text.split("\n\n") if stream else ["data: " + answer.text]
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        texts = dict.fromkeys(range(len(prompt)), "")
        for choice in (choice for event in events for choice in event["choices"]):
            texts[choice["index"]] += choice["text"]
        wanted = [answer_of(asked(5, prompt=each)) for each in prompt]
        assert list(texts.values()) == wanted


ODD_COUNTS = [HUGE, 10**12, -5, "7", None, 1.5, {"a": 1}]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@behind({})
async def test_a_usage_that_cannot_be_reaches_no_other_request(
    front: Front, servers: list[StandIn], stream: bool
):
    given = {"id": "a", "choices": [{"index": 0, "text": "hi", "finish_reason": "stop"}]}
    usage: dict[str, Any] = {}

    def script(path: str, body: dict[str, Any]) -> bytes | None:
        if body["prompt"] != "odd":
            return None
        if body.get("stream"):
            return streamed(text_event("hi", finish_reason="stop"), {"choices": [], "usage": usage})
        return page(json.dumps(given | {"usage": usage}).encode())

    servers[0].script = script
    for count in ODD_COUNTS:
        usage |= dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), count)
        odd = await front.http.post(COMPLETIONS, json=asked(prompt="odd", stream=stream, **USAGE))
        assert odd.status_code == 200
        assert "hi" in odd.text
        assert (await front.stream(asked())).text == answer_of(asked())
    told = await front.http.get("/metrics")
    assert told.status_code == 200
    assert await metric(front, "llmctl_prompt_tokens_total") < 1000
    assert await metric(front, "llmctl_generation_tokens_total") < 1000


@behind({}, max_body_bytes=1 << 20)
async def test_a_prompt_of_spaces_changes_no_others_estimate(front: Front, servers: list[StandIn]):
    gauge = front.backend.gauge
    prompt = [b"word " * 1000]
    before = gauge.tokens(prompt)
    servers[0].token_bytes = 400  # so long a token has this prompt
    await front.http.post(CHAT, json=chatted(messages=[{"role": "user", "content": " " * 390_000}]))
    assert gauge.tokens(prompt) > 0.8 * before


@pytest.mark.parametrize("line", [b"100 Continue", b"102 Processing", b"103 Early\r\nlink: </a>"])
@behind({}, {})
async def test_interim_answers_without_end_send_the_request_elsewhere(
    front: Front, servers: list[StandIn], line: bytes
):
    interim = b"HTTP/1.1 %b\r\n\r\n" % line
    servers[0].script = lambda *_: b""
    servers[0].flood = interim * 1000
    while not servers[0].served[COMPLETIONS]:
        whole = await front.http.post(COMPLETIONS, json=asked())
        assert whole.json()["choices"][0]["text"] == answer_of(asked())
        assert (await front.stream(asked())).text == answer_of(asked())
    servers[1].kill()
    choice = {"index": 0, "text": "hi", "finish_reason": "stop"}
    servers[0].flood = b""
    servers[0].script = lambda *_: interim * 32 + page(json.dumps({"choices": [choice]}).encode())
    passed = await front.http.post(COMPLETIONS, json=asked())
    assert passed.json()["choices"][0]["text"] == "hi"


@pytest.mark.parametrize(
    "event",
    [b"\n", b":\n\n", b"data: {}\n\n", b'data: {"choices":[{}]}\n\n',
     b'data: {"choices":[{"text":"x"}]}\n\n'],
)  # fmt: skip
@pytest.mark.slow
@behind({}, {}, hang_s=60.0)
async def test_events_without_end_send_the_request_elsewhere(
    front: Front, servers: list[StandIn], event: bytes
):
    piece = event * (50_000 // len(event))
    head = b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    servers[0].script = lambda *_: head
    servers[0].flood = piece
    while not servers[0].served[COMPLETIONS]:
        body = asked(200, temperature=0)
        if b"choices" not in event:
            assert (await front.stream(body)).text == answer_of(body)
        else:  # the client has them
            answer = await front.http.post(COMPLETIONS, json=body | {"stream": True})
            assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.slow
def test_long_pages_of_metrics_stop_nothing(monkeypatch: pytest.MonkeyPatch):
    """A page of 4 MB of lines that almost match: with a quadratic expression it takes minutes."""
    monkeypatch.setattr(pools, "REPORT_EVERY_S", 0.01)
    line = b"vllm:num_requests_waiting{" + b"x" * 40 + b"\n"

    async def test(front: Front, servers: list[StandIn]) -> None:
        task = front.pool.background.start("reports of replicas", front.pool.read_reports)
        for _ in range(20):
            assert (await front.http.get("/health")).status_code == 200
            assert (await front.http.get("/replicas/0/metrics")).status_code in (200, 404)
        while servers[0].asked["/metrics"] < 3:
            await asyncio.sleep(0.01)
        task.cancel()

    metrics = page(line * (4_000_000 // len(line)))
    run(test, StandIn(pages={"/metrics": metrics}), router="llm-d")


REPORTS = [
    "vllm:num_requests_waiting 3.0\n",  # without a figure of its cache
    "vllm:num_requests_waiting +Inf\nvllm:kv_cache_usage_perc NaN\n",
    "vllm:num_requests_waiting -1e300\nvllm:kv_cache_usage_perc 7e300\n",
    f"vllm:num_requests_waiting {HUGE}\n",
    "",
]


@pytest.mark.slow
@pytest.mark.parametrize("text", REPORTS, ids=range(len(REPORTS)))
def test_odd_reports_stop_no_others(text: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pools, "REPORT_EVERY_S", 0.01)

    async def test(front: Front, servers: list[StandIn]) -> None:
        front.pool.background.start("reports of replicas", front.pool.read_reports)
        known = front.backend.balancer.replicas
        while any(each.reported_waiting < 0 for each in known[1:]):
            await asyncio.sleep(0.005)
        before = servers[0].asked["/metrics"]
        while servers[0].asked["/metrics"] < before + 3:
            await asyncio.sleep(0.005)
        assert known[1].kv_usage == 0.25
        for each in known:
            assert 0 <= each.waiting <= 1 << 20
            assert 0.0 <= each.kv_usage <= 1.0
        assert await metric(front, "llmctl_background_task_failures_total{") == 0

    good = "vllm:num_requests_waiting 2.0\nvllm:kv_cache_usage_perc 0.25\n"
    run(test, StandIn(metrics=text), StandIn(metrics=good), router="llm-d")


MODELS = [
    b'{"data":[{"id":"\xff"}]}',
    DEEP,
    b'{"data":[{"id":"standin","max_model_len":%d}]}' % HUGE,
    b'{"data":[{"id":"standin","max_model_len":-1}]}',
    b'{"data":null}',
    b"\xff\xfe",
    b"",
    b"x" * (5 << 20),
]


@behind({})
async def test_a_fault_of_the_front_ends_one_connection_and_says_so(
    front: Front, servers: list[StandIn], monkeypatch: pytest.MonkeyPatch
):
    """uvicorn closes it: a client that is not told would lose its next request."""

    def fails(*_: object) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr("toolkit.server.application.generate_latest", fails)
    answer = await front.http.get("/metrics")
    assert answer.status_code == 500
    assert answer.headers["connection"] == "close"
    assert (await front.http.get("/health")).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/version", "/health", "/metrics"])
def test_a_replica_with_odd_pages_is_probed_again(path: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pools, "PROBE_DOWN_S", 0.01)
    odd = [StandIn(pages={path: page(body)}) for body in MODELS]

    async def test(front: Front, servers: list[StandIn]) -> None:
        front.pool.renew([each.url for each in servers])
        for each in odd:
            while each.asked["/health"] < 2 and each.url not in {one.url for one in front.pool.up}:
                await asyncio.sleep(0.005)
        assert (await front.stream(asked())).text == answer_of(asked())
        assert (await front.http.get("/replicas/0/metrics")).status_code in (200, 404)
        for each in odd:
            each.pages.clear()
        await front.until("up", len(servers))
        assert await metric(front, "llmctl_background_task_failures_total{") == 0

    run(test, *odd, StandIn(), starts=())


@pytest.mark.parametrize("where", ["pages", "stream", "whole"])
def test_trailers_without_end_take_no_memory(where: str):
    answer = endless_trailers()

    async def test(front: Front, servers: list[StandIn]) -> None:
        body = asked(stream=where == "stream")
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        answers = await asyncio.gather(
            *(front.http.post(COMPLETIONS, json=body) for _ in range(2)), return_exceptions=True
        )
        assert all(isinstance(each, httpx.Response) for each in answers)
        after_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert after_kib - before_kib < 64 << 10
        assert (await front.http.get("/replicas/0/metrics")).status_code in (200, 404)

    pages = {"/metrics": answer} if where == "pages" else {}
    script = None if where == "pages" else lambda path, body: answer
    run(test, StandIn(pages=pages, script=script), wait_up_s=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "odd",
    [
        b'{"choices":[{"index":0,"text":"\xff"}]}',
        b'{"id":"\xff","choices":[]}',
        b'{"choices":[{"index":0,"text":' + b"[" * 50_000,
        b'{"choices":[{"index":7,"text":"x"}]}',
        b'{"choices":[{"index":-1,"text":"x"}]}',
        b'{"choices":[{"index":%d,"text":"x"}]}' % HUGE,
        b'{"choices":"x"}',
        b"nothing",
        b"7",
    ],
    ids=range(9),
)
@behind()
async def test_an_event_that_is_none_sends_the_request_elsewhere(
    front: Front, servers: list[StandIn], odd: bytes
):
    wanted = answer_of(asked())
    first = first_event(wanted[0])
    servers[0].script = lambda path, body: streamed(first, odd)
    for _ in range(3):
        told = await front.stream(asked())
        assert told.text == wanted
        assert told.done


@behind({})
async def test_the_content_type_of_a_replica_may_hold_any_byte(
    front: Front, servers: list[StandIn]
):
    kind = b"text/event-stream; name=\xff\xc3\xa9"
    servers[0].script = lambda _path, _body: streamed(text_event(answer_of(asked())), kind=kind)
    answer = await front.http.post(COMPLETIONS, json=asked(stream=True))
    assert answer.status_code == 200
    assert (b"content-type", kind) in [(k.lower(), v) for k, v in answer.headers.raw]


UNREADABLE = [
    b"\xff",
    b'{"prompt": "\xff"}',
    b'{"\xff": 1, "prompt": "a"}',
    b'{"model": "\xff", "prompt": "a"}',
    b'{"user": "\xff", "prompt": "a", "messages": []}',
    b'{"prompt": "a"',
    b"[1]",
    b"null",
    b"",
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"x": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b', "prompt": "a"}',
    b"\xef\xbb\xbf{}",
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@behind({})
async def test_a_body_that_cannot_be_read_gets_400(front: Front, servers: list[StandIn], path: str):
    headers = {"content-type": "application/json"}
    for body in UNREADABLE:
        answer = await front.http.post(path, content=body, headers=headers)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]
    assert servers[0].served.total() == 0


@pytest.mark.parametrize("ids", [True, False], ids=["ids", "no ids"])
@pytest.mark.parametrize("cut_behind", ["finish", "usage"])
def test_an_answer_that_lacks_its_last_lines_has_its_usage_once(cut_behind: str, ids: bool):
    """Where it is known: without ids only the server's last lines have it."""
    whole: list[Told] = []

    async def test(front: Front, servers: list[StandIn]) -> None:
        whole.append(await front.stream(asked(**USAGE, return_token_ids=ids)))
        first = StandIn(speaks_ids=ids)
        await first.start()
        events = [json.dumps(each) for each in whole[0].events]
        kept = events if cut_behind == "usage" else events[:-1]
        kept = [each.replace('"finish_reason"', '"x": 1, "finish_reason"') for each in kept]
        first.script = lambda path, body: streamed(*(one.encode() for one in kept), done=False)
        front.pool.renew([first.url, *(each.url for each in servers)])
        await front.until("up", 2)
        broke = 0
        for _ in range(4):  # round-robin
            told = await front.stream(asked(**USAGE))
            assert (told.text, told.done) == (whole[0].text, True)
            if "error" in told.events[-1]:
                broke += 1
                continue
            usages = [each["usage"] for each in told.events if each.get("usage")]
            assert usages == [whole[0].usage]
            assert told.finish == "length"
        assert broke == (0 if ids or cut_behind == "usage" else 2)
        first.kill()

    run(test, StandIn(speaks_ids=ids), router="round-robin")


@pytest.mark.slow
@pytest.mark.parametrize("context", [4096, 0], ids=["context", "no context"])
def test_a_chat_without_a_limit_does_not_grow(context: int):
    body = {key: value for key, value in chatted(**USAGE).items() if key != "max_tokens"}
    body |= {"temperature": 0}

    async def test(front: Front, servers: list[StandIn]) -> None:
        async def heal() -> None:
            for each in servers:
                each.cut_at = each.cut_at if not each.is_idle else -1

        whole = await front.stream(body, chat=True)
        assert whole.usage["completion_tokens"] == 20
        for cut_at in (900, 1500, 2500):
            for each in servers:
                each.cut_at = cut_at
            told = await front.stream(body, chat=True, at=5, act=heal)
            assert (told.text, told.finish, told.usage) == (whole.text, "length", whole.usage)

    kind = {"default_tokens": 20, "max_model_len": context}
    run(test, StandIn(token_s=0.001, **kind), StandIn(token_s=0.001, **kind))


@behind()
async def test_ids_finish_reasons_and_times_stay_those_of_the_first_server(
    front: Front, servers: list[StandIn]
):
    first, *others = answer_of(asked())[:5]
    events = [text_event(letter, token_ids=[ord(letter)]) for letter in others]
    servers[0].script = lambda path, body: streamed(first_event(first), *events, done=False)
    for _ in range(2):
        told = await front.stream(asked())
        assert told.text == answer_of(asked())
        assert len({each["id"] for each in told.events}) == 1
        assert len({each["created"] for each in told.events}) == 1
        reasons = [each["choices"][0].get("finish_reason") for each in told.events]
        assert [one for one in reasons if one] == ["length"]


@behind()
async def test_events_without_an_id_get_none_in_their_text(front: Front, servers: list[StandIn]):
    wanted = answer_of(asked())

    def script(path: str, body: dict[str, Any]) -> bytes | None:
        done = len(body["prompt"]) - len(PROMPT)
        events = [text_event(letter, token_ids=[ord(letter)]) for letter in wanted[done:]]
        if done:
            events[-1]["choices"][0]["finish_reason"] = "length"
        else:
            events = [first_event(wanted[0]), *events[1:5]]
        for event in events:
            del event["id"]
        return streamed(*events, done=bool(done))

    for each in servers:
        each.script = script
    told = await front.stream(asked())
    assert told.text == wanted
    assert not any("id" in each for each in told.events)


@pytest.mark.slow
def test_a_replica_that_gets_another_model_is_left_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pools, "PROBE_UP_S", 0.01)

    async def test(front: Front, servers: list[StandIn]) -> None:
        servers[0].model = "other"
        await front.until("left out", 1)
        shown = (await front.http.get("/replicas")).json()["replicas"]
        assert says(shown[0]["problem"], "'other'", "'standin'")
        assert [each["problem"] for each in shown[1:]] == [""]
        servers[0].model = MODEL
        await front.until("up", 2)

    run(test)


@pytest.mark.slow
@pytest.mark.parametrize("status", [404, 401, 500])
def test_a_replica_that_refuses_at_once_takes_no_requests(status: int):
    async def test(front: Front, servers: list[StandIn]) -> None:
        answers = [await front.http.post(COMPLETIONS, json=asked()) for _ in range(8)]
        if status != 500:
            assert [each.status_code for each in answers] == [200] * 8
        while servers[0].url in {each.url for each in front.pool.up}:
            await front.http.post(COMPLETIONS, json=asked())
            await asyncio.sleep(0.01)
        shown = (await front.http.get("/replicas")).json()["replicas"][0]
        assert (shown["state"], str(status) in shown["problem"]) == ("down", True)
        before = servers[0].served.total()
        for _ in range(10):
            assert (await front.http.post(COMPLETIONS, json=asked())).status_code == 200
        assert servers[0].served.total() - before <= 2  # its probes
        servers[0].status = 0
        await front.until("up", 2)

    run(test, StandIn(status=status), StandIn())


@pytest.mark.slow
@behind()
async def test_a_clients_errors_take_no_replica_out(front: Front, servers: list[StandIn]):
    """Twenty requests at which every replica fails; each of them serves all others."""

    def script(path: str, body: dict[str, Any]) -> bytes | None:
        return page(b'{"error": {"message": "a bug"}}', 500) if body["prompt"] == "bug" else None

    for each in servers:
        each.script = script
    for _ in range(20):
        assert (await front.http.post(COMPLETIONS, json=asked(prompt="bug"))).status_code == 500
    await asyncio.sleep(0.3)
    assert len(front.pool.up) == 2
    assert (await front.http.post(COMPLETIONS, json=asked())).status_code == 200


@behind({})
async def test_a_front_that_lists_itself_leaves_itself_out(front: Front, servers: list[StandIn]):
    front.pool.renew([str(front.http.base_url).rstrip("/"), servers[0].url])
    await front.until("left out", 1)
    shown = (await front.http.get("/replicas")).json()["replicas"]
    assert {each["url"]: each["state"] for each in shown}[servers[0].url] == "up"
    assert (await front.stream(asked())).text == answer_of(asked())
    assert (await front.http.get("/health")).status_code == 200


@pytest.mark.slow
def test_the_words_of_a_replica_become_no_labels_and_no_lines():
    said: list[str] = []
    forged = "x\n2026 replica is up \x1b[2J\u202e"

    def script(path: str, body: dict[str, Any]) -> bytes:
        choice = {"index": 0, "text": "a", "finish_reason": f"reason {body['prompt']}"}
        return page(json.dumps({"choices": [choice]}).encode())

    async def test(front: Front, servers: list[StandIn]) -> None:
        for number in range(20):
            await front.http.post(COMPLETIONS, json=asked(prompt=f"{number}"))
        told = (await front.http.get("/metrics")).text
        assert 'finish_reason="other"' in told
        assert told.count("llmctl_requests_total{") == 1
        front.pool.renew([servers[1].url])
        await front.until("left out", 1)
        assert all(line.isprintable() for line in said), said

    other = StandIn(model=forged)

    async def both(front: Front, servers: list[StandIn]) -> None:
        front.pool.renew([servers[0].url])
        await front.until("up", 1)
        await test(front, servers)

    run(both, StandIn(script=script), other, starts=(), said=said)


async def use_kept_connections_up(front: Front, servers: list[StandIn]) -> None:
    """Let each request close its connection, until none is idle."""
    front.pool.http.most_kept = 0
    while any(each.connections for each in servers):
        for replica in front.pool.replicas:
            await front.pool._ask(replica, "/health")


@behind(*[{}] * 4)
async def test_where_many_connections_are_in_use_none_is_kept(front: Front, servers: list[StandIn]):
    assert (await front.http.post(COMPLETIONS, json=asked())).status_code == 200
    assert any(each.connections for each in servers)
    await use_kept_connections_up(front, servers)
    asking = [front.pool._ask(front.pool.replicas[0], "/health") for _ in range(6)]
    assert {status for status, _ in await asyncio.gather(*asking)} == {200}
    assert front.pool.http.in_use == 0
    front.pool.renew([])
    while any(each.connections for each in servers):
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("named", ["header", "field"])
def test_requests_of_one_session_go_together(named: str):
    secret = "someone@example.org/" * 50

    async def test(front: Front, servers: list[StandIn]) -> None:
        for _ in range(4):
            headers = {"x-session-id": secret} if named == "header" else {}
            body = asked(1) | ({} if headers else {"prompt_cache_key": secret})
            await front.http.post(COMPLETIONS, json=body, headers=headers)
        assert sorted(each.served.total() for each in servers) == [0, 4]

    run(test, router="session")


@behind()
async def test_a_front_without_descriptors_says_so_and_keeps_its_replicas(
    front: Front, servers: list[StandIn]
):
    assert (await front.http.get("/health")).status_code == 200
    await use_kept_connections_up(front, servers)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)  # the least number that is not used
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        answer = await front.http.post(COMPLETIONS, json=asked())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert len(front.pool.up) == 2
    assert (await front.http.post(COMPLETIONS, json=asked())).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@behind(hang_s=0.3)
async def test_an_answer_that_stops_in_the_middle_goes_on_elsewhere(
    front: Front, servers: list[StandIn], stream: bool
):
    """The replica serves all other requests, and answers its probes."""
    begun = [True]
    part = b"HTTP/1.1 200 X\r\ncontent-length: 9999\r\n\r\n" + b'data: {"choices": [' * 3
    for each in servers:
        each.script = lambda *_: part if begun and begun.pop() else None
    answer = await front.http.post(COMPLETIONS, json=asked(stream=stream), timeout=20)
    assert answer.status_code == 200
    assert sum(each.served.total() for each in servers) >= 2
    assert not begun


@pytest.mark.parametrize("status", [0, 600, 999, 1000])
@pytest.mark.parametrize("stream", [False, True])
@behind({}, wait_up_s=0.05)
async def test_a_status_that_is_none_is_no_answer(
    front: Front, servers: list[StandIn], status: int, stream: bool
):
    servers[0].script = lambda path, body: page(b"{}", status)
    answer = await front.http.post(COMPLETIONS, json=asked(stream=stream))
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "replicas"


@pytest.mark.parametrize("roles", [[True, False], [True, True]])
def test_the_role_of_each_choice_comes_once_also_after_a_failure(roles: list[bool]):
    """The first replica breaks off behind the roles, before a token."""

    def event(index: int, end: bool = False, **delta: str) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": "stop" if end else None}
        return {"id": "first", "created": 1, "model": MODEL, "choices": [choice]}

    begun = [event(k, role="assistant", content="") for k in (0, 1) if roles[k]]
    broken = streamed(*begun, done=False)
    both = [event(k, role="assistant", content="") for k in (0, 1)]
    texts = [event(0, content="ab"), event(1, content="c"), event(0, end=True), event(1, end=True)]
    whole = streamed(*both, *texts)

    async def test(front: Front, servers: list[StandIn]) -> None:
        answers = [broken, whole, whole]
        for each in servers:
            each.script = lambda path, body: answers.pop(0)
        told = await front.stream(chatted(n=2, temperature=0), chat=True)
        deltas: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
        for choice in (one for each in told.events for one in each["choices"]):
            deltas[choice["index"]].append(choice["delta"])
        for index, text in ((0, "ab"), (1, "c")):
            assert [each["role"] for each in deltas[index] if "role" in each] == ["assistant"]
            assert "role" in deltas[index][0]
            assert "".join(each.get("content", "") for each in deltas[index]) == text

    run(test, StandIn(), StandIn())


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("wants", [False, True])
@behind({"speaks_ids": False})
async def test_a_lone_server_without_token_ids_is_counted_by_its_usage(
    front: Front, servers: list[StandIn], wants: bool, chat: bool
):
    """Its events have several tokens each."""
    usage = {"prompt_tokens": 7, "completion_tokens": 9, "total_tokens": 16}

    def event(text: str, end: str | None = None) -> dict[str, Any]:
        said = {"delta": {"content": text}} if chat else {"text": text}
        return {"id": "a", "choices": [{"index": 0, "finish_reason": end, **said}]}

    last = {"id": "a", "choices": [], "usage": usage}
    servers[0].script = lambda path, body: streamed(event("abc"), event("def", "stop"), last)
    body = (chatted if chat else asked)(20, **(USAGE if wants else {}))
    told = await front.stream(body, chat=chat)
    shown = [each["usage"] for each in told.events if each.get("usage")]
    assert shown == ([usage] if wants else [])
    assert await metric(front, "llmctl_generation_tokens_total") == 9
    assert await metric(front, "llmctl_prompt_tokens_total") == 7
