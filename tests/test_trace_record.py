"""`llmctl trace record`: what passes through is untouched, what is written holds lengths and times
and nothing else.
"""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import sse_server
from commands import llmctl
from hypothesis import given
from hypothesis import strategies as st
from said import says
from sse_server import DONE, chunked, event, tokens_event, usage_event, whole
from sse_server import sse_server as serving

from toolkit.endpoints.upstream import Upstream
from toolkit.openai.errors import ApiError
from toolkit.openai.requests import COMPLETIONS, GenerationCall
from toolkit.server import recorder as recording
from toolkit.server.application import Application
from toolkit.server.options import ServerOptions
from toolkit.server.recorder import AnswerReader, Recorder, recorder_of
from toolkit.server.server import Server
from toolkit.traces.read import read_trace
from toolkit.traces.write import TraceLog

SECRET = "sk-canary-7f3a"
TEXT = "a text that must not be found again"
ROLE = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})


def answer(body: dict) -> bytes:
    """A server that tells the usage where it is asked to."""
    asked = (body.get("stream_options") or {}).get("include_usage")
    if not body.get("stream"):
        usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
        return whole({"choices": [{"index": 0, "text": TEXT}], "usage": usage})
    usage = [usage_event(3)] if asked else []
    return chunked(*[tokens_event(TEXT)] * 3, *usage, DONE)


@asynccontextmanager
async def recorder(
    url: str, out: Path, block_tokens: int = 0
) -> AsyncIterator[tuple[httpx.AsyncClient, Application]]:
    with TraceLog(out) as log:
        async with Upstream(url, 30.0) as upstream:
            options = ServerOptions(host="0.0.0.0")  # any Host may be named
            backend = Recorder(upstream, options, block_tokens)
            backend.log = log
            app = Application(backend, options)
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://proxy"
            ) as client:
                yield client, app
            await backend.stop()


def through(
    out: Path, use: Callable, reply: Callable = answer, block_tokens: int = 0
) -> sse_server.Server:
    """Run `use(client, recorder)` in front of a server; the server, with what it was sent."""

    async def run(url: str) -> None:
        async with recorder(url, out, block_tokens) as (client, app):
            await use(client, app)

    with serving(reply) as server:
        asyncio.run(run(server.url))
    return server


def in_front_of(handle: Callable, out: Path, use: Callable, block_tokens: int = 0) -> None:
    """Run `use(client, recorder)` in front of a server that answers each connection itself."""

    async def run() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, recorder(url, out, block_tokens) as (client, app):
            await use(client, app)

    asyncio.run(run())


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def body(**more) -> dict:
    return {"model": "tiny", "prompt": TEXT, "max_tokens": 9} | more


def test_a_stream_is_counted_by_a_hidden_usage(tmp_path: Path):
    async def use(client: httpx.AsyncClient, app: Application) -> None:
        got = await client.post(
            "/v1/completions", json=body(stream=True), headers={"authorization": f"Bearer {SECRET}"}
        )
        assert got.content == tokens_event(TEXT) * 3 + DONE

    server = through(tmp_path / "log", use)
    assert server.bodies == [body(stream=True, stream_options={"include_usage": True})]
    assert f"authorization: Bearer {SECRET}" in server.heads[0]
    (row,) = rows(tmp_path / "log")
    assert 0 <= row.pop("ttft_ms") <= row.pop("e2e_ms")
    assert row.pop("timestamp") > 0
    assert row == {"input_length": 1, "output_length": 3, "max_tokens": 9, "status": "ok"}


def test_a_client_that_asks_for_usage_gets_it(tmp_path: Path):
    asked = (
        b'{ "stream":true, "prompt":"x","stream_options": {"include_usage":true, "other": '
        b'1},"prompt2":1}'
    )

    async def use(client: httpx.AsyncClient, app: Application) -> None:
        got = await client.post("/v1/completions", content=asked)
        assert got.content == tokens_event(TEXT) * 3 + usage_event(3) + DONE

    server = through(tmp_path / "log", use)
    assert server.bodies == [json.loads(asked)]
    assert f"content-length: {len(asked)}\r\n" in server.heads[0].lower()
    assert [row["output_length"] for row in rows(tmp_path / "log")] == [3]


def test_whole_answers_are_counted_row_by_row(tmp_path: Path):
    async def use(client: httpx.AsyncClient, app: Application) -> None:
        got = await client.post("/v1/completions", json=body(prompt=["a", "b"]))
        assert got.json()["choices"][0]["text"] == TEXT

    through(tmp_path / "log", use)
    found = [(row["input_length"], row["output_length"]) for row in rows(tmp_path / "log")]
    assert found == [(4, 3), (3, 2)]
    trace, report = read_trace(tmp_path / "log")
    assert (len(trace), report.dropped) == (2, {})


