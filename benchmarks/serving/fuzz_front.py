"""A front before replicas, under odd requests, hostile replicas and flapping ones.

    python -m benchmarks.serving.fuzz_front

Five parts: heads of requests with `Upgrade` that arrive in two segments, before bodies that are
requests; bodies of requests with odd fields and torn bytes; a replica that answers requests, probes
and readers of metrics with hostile bytes, beside a good one; one that never ends an answer; and
replicas that end and start again under streams, each of which must be the undisturbed answer. All
the time /health is asked. No answer may be a 5xx that is not meant or reach another client, no
stream may differ, and at the end every task of the front must run, as its metrics say. The front
has a process of its own, and so has what asks /health; clients and replicas share one.

Takes eight minutes on one core. Needs no model and no GPU.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import httpx
import psutil
import uvloop

from benchmarks.common.command import make_parser
from benchmarks.common.fronts import front_on
from benchmarks.common.raw_client import told
from benchmarks.common.standin import MODEL, STREAM_HEAD, StandIn, answer_of
from toolkit.server import replicas
from toolkit.server.options import ServerOptions
from toolkit.server.process import url

HUGE = 10**400
HEALTH_EVERY_S = 0.02
BEAT_S = 0.002
SEGMENT_S = 0.005  # between two, so that they arrive apart
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
PATHS = (COMPLETIONS, CHAT, RESPONSES)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 64, 2**31, 2**63, HUGE, -HUGE, 0.5, 1e300, -0.0),
    *("", "a", "true", "64", "\x00", "\u202e", "é" * 50, "x" * 5000),
    *([], [1], ["a"], ["a", "b"], [[1], [2]], [[]], [None], [{}], [1, "a"], [-1], [HUGE]),
    *({}, {"a": 1}, {"type": "text"}, {"include_usage": 1}, {"include_usage": True}),
)
FIELDS = (
    *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "best_of"),
    *("stream", "stream_options", "temperature", "stop", "include_stop_str_in_output"),
    *("return_token_ids", "min_tokens", "priority", "prompt_cache_key", "prompt_embeds", "tools"),
    *("logprobs", "echo", "suffix", "user", "ignore_eos", "input", "nothing"),
    *("max_output_tokens", "instructions", "previous_response_id", "background", "store"),
)
TORN = (b"\xff", b"\x00", b'"', b"{", b"[" * 3000, b"\\ud800", b",", b"\xe2\x82", b"1e999")


def good_body(path: str) -> dict[str, Any]:
    about = {"model": MODEL, "max_tokens": 4, "ignore_eos": True}
    if path == COMPLETIONS:
        return about | {"prompt": "Once"}
    if path == RESPONSES:
        return {"model": MODEL, "input": "Once", "max_output_tokens": 4, "ignore_eos": True}
    return about | {"messages": [{"role": "user", "content": "Once"}]}


def odd_body(rng: random.Random) -> tuple[str, bytes]:
    """A path, and a body near a good one: with other fields, or torn."""
    path = rng.choice(PATHS)
    fields = good_body(path)
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        name = rng.choice(FIELDS)
        if rng.random() < 0.2:
            fields.pop(name, None)
        else:
            fields[name] = rng.choice(VALUES)
    body = json.dumps(fields, ensure_ascii=rng.random() < 0.5).encode(errors="replace")
    if rng.random() < 0.4:
        at = rng.randrange(len(body) + 1)
        cut = at + rng.choice((0, 0, 1, 3, 50))
        body = body[:at] + rng.choice((b"", *TORN)) + body[cut:]
    return path, body


def hostile(rng: random.Random) -> bytes:
    """A whole answer of a replica, or a part of one, that is hardly what was asked for."""
    kind = rng.choice(("json", "events", "events", "events", "wire", "wire", "random"))
    value = rng.choice(VALUES)
    status = rng.choice((200, 200, 200, 200, 204, 302, 400, 404, 429, 503))
    if kind == "json":
        usage = {"prompt_tokens": value, "completion_tokens": rng.choice(VALUES)}
        choice = {"index": rng.choice(VALUES), "text": rng.choice(VALUES), "finish_reason": value}
        whole = {"choices": [choice], "usage": usage, "data": rng.choice(VALUES), "id": value}
        return framed(rng, status, torn(rng, json.dumps(whole).encode()))
    if kind == "events":
        lines = []
        for _ in range(rng.randrange(6)):
            choice = {"index": 0, "text": "x", "delta": {"content": "x"}, "finish_reason": None}
            choice[rng.choice(("index", "text", "finish_reason", "token_ids", "delta"))] = (
                rng.choice(VALUES)
            )
            event = {"id": rng.choice(("a", value)), "choices": [choice], "usage": value}
            lines.append(b"data: " + json.dumps(event).encode() + b"\n\n")
        lines += [b"data: [DONE]\n\n"] * (rng.random() < 0.5)
        return framed(rng, status, torn(rng, b"".join(lines)))
    if kind == "wire":
        return rng.choice(WIRE)
    return rng.randbytes(rng.randrange(200))


JSON_BODY = b"content-type: application/json"
WIRE = (
    b"",
    b"HTTP/1.1 200 X\r\n\r\n",
    b"HTTP/1.1 200 X\r\ncontent-length: 99999999999999999999\r\n\r\n{}",
    b"HTTP/1.1 200 X\r\ncontent-length: -1\r\n\r\n{}",
    b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n" + b"x: y\r\n" * 90_000,
    b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\n2;" + b"e" * 500_000,
    b"HTTP/1.1 100 Continue\r\n\r\n" * 20_000,
    b"HTTP/1.1 999 X\r\ncontent-length: 2\r\n\r\n{}",
    b"HTTP/1.1 101 Upgrade\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    b"HTTP/1.1 200 X\r\nx: " + b"y" * 400_000 + b"\r\n\r\n",
    b"HTTP/1.1 200 X\r\nconnection: close\r\n\r\n" + b"data: " + b"a" * 2_000_000,
)


# Of answers that never end: what comes first, and what then comes again and again.
INTERIM = tuple(
    (b"", b"HTTP/1.1 %b\r\n\r\n" % line * 1000)
    for line in (b"100 Continue", b"102 Processing", b"103 X\r\nlink: </a>")
)
EVENTS = tuple(
    (STREAM_HEAD, b"%x\r\n%b\r\n" % (len(piece), piece))
    for piece in (
        *(b"\n" * (1 << 16), b"\r" * (1 << 16), b"\r\n" * (1 << 15), b":\n\n" * 20_000),
        *(b"data:\n\n" * 10_000, b"event: ping\n\n" * 5_000),
        b'data: {"choices":[]}\n\n' * 3_000,
        b'data: {"choices":[{"text":""}]}\n\n' * 2_000,
        b'data: {"choices":[{"text":"x"}]}\n\n' * 2_000,
    )
) + tuple((STREAM_HEAD, b"%x\r\n%b\r\n" % (len(one), one) * 5_000) for one in (b"\n", b":\n\n"))


def torn(rng: random.Random, content: bytes) -> bytes:
    if rng.random() < 0.5 or not content:
        return content
    at = rng.randrange(len(content))
    return content[:at] + rng.choice((b"", *TORN)) + content[at + rng.choice((0, 1, 9)) :]


def framed(rng: random.Random, status: int, body: bytes) -> bytes:
    kind = rng.choice((b"application/json", b"text/event-stream", b"text/plain", b"\xff"))
    head = b"HTTP/1.1 %d X\r\ncontent-type: %s\r\n" % (status, kind)
    if rng.random() < 0.5:
        return head + b"content-length: %d\r\n\r\n" % len(body) + body
    return head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


METRICS = (
    b"vllm:num_requests_waiting{" + b"x" * 300_000,
    (b"vllm:num_requests_waiting{" + b"y" * 40 + b"\n") * 20_000,
    b"vllm:num_requests_waiting NaN\nvllm:kv_cache_usage_perc 1e999\n",
    b'vllm:num_requests_waiting{a="' + b"\\" * 100_000 + b'"} 1\n',
    b"# TYPE a counter\n" * 10_000 + b'a_total{b="c"} 1\n',
    b"vllm:num_requests_running %d\n" % HUGE,
)


def hostile_page(rng: random.Random, path: str) -> bytes:
    if path == "/metrics" and rng.random() < 0.6:
        return framed(rng, 200, rng.choice(METRICS))
    return hostile(rng)


@dataclass
class Found:
    """What came of a run."""

    statuses: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    slowest_s: list[float] = field(default_factory=list)  # /health's, by kind of flood
    memory_mib: int = 0  # of the front's process, at the end

    def complain(self, text: str) -> None:
        if len(self.complaints) < 100:
            self.complaints.append(text)


class Front:
    """A front in a process of its own, and a client of it."""

    def __init__(self, http: httpx.AsyncClient, pid: int, pipe: Connection) -> None:
        self.http = http
        self.process = psutil.Process(pid)
        self.pipe = pipe

    async def until_up(self, count: int) -> None:
        """Wait until so many replicas are up."""
        up = -1
        while up < count:
            await asyncio.sleep(0.05)
            listed = (await self.http.get("/replicas")).json()["replicas"]
            up = sum(each["state"] == "up" for each in listed)


def start(work: Callable[..., None], *arguments: Any) -> tuple[SpawnProcess, Connection]:
    """A process of this module's `work`, which gets one end of a pipe last; and the other end."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


