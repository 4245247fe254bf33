"""Where the list of replicas comes from, and what happens to it when the source changes."""

import asyncio
from pathlib import Path

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


def read(source: sources.ReplicaSource) -> list[str]:
    return asyncio.run(source.read())


def test_a_file_is_read_again_and_a_bad_one_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "replicas.txt"
    file.write_text("http://a:1/\n\n# none\nhttp://b:2 # two\nhttp://a:1\n")
    source = replica_source(str(file))
    assert read(source) == ["http://a:1", "http://b:2"]
    monkeypatch.setattr(type(source), "every_s", 0.002)
    applied: list[list[str]] = []
    said: list[str] = []

    def apply(urls: list[str]) -> str:
        applied.append(urls)
        return "changed"

    async def follow() -> None:
        task = asyncio.create_task(follow_source(source, apply, said.append))
        await asyncio.sleep(0)
        file.write_text("ftp://c:3\n")
        while not said:
            await asyncio.sleep(0.001)
        file.write_text("http://c:3\n")
        while not applied:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(follow())
    assert applied == [["http://c:3"]]
    assert "the replicas stay as they are" in said[0]
    assert said[-1] == "changed"


def test_all_addresses_of_a_name():
    assert "http://127.0.0.1:8000" in read(replica_source("dns://localhost:8000"))
    with pytest.raises(InputError, match="cannot be resolved"):
        read(replica_source("dns://no-such-name.invalid:8000"))


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
        with pytest.raises(InputError, match="gave no EndpointSlices of here/vllm"):
            read(source)


@pytest.mark.parametrize("text", ["dns://a", "dns://a:0", "k8s://a:1", "s3://x", "dns://a/b:1"])
def test_other_sources_are_refused(text: str):
    with pytest.raises(InputError):
        replica_source(text)


def test_given_urls_are_checked_and_kept_once():
    assert read(GivenReplicas(["http://a:1/", "http://a:1"])) == ["http://a:1"]
    with pytest.raises(InputError):
        GivenReplicas(["a:1"])