def test_a_large_request_is_read_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = body(stream=True, prompt="word " * 10_000)
    threads = []

    def noting(route: str, text: bytes) -> GenerationCall:
        threads.append(threading.current_thread())
        return GenerationCall(route, text)

    monkeypatch.setattr(recording, "GenerationCall", noting)

    async def use(client: httpx.AsyncClient, app: Application) -> None:
        got = await client.post("/v1/completions", json=asked)
        assert got.content == tokens_event(TEXT) * 3 + DONE

    server = through(tmp_path / "log", use)
    assert server.bodies == [asked | {"stream_options": {"include_usage": True}}]
    assert threading.main_thread() not in threads
    assert len(threads) == 1


def test_neither_texts_nor_keys_are_in_the_file(tmp_path: Path):
    async def use(client: httpx.AsyncClient, app: Application) -> None:
        for more in ({"stream": True}, {"stream": False}, {"stream": "?"}, {"user": SECRET}):
            await client.post("/v1/completions", json=body(**more), headers={"api-key": SECRET})

    through(tmp_path / "log", use)
    assert rows(tmp_path / "log")
    assert not any(
        word in (tmp_path / "log").read_text() for word in (SECRET, "text", "canary", "tiny")
    )


def test_other_routes_pass(tmp_path: Path):
    async def use(client: httpx.AsyncClient, app: Application) -> None:
        assert (await client.get("/v1/models?x=1")).json() == sse_server.MODELS
        assert (
            await client.get("//elsewhere.example/x")
        ).json() == sse_server.MODELS  # the same server's
        assert (await client.post("/tokenize", content=b'{"prompt": "x"}')).status_code == 200

    through(tmp_path / "log", use)
    assert rows(tmp_path / "log") == []


def test_errors_of_the_server_pass_and_are_said(tmp_path: Path):
    refusal = {"error": {"message": "slow down", "type": "rate", "param": None, "code": "rate"}}

    async def use(client: httpx.AsyncClient, app: Application) -> None:
        got = await client.post("/v1/completions", json=body(stream=True))
        assert (got.status_code, got.json()) == (429, refusal)

    through(tmp_path / "log", use, lambda _: whole(refusal, 429))
    assert [row["status"] for row in rows(tmp_path / "log")] == ["HTTP 429"]


def test_a_server_is_asked_again_without_stream_options(tmp_path: Path):
    def reply(asked: dict) -> bytes:
        return (
            whole({"error": "unknown field"}, 400) if "stream_options" in asked else answer(asked)
        )

    async def use(client: httpx.AsyncClient, app: Application) -> None:
        for _ in range(2):
            got = await client.post("/v1/completions", json=body(stream=True))
            assert got.content == tokens_event(TEXT) * 3 + DONE

    server = through(tmp_path / "log", use, reply)
    assert ["stream_options" in asked for asked in server.bodies] == [True, False, False]
    assert [row["status"] for row in rows(tmp_path / "log")] == ["uncounted", "uncounted"]


def test_a_bad_request_is_refused_by_the_server_in_its_own_words(tmp_path: Path):
    async def use(client: httpx.AsyncClient, app: Application) -> None:
        got = await client.post("/v1/completions", json=body(stream=True, max_tokens=-1))
        assert got.status_code == 400
        assert app.backend.asks_usage, "the server may know stream_options all the same"

    through(tmp_path / "log", use, lambda _: whole({"error": {"message": "max_tokens"}}, 400))


def test_a_status_that_is_none_is_a_502(tmp_path: Path):
    left = [0, 600, 999, 1000]

    async def use(client: httpx.AsyncClient, app: Application) -> None:
        while left:
            assert (await client.post("/v1/completions", json=body())).status_code == 502

    through(tmp_path / "log", use, lambda _: whole({}, left.pop()))


def test_no_server_is_a_502_that_names_no_address(tmp_path: Path):
    async def use() -> None:
        async with recorder("http://127.0.0.1:9", tmp_path / "log") as (client, app):
            got = await client.post("/v1/completions", json=body())
            assert got.status_code == 502
            assert not app.backend.left

    asyncio.run(use())
    assert [row["status"] for row in rows(tmp_path / "log")] == ["failed"]