async def beat(busy_s: list[float]) -> None:
    """Note the processor time that the loop's thread uses between two beats, until cancelled: what
    it holds up others by itself, however busy the machine is.
    """
    before_s = time.thread_time()
    while True:
        await asyncio.sleep(BEAT_S)
        now_s = time.thread_time()
        busy_s.append(now_s - before_s)
        before_s = now_s


async def serve_front(
    urls: list[str], parent: Connection, *, deadline_s: float, asks_often: bool
) -> None:
    """Serve a front before these replicas, until the parent closes its end."""
    if asks_often:
        replicas.PROBE_UP_S = 0.02
    options = ServerOptions(wait_up_s=20.0, request_timeout_s=deadline_s)
    async with front_on(urls, MODEL, "llm-d", options, hang_s=2.0) as (pool, listener):
        pool.background.start("silent replicas", pool.sweep)
        pool.background.start("reports of replicas", pool.read_reports)
        gc.collect()
        gc.freeze()  # as `llmctl serve` does
        parent.send(url(listener))
        busy_s: list[float] = []
        beating = asyncio.create_task(beat(busy_s))
        with suppress(EOFError):
            while await asyncio.to_thread(parent.recv):
                parent.send(busy_s)
        beating.cancel()


def front_process(urls: list[str], deadline_s: float, asks_often: bool, parent: Connection) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_front(urls, parent, deadline_s=deadline_s, asks_often=asks_often))


