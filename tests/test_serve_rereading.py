"""Files that a running server reads again: which changes it sees, and what stays in force."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from said import says
from test_serve_keys import ANA, BEN, post
from within import with_server

from benchmarks.common.serving import Server, fake_plan
from toolkit.errors import InputError
from toolkit.server.access import read_keys
from toolkit.server.watched import follow, watched_file

NEW = "sk-new-canary"


def in_place(file: Path, text: str) -> None:
    file.write_text(text)


def by_a_new_file(file: Path, text: str) -> None:
    (file.parent / "new").write_text(text)
    (file.parent / "new").replace(file)


def same_length_and_time(file: Path, text: str) -> None:
    before = file.stat()
    file.write_text(text)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def by_a_swapped_link(file: Path, text: str) -> None:
    """Change a file as Kubernetes does: a link that leads through a link to a folder is swapped."""
    folder = file.parent / "..2026"
    folder.mkdir()
    (folder / file.name).write_text(text)
    (file.parent / "..data_tmp").symlink_to(folder.name)
    (file.parent / "..data_tmp").replace(file.parent / "..data")


@pytest.mark.parametrize(
    "write", [in_place, by_a_new_file, same_length_and_time, by_a_swapped_link]
)
def test_a_change_is_seen_once_however_it_is_made(
    tmp_path: Path, write: Callable[[Path, str], None]
):
    (tmp_path / "..old").mkdir()
    (tmp_path / "..old" / "keys").write_text("one")
    (tmp_path / "..data").symlink_to("..old")
    file = tmp_path / "keys"
    file.symlink_to("..data/keys")
    source = watched_file(file, Path.read_text)
    assert (source.value, source.changed()) == ("one", None)
    write(file, "two")
    assert (source.changed(), source.changed()) == ("two", None)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda file: file.write_text("keys: []"), "keys"),
        (lambda file: file.write_text(""), "keys"),
        (Path.unlink, "keys.*No such file"),
        (
            lambda file: (file.write_text(BEN), file.chmod(0o666)),
            "keys",
        ),
    ],
)
def test_a_bad_version_is_reported_and_the_next_good_one_applies(
    tmp_path: Path, spoil: Callable, said: str
):
    file = tmp_path / "keys"
    file.write_text(ANA)
    source = watched_file(file, read_keys)
    spoil(file)
    with pytest.raises(InputError, match=said):
        source.changed()
    assert source.value == (ANA,)
    file.unlink(missing_ok=True)
    file.write_text(BEN)
    assert source.changed() == (BEN,)


@with_server(api_key=ANA)
async def test_a_request_of_a_revoked_key_still_gets_its_answer(http: httpx.AsyncClient):
    running = asyncio.create_task(post(http, ANA, max_tokens=64))
    while not http.driver.running:
        await asyncio.sleep(0)
    assert "1" in http.renew_keys((BEN,))
    assert [(await post(http, key)).status_code for key in (ANA, BEN)] == [401, 200]
    assert (await running).json()["usage"]["completion_tokens"] == 64


def test_changes_are_applied_and_errors_reported(tmp_path: Path):
    file = tmp_path / "number"
    said = asyncio.Queue[str]()
    taken = []

    def number(file: Path) -> int:
        if not file.read_text().isdecimal():
            raise InputError(f"{file.name}: no number")
        return int(file.read_text())

    def take(value: int) -> str:
        taken.append(value)
        return f"now {value}"

    async def test() -> None:
        file.write_text("1")
        source = watched_file(file, number)
        source.every_s = 0.001
        following = asyncio.create_task(follow(source, take, said.put_nowait))
        lines = []
        for text in ("2", "x", "3"):  # the same problem is said once
            by_a_new_file(file, text)
            lines.append(await said.get())
        following.cancel()
        kept = lines.pop(1)
        assert kept.startswith("warning: number: no number")
        assert lines == ["now 2", "now 3"]
        assert taken == [2, 3]

    asyncio.run(test())


@pytest.mark.slow
def test_a_running_server_applies_the_new_file(tmp_path: Path):
    fake_plan(tmp_path)
    file = tmp_path / "keys"
    file.write_text(ANA)
    with Server(tmp_path / "plan.json", "--api-key-file", str(file)) as server:
        assert models_status(server, ANA) == 200
        by_a_new_file(file, NEW)
        while models_status(server, NEW) == 401:
            assert server.process.poll() is None
        assert models_status(server, ANA) == 401
        assert server.end() == 0
    assert says(server.said, "keys", "1")
    assert "canary" not in server.said


def models_status(server: Server, secret: str) -> int:
    return httpx.get(
        f"{server.url}/v1/models", headers={"Authorization": f"Bearer {secret}"}
    ).status_code
