"""A server before stand-in replicas that are killed, hung, drained and restarted."""

import asyncio
import errno
import json
import os
import re
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import samples
from said import logged_to, says
from within import Test, within

from benchmarks.common.standin import MODEL, StandIn, answer_of
from toolkit.bench.client import LoadSpec, replay
from toolkit.bench.predict import check_server, counts
from toolkit.bench.report import CACHE_HITS, CACHE_QUERIES
from toolkit.endpoints.target import find_target
from toolkit.errors import ForeignError
from toolkit.files.fit import Fit
from toolkit.files.plan import Plan
from toolkit.files.recipe import RouterSpec
from toolkit.files.tuning import Settings
from toolkit.laws.passes import PassLaw
from toolkit.openai.merge import MergedAnswer
from toolkit.openai.requests import CHAT, GenerationCall
from toolkit.processes import supervisor
from toolkit.routing.admission import UNLIMITED, LatencyLimits
from toolkit.routing.balancer import Balancer
from toolkit.routing.routers import ROUTERS, make_router
from toolkit.routing.types import ReplicaTraits
from toolkit.sched.policies.parameters import defaults
from toolkit.sched.types import Request
from toolkit.server import replicas as pools
from toolkit.server.application import Application
from toolkit.server.log import EventLog
from toolkit.server.options import ServerOptions, one_key
from toolkit.server.own_replicas import OwnReplicas
from toolkit.server.pool import PoolBackend, traits_of_replicas
from toolkit.server.process import listen, url
from toolkit.server.replicas import ReplicaNeeds, ReplicaPool
from toolkit.server.server import HttpServer
from toolkit.traces.types import Sessions, Trace

PROMPT = "Once upon a time"


Act = Callable[[], Awaitable[None]]


class Front:
    """A front before replicas under test."""

    def __init__(self, http: httpx.AsyncClient, app: Application, backend: PoolBackend) -> None:
        self.http = http
        self.app = app
        self.backend = backend
        self.pool = backend.pool

    async def stream(
        self, body: dict[str, Any], *, chat: bool = False, at: int = 0, act: Act | None = None
    ) -> "Told":
        """Send a streamed request; at event number `at`, `act` is called."""
        told = Told()
        path = "/v1/chat/completions" if chat else "/v1/completions"
        async with self.http.stream("POST", path, json=body | {"stream": True}) as response:
            told.status = response.status_code
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    told.add(line[6:])
                    if act is not None and len(told.events) == at and not told.acted:
                        told.acted = True
                        await act()
        return told

    async def until(self, state: str, count: int) -> None:
        while sum(each.state == state for each in self.pool.replicas) < count:
            await asyncio.sleep(0.005)


class Told:
    """What a client was told in a stream."""

    def __init__(self) -> None:
        self.status = 0
        self.done = self.acted = False
        self.events: list[dict[str, Any]] = []

    def add(self, data: str) -> None:
        assert not self.done
        if data == "[DONE]":
            self.done = True
        else:
            self.events.append(json.loads(data))

    @property
    def text(self) -> str:
        choices = [each["choices"][0] for each in self.events if each.get("choices")]
        return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)

    @property
    def usage(self) -> dict[str, int]:
        return self.events[-1]["usage"]

    @property
    def finish(self) -> str:
        return [e["choices"][0].get("finish_reason") for e in self.events if e.get("choices")][-1]


@asynccontextmanager
async def fronted(
    *standins: StandIn | dict[str, Any],
    router: str = "least-requests",
    needs: ReplicaNeeds = ReplicaNeeds(MODEL),  # noqa: B008
    hang_s: float = 5.0,
    api_key: str = "",
    said: list[str] | None = None,
    limits: LatencyLimits = UNLIMITED,
    law: PassLaw | None = None,
    starts: tuple[str, ...] | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[Front, list[StandIn]]]:
    """A front before stand-ins, or new ones with these options; by default before two."""
    given = standins or ({}, {})
    servers = [StandIn(**each) if isinstance(each, dict) else each for each in given]
    for server in servers:
        await server.start()
    balancer = Balancer(make_router(router, {}), [], block_tokens=64, limits=limits)
    pool = ReplicaPool(
        balancer,
        ReplicaTraits(100_000, law=law),
        needs,
        hang_s=hang_s,
    )
    options = ServerOptions(keys=one_key(api_key), **settings)
    backend = PoolBackend(pool, options)
    backend.facts = {
        "model": MODEL,
        "engine": "vllm",
        "device": "cpu",
        "policy": "vllm",
        "parameters": {"max_num_seqs": 8},
        "predicted": {},
    }
    app = Application(backend, options)
    sweep = asyncio.create_task(pool.sweep())
    with listen("127.0.0.1", 0) as listener, logged_to([] if said is None else said):
        server = HttpServer(app, descriptors_each=2)
        await server.start(listener)
        pool.renew([each.url for each in servers] if starts is None else starts)
        async with httpx.AsyncClient(base_url=url(listener), timeout=30) as http:
            front = Front(http, app, backend)
            if needs.model == MODEL and starts is None:
                await front.until("up", sum(each.model == MODEL for each in servers))
            async with asyncio.timeout(30):
                yield front, servers
        sweep.cancel()
        await asyncio.gather(sweep, return_exceptions=True)
        await pool.stop()
        await server.stop()
    for each in servers:
        each.kill()
    await asyncio.sleep(0.01)