@asynccontextmanager
async def front_before(
    *servers: StandIn, deadline_s: float = 600.0, asks_often: bool = False
) -> AsyncIterator[Front]:
    """A front before these replicas, which run in this process."""
    for server in servers:
        await server.start()
    urls = [server.url for server in servers]
    process, ours = start(front_process, urls, deadline_s, asks_often)
    base_url = await asyncio.to_thread(ours.recv)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=base_url, timeout=60, limits=limits, trust_env=False
    ) as http:
        front = Front(http, process.pid or 0, ours)
        await front.until_up(1)
        yield front
    ours.close()
    await asyncio.to_thread(process.join, 30)
    for server in servers:
        server.kill()


def watch_health(host: str, port: int, parent: Connection) -> None:
    """Ask /health again and again, in a process that nothing else delays, until the parent says
    that it is over; then tell it the seconds of each answer, and how many were no 200.
    """
    connection = HTTPConnection(host, port, timeout=60)
    times_s = []
    wrong = 0
    parent.send("ready")
    while not parent.poll(HEALTH_EVERY_S):
        begin_s = time.perf_counter()
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        times_s.append(time.perf_counter() - begin_s)
        wrong += answer.status != 200
    parent.send((times_s, wrong))


async def in_parallel(
    count: int, clients: int, ask: Callable[[int], Any], found: Found, front: Front
) -> None:
    """Call `ask` for each number, by so many clients at once, while /health is asked."""
    numbers = iter(range(count))

    async def client() -> None:
        for number in numbers:
            await ask(number)

    base_url = front.http.base_url
    process, ours = start(watch_health, base_url.host, base_url.port or 80)
    await asyncio.to_thread(ours.recv)
    await asyncio.gather(*(client() for _ in range(clients)))
    ours.send("over")
    found.health_s, wrong = await asyncio.to_thread(ours.recv)
    await asyncio.to_thread(process.join)
    if wrong:
        found.complain(f"/health answered no 200 {wrong} times")


