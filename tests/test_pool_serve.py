"""`llmctl serve` as a front: before replicas that run, and before those that it starts."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import test_serve_vllm
from browser import CONTRAST, chromium, page_of
from commands import llmctl
from orders import changed
from said import says
from test_serve_status import shows

from benchmarks.common.standin import MODEL, StandIn, answer_of
from toolkit.files.io import read_file, write_file
from toolkit.files.plan import Plan
from toolkit.files.recipe import RouterSpec

pytestmark = pytest.mark.slow

BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 30, "ignore_eos": True}


@contextmanager
def standins(*servers: StandIn) -> Iterator[asyncio.AbstractEventLoop]:
    """Stand-in replicas on a thread of their own."""
    loop = asyncio.new_event_loop()
    started = threading.Event()

    async def begin() -> None:
        for server in servers:
            await server.start()
        started.set()

    def work() -> None:
        loop.run_until_complete(begin())
        loop.run_forever()
        for server in servers:
            server.kill()
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(10)
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def plan_for(folder: Path, workers: int = 1) -> Path:
    path = test_serve_vllm.plan_for(folder)
    write_file(read_file(Plan, path).model_copy(update={"workers": workers}), path)
    return path


def test_a_front_before_servers_that_run_already(tmp_path: Path):
    first = StandIn(token_s=0.02)
    second = StandIn(token_s=0.02)
    with standins(first, second) as loop:
        listed = tmp_path / "replicas.txt"
        listed.write_text(f"{first.url}\n{second.url}  # the second\n")
        words = ["--replica", listed, "--served-model-name", MODEL, "--router", "least-requests"]
        words += ["--request-log", tmp_path / "requests.jsonl"]
        with test_serve_vllm.served(plan_for(tmp_path), *map(str, words)) as server:
            answer = httpx.post(f"{server.url}/v1/completions", json=BODY).json()
            assert answer["choices"][0]["text"] == answer_of(BODY)
            text = ""
            killed = False
            with httpx.stream(
                "POST", f"{server.url}/v1/completions", json=BODY | {"stream": True}
            ) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
                    if len(text) == 5 and not killed:
                        killed = True
                        for each in (first, second):
                            if any(c.task and not c.task.done() for c in each.connections):
                                loop.call_soon_threadsafe(each.kill)
            assert text == answer_of(BODY)
            assert server.end() == 0, server.said
    assert server.ready["router"] == "least-requests"
    logged = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert [each["output_length"] for each in logged] == [30, 30]


def test_near_the_limit_of_descriptors_no_client_is_reset(tmp_path: Path):
    """26 clients at once, idle connections to twelve replicas, and 188 descriptors."""
    servers = [StandIn(first_s=0.05) for _ in range(12)]

    async def ask_all(base: str) -> list[int]:
        limits = httpx.Limits(max_connections=26)
        statuses = []
        async with httpx.AsyncClient(base_url=base, limits=limits, timeout=30) as http:
            for session in range(24):  # each goes to one replica
                named = {"x-session-id": str(session)}
                asking = [http.post("/v1/completions", json=BODY, headers=named) for _ in range(26)]
                statuses += [answer.status_code for answer in await asyncio.gather(*asking)]
        return statuses

    with standins(*servers):
        words = [word for each in servers for word in ("--replica", each.url)]
        words += ["--served-model-name", MODEL, "--router", "session"]
        command = [sys.executable, "-m", "toolkit", "serve", str(plan_for(tmp_path))]
        command += ["--port", "0", "--json", *words]
        limited = ["sh", "-c", 'ulimit -n 188; exec "$@"', "sh", *command]
        with subprocess.Popen(
            limited, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as server:
            assert server.stdout is not None
            ready = json.loads(server.stdout.readline())
            up = 0
            while up < len(servers):
                listed = httpx.get(f"{ready['url']}/replicas").json()["replicas"]
                up = sum(each["state"] == "up" for each in listed)
            statuses = asyncio.run(ask_all(ready["url"]))
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=30)
    assert sum(bool(each.served.total()) for each in servers) >= 9
    assert set(statuses) == {200}


def test_several_workers_are_servers_behind_a_front(tmp_path: Path):
    path = plan_for(tmp_path, workers=2)
    router = RouterSpec(name="session")
    write_file(changed(read_file(Plan, path), settings__replica_router=router), path)
    with test_serve_vllm.served(path, "--served-model-name", MODEL) as server:
        assert server.ready["router"] == "session"
        shown = httpx.get(f"{server.url}/replicas").json()["replicas"]
        assert [each["state"] for each in shown] == ["up", "up"]
        asked = {"model": MODEL, "prompt": [1, 2], "max_tokens": 3, "stream": False}
        for _ in range(4):
            answer = httpx.post(f"{server.url}/v1/completions", json=asked)
            assert answer.json()["usage"]["completion_tokens"] == 3
        assert server.end() == 0, server.said
    assert says(server.said, "2 servers")


def test_one_that_cannot_load_ends_the_front(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    path = test_serve_vllm.plan_for(tmp_path, source="dies")
    write_file(read_file(Plan, path).model_copy(update={"workers": 2}), path)
    assert "the fake dies" in test_serve_vllm.refused(capfd, path, code=3)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--router", "least-request"], "'least-request'"),
        (["--replica", "dns://x"], "--replica dns://x: "),
        (["--replica", "missing.txt"], "missing.txt: "),
        (["--replica", "ftp://x"], "--replica ftp://x: "),
        (["--router", "by-law"], "'by-law'"),
        (["--admission", "targets"], "--admission targets: "),
        (["--replica", "http://a:1", "--replica", "x"], "'x'"),
        (["--event-log", "events.jsonl"], "--event-log"),
        (["--live"], "start each of them with --live"),
        (["--ray", "local"], "--ray local: "),
    ],
)
def test_wrong_input_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
):
    given = (
        words if words[0].startswith("--replica") else [*words, "--replica", "http://127.0.0.1:9"]
    )
    assert llmctl("serve", plan_for(tmp_path), "--port", "0", *given) == 2
    assert expected in " ".join(capsys.readouterr().err.split())


def test_the_status_page_shows_replicas_and_is_readable(tmp_path: Path):
    first = StandIn()
    second = StandIn()
    with standins(first, second) as loop, chromium() as browser:
        words = ["--replica", first.url, "--replica", second.url, "--router", "llm-d"]
        words += ["--served-model-name", MODEL]
        with test_serve_vllm.served(plan_for(tmp_path), *words) as server:
            url = server.ready["status_page"]
            for _ in range(4):
                httpx.post(f"{server.url}/v1/completions", json=BODY)
            data = httpx.get(f"{url}status.json")
            with page_of(browser, url, viewport={"width": 360, "height": 800}) as (page, seen):
                shows(page, "#state", "ready")
                shows(page, "#t-workers", "Replicas")
                shows(page, "#totals td:nth-child(2)", "4")
                shows(page, "#workers tbody tr:nth-child(2) td:nth-child(2)", "up")
                shows(page, "#policy td:nth-child(2)", "llm-d")
                assert page.evaluate("document.documentElement.scrollWidth") == 360
                assert page.evaluate(CONTRAST) == []
                loop.call_soon_threadsafe(second.kill)
                shows(page, "#workers tbody tr:nth-child(2) td:nth-child(2)", "down")
                assert seen.complaints == []
            assert server.end() == 0, server.said
    shown = data.json()
    assert (shown["router"], shown["knobs"]["prefix"]) == ("llm-d", 3.0)


def test_a_server_that_llmctl_does_not_start_is_served_through_a_front(tmp_path: Path):
    path = plan_for(tmp_path)
    plan = json.loads(path.read_text())
    plan["recipe"]["engine"] = {"name": "openai", "url": "http://127.0.0.1:9"}
    path.write_text(json.dumps(plan))
    with (
        standins(standin := StandIn(speaks_ids=False)),
        test_serve_vllm.served(path, "--replica", standin.url) as server,
    ):
        url = server.url
        answer = httpx.post(f"{url}/v1/completions", json=BODY).json()
        models = httpx.get(f"{url}/v1/models").json()["data"]
        assert server.end() == 0, server.said
    assert answer["choices"][0]["text"] == answer_of(BODY)
    assert models[0]["id"] == MODEL