behind = within(fronted, "front", "servers")


def run(test: Test, *standins: StandIn, **options: Any) -> None:
    behind(*standins, **options)(test)()


def asked(max_tokens: int = 40, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True}
    return body | more


def chatted(max_tokens: int = 40, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": PROMPT}]
    return {
        "model": MODEL,
        "messages": messages,
        "max_tokens": max_tokens,
        "ignore_eos": True,
    } | more


USAGE = {"stream_options": {"include_usage": True}}


@behind()
async def test_a_stream_passes_with_nothing_that_only_the_front_asked_for(
    front: Front, servers: list[StandIn]
):
    plain = await front.stream(asked())
    counted = await front.stream(asked(**USAGE))
    assert plain.text == counted.text == answer_of(asked())
    assert plain.done
    assert plain.finish == "length"
    assert len(plain.events) == 40
    assert "token_ids" not in json.dumps(plain.events)
    assert counted.usage == {
        "prompt_tokens": len(PROMPT), "completion_tokens": 40,
        "total_tokens": len(PROMPT) + 40,
    }  # fmt: skip
    ids = await front.stream(asked(return_token_ids=True))
    assert [e["choices"][0]["token_ids"] for e in ids.events] == [[ord(c)] for c in plain.text]


@pytest.mark.slow
@behind()
async def test_whole_answers_models_and_pages(front: Front, servers: list[StandIn]):
    whole = (await front.http.post("/v1/completions", json=asked())).json()
    assert whole["choices"][0]["text"] == answer_of(asked())
    chat = (await front.http.post("/v1/chat/completions", json=chatted())).json()
    assert chat["choices"][0]["message"]["content"] == answer_of(chatted(), chat=True)
    models = (await front.http.get("/v1/models")).json()["data"]
    assert [(each["id"], each["max_model_len"]) for each in models] == [(MODEL, 4096)]
    assert (await front.http.get("/ready")).json() == {"status": "ready"}
    assert (await front.http.get("/health")).status_code == 200
    told = (await front.http.get("/metrics")).text
    assert 'llmctl_requests_total{finish_reason="length"' in told
    shown = (await front.http.get("/replicas")).json()
    assert [each["state"] for each in shown["replicas"]] == ["up", "up"]
    assert (await front.http.get("/nothing")).status_code == 404
    assert (await front.http.head("/health")).status_code == 200


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("how", ["plain", "stops", "ids"])
@pytest.mark.parametrize("end", ["kill", "abort_requests"])
def test_a_stream_goes_on_elsewhere_without_a_token_twice(chat: bool, how: str, end: str):
    async def test(front: Front, servers: list[StandIn]) -> None:
        body = chatted(**USAGE) if chat else asked(**USAGE)
        if how == "stops":
            body |= {"stop": ["zzzzz"], "temperature": 0}
        if how == "ids":
            body |= {"return_token_ids": True}

        async def stop() -> None:
            busy = max(servers, key=lambda each: len(each.served))
            getattr(busy, end)()

        told = await front.stream(body, chat=chat, at=12, act=stop)
        prompt = len(PROMPT) + (len("<user><assistant>") if chat else 0)
        assert told.text == answer_of(body, chat=chat)
        assert (told.finish, told.done) == ("length", True)
        assert told.usage["completion_tokens"] == 40
        assert told.usage["prompt_tokens"] == prompt
        assert len({each["id"] for each in told.events}) == 1
        assert front.backend.continued == 1
        assert front.backend.stats.ended == {"length": 1}
        if how == "ids":
            choices = [choice for each in told.events for choice in each["choices"]]
            ids = [one for choice in choices for one in choice.get("token_ids") or []]
            assert ids == [ord(letter) for letter in told.text]

    run(test, *(StandIn(token_s=0.002) for _ in range(2)))


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("why", ["no ids", "log probabilities"])
@pytest.mark.parametrize("end", ["kill", "abort_requests"])
def test_a_stream_that_cannot_go_on_ends_with_one_error(chat: bool, why: str, end: str):
    body = (chatted if chat else asked)(**({} if why == "no ids" else {"logprobs": 1}))

    async def test(front: Front, servers: list[StandIn]) -> None:
        async def stop() -> None:
            getattr(max(servers, key=lambda each: each.served.total()), end)()

        told = await front.stream(body, chat=chat, at=12, act=stop)
        assert answer_of(body, chat=chat).startswith(told.text)
        assert says(told.events[-1]["error"]["message"], "broke off")
        assert ["error" in each for each in told.events].count(True) == 1
        assert (told.status, told.done, front.backend.continued) == (200, True, 0)
        assert front.backend.stats.ended == {"failed": 1}
        assert sum(each.served.total() for each in servers) == 1

    run(test, *(StandIn(token_s=0.002, speaks_ids=why != "no ids") for _ in range(2)))


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("end", ["kill", "abort_requests"])
def test_before_its_first_token_any_stream_may_begin_anew(chat: bool, end: str):
    """A chat has the role before; the client gets it with the first token."""
    body = (chatted if chat else asked)(logprobs=1)

    async def test(front: Front, servers: list[StandIn]) -> None:
        asking = asyncio.create_task(front.stream(body, chat=chat))
        while not any(each.served.total() for each in servers):
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        busy = max(servers, key=lambda each: each.served.total())
        busy.hung = False
        getattr(busy, end)()
        for each in servers:
            each.hung = False
        told = await asking
        assert (told.text, told.done) == (answer_of(body, chat=chat), True)
        roles = [each for each in told.events if chat and "role" in each["choices"][0]["delta"]]
        assert len(roles) == chat
        assert sum(each.served.total() for each in servers) == 2

    run(test, *(StandIn(speaks_ids=False, hung=True, token_s=0.001) for _ in range(2)))


def events_of(tokens: str, *, ids: bool, hold: int) -> bytes:
    """The events of a chat that a server streams: a token a character, `hold` held back."""
    lines = []
    for k, token in enumerate(tokens):
        choice: dict[str, Any] = {"index": 0, "delta": {"content": tokens[k - hold] * (k >= hold)}}
        if ids:
            choice |= {"token_ids": [ord(token)]} | ({"prompt_token_ids": [1, 2]} if not k else {})
        lines.append(f"data: {json.dumps({'id': 'a', 'choices': [choice]})}\n\n")
    return "".join(lines).encode()


def passing_chat(**more: Any) -> MergedAnswer:
    body = {"messages": [], "stream": True, "max_tokens": 20} | more
    return MergedAnswer(GenerationCall(CHAT, json.dumps(body).encode()))


def text_in(passed: bytes) -> str:
    """The text of a chat's events."""
    events = [json.loads(line[6:]) for line in passed.decode().split("\n\n") if line]
    return "".join(each["choices"][0]["delta"].get("content", "") for each in events)


@pytest.mark.parametrize(
    ("attempts", "behind"),
    [
        (["abcdefgh", "fghijkl"], [5, 9]),  # of "abcdefgh" the client has "abcde"
        (["abcdefgh", "fghi", "fghijkl"], [5, 5, 9]),  # of "fghi" it has f, which comes again
    ],
)
def test_a_greedy_answer_goes_on_behind_the_tokens_whose_text_the_client_has(
    attempts: list[str], behind: list[int]
):
    """A server holds back three characters, which may begin a stop string."""
    passing = passing_chat(stop=["xx", "yyyy"], temperature=0)
    passing.request(speaks_ids=True)
    text = ""
    for tokens, count in zip(attempts, behind, strict=True):
        text += text_in(passing.feed(events_of(tokens, ids=True, hold=3)))
        assert passing.goes_on
        path, content = passing.request(speaks_ids=True, context=100)
        asked_for = json.loads(content)
        assert path == "/v1/completions"
        assert asked_for["prompt"] == [1, 2, *map(ord, text[:count])]
        assert asked_for["max_tokens"] == 20 - count
    assert text == "abcdefghi"


@pytest.mark.parametrize(
    ("more", "ids"),
    [({}, False), ({"temperature": 0}, False), ({"stop": ["xx"]}, True), ({"n": 2}, True)],
)
def test_an_answer_without_ids_or_with_a_part_of_a_sampled_token_does_not_go_on(
    more: dict[str, Any], ids: bool
):
    passing = passing_chat(**more)
    passing.request(speaks_ids=ids)
    assert passing.goes_on
    two = json.dumps({"choices": [{"index": 0, "delta": {"content": "ab"}, "token_ids": [7]}]})
    one = f"data: {two}\n\n".encode() if ids else b""
    passing.feed(events_of("abc", ids=ids, hold=0) + one)
    assert passing.begun
    assert not passing.goes_on


@pytest.mark.parametrize(("again", "differs"), [("fghi", False), ("zfgh", True)])
def test_text_that_is_generated_again_is_compared(again: str, differs: bool):
    """Three ids of one event may end inside a character, so the answer goes on before them."""
    passing = passing_chat(temperature=0)
    passing.request(speaks_ids=True)
    passing.feed(events_of("abcde", ids=True, hold=0))
    three = {"index": 0, "delta": {"content": "fgh"}, "token_ids": [6, 7, 8]}
    passing.feed(f"data: {json.dumps({'choices': [three]})}\n\n".encode())
    assert json.loads(passing.request(speaks_ids=True)[1])["prompt"] == [1, 2, *b"abcde"]
    rest = passing.feed(events_of(again, ids=True, hold=0))
    assert (text_in(rest), bool(passing.failure)) == ("" if differs else "i", differs)
    assert passing.goes_on == (not differs)


def test_ids_that_the_client_has_are_not_generated_again():
    passing = passing_chat(temperature=0, return_token_ids=True)
    passing.request(speaks_ids=True)
    passing.feed(events_of("abc", ids=True, hold=0))
    assert passing.goes_on
    inside = {"index": 0, "delta": {"content": ""}, "token_ids": [7]}
    passing.feed(f"data: {json.dumps({'choices': [inside]})}\n\n".encode())
    assert not passing.goes_on


@pytest.mark.slow
@behind({}, wait_up_s=0.05)
async def test_without_a_replica_requests_get_503_at_once_until_one_is_back(
    front: Front, servers: list[StandIn]
):
    (server,) = servers
    server.kill()
    refused = await front.http.post("/v1/completions", json=asked())
    while refused.status_code != 503:  # the first one finds it out, and waits
        refused = await front.http.post("/v1/completions", json=asked())
    assert refused.headers["retry-after"] == "5"
    assert refused.json()["error"]["code"] in ("overloaded", "replicas")
    assert (await front.http.get("/ready")).status_code == 503
    await server.start()
    await front.until("up", 1)
    assert (await front.stream(asked())).text == answer_of(asked())


@behind({}, {})
async def test_while_a_replica_is_in_doubt_others_are_preferred(
    front: Front, servers: list[StandIn]
):
    first = front.pool.replicas[0]
    assert front.pool.barred() == []
    front.pool.answered(first, 500)
    assert front.pool.barred() == [first.index]
    assert first.state == "up"
    while front.pool.barred():  # until it has answered for itself
        await asyncio.sleep(0.005)
    assert first.state == "up"


@pytest.mark.parametrize(("status", "tries"), [(500, 2), (400, 1)])
@behind()
async def test_a_request_that_no_replica_serves_gets_its_answer(
    front: Front, servers: list[StandIn], status: int, tries: int
):
    for each in servers:
        each.status = status
    told = await front.http.post("/v1/completions", json=asked())
    assert told.status_code == status
    assert told.json()["error"]["message"] == "made so"
    assert sum(each.served.total() for each in servers) == tries


@behind({"status": 503}, {})
async def test_a_busy_replica_sends_a_request_elsewhere(front: Front, servers: list[StandIn]):
    for _ in range(4):
        assert (await front.stream(asked())).text == answer_of(asked())


def test_a_lost_replica_and_its_return_are_logged_once_each() -> None:
    said: list[str] = []

    async def test(front: Front, servers: list[StandIn]) -> None:
        lost = servers[0]
        said.clear()
        lost.kill()
        for _ in range(4):  # some of them meet it
            assert (await front.stream(asked())).text == answer_of(asked())
        await front.until("down", 1)
        assert front.pool.losses == 1
        await lost.start()
        await front.until("up", 2)
        about = [line for line in said if lost.url in line]
        assert [line.split()[0] for line in about] == ["WARNING", "INFO"], said
        assert says(about[0], "replica")
        assert re.search(r"\b\d+\.\d s\b", about[1]), "how long it was away"

    run(test, said=said, router="round-robin")


def test_another_model_context_or_version_is_named_and_left_out():
    said: list[str] = []

    async def test(front: Front, servers: list[StandIn]) -> None:
        front.pool.renew([each.url for each in servers])
        await front.until("left out", 3)
        await front.until("up", 1)
        assert [each.state for each in front.pool.replicas] == ["up", *["left out"] * 3]
        text = "\n".join(said)
        assert says(text, "'other'", "'standin'")
        assert says(text, "100", "4096")
        assert says(text, "0.31.0", "0.32.0")

    others = [StandIn(model="other"), StandIn(max_model_len=100), StandIn(version="0.31.0")]
    needs = ReplicaNeeds(MODEL, 4096, version="0.32.0")
    run(test, StandIn(), *others, needs=needs, said=said, starts=())


@pytest.mark.slow
@behind({"token_s": 0.002}, {"token_s": 0.002})
async def test_the_list_of_replicas_may_change_under_requests(front: Front, servers: list[StandIn]):
    extra = StandIn(token_s=0.002)
    await extra.start()

    async def renew() -> None:
        front.pool.renew([extra.url])

    told = await front.stream(asked(), at=5, act=renew)
    assert told.text == answer_of(asked())
    await front.until("up", 1)
    assert (await front.stream(asked())).text == answer_of(asked())
    assert extra.served.total() == 1
    assert [each.url for each in front.pool.replicas] == [extra.url]
    extra.kill()


@behind(api_key="secret", max_body_bytes=4000)
async def test_wrong_requests_and_keys(front: Front, servers: list[StandIn]):
    http = front.http
    assert (await http.post("/v1/completions", json=asked())).status_code == 401
    headers = {"authorization": "Bearer secret"}
    other = await http.post("/v1/completions", json=asked(model="x"), headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
    bad = await http.post(
        "/v1/completions", content=b"[", headers=headers | {"content-type": "application/json"}
    )
    assert bad.status_code == 400
    large = await http.post("/v1/completions", json=asked(x="y" * 5000), headers=headers)
    assert large.status_code == 413
    good = await http.post("/v1/completions", json=asked(), headers=headers)
    assert good.status_code == 200


@behind(router="llm-d")
async def test_reports_reach_the_balancer(
    front: Front, servers: list[StandIn], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pools, "REPORT_EVERY_S", 0.01)
    text = 'vllm:num_requests_waiting{engine="0"} 2.0\nvllm:kv_cache_usage_perc{engine="0"} 0.25\n'
    for each in servers:
        each.metrics = text
    task = asyncio.create_task(front.pool.read_reports())
    known = front.backend.balancer.replicas
    while any(each.reported_waiting < 0 for each in known):
        await asyncio.sleep(0.005)
    assert {(each.waiting, each.kv_usage) for each in known} == {(2, 0.25)}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def counted(queries: int, batch_s: float) -> str:
    """The metrics of a replica."""
    return (
        "# TYPE vllm:prefix_cache_queries counter\n"
        f'vllm:prefix_cache_queries_total{{engine="0"}} {queries}\n'
        f'vllm:prefix_cache_hits_total{{engine="0"}} {queries // 2}\n'
        f"# TYPE llmctl_batch_seconds counter\nllmctl_batch_seconds_total {batch_s}\n"
    )


@behind({"metrics": counted(40, 1.5)}, {"metrics": counted(10, 2.0)})
async def test_what_replicas_count_comes_through_the_front_together(
    front: Front, servers: list[StandIn]
):
    target = await asyncio.to_thread(find_target, str(front.http.base_url))
    assert (target.own, target.front) == (False, True)
    pages = [await front.http.get(f"/replicas/{place}/metrics") for place in (0, 1, 2, "x")]
    assert [page.status_code for page in pages] == [200, 200, 404, 404]
    assert "vllm:prefix_cache_queries_total" in pages[0].text
    found = await asyncio.to_thread(counts, target)
    assert found["llmctl_batch_seconds_total"] == 3.5
    assert (found[CACHE_QUERIES], found[CACHE_HITS]) == (50.0, 25.0)


@behind(router="sglang")
async def test_a_front_that_runs_another_router_than_the_plan_is_foreign(
    front: Front, servers: list[StandIn]
):
    target = await asyncio.to_thread(find_target, str(front.http.base_url))

    def found(name: str, workers: int = 2, **given: float) -> str:
        spec = RouterSpec(name=name, parameters=defaults(ROUTERS[name]) | given)
        fit = samples.paged_fit()
        engine = fit.engine.model_copy(update={"engine": "vllm", "engine_version": "0.32.0"})
        plan = fake_plan_of(fit.model_copy(update={"engine": engine}))
        said: list[str] = []
        settings = plan.settings.model_copy(update={"replica_router": spec})
        changes = {"workers": workers, "settings": settings}
        check_server(plan.model_copy(update=changes), target, said.append)
        return "; ".join(said)

    assert await asyncio.to_thread(found, "sglang") == ""
    for name, workers, given, named in [
        ("by-law", 2, {}, ("'sglang'", "'by-law'", "2")),
        ("sglang", 3, {}, ("'sglang'", "2", "3")),
        ("sglang", 2, {"threshold": 0.5}, ("'sglang'", "threshold", "0.3", "0.5")),
    ]:
        assert says(await asyncio.to_thread(found, name, workers, **given), *named)
    older = fake_plan_of(samples.paged_fit())
    with pytest.raises(ForeignError, match=r"0\.1\.0.*0\.32\.0"):
        await asyncio.to_thread(check_server, older, target)


def test_the_sessions_of_a_replay_go_where_the_simulator_sends_them():
    served = []
    previous = np.array([-1, -1, 0, 1, 2])
    lengths = np.array([200, 100, 230, 120, 260]), np.full(5, 4), np.full(5, 4)
    trace = Trace(np.arange(5) * 0.01, *lengths, sessions=Sessions(previous, np.zeros(5)))

    async def test(front: Front, servers: list[StandIn]) -> None:
        target = await asyncio.to_thread(find_target, str(front.http.base_url))
        found = await replay(target, trace, LoadSpec("given", 4, 256), lambda: None)
        assert not any(sample.failure for sample in found.samples)
        served.extend(server.served.total() for server in servers)

    run(test, router="session")
    simulated = Balancer(make_router("session", {}), [ReplicaTraits(100_000)] * 2)
    homes = [
        simulated.route(Request(str(row), 0.0, 100, 4, session=session), 0.0)
        for row, session in enumerate(("0", "1", "0", "1", "0"))
    ]
    assert served == [homes.count(0), homes.count(1)]


@pytest.mark.slow
@behind({"token_s": 0.002}, request_timeout_s=0.1)
async def test_a_deadline_ends_a_stream_and_a_whole_answer(front: Front, servers: list[StandIn]):
    told = await front.stream(asked(400))
    assert says(told.events[-1]["error"]["message"], "0.1 s")
    assert told.done
    whole = await front.http.post("/v1/completions", json=asked(400))
    assert whole.status_code == 504
    assert front.backend.stats.ended == {"timeout": 2}
    assert all(not each.requests for each in front.backend.balancer.replicas)


@pytest.mark.slow
@behind({"token_s": 0.002}, {"token_s": 0.002})
async def test_the_official_clients(front: Front, servers: list[StandIn]):
    """Whole, streamed and cancelled, synchronously and not."""
    openai = pytest.importorskip("openai")
    given = {"base_url": f"{front.http.base_url}/v1", "api_key": "x", "max_retries": 0}
    more = {"extra_body": {"ignore_eos": True}}
    prompt = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, **more}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}]}
    chat |= {"max_tokens": 4000, **more}
    wanted = answer_of(asked())
    async with openai.AsyncOpenAI(**given) as client:
        whole = await client.completions.create(**prompt)
        stream = await client.completions.create(**prompt, stream=True)
        texts = [event.choices[0].text async for event in stream]
        assert "".join(texts) == whole.choices[0].text == wanted
        leaving = await client.chat.completions.create(**chat, stream=True)
        assert (await anext(leaving)).choices[0].delta.content is not None
        assert front.backend.left == 1
        await leaving.close()
        while front.backend.left:
            await asyncio.sleep(0.005)

    def use() -> None:
        with openai.OpenAI(**given) as client:
            pieces = client.completions.create(**prompt, stream=True)
            texts = [event.choices[0].text for event in pieces]
            assert "".join(texts) == client.completions.create(**prompt).choices[0].text == wanted
            with client.chat.completions.create(**chat, stream=True) as leaving:
                next(leaving)

    await asyncio.to_thread(use)
    while front.backend.left:
        await asyncio.sleep(0.005)