def test_a_stream_that_breaks_off_breaks_off_for_the_client_too(tmp_path: Path):
    cut = chunked(tokens_event(), usage_event(1)).removesuffix(b"0\r\n\r\n")
    ends: list[bool] = []

    async def use(client: httpx.AsyncClient, app: Application) -> None:
        sent = await ask(app, body(stream=True))
        ends.append(sent[-1].get("more_body", True))

    through(tmp_path / "log", use, lambda _: cut)
    assert ends == [True]
    assert [row["status"] for row in rows(tmp_path / "log")] == ["failed"]


HEADERS = [(b"host", b"localhost"), (b"content-type", b"application/json")]


async def ask(app: Application, content: dict, leaves_after: int = 1 << 30) -> list[dict]:
    """Call the application as a server does; a client that leaves after so many messages."""
    gone = asyncio.Event()
    sent = []
    bodies = [json.dumps(content).encode()]

    async def receive() -> dict:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict) -> None:
        sent.append(message)
        if len(sent) >= leaves_after:
            gone.set()

    path = "/v1/completions"
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "http_version": "1.1",
        "raw_path": path.encode(),
        "query_string": b"",
    }
    await app({**scope, "headers": HEADERS}, receive, send)
    return sent


def test_a_client_that_leaves_cancels_the_request_behind(tmp_path: Path):
    """The first token has passed, the server goes on; its connection is closed."""
    left = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(chunked(tokens_event()).removesuffix(b"0\r\n\r\n"))
        await writer.drain()
        while await reader.read(1 << 16):
            pass
        left.set()
        writer.close()

    async def use(_: httpx.AsyncClient, app: Application) -> None:
        sent = await asyncio.wait_for(ask(app, body(stream=True), leaves_after=2), 30)
        assert sent[1]["body"] == tokens_event()
        await asyncio.wait_for(left.wait(), 30)

    in_front_of(slow, tmp_path / "log", use)
    (row,) = rows(tmp_path / "log")
    assert (row["status"], row["output_length"]) == ("cancelled", 0)


def test_a_role_is_no_token():
    reader = AnswerReader(strip=True)
    assert reader.feed(ROLE) == ROLE
    assert not reader.has_tokens
    reader.feed(event({"choices": [{"index": 0, "delta": {"content": "x"}}]}))
    assert reader.has_tokens


EVENTS = st.lists(
    st.sampled_from(
        [tokens_event("x"), tokens_event("ü\n\n"), ROLE, DONE, b": waiting\n\n", b"data: {\r\n\r\n"]
    )
)


@given(before=EVENTS, after=EVENTS, cuts=st.lists(st.integers(0, 400)))
def test_however_it_is_cut_only_the_usage_is_left_out(before, after, cuts):
    stream = b"".join([*before, usage_event(3), *after])
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    reader = AnswerReader(strip=True)
    plain = AnswerReader(strip=False)
    pieces = [stream[start:end] for start, end in itertools.pairwise(edges)]
    passed = b"".join(map(reader.feed, pieces)) + reader.end()
    assert passed == b"".join([*before, *after])
    assert b"".join(map(plain.feed, pieces)) + plain.end() == stream
    assert reader.usage is not None
    assert reader.usage.completion_tokens == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            b'{"stream":true,"x":1e400}',
            b'{"stream":true,"x":1e400,"stream_options":{"include_usage":true}}',
        ),
        (
            b'{"stream":true,"stream_options":null}',
            b'{"stream":true,"stream_options":{"include_usage":true}}',
        ),
        (
            b'{"stream":true,"stream_options":{"a":[1],"include_usage":false},"b":"\\u00e9"}',
            b'{"stream":true,"stream_options":{"a":[1],"include_usage":true},"b":"\\u00e9"}',
        ),
    ],
)
def test_nothing_but_the_option_changes(text, expected):
    assert GenerationCall(COMPLETIONS, text).first(speaks_ids=False) == (COMPLETIONS, expected)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{", b'{"stream": 3}', b'{"n": "x"}', b"\xff", b"[" * 100_000]
)
def test_what_is_no_request_for_tokens_is_left_to_the_server(text):
    with pytest.raises(ApiError):
        GenerationCall(COMPLETIONS, text)


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        *[("x", 1), ([1, 2, 3], 1), (["a", "b"], 2), ([[1], [2], [3]], 3), ([], 1), (None, 1)],
        *[(['a"]', "b\\", ","], 3), ([[], [1]], 2), ([1] * 3000, 1)],
    ],
)
def test_rows_of_a_request(prompt, count):
    asked = GenerationCall(COMPLETIONS, json.dumps({"prompt": prompt, "n": 2}).encode())
    assert asked.choices == 2 * count