async def check_tasks(front: Front, found: Found) -> None:
    """No task of the front has failed, as its metrics say."""
    lines = (await front.http.get("/metrics")).text.splitlines()
    failed = [line for line in lines if line.startswith("llmctl_background_task_failures_total{")]
    if len(failed) < 3 or not all(line.endswith(" 0.0") for line in failed):
        found.complain(f"failures of tasks: {failed}")
    front.pipe.send("busy")
    found.busy_s = await asyncio.to_thread(front.pipe.recv)
    found.memory_mib = front.process.memory_info().rss >> 20


def posted(path: str, body: bytes, *lines: bytes) -> tuple[bytes, bytes]:
    """The head and the body of a request."""
    lines = (b"POST %b HTTP/1.1" % path.encode(), b"host: localhost", JSON_BODY, *lines)
    return b"\r\n".join((*lines, b"content-length: %d" % len(body), b"", b"")), body


async def cut_heads(count: int) -> Found:
    """Cut heads with `Upgrade` at every position. Their bodies are requests of mallory; on the same
    connection alice asks next, as behind a proxy that uses it again.
    """
    found = Found()
    bodies = {name: good_body(COMPLETIONS) | {"prompt": name} for name in ("mallory", "alice")}
    texts = {name: answer_of(body).encode() for name, body in bodies.items()}
    hidden, alice = (json.dumps(body).encode() for body in bodies.values())
    inner = b"".join(posted(COMPLETIONS, hidden))
    asked = b"".join(posted(COMPLETIONS, alice, b"connection: close"))
    wish = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk")
    plain = posted(COMPLETIONS, inner, *wish)
    head = b"POST /v1/completions HTTP/1.1", b"host: localhost", JSON_BODY, *wish
    framed = (
        b"\r\n".join((*head, b"transfer-encoding: chunked", b"", b"")),
        b"%x\r\n%b\r\n0\r\n\r\n" % (len(inner), inner),
    )
    health = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    kinds = [(before, *request) for before in (b"", health) for request in (plain, framed)]
    async with front_before(StandIn(), StandIn()) as front:
        base_url = front.http.base_url

        async def ask(number: int) -> None:
            before, head, body = kinds[number % len(kinds)]
            at = number * len(head) // count
            reader, writer = await asyncio.open_connection(base_url.host, base_url.port)
            for segment in (before + head[:at], head[at:], body, asked):
                if not writer.is_closing():  # the wish is refused as soon as the head is there
                    writer.write(segment)
                await asyncio.sleep(SEGMENT_S)
            received = b""
            with suppress(ConnectionError):
                received = await reader.read(-1)
            writer.close()
            answers = received.split(b"HTTP/1.1 ")[1:]
            found.statuses["served" if texts["alice"] in received else "closed"] += 1
            if texts["mallory"] in received or len(answers) > 1 + bool(before):
                found.complain(f"cut at {at} of {head!r}: {received[-300:]!r}")

        await in_parallel(count, 8, ask, found, front)
        await check_tasks(front, found)
    return found