@behind({"token_s": 0.002})
async def test_a_client_that_leaves_frees_its_replica(front: Front, servers: list[StandIn]):
    body = asked(4000) | {"stream": True}
    async with front.http.stream("POST", "/v1/completions", json=body) as response:
        await anext(response.aiter_lines())
    while front.backend.left:
        await asyncio.sleep(0.002)
    assert front.backend.stats.ended == {"cancelled": 1}
    assert not any(each.attempts for each in front.pool.replicas)


@behind({"token_s": 0.005})
async def test_what_runs_when_a_front_stops_ends_with_an_error(
    front: Front, servers: list[StandIn]
):
    told = await front.stream(asked(60), at=3, act=front.backend.stop)
    assert "error" in told.events[-1]
    assert front.backend.stats.ended["failed"] == 1


@behind({"token_s": 0.002}, {"token_s": 0.002}, max_waiting=2)
async def test_more_requests_than_may_wait_get_503(front: Front, servers: list[StandIn]):
    for replica in front.backend.balancer.replicas:
        replica.traits = ReplicaTraits(100_000, max_rows=1)
    bodies = [front.http.post("/v1/completions", json=asked(60)) for _ in range(12)]
    codes = [each.status_code for each in await asyncio.gather(*bodies)]
    assert codes.count(503) >= 6
    assert codes.count(200) >= 4
    assert front.backend.stats.refused == codes.count(503)


