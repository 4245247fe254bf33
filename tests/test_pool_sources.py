"""Where the list of replicas comes from, and what happens to it when the source changes."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from toolkit.errors import InputError
from toolkit.files.io import write_text
from toolkit.server.watched import Watched, follow, given_replicas, listed_replicas


@asynccontextmanager
async def following(
    source: Watched[list[str]], apply: Callable[[list[str]], str], say: Callable[[str], object]
) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(follow(source, apply, say))
    async with asyncio.timeout(20):
        yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def read(source: Watched[list[str]]) -> list[str]:
    source.changed()
    return source.value


def test_a_file_is_read_again_and_a_bad_one_changes_nothing(tmp_path: Path):
    file = tmp_path / "replicas.txt"
    file.write_text("http://a:1/\n\n# none\nhttp://b:2 # two\nhttp://a:1\n")
    source = listed_replicas(str(file))
    source.every_s = 0.002
    assert read(source) == ["http://a:1", "http://b:2"]
    applied: list[list[str]] = []
    said: list[str] = []

    def apply(urls: list[str]) -> str:
        applied.append(urls)
        return "changed"

    async def change() -> None:
        async with following(source, apply, said.append):
            await asyncio.sleep(0)
            write_text(file, "ftp://c:3\n")  # at once: a thread may read the file meanwhile
            while not said:
                await asyncio.sleep(0.001)
            write_text(file, "http://c:3\n")
            while not applied:
                await asyncio.sleep(0.001)

    asyncio.run(change())
    assert applied == [["http://c:3"]]
    assert "'ftp://c:3'" in said[0]
    assert said[-1] == "changed"


def test_all_addresses_of_a_name():
    assert "http://127.0.0.1:8000" in read(listed_replicas("dns://localhost:8000"))
    with pytest.raises(InputError, match=r"no-such-name\.invalid"):
        read(listed_replicas("dns://no-such-name.invalid:8000"))


@pytest.mark.parametrize("text", ["dns://a", "dns://a:0", "s3://x", "dns://a/b:1"])
def test_other_sources_are_refused(text: str):
    with pytest.raises(InputError):
        listed_replicas(text)


def test_given_urls_are_checked_and_kept_once():
    assert read(given_replicas(["http://a:1/", "http://a:1"])) == ["http://a:1"]
    with pytest.raises(InputError):
        given_replicas(["a:1"])


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
    said = "is not" if kind == "binary" else r"replicas\.txt"
    with pytest.raises(InputError, match=said):
        read(listed_replicas(str(file)))


@pytest.mark.parametrize("name", ["a..b", f"{'a' * 70}.b"])
def test_what_is_no_name_is_one_line(name: str):
    with pytest.raises(InputError, match=name):
        read(listed_replicas(f"dns://{name}:80"))


@pytest.mark.parametrize(
    "url", [f"http://a:1{'0' * 400}", "http://a:99999", "http://a:-1", "http://a:0", "http://a..b"]
)
def test_a_port_or_a_host_that_cannot_be_is_refused(url: str):
    with pytest.raises(InputError, match=f"'{url[:200]}"):
        given_replicas([url])


SPELLINGS = ("http://127.0.0.1:8001", "http://127.0.0.1:8001/", "HTTP://127.0.0.1:8001/v1")


def test_three_spellings_are_one_replica(tmp_path: Path):
    file = tmp_path / "replicas.txt"
    file.write_text("\n".join(SPELLINGS))
    for source in (given_replicas(SPELLINGS), listed_replicas(str(file))):
        assert read(source) == [SPELLINGS[0]]
    assert read(given_replicas(SPELLINGS[::-1])) == [SPELLINGS[0]]
    assert read(given_replicas(["http://A.example:80/v1/", "http://a.EXAMPLE"])) == [
        "http://a.example"
    ]


def test_what_is_not_the_same_server_is_not_one():
    several = ["http://a:1", "http://a:2", "https://a:1", "http://a:1/b", "http://b:1"]
    several += ["http://localhost.a:1", "http://localhost:8001", "http://127.0.0.1:8001"]
    assert read(given_replicas(several)) == several