async def floods(kinds: Sequence[tuple[bytes, bytes]], each: int) -> Found:
    """Ask a front before a replica that never ends an answer, and a good one."""
    found = Found()
    rogue = StandIn()
    async with front_before(rogue, StandIn(), deadline_s=30.0) as front:
        for number, (first, flood) in enumerate(kinds):
            rogue.script = lambda *_, first=first: first
            rogue.flood = flood

            async def ask(_: int, number: int = number) -> None:
                body = good_body(COMPLETIONS) | {"stream": True}
                async with front.http.stream("POST", COMPLETIONS, json=body) as answer:
                    found.statuses[str(answer.status_code)] += 1
                    if answer.status_code not in (200, 503, 504):
                        found.complain(f"flood {number}: {answer.status_code}")
                    await answer.aread()

            before_s = found.health_s
            await in_parallel(each, 8, ask, found, front)
            found.slowest_s.append(max(found.health_s, default=0.0))
            found.health_s = before_s + found.health_s
        rogue.script = None
        await front.until_up(2)
        wanted = answer_of(good_body(COMPLETIONS))
        for _ in range(10):
            answer = await front.http.post(COMPLETIONS, json=good_body(COMPLETIONS))
            if answer.json()["choices"][0]["text"] != wanted:
                found.complain(f"another answer: {answer.text[:200]}")
        await check_tasks(front, found)
    return found


async def odd_bodies(count: int, seed: int) -> Found:
    """Send odd bodies to a front before good replicas."""
    found = Found()
    async with front_before(StandIn(), StandIn()) as front:
        http = front.http

        async def ask(number: int) -> None:
            rng = random.Random(f"{seed} {number}")
            path, body = odd_body(rng)
            headers = {"content-type": "application/json"}
            if rng.random() < 0.05:
                headers["x-session-id"] = "s" * rng.randrange(5000)
            answer = await http.post(path, content=body, headers=headers)
            found.statuses[str(answer.status_code)] += 1
            if answer.status_code >= 500:
                found.complain(
                    f"{answer.status_code} {answer.text[:100]} for {path} {body[:200]!r}"
                )

        await in_parallel(count, 8, ask, found, front)
        await check_tasks(front, found)
    return found


async def hostile_replicas(count: int, seed: int) -> Found:
    """Ask a front before a hostile replica and a good one; the other one's answers stay right."""
    found = Found()
    rng = random.Random(seed)
    rogue = StandIn()
    good = StandIn()
    wanted = answer_of(good_body(COMPLETIONS))
    # A replica that begins no answer may have a long queue: only a deadline ends such a request.
    async with front_before(rogue, good, deadline_s=30.0, asks_often=True) as front:
        http = front.http
        rogue.script = lambda *_: hostile(rng) if rng.random() < 0.7 else None

        async def ask(number: int) -> None:
            for path in ("/health", "/v1/models", "/version", "/metrics"):
                rogue.pages.pop(path, None)
                if rng.random() < 0.3:
                    rogue.pages[path] = hostile_page(rng, path)
            if number % 10 == 0:
                await http.get("/replicas/0/metrics")
            path = rng.choice((COMPLETIONS, COMPLETIONS, RESPONSES))
            body = good_body(path) | {"stream": rng.random() < 0.7}
            answer = await http.post(path, json=body)
            found.statuses[str(answer.status_code)] += 1
            if answer.status_code >= 500 and answer.status_code not in (503, 504):
                found.complain(f"{answer.status_code} {answer.text[:200]}")

        await in_parallel(count, 8, ask, found, front)
        rogue.script = None
        rogue.pages.clear()
        await front.until_up(2)
        for _ in range(10):
            answer = await http.post(COMPLETIONS, json=good_body(COMPLETIONS))
            if answer.json()["choices"][0]["text"] != wanted:
                found.complain(f"another answer: {answer.text[:200]}")
        await check_tasks(front, found)
    return found