SLOW = PassLaw({"pass": 1e-3, "token": 1.0})  # a token takes a second


@behind({"token_s": 0.002, "first_s": 0.2}, limits=LatencyLimits(ttft_s=5.0), law=SLOW)
async def test_what_would_miss_its_target_gets_503_and_when_to_come_back(
    front: Front, servers: list[StandIn]
):
    first = asyncio.create_task(front.stream(asked(200)))
    while not front.backend.left:
        await asyncio.sleep(0.001)
    refused = await front.http.post("/v1/completions", json=asked())
    assert refused.status_code == 503
    error = refused.json()["error"]
    assert error["code"] == "overloaded"
    assert says(error["message"], "first token")
    assert 1 <= int(refused.headers["Retry-After"]) <= 60
    assert (await first).text == answer_of(asked(200))
    assert "llmctl_refused_total{" in (told := (await front.http.get("/metrics")).text)
    assert (
        next(line for line in told.splitlines() if line.startswith("llmctl_refused_total"))[-3:]
        == "1.0"
    )
    assert (await front.stream(asked())).text == answer_of(asked())


def fake_plan_of(fit: Fit) -> Plan:
    policy = Settings(policy="vllm", parameters={"max_num_seqs": 8})
    return samples.plan(samples.recipe(), fit, workers=2).model_copy(update={"settings": policy})


