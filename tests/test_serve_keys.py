"""API keys: accepted and refused keys, the file of keys, and priority."""

import hashlib
from pathlib import Path

import httpx
import pytest
from commands import llmctl
from prometheus_client.parser import text_string_to_metric_families
from said import says
from toy_server import client
from within import in_a_loop, with_server

from benchmarks.common.serving import fake_plan
from toolkit.errors import InputError
from toolkit.server.access import MAX_KEYS, ApiKey, read_callers, read_keys

ANA = "sk-ana-canary"
BEN = "sk-ben-canary"


def key(name: str, secret: str, *, urgent: bool = False) -> ApiKey:
    return ApiKey(name=name, sha256=hashlib.sha256(secret.encode()).hexdigest(), urgent=urgent)


async def post(http: httpx.AsyncClient, secret: str = ANA, **body: object) -> httpx.Response:
    body = {"prompt": "hello", "max_tokens": 4, "temperature": 0} | body
    headers = {"Authorization": f"Bearer {secret}"}
    return await http.post("/v1/completions", json=body, headers=headers)


async def requests_of_keys(http: httpx.AsyncClient, secret: str = ANA) -> dict[str, float]:
    """The requests of each key."""
    text = (await http.get("/metrics", headers={"Authorization": f"Bearer {secret}"})).text
    return {
        sample.labels["key"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "llmctl_key_requests_total"
    }


@with_server(keys=[key("ana", ANA), key("ben", BEN)])
async def test_only_known_keys_are_accepted_and_counted_by_their_names(http: httpx.AsyncClient):
    refused = ("sk-other", key("x", ANA).sha256)
    for secret in (ANA, ANA, BEN, *refused):
        assert (await post(http, secret)).status_code == (401 if secret in refused else 200)
    assert (await http.get("/v1/models")).status_code == 401
    assert await requests_of_keys(http) == {"ana": 2, "ben": 1}


DIGEST = key("x", ANA).sha256
ENTRY = f"  - name: ana\n    sha256: {DIGEST}\n"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", ("keys.yaml",)),
        ("keys: []", ("keys", "1")),
        (f"keys:\n  - name: ana\n    sha256: {ANA}\n", ("keys[0].sha256", "64")),
        (
            f"keys:\n  - name: ana\n    sha256: {hashlib.sha256(b'').hexdigest()}\n",
            ("keys[0].sha256", "sha256 of empty input"),
        ),
        (f"keys:\n  - name: Ana!\n    sha256: {DIGEST}\n", ("keys[0].name: 'Ana!'",)),
        (f"keys:\n  - name: ana\n    key: {ANA}\n", ("keys[0].key",)),
        (f"keys:\n{ENTRY}{ENTRY}", ("'ana'",)),
        (f"keys:\n{ENTRY}{ENTRY.replace('ana', 'ben')}", ("'ana'", "'ben'")),
        (f"keys:\n{ENTRY}    urgent: 1\n", ("keys[0].urgent: 1",)),
        (f"keys:\n{ENTRY}    urgen: true\n", ("'urgent'",)),
        (
            "keys:\n" + "".join(ENTRY.replace("ana", f"n{k}") for k in range(MAX_KEYS + 1)),
            ("keys", str(MAX_KEYS)),
        ),
    ],
)
def test_errors_of_a_keys_file_show_no_secret(tmp_path: Path, text, named):
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_keys(path)
    shown = f"{caught.value.message} {caught.value.hint}"
    assert says(shown, *named)
    assert ANA not in shown


def test_a_world_writable_keys_file_is_refused(tmp_path: Path):
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys:\n{ENTRY}")
    assert [one.name for one in read_keys(path)] == ["ana"]
    path.chmod(0o666)
    with pytest.raises(InputError, match=r"keys\.yaml") as caught:
        read_keys(path)
    assert "chmod" in caught.value.hint


def test_a_file_holds_one_key_or_several(tmp_path: Path):
    path = tmp_path / "keys"
    path.write_text(f"{ANA}\n")
    assert read_callers(path) == (ANA, ())
    path.write_text(f"keys:\n{ENTRY}")
    key, keys = read_callers(path)
    assert (key, [one.name for one in keys]) == ("", ["ana"])


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"sk-a sk-b", b"keys:", b'{"keys":[]}', b"\xff\xfe"]
)
def test_a_file_without_a_key_is_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(InputError):
        read_callers(path)


@pytest.mark.slow
def test_an_api_key_and_a_keys_file_together_are_refused(tmp_path: Path, capsys):
    fake_plan(tmp_path)
    (tmp_path / "keys.yaml").write_text(f"keys:\n{ENTRY}")
    given = ["--api-key-file", tmp_path / "keys.yaml", "--api-key", ANA]
    assert llmctl("serve", tmp_path / "plan.json", *given) == 2
    assert says(capsys.readouterr().err, "--api-key-file", "--api-key")


@in_a_loop
async def test_only_an_urgent_key_may_ask_for_priority():
    keys = (key("ana", ANA), key("ben", BEN, urgent=True))
    async with client(keys=keys) as http:
        refused = await post(http, ANA, priority=-1)
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "priority_not_allowed"
        assert (await post(http, ANA, priority=5)).status_code == 200
        assert (await post(http, BEN, priority=-1)).status_code == 200
    async with client(api_key=ANA) as http:
        assert (await post(http, ANA, priority=-1)).status_code == 200