@pytest.mark.slow
def test_the_command_records_and_ends_in_order(tmp_path: Path):
    out = tmp_path / "log.jsonl"
    with serving(answer) as server:
        words = ["trace", "record", "--upstream", server.url, "--listen", "127.0.0.1:0"]
        with subprocess.Popen(
            [sys.executable, "-m", "toolkit", *words, "--out", out, "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"] + "/v1/completions"
            for stream in (True, False):
                got = httpx.post(url, json=body(stream=stream), timeout=240)
                assert got.status_code == 200
            process.terminate()
            _, said = process.communicate(timeout=240)
    assert process.returncode == 0
    assert says(said, "2 ok", f"llmctl trace inspect {out}")
    assert [row["output_length"] for row in rows(out)] == [3, 5]


@pytest.mark.parametrize(
    ("upstream", "at", "named"),
    [
        ("ftp://x", "127.0.0.1:0", ("'ftp://x'",)),
        (f"http://user:{SECRET}@x", "127.0.0.1:0", ("URL",)),
        ("http://127.0.0.1:1", "8100", ("--listen '8100'",)),
        ("http://127.0.0.1:1", "0.0.0.0:0", ("host 0.0.0.0", "--insecure")),
    ],
)
def test_what_cannot_be_recorded_is_one_line(tmp_path: Path, capsys, upstream, at, named):
    words = ["--out", tmp_path / "log", "--upstream", upstream, "--listen", at]
    assert llmctl("trace", "record", *words) == 2
    error = capsys.readouterr().err
    assert says(error, *named)
    assert SECRET not in error


GET = b"GET /v1/models HTTP/1.1\r\n"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (GET + b"\r\n", 400),
        (GET + b"Host: evil.com\r\nConnection: close\r\n\r\n", 403),
    ],
    ids=["no host", "another machine's name"],
)
def test_the_recorder_has_the_bounds_of_the_server(tmp_path: Path, data: bytes, status: int):
    head, _, rest = talk(tmp_path, data).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"content-type: application/json" in head
    assert json.loads(rest)["error"].keys() == {"message", "type", "param", "code"}


def test_the_body_of_a_request_that_would_upgrade_passes(tmp_path: Path):
    asked = json.dumps(body()).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, close\r\n"
    head += b"Upgrade: h2c\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    assert talk(tmp_path, head % len(asked) + asked).startswith(b"HTTP/1.1 200 ")
    assert [row["output_length"] for row in rows(tmp_path / "log")] == [5]


def talk(folder: Path, data: bytes) -> bytes:
    """What the recorder says on a socket to these bytes until it closes."""

    async def run(upstream: str) -> bytes:
        said: list[bytes] = []

        async def ask(address: str) -> None:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", int(address.rpartition(":")[2])
            )
            writer.write(data)
            said.append(await reader.read(-1))
            writer.close()
            os.kill(os.getpid(), signal.SIGTERM)

        asking: list[asyncio.Task[None]] = []
        options = ServerOptions(request_log=folder / "log")
        with Server.open(options, recorder_of(upstream, options, 0)) as server:
            await server.serve(lambda at: asking.append(asyncio.create_task(ask(at))))
        await asking[0]
        return said[0]

    with serving(answer) as server:
        return asyncio.run(run(server.url))


def recorded(tmp_path: Path, *bodies: dict, block_tokens: int = 4) -> list[dict]:
    """The rows of requests that were recorded one after another, by one recorder."""
    out = tmp_path / f"log{len(list(tmp_path.iterdir()))}"

    def reply(body: dict) -> bytes:
        count = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 40
        usage = {"prompt_tokens": count, "completion_tokens": 5}
        return whole({"choices": [{"index": 0, "text": TEXT}], "usage": usage})

    async def use(client: httpx.AsyncClient, app: Application) -> None:
        for one in bodies:
            path = "/v1/chat/completions" if "messages" in one else "/v1/completions"
            assert (await client.post(path, json=one)).status_code == 200

    through(out, use, reply, block_tokens)
    assert TEXT not in out.read_text()
    return rows(out)


def shared_run(one: dict, other: dict) -> int:
    same = [a == b for a, b in zip(one["hash_ids"], other["hash_ids"], strict=False)]
    return [*same, False].index(False)