def test_the_law_of_the_plans_fit_routes():
    fit = samples.paged_fit()
    plan = fake_plan_of(fit)
    traits = traits_of_replicas(plan)
    assert (traits.capacity_tokens, traits.law is None) == (fit.engine.capacity_tokens, False)
    balancer = Balancer(make_router("by-law", {}), [], block_tokens=64)
    for _ in range(2):
        balancer.change(balancer.add(traits), is_up=True)
    chosen = {balancer.route(Request(f"r{k}", 0.0, 500, 50), 0.0) for k in range(2)}
    assert chosen == {0, 1}


@pytest.mark.slow
def test_the_status_page_says_how_each_replica_is_without_its_address():
    async def test(front: Front, servers: list[StandIn]) -> None:
        prompt = PROMPT * 40
        for _ in range(4):
            await front.http.post("/v1/completions", json=asked(prompt=prompt))
        page = await front.http.get("/")
        assert "text/html" in page.headers["content-type"]
        data = (await front.http.get("/status.json")).json()
        assert [each["requests"] for each in data["replicas"]] == [2, 2]
        assert [each["state"] for each in data["replicas"]] == ["up", "up"]
        assert (data["router"], data["state"]) == ("round-robin", "ready")
        assert data["totals"]["ended"] == {"length": 4}
        assert data["totals"]["output_tokens"] > 0
        assert servers[0].url not in json.dumps(data)
        servers[1].kill()
        await front.until("down", 1)
        data = (await front.http.get("/status.json")).json()
        assert [each["state"] for each in data["replicas"]] == ["up", "down"]

    run(test, router="round-robin", status_page=True)


