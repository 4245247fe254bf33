"""`llmctl trace record`, and the log of requests of a front: what is written holds lengths, times
and what prompts share, and nothing else.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import sse_server
from commands import llmctl
from said import says
from sse_server import DONE, chunked, event, tokens_event, usage_event, whole
from sse_server import sse_server as serving

from toolkit.errors import InputError
from toolkit.openai.requests import COMPLETIONS, GenerationCall
from toolkit.server.application import Application
from toolkit.server.options import ServerOptions
from toolkit.server.pool import recording_backend
from toolkit.server.watched import given_replicas
from toolkit.traces.read import read_trace
from toolkit.traces.write import TraceLog

SECRET = "sk-canary-7f3a"
TEXT = "a text that must not be found again"
END = event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
PROBE = {"model": "tiny", "prompt": "a", "max_tokens": 1}


def answer(body: dict) -> bytes:
    """A server that tells the usage where it is asked to."""
    asked = (body.get("stream_options") or {}).get("include_usage")
    if not body.get("stream"):
        usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
        choices = [{"index": 0, "text": TEXT, "finish_reason": "length"}]
        return whole({"choices": choices, "usage": usage})
    usage = [usage_event(3)] if asked else []
    return chunked(*[tokens_event(TEXT)] * 3, END, *usage, DONE)


@asynccontextmanager
async def recorder(
    url: str, out: Path, block_tokens: int = 0, key: str = ""
) -> AsyncIterator[tuple[httpx.AsyncClient, Application]]:
    options = ServerOptions(
        host="0.0.0.0",  # any Host may be named
        replicas=given_replicas([url]),
        replica_key=key,
        block_tokens=block_tokens,
        wait_up_s=0.1,
    )
    with TraceLog(out) as log, recording_backend(options) as backend:
        backend.log = log
        app = Application(backend, options)
        await backend.start()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
            yield client, app
        await backend.stop()


def through(
    out: Path, use: Callable, reply: Callable = answer, block_tokens: int = 0, key: str = ""
) -> sse_server.Server:
    """Run `use(client, recorder)` in front of a server; the server, with what it was sent."""

    async def run(url: str) -> None:
        async with recorder(url, out, block_tokens, key) as (client, app):
            await use(client, app)

    with serving(reply) as server:
        asyncio.run(run(server.url))
    server.bodies = [one for one in server.bodies if one != PROBE]
    return server


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def body(**more) -> dict:
    return {"model": "tiny", "prompt": TEXT, "max_tokens": 9} | more


def test_a_stream_is_counted_by_a_hidden_usage(tmp_path: Path):
    async def use(client: httpx.AsyncClient, app: Application) -> None:
        got = await client.post("/v1/completions", json=body(stream=True))
        assert got.content == tokens_event(TEXT) * 3 + END + DONE

    server = through(tmp_path / "log", use, key=SECRET)
    assert server.bodies == [body(stream=True, stream_options={"include_usage": True})]
    assert f"authorization: Bearer {SECRET}" in server.heads[0]
    (row,) = rows(tmp_path / "log")
    assert 0 <= row.pop("ttft_ms") <= row.pop("e2e_ms")
    assert row.pop("timestamp") > 0
    assert row == {"input_length": 1, "output_length": 3, "max_tokens": 9, "status": "ok"}


def test_a_client_that_asks_for_usage_gets_it(tmp_path: Path):
    asked = body(stream=True, stream_options={"include_usage": True, "other": 1}, prompt2=1)

    async def use(client: httpx.AsyncClient, app: Application) -> None:
        got = await client.post("/v1/completions", json=asked)
        assert got.content == tokens_event(TEXT) * 3 + END + usage_event(3) + DONE

    server = through(tmp_path / "log", use)
    assert server.bodies == [asked]
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


def test_a_limit_that_no_client_set_is_not_written(tmp_path: Path):
    async def use(client: httpx.AsyncClient, app: Application) -> None:
        chat = {"messages": [{"role": "user", "content": TEXT}]}
        assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200

    through(tmp_path / "log", use)
    assert "max_tokens" not in rows(tmp_path / "log")[0]


def test_calls_of_tools_end_well(tmp_path: Path):
    def reply(_: dict) -> bytes:
        usage = {"prompt_tokens": 7, "completion_tokens": 5}
        message = {"role": "assistant", "content": None, "tool_calls": [{}]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        return whole({"choices": [choice], "usage": usage})

    async def use(client: httpx.AsyncClient, app: Application) -> None:
        chat = {"messages": [{"role": "user", "content": TEXT}], "tools": []}
        assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200

    through(tmp_path / "log", use, reply)
    assert [row["status"] for row in rows(tmp_path / "log")] == ["ok"]


def test_neither_texts_nor_keys_are_in_the_file(tmp_path: Path):
    async def use(client: httpx.AsyncClient, app: Application) -> None:
        for more in ({"stream": True}, {"stream": False}, {"stream": "?"}, {"user": SECRET}):
            await client.post("/v1/completions", json=body(**more), headers={"api-key": SECRET})

    through(tmp_path / "log", use, block_tokens=4, key=SECRET)
    assert rows(tmp_path / "log")
    assert not any(
        word in (tmp_path / "log").read_text() for word in (SECRET, "text", "canary", "tiny")
    )


def test_errors_of_the_server_pass_and_are_said(tmp_path: Path):
    refusal = {"error": {"message": "slow down", "type": "rate", "param": None, "code": "rate"}}

    async def use(client: httpx.AsyncClient, app: Application) -> None:
        got = await client.post("/v1/completions", json=body(stream=True))
        assert (got.status_code, got.json()) == (429, refusal)

    through(tmp_path / "log", use, lambda _: whole(refusal, 429))
    assert [row["status"] for row in rows(tmp_path / "log")] == ["HTTP 429"]


def test_what_no_usage_counts_is_said_to_be_uncounted(tmp_path: Path):
    async def use(client: httpx.AsyncClient, app: Application) -> None:
        got = await client.post("/v1/completions", json=body(stream=True))
        assert got.content == tokens_event(TEXT) + END + DONE

    through(tmp_path / "log", use, lambda _: chunked(tokens_event(TEXT), END, DONE))
    assert [row["status"] for row in rows(tmp_path / "log")] == ["uncounted"]
    with pytest.raises(InputError):  # nothing in it is usable
        read_trace(tmp_path / "log")


def test_no_server_is_an_error_that_names_no_address(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("toolkit.server.pool.FIRST_PROBES_S", 0.1)

    async def use() -> None:
        async with recorder("http://127.0.0.1:9", tmp_path / "log") as (client, app):
            got = await client.post("/v1/completions", json=body())
            assert got.status_code == 503
            assert "127.0.0.1" not in got.text
            assert not app.backend.left

    asyncio.run(use())


def test_an_answer_that_breaks_off_is_failed(tmp_path: Path):
    cut = chunked(tokens_event(), usage_event(1)).removesuffix(b"0\r\n\r\n")

    async def use(client: httpx.AsyncClient, app: Application) -> None:
        got = await client.post("/v1/completions", json=body(stream=True))
        assert b'"error"' in got.content

    through(tmp_path / "log", use, lambda asked: whole({}) if asked == PROBE else cut)
    assert [row["status"] for row in rows(tmp_path / "log")] == ["failed"]


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
        words = ["trace", "record", "--upstream", server.url, "--port", "0"]
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
    assert says(said, "2 length", f"llmctl trace inspect {out}")
    assert [row["output_length"] for row in rows(out)] == [3, 5]


@pytest.mark.parametrize(
    ("upstream", "at", "named"),
    [
        ("ftp://x", "127.0.0.1", ("'ftp://x'",)),
        (f"http://user:{SECRET}@x", "127.0.0.1", ("URL",)),
        ("http://127.0.0.1:1", "0.0.0.0", ("host 0.0.0.0", "--insecure")),
    ],
)
def test_what_cannot_be_recorded_is_one_line(tmp_path: Path, capsys, upstream, at, named):
    words = ["--out", tmp_path / "log", "--upstream", upstream, "--host", at, "--port", 0]
    assert llmctl("trace", "record", *words) == 2
    error = capsys.readouterr().err
    assert says(error, *named)
    assert SECRET not in error


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
    text = "".join(map(str, range(200)))[:160]
    found = recorded(tmp_path, body(prompt=text), body(prompt=text[:80] + "x" * 80))
    assert [len(row["hash_ids"]) for row in found] == [10, 10]
    assert shared_run(*found) == 5  # 16 bytes are a block
    first = {"role": "system", "content": text}
    chats = [{"messages": [first, {"role": "user", "content": one}]} for one in ("a", "b")]
    found = recorded(tmp_path, *[body(prompt=None) | chat for chat in chats])
    assert shared_run(*found) == 10
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
