"""API keys: accepted and refused ones, and the file of keys."""

from pathlib import Path

import httpx
import pytest
from commands import llmctl
from said import says
from within import with_server

from benchmarks.common.serving import fake_plan
from toolkit.errors import InputError
from toolkit.server.access import read_keys

ANA = "sk-ana-canary"
BEN = "sk-ben-canary"


async def post(http: httpx.AsyncClient, secret: str = ANA, **body: object) -> httpx.Response:
    body = {"prompt": "hello", "max_tokens": 4, "temperature": 0} | body
    headers = {"Authorization": f"Bearer {secret}"}
    return await http.post("/v1/completions", json=body, headers=headers)


@with_server(api_key=ANA)
async def test_only_known_keys_are_accepted(http: httpx.AsyncClient):
    assert (await post(http, ANA)).status_code == 200
    assert (await post(http, BEN)).status_code == 401
    assert (await http.get("/v1/models")).status_code == 401
    assert (await http.get("/health")).status_code == 200


def test_a_file_has_a_key_on_each_line(tmp_path: Path):
    path = tmp_path / "keys"
    path.write_text(f"{ANA}\n")
    assert read_keys(path) == (ANA,)
    path.write_text(f"# of the team\n{ANA}\n{BEN}\n\n{ANA}\n")
    assert read_keys(path) == (ANA, BEN)


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"\xff\xfe", b"a key", f"keys:\n  - name: {ANA}\n".encode()]
)
def test_a_file_of_something_else_is_refused_without_a_secret(tmp_path: Path, content: bytes):
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_keys(path)
    shown = f"{caught.value.message} {caught.value.hint}"
    assert says(shown, "keys")
    assert ANA not in shown


def test_a_world_writable_keys_file_is_refused(tmp_path: Path):
    path = tmp_path / "keys"
    path.write_text(ANA)
    path.chmod(0o666)
    with pytest.raises(InputError) as caught:
        read_keys(path)
    assert "chmod" in caught.value.hint


@pytest.mark.slow
def test_an_api_key_and_a_keys_file_together_are_refused(tmp_path: Path, capsys):
    fake_plan(tmp_path)
    (tmp_path / "keys").write_text(ANA)
    given = ["--api-key-file", tmp_path / "keys", "--api-key", ANA]
    assert llmctl("serve", tmp_path / "plan.json", *given) == 2
    assert says(capsys.readouterr().err, "--api-key-file", "--api-key")