class OwnStandIn:
    """A server that the pool starts: a stand-in; its process goes on when it hangs."""

    def __init__(self, number: int, standin: StandIn) -> None:
        self.number = number
        self.standin = standin
        self.stopped = False
        self.running = True
        self.url = standin.url

    def ended_by(self) -> str:
        return "exit code 9"

    def wait_until_ready(self) -> None:
        pass

    def stop(self) -> None:
        self.stopped = True
        self.running = False


class OwnStandIns:
    """Starts one stand-in after the other; `check` sees each order, and may raise."""

    def __init__(self, count: int, check: Callable[[Plan, int], None] = lambda *_: None) -> None:
        self.standins = [StandIn() for _ in range(count)]
        self.made: list[OwnStandIn] = []
        self._left = iter(self.standins)
        self._check = check

    def replica(self, plan: Plan, options: ServerOptions, number: int, folder: Path) -> OwnStandIn:
        self._check(plan, number)
        server = OwnStandIn(number, next(self._left))
        self.made.append(server)
        return server

    def urls(self, *numbers: int) -> set[str]:
        return {self.standins[number].url for number in numbers}


@asynccontextmanager
async def own_replicas(
    plan: Plan,
    backend: OwnStandIns,
    front: Front,
    said: list[str],
    log: EventLog | None = None,
) -> AsyncIterator[OwnReplicas]:
    """Replicas that `backend` starts for the front; what it is told goes to `said`."""
    for each in backend.standins:
        await each.start()
    options = ServerOptions(model=MODEL, timeout_s=1.0, say=said.append)
    own = OwnReplicas(backend.replica, plan, options, front.pool, front.backend.stats, log)
    starting = asyncio.create_task(own.start())
    with logged_to(said):
        async with asyncio.timeout(20):
            yield own
    await asyncio.gather(starting, return_exceptions=True)
    await own.stop()
    for each in backend.standins:
        each.kill()


