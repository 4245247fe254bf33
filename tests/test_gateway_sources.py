"""Where the list of replicas comes from, and what happens to it when the source changes."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sse_server import sse_server

from toolkit.errors import InputError
from toolkit.gateway import sources
from toolkit.gateway.sources import (
    GivenReplicas,
    SlicedReplicas,
    follow_source,
    replica_source,
)

SLICES = {
    "items": [
        {
            "endpoints": [
                {"addresses": ["10.0.0.1"], "conditions": {"ready": True}},
                {"addresses": ["10.0.0.2"], "conditions": {"ready": False}},
                {"addresses": ["10.0.0.3"], "conditions": {"terminating": True}},
                {"addresses": ["fd00::1"]},
            ]
        },
        {"endpoints": None},
    ]
}


@asynccontextmanager
async def following(
    source: sources.ReplicaSource, apply: Callable[[list[str]], str], say: Callable[[str], object]
) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(follow_source(source, apply, say))
    async with asyncio.timeout(20):
        yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def read(source: sources.ReplicaSource) -> list[str]:
    return asyncio.run(source.read())


def test_a_file_is_read_again_and_a_bad_one_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "replicas.txt"
    file.write_text("http://a:1/\n\n# none\nhttp://b:2 # two\nhttp://a:1\n")
    source = replica_source([str(file)])
    assert read(source) == ["http://a:1", "http://b:2"]
    monkeypatch.setattr(sources, "FILE_EVERY_S", 0.002)
    applied: list[list[str]] = []
    said: list[str] = []

    def apply(urls: list[str]) -> str:
        applied.append(urls)
        return "changed"

    async def follow() -> None:
        async with following(source, apply, said.append):
            await asyncio.sleep(0)
            file.write_text("ftp://c:3\n")
            while not said:
                await asyncio.sleep(0.001)
            file.write_text("http://c:3\n")
            while not applied:
                await asyncio.sleep(0.001)

    asyncio.run(follow())
    assert applied == [["http://c:3"]]
    assert "'ftp://c:3'" in said[0]
    assert said[-1] == "changed"


def test_all_addresses_of_a_name():
    assert "http://127.0.0.1:8000" in read(replica_source(["dns://localhost:8000"]))
    with pytest.raises(InputError, match=r"no-such-name\.invalid"):
        read(replica_source(["dns://no-such-name.invalid:8000"]))


def test_the_endpoints_of_a_service_without_those_that_end(tmp_path: Path):
    (tmp_path / "token").write_text("secret\n")
    with sse_server(models=SLICES) as server:
        source = SlicedReplicas("here", "vllm", 8000, api=server.url, account=tmp_path)
        assert read(source) == [
            "http://10.0.0.1:8000",
            "http://10.0.0.2:8000",
            "http://[fd00::1]:8000",
        ]
    with sse_server(models={"kind": "Status"}) as server:
        source = SlicedReplicas("here", "vllm", 8000, api=server.url, account=tmp_path)
        with pytest.raises(InputError, match=r"EndpointSlices.*here/vllm"):
            read(source)


@pytest.mark.parametrize("text", ["dns://a", "dns://a:0", "k8s://a:1", "s3://x", "dns://a/b:1"])
def test_other_sources_are_refused(text: str):
    with pytest.raises(InputError):
        replica_source([text])


def test_given_urls_are_checked_and_kept_once():
    assert read(GivenReplicas(["http://a:1/", "http://a:1"])) == ["http://a:1"]
    with pytest.raises(InputError):
        GivenReplicas(["a:1"])


def slice_of(version: int, *endpoints: tuple[str, bool, bool]) -> dict[str, Any]:
    """An EndpointSlice; an endpoint is (address, serving, terminating)."""
    found = [
        {"addresses": [address], "conditions": {"serving": serving, "terminating": terminating}}
        for address, serving, terminating in endpoints
    ]
    return {"metadata": {"name": "vllm-x", "resourceVersion": str(version)}, "endpoints": found}


def event(kind: str, content: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": content}).encode() + b"\n"


class ApiServer:
    """A stand-in API server: answers each request with the next of its scripted answers."""

    def __init__(self, *answers: tuple[int, list[bytes]]) -> None:
        self.answers = list(answers)
        self.asked = list[str]()
        self.tokens = set[str]()
        self.url = ""
        self.read = asyncio.Event()  # what came before a connection breaks off is read

    async def __aenter__(self) -> "ApiServer":
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):  # also where the test's loop ends first
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.asked.append(head.partition(" HTTP")[0].partition("=kubernetes.io%2F")[2])
            self.tokens |= {
                line for line in head.splitlines() if line.lower().startswith("authoriz")
            }
            status, pieces = self.answers.pop(0) if self.answers else (200, [b"wait"])
            writer.write(f"HTTP/1.1 {status} X\r\nConnection: close\r\n".encode())
            writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
            for piece in pieces:
                if piece == b"cut":
                    await self.read.wait()
                    writer.transport.abort()
                    return
                if piece == b"wait":  # a watch without news
                    await reader.read()
                    break
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                await writer.drain()
            writer.write(b"0\r\n\r\n")


def listed(version: int, *endpoints: tuple[str, bool, bool]) -> tuple[int, list[bytes]]:
    items = [slice_of(version, *endpoints)]
    return 200, [
        json.dumps({"metadata": {"resourceVersion": str(version)}, "items": items}).encode()
    ]


def test_endpoints_are_watched_and_listed_again_only_where_the_version_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "token").write_text("secret\n")
    monkeypatch.setattr(sources, "PAUSE_S", 0.001)
    one = ("10.0.0.1", True, False)
    two = ("10.0.0.2", True, False)
    ends = ("10.0.0.1", True, True)
    ended = ("10.0.0.1", False, True)
    changed = event("MODIFIED", slice_of(12, one, two))
    answers = [
        (500, [b"no"]),
        listed(10, one),
        # an event in two pieces, a bookmark, and a connection that breaks off
        (200, [changed[:30], changed[30:], event("BOOKMARK", slice_of(15)), b"cut"]),
        (200, [event("MODIFIED", slice_of(16, ends, two))]),  # the API server ends the watch
        (200, [event("ERROR", {"kind": "Status", "code": 410, "metadata": {}})]),
        (410, []),
        listed(30, ends),  # every endpoint ends, and one still serves
        (410, []),
        listed(40, ended, two),
        (200, [event("DELETED", slice_of(41, ended, two)), b"wait"]),
    ]
    answers[5:6] = [listed(20, two)]
    answers[6:6] = [(410, [])]
    applied: list[list[str]] = []
    said: list[str] = []

    async def follow() -> list[str]:
        def apply(urls: list[str]) -> str:
            applied.append([url[7:-5] for url in urls])
            server.read.set()
            return "changed"

        async with ApiServer(*answers) as server:
            source = SlicedReplicas("here", "vllm", 8000, api=server.url, account=tmp_path)
            with pytest.raises(InputError, match="500"):
                await source.read()
            async with following(source, apply, said.append):
                while [] not in applied:
                    await asyncio.sleep(0.001)
        assert server.tokens == {"authorization: Bearer secret"}
        return server.asked

    asked = asyncio.run(follow())
    assert applied == [
        ["10.0.0.1", "10.0.0.2"],
        ["10.0.0.2"],
        ["10.0.0.1"],
        ["10.0.0.2"],
        [],
    ]
    versions = [each.rpartition("resourceVersion=")[2] if "watch" in each else "" for each in asked]
    assert versions == ["", "", "10", "15", "16", "", "20", "", "30", "", "40"]
    assert "allowWatchBookmarks=true" in asked[2]


def test_several_lists_have_kinds_and_one_that_changes_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sources, "FILE_EVERY_S", 0.002)
    fast = tmp_path / "fast.txt"
    mixed = tmp_path / "mixed.txt"
    fast.write_text("http://a:1\n")
    mixed.write_text("slow=http://b:2/\nhttp://c:3\n")
    source = replica_source([f"fast={fast}", str(mixed)])
    assert read(source) == ["fast=http://a:1", "slow=http://b:2", "http://c:3"]
    applied: list[list[str]] = []

    async def follow() -> None:
        async with following(source, lambda all_: applied.append(all_) or "", print):
            await asyncio.sleep(0.01)
            mixed.write_text("slow=http://d:4\n")
            while not applied:
                await asyncio.sleep(0.001)

    asyncio.run(follow())
    assert applied[-1] == ["fast=http://a:1", "slow=http://d:4"]
    given = sources.SeveralSources([("a", GivenReplicas(["http://a:1"]))])
    assert asyncio.run(given.wait()) is False


@pytest.mark.parametrize(
    "line",
    [
        b'{"type":"MODIFIED","object":{"metadata":{"name":"\xff"}}}\n',
        b'{"type":' + b"[" * 50_000 + b"\n",
        b"nothing\n",
        b'{"type":"MODIFIED","object":{"endpoints":[{"addresses":["a b\\n"]}]}}\n',
        b'{"type":"MODIFIED","object":{"endpoints":[{"addresses":[""]}]}}\n',
    ],
    ids=range(5),
)
def test_an_odd_change_ends_no_watch(line: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources, "PAUSE_S", 0.001)
    monkeypatch.setattr(sources, "PAUSE_MAX_S", 0.002)
    one = ("10.0.0.1", True, False)
    two = ("10.0.0.2", True, False)
    answers = [listed(10, one), (200, [line, b"cut"]), (410, []), listed(11, one, two)]
    applied: list[list[str]] = []

    def apply(urls: list[str]) -> str:
        for url in urls:  # as a pool does
            sources.Upstream(url, 1.0)
        applied.append(urls)
        return ""

    async def follow() -> None:
        async with ApiServer(*answers) as server:
            server.read.set()
            source = SlicedReplicas("here", "vllm", 8000, api=server.url, account=tmp_path)
            async with following(source, apply, lambda _: None) as task:
                while not applied or len(applied[-1]) < 2:
                    assert not task.done(), task.exception()
                    await asyncio.sleep(0.001)

    asyncio.run(follow())
    assert applied[-1] == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]


@pytest.mark.parametrize("kind", ["empty", "comments", "pipe", "folder", "binary", "long"])
def test_a_file_that_lists_no_replicas_is_refused(kind: str, tmp_path: Path):
    file = tmp_path / "replicas.txt"
    match kind:
        case "pipe":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
        case _:
            contents = {"empty": b"", "comments": b"# none\n", "binary": b"\xff\xfe"}
            file.write_bytes(contents.get(kind, b"http://a:1\n" * 200_000))
    with pytest.raises(InputError, match=r"replicas\.txt"):
        read(replica_source([str(file)]))


@pytest.mark.parametrize("name", ["a..b", f"{'a' * 70}.b"])
def test_what_is_no_name_is_one_line(name: str):
    with pytest.raises(InputError, match=name):
        read(replica_source([f"dns://{name}:80"]))


@pytest.mark.parametrize(
    "url", [f"http://a:1{'0' * 400}", "http://a:99999", "http://a:-1", "http://a:0", "http://a..b"]
)
def test_a_port_or_a_host_that_cannot_be_is_refused(url: str):
    with pytest.raises(InputError, match=f"'{url[:200]}"):
        GivenReplicas([url])


SPELLINGS = ("http://127.0.0.1:8001", "http://localhost:8001/", "HTTP://127.0.0.1:8001/v1")


def test_three_spellings_are_one_replica(tmp_path: Path):
    file = tmp_path / "replicas.txt"
    file.write_text("\n".join(SPELLINGS))
    for source in (GivenReplicas(SPELLINGS), replica_source([str(file)])):
        assert read(source) == [SPELLINGS[0]]
    assert read(GivenReplicas(SPELLINGS[::-1])) == [SPELLINGS[0]]
    assert read(GivenReplicas(["http://A.example:80/v1/", "http://a.EXAMPLE"])) == [
        "http://a.example"
    ]


def test_what_is_not_the_same_server_is_not_one():
    several = ["http://a:1", "http://a:2", "https://a:1", "http://a:1/b", "http://b:1"]
    several += ["http://localhost.a:1", "http://localhost:8001", "http://[::1]:8001"]
    assert read(GivenReplicas(several)) == several