async def flaps(count: int, streams: int, seed: int) -> Found:
    """End and start replicas again under streams."""
    found = Found()
    rng = random.Random(seed)
    begun = asyncio.Event()
    ended = asyncio.Event()
    # Clients and servers share one process: 200 streams of 10 tokens a second.
    servers = [StandIn(token_s=0.1 if streams > 50 else 0.01) for _ in range(4)]

    async def flap() -> None:
        await begun.wait()
        for _ in range(count):
            one = rng.choice(servers[1:])
            rng.choice((one.kill, one.kill, one.abort_requests))()
            await asyncio.sleep(rng.uniform(0.0, 0.05))
            if one._server is None:
                await one.start()
            await asyncio.sleep(rng.uniform(0.0, 0.1))
        ended.set()

    async with front_before(*servers) as front:
        http = front.http

        async def ask(number: int) -> None:
            begun.set()
            while not ended.is_set():
                body = good_body(COMPLETIONS) | {"max_tokens": 60, "prompt": f"Once {number}"}
                answer = await http.post(COMPLETIONS, json=body | {"stream": True})
                found.statuses[str(answer.status_code)] += 1
                seen = told(answer.status_code, answer.content)
                whole = seen.text == answer_of(body) and seen.done and not seen.errors
                if answer.status_code == 200 and not whole:
                    found.complain(f"another stream: {seen} for {answer_of(body)!r}")

        flapping = asyncio.create_task(flap())
        await in_parallel(streams, streams, ask, found, front)
        await flapping
        await front.until_up(len(servers))
        await check_tasks(front, found)
    return found


def quantiles(times_s: list[float]) -> str:
    """The median, the 99th percentile and the largest, in words; of a part that ended before the
    first was measured, none.
    """
    if not times_s:
        return "none"
    ordered = sorted(times_s)
    shares = [ordered[min(int(len(ordered) * one), len(ordered) - 1)] for one in (0.5, 0.99, 1)]
    return ", ".join(f"{1000 * each:.0f}" for each in shares) + " ms"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--heads", type=int, default=400)
    parser.add_argument("--bodies", type=int, default=20_000)
    parser.add_argument("--answers", type=int, default=2_000)
    parser.add_argument("--floods", type=int, default=24, metavar="N", help="requests of each")
    parser.add_argument("--flaps", type=int, default=1_000)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    wrong = 0
    head = (
        "part | answers | statuses | /health p50, p99, max | the loop's turns in CPU time | memory"
    )
    print(f"| {head} | complaints |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    seed = options.seed
    parts = (
        (f"{options.heads:,} cut heads", cut_heads(options.heads)),
        (f"{options.bodies:,} odd bodies", odd_bodies(options.bodies, seed)),
        (f"{options.answers:,} hostile", hostile_replicas(options.answers, seed)),
        ("interim floods", floods(INTERIM, options.floods)),
        ("event floods", floods(EVENTS, options.floods)),
        (f"{options.flaps:,} flaps", flaps(options.flaps, options.streams, seed)),
    )
    for name, work in parts:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found = runner.run(work)
        wrong += len(found.complaints)
        statuses = ", ".join(f"{key}: {n:,}" for key, n in sorted(found.statuses.items()))
        health = quantiles(found.health_s)
        busy = quantiles(found.busy_s)
        memory = f"{found.memory_mib} MiB"
        total = found.statuses.total()
        row = f"| {name} | {total:,} | {statuses} | {health} | {busy} | {memory} "
        print(f"{row}| {len(found.complaints)} |", flush=True)
        for line in found.complaints[:5]:
            print(f"  {line}")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