async def until_up(front: Front, urls: set[str]) -> None:
    while not urls <= {each.url for each in front.pool.up}:
        await asyncio.sleep(0.005)


@pytest.mark.slow
@behind()
async def test_an_own_replica_that_answers_no_probe_is_killed_and_started_again(
    front: Front, servers: list[StandIn]
):
    plan = fake_plan_of(samples.paged_fit())
    serve = plan.recipe.serve.model_copy(update={"hang_s": 0.3})
    recipe = plan.recipe.model_copy(update={"serve": serve})
    plan = plan.model_copy(update={"workers": 1, "recipe": recipe})
    backend = OwnStandIns(2)
    said: list[str] = []
    async with own_replicas(plan, backend, front, said):
        await until_up(front, backend.urls(0))
        backend.standins[0].kill()
        await until_up(front, backend.urls(1))
        assert (await front.stream(asked())).text == answer_of(asked())
    assert [each.stopped for each in backend.made] == [True, True]
    assert any(says(line, "replica 0", "0.3 s") for line in said), said


@pytest.mark.slow
@behind()
async def test_an_own_replica_without_room_for_its_files_is_started_again(
    front: Front, servers: list[StandIn], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(supervisor, "PAUSE_S", 0.01)
    plan = fake_plan_of(samples.paged_fit()).model_copy(update={"workers": 1})
    backend = OwnStandIns(2)
    said: list[str] = []
    full = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) for _ in range(2)]
    make = tempfile.TemporaryDirectory

    def folder(**options: Any) -> tempfile.TemporaryDirectory[str]:
        if backend.made and full:
            raise full.pop()
        return make(**options)

    monkeypatch.setattr(tempfile, "TemporaryDirectory", folder)
    async with own_replicas(plan, backend, front, said):
        await until_up(front, backend.urls(0))
        backend.made[0].running = False  # its process ended
        await until_up(front, backend.urls(1))
    assert not full
    assert [line for line in said if os.strerror(errno.ENOSPC) in line]
