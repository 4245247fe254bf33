"""TLS: the server's own certificate, those of servers that are asked, and one clear line where one
is not believed.
"""

import asyncio
import json
import os
import ssl
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path

import httpx
import pytest
from certificates import listening, needs_openssl, self_signed
from commands import llmctl
from sse_server import sse_server

from benchmarks.common.serving import Server, fake_plan
from toolkit.endpoints.target import find_target
from toolkit.endpoints.upstream import Upstream, UpstreamError
from toolkit.errors import InputError

pytestmark = [pytest.mark.slow, needs_openssl]
NOT_TRUSTED = "self-signed certificate"


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return self_signed(tmp_path_factory.mktemp("ours"), "ours")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate that is good for another host."""
    return self_signed(tmp_path_factory.mktemp("other"), "other", "DNS:other.example")


def ended(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    return llmctl(*words), capsys.readouterr().err


def test_the_server_speaks_tls(tmp_path: Path, ours, monkeypatch):
    fake_plan(tmp_path)
    options = ["--ssl-certfile", str(ours[0]), "--ssl-keyfile", str(ours[1])]
    with Server(tmp_path / "plan.json", *options) as server:
        assert server.url.startswith("https://127.0.0.1:")
        body = {"prompt": "a", "max_tokens": 20, "stream": True, "ignore_eos": True}
        trusted = ssl.create_default_context(cafile=ours[0])
        answer = httpx.post(f"{server.url}/v1/completions", json=body, verify=trusted, timeout=60)
        assert answer.text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{server.url}/ready")
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http{server.url.removeprefix('https')}/ready")
        assert server.end() == 0
    assert server.said.splitlines()[-1] == "ended; requests finished: 1"
    assert "Traceback" not in server.said


def test_what_is_no_certificate_is_one_line(tmp_path: Path, ours, other, capsys):
    fake_plan(tmp_path)
    empty = tmp_path / "empty"
    empty.write_text("")
    certificate = ours[0]
    for certfile, keyfile, said in (
        (certificate, other[1], "other.key: "),
        (certificate, None, "ours.pem: "),
        (empty, ours[1], "empty"),
        (certificate, tmp_path, "Is a directory"),
        ("nowhere", None, "nowhere: "),
        (None, ours[1], "--ssl-keyfile without a certificate"),
    ):
        given = {"--ssl-certfile": certfile, "--ssl-keyfile": keyfile}
        words = [word for option, file in given.items() if file for word in (option, str(file))]
        code, err = ended(capsys, "serve", str(tmp_path / "plan.json"), *words)
        assert (code, err.count("error: ")) == (2, 1)
        assert said in err


def test_a_server_that_is_measured_has_to_be_believed(ours, monkeypatch):
    with sse_server(tls=listening(*ours)) as server:
        with pytest.raises(InputError) as caught:
            find_target(server.url)
        assert caught.value.message.startswith(f"{server.url}: ")
        assert caught.value.message.endswith(NOT_TRUSTED)
        assert "SSL_CERT_FILE" in caught.value.hint
        monkeypatch.setenv("SSL_CERT_FILE", str(ours[0]))
        assert find_target(server.url).model == "tiny"


def test_the_recorder_verifies_its_upstream(tmp_path: Path, ours, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(ours[0]))
    out = tmp_path / "log.jsonl"
    with sse_server(tls=listening(*ours)) as server:
        command = [sys.executable, "-m", "toolkit", "trace", "record", "--upstream", server.url]
        command += ["--port", "0", "--out", str(out), "--json"]
        trusting = os.environ | {"SSL_CERT_FILE": str(ours[0])}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=trusting) as process:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            body = {"prompt": "a", "max_tokens": 3, "stream": False}
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=240).status_code == 200
            process.terminate()
    assert process.returncode == 0
    assert json.loads(out.read_text())["output_length"] == 3


def test_a_bad_upstream_certificate_is_told_to_clients(ours):
    async def ask(url: str) -> str:
        async with aclosing(Upstream(url, 5.0)) as upstream:
            with pytest.raises(UpstreamError) as caught:
                await upstream.send("GET", b"/v1/models", [], b"")
            return str(caught.value)

    with sse_server(tls=listening(*ours)) as server:
        assert "not trusted" in asyncio.run(ask(server.url))