def test_what_prompts_of_tokens_share_is_noted_exactly(tmp_path: Path):
    system = list(range(100, 121))
    prompts = [[*system, *range(9)], [*system, 5, 4, 3, 2, 1, 0], [7, *system], system]
    found = recorded(tmp_path, *[body(prompt=prompt) for prompt in prompts])
    assert [len(row["hash_ids"]) for row in found] == [8, 7, 6, 6]
    assert [shared_run(found[0], row) for row in found] == [8, 5, 0, 5]
    assert all(row["block_tokens"] == 4 for row in found)
    assert all(0 <= one < 2**53 for row in found for one in row["hash_ids"])
    (again,) = recorded(tmp_path, body(prompt=prompts[0]))
    assert not {*found[0]["hash_ids"]} & {*again["hash_ids"]}, "of another recording"


def test_what_texts_and_chats_share_is_noted_in_blocks_of_bytes(tmp_path: Path):
    text = "".join(map(str, range(200)))[:400]
    found = recorded(tmp_path, body(prompt=text), body(prompt=text[:200] + "x" * 200))
    assert [len(row["hash_ids"]) for row in found] == [10, 10]
    assert shared_run(*found) == 5  # 40 bytes are a block, as 4 of the first 40 tokens
    first = {"role": "system", "content": text}
    chats = [{"messages": [first, {"role": "user", "content": one}]} for one in ("a", "b")]
    found = recorded(tmp_path, *[body(prompt=None) | chat for chat in chats])
    assert 8 <= shared_run(*found) < 10
    other_tools = recorded(tmp_path, *[body(prompt=None, tools=[one]) | chats[0] for one in (1, 2)])
    assert shared_run(*other_tools) == 0


def test_rows_that_share_a_count_have_no_blocks(tmp_path: Path):
    several = recorded(tmp_path, body(prompt=["one", "two"]), body(prompt="one", n=2))
    assert len(several) == 4
    assert not any("hash_ids" in row for row in several)
    assert "hash_ids" not in recorded(tmp_path, body(prompt=[1, 2]), block_tokens=0)[0]


def test_a_recorded_trace_is_read_with_what_its_prompts_share(tmp_path: Path):
    prompts = [list(range(30)), [*range(24), 9, 9]]
    found = recorded(tmp_path, *[body(prompt=prompt) for prompt in prompts])
    path = tmp_path / "read.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    trace, report = read_trace(path)
    assert report.unshared.counts == {}
    assert trace.shared.block_tokens == 4
    assert trace.shared.counts.tolist() == [8, 7]


HUGE = 10**400


ODD_COUNTS = [10**9, HUGE, -1, "7", 1.5]


@pytest.mark.parametrize("stream", [False, True])
def test_a_usage_that_cannot_be_is_no_work(stream: bool, tmp_path: Path):
    """Blocks follow the prompt, not the server's count of it."""
    left = [count for count in ODD_COUNTS for _ in range(2)]

    def reply(body: dict) -> bytes:
        usage = {"prompt_tokens": left.pop(), "completion_tokens": 1}
        if not stream:
            return whole({"choices": [{"index": 0, "text": "x"}], "usage": usage})
        return chunked(tokens_event("x"), event({"choices": [], "usage": usage}), DONE)

    async def use(client: httpx.AsyncClient, app: Application) -> None:
        body = {"prompt": "some text", "stream": stream}
        while left:
            assert (await client.post("/v1/completions", json=body)).status_code == 200

    through(tmp_path / "t.jsonl", use, reply, block_tokens=16)
    assert all(len(row.get("hash_ids") or []) < 10 for row in rows(tmp_path / "t.jsonl"))


ODD_BODIES = [
    b'{"prompt": "\xff"}',
    b'{"\xff": 1, "prompt": "a"}',
    b'{"prompt": "a", "stream": true, "user": "\xff"}',
    b'{"prompt": [%d], "stream": true}' % HUGE,
    b'{"prompt": "a", "n": %d}' % HUGE,
    b'{"prompt": "a", "max_tokens": %d}' % HUGE,
    b'{"prompt": "a", "stream_options": 7, "stream": true}',
    b'{"prompt": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
    b"\xff",
]


def test_an_odd_body_passes_as_it_is(tmp_path: Path):
    passed = []

    async def use(client: httpx.AsyncClient, app: Application) -> None:
        headers = {"content-type": "application/json"}
        for body in ODD_BODIES:
            answer = await client.post("/v1/completions", content=body, headers=headers)
            assert answer.status_code == 200
            assert body[:10] in passed[-1]

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        passed.append(await reader.readexactly(size))
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        writer.write(whole({"choices": [], "usage": usage}))
        writer.close()

    in_front_of(handle, tmp_path / "t.jsonl", use, block_tokens=16)
