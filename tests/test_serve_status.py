"""The status page: access, what it shows and hides, and how it looks in a browser."""

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from browser import CONTRAST, chromium, page_of
from hypothesis import given
from hypothesis import strategies as st
from toy_server import OPTIONS, HandWorkers, ToyWorkers, app_of, make_driver
from within import in_a_loop, within

from benchmarks.common.serving import fake_plan
from toolkit.cli.main import run
from toolkit.metrics import Served, meets_sla
from toolkit.server.driver import Driver
from toolkit.server.options import one_key
from toolkit.server.stats import RequestTimes, Stats
from toolkit.server.status import facts_of

SLA = {
    "ttft_p99_s": 200.0,
    "e2e_mean_s": 500.0,
    "mtpot_p99_s": 100.0,
}  # no busy machine breaks them
FACTS = {
    "model": "toy",
    "engine": "fake",
    "device": "cpu",
    "policy": "slice",
    "parameters": {"slice_tokens": 8},
    "predicted": {"ttft_p99_s": 1.5},
}
KEY = "sk-canary-51c0"


@asynccontextmanager
async def client(
    workers: HandWorkers | None = None, *, page: bool = True, api_key: str = "", **settings
):
    """A client of a server with a status page; `.driver` on it."""
    driver = make_driver(workers or ToyWorkers())
    driver.stats.sla = SLA
    await driver.start()
    options = replace(OPTIONS, keys=one_key(api_key), status_page=page, **settings)
    app = app_of(driver, options, FACTS)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000"
    ) as http:
        http.driver = driver
        yield http
    await driver.stop()


async def data(http: httpx.AsyncClient, **query) -> dict:
    answer = await http.get("/status.json", params=query)
    assert answer.status_code == 200
    return answer.json()


with_page = within(client, "http")


@with_page(api_key=KEY)
async def test_the_page_needs_no_key_and_other_routes_still_do(http: httpx.AsyncClient):
    for path in ("/", "/status.json"):
        answer = await http.get(path)
        assert answer.status_code == 200
        assert KEY not in answer.text
    for path in ("/v1/models", "/metrics", "/status", "/index.html"):
        assert (await http.get(path)).status_code == 401


@pytest.mark.parametrize(("api_key", "status"), [("", 404), (KEY, 401)])
def test_without_the_page_there_is_no_such_route(api_key: str, status: int):
    async def main() -> None:
        async with client(page=False, api_key=api_key) as http:
            for path in ("/", "/status.json"):
                assert (await http.get(path)).status_code == status

    asyncio.run(main())


@with_page()
async def test_a_foreign_host_name_cannot_read_the_page(http: httpx.AsyncClient):
    for host, status in (("localhost:8000", 200), ("rebound.example:8000", 403)):
        for path in ("/", "/status.json"):
            answer = await http.get(path, headers={"host": host})
            assert answer.status_code == status
            assert "access-control-allow-origin" not in answer.headers


@with_page()
async def test_a_refused_request_is_not_within_all_targets(http: httpx.AsyncClient):
    await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
    http.driver.stats.refusals["the queue is full"] += 3
    found = await data(http)
    totals = found["totals"]
    assert (totals["served"], totals["within_targets"], totals["refused"]) == (1, 1, 3)


@with_page()
async def test_the_page_shows_totals_and_nothing_of_any_request(http: httpx.AsyncClient):
    asked = {
        "prompt": "a secret text",
        "temperature": 0,
        "max_tokens": 20,
        "user": "end-user-7",
    }
    answer = await http.post("/v1/completions", json=asked, headers={"x-request-id": "my-own-id"})
    found = await data(http)
    assert found["totals"]["ended"] == {"length": 1}
    assert (found["totals"]["input_tokens"], found["totals"]["output_tokens"]) == (13, 20)
    assert (found["totals"]["served"], found["totals"]["within_targets"]) == (1, 1)
    for name in ("ttft", "e2e", "mtpot"):
        assert sum(found["latencies"][name]["counts"]) == 1
    assert 0 < found["latencies"]["ttft"]["total"] <= found["latencies"]["e2e"]["total"]
    text = json.dumps(found)
    text_made = answer.json()["choices"][0]["text"]
    assert not any(
        word in text
        for word in ("secret", text_made, "end-user-7", "my-own-id", answer.json()["id"])
    )


@in_a_loop
async def test_workers_are_shown_separately():
    workers = HandWorkers(2)
    async with client(workers) as http:
        post = asyncio.create_task(
            http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 4})
        )
        while 0 not in workers.running:
            await asyncio.sleep(0)
        before = (await data(http))["workers"]
        assert [(one["state"], one["rows"]) for one in before] == [("running", 1), ("idle", 0)]
        assert before[0]["kv_tokens"] > 0 == before[1]["kv_tokens"]
        workers.crash(0)
        after = await data(http)
        assert (after["workers"][0]["state"], after["workers"][0]["restarts"]) == ("lost", 1)
        while 1 not in workers.running:
            await asyncio.sleep(0)
        workers.finish(1)
        await post


@in_a_loop
async def test_the_ratio_of_each_worker_is_of_all_its_batches():
    async with client(HandWorkers(2)) as http:
        http.driver.stats.batch_s[1] = 3.0
        http.driver.stats.predicted_batch_s[1] = 2.0
        assert [one["batch_ratio"] for one in (await data(http))["workers"]] == [None, 1.5]


REQUEST = st.tuples(
    st.floats(0, 10), st.floats(0, 10), st.floats(0, 10), st.integers(1, 50), st.floats(0, 3)
)


@given(request=REQUEST, limits=st.lists(st.floats(0.01, 10), min_size=5, max_size=5))
def test_within_targets_agrees_with_the_summaries(request, limits):
    import numpy as np

    arrival, ttft, rest, tokens, gap = request
    first = arrival + ttft
    last = first + (rest if tokens > 1 else 0.0)  # the only token is the first and the last
    keys = ("ttft_p99_s", "tpot_mean_s", "itl_p50_s", "mtpot_max_s", "e2e_p95_s")
    sla = dict(zip(keys, limits, strict=True))
    stats = Stats(sla=sla)
    stats.count_end("stop", RequestTimes(arrival, first, last, gap), tokens)
    one = [np.array([value]) for value in (arrival, first, last, tokens, gap, True)]
    tpot = (last - first) / max(tokens - 1, 1)
    if (
        min(
            abs(a - b)
            for a, b in zip((first - arrival, tpot, gap, gap, last - arrival), limits, strict=True)
        )
        > 1e-9
    ):
        assert stats.within_targets == meets_sla(Served(*one), sla).sum()


def test_a_model_folder_is_shown_by_its_last_part(tmp_path: Path):
    plan = fake_plan(tmp_path)
    assert facts_of(plan, "/home/user/models/my-llama")["model"] == "my-llama"
    assert facts_of(plan, "meta/llama")["model"] == "meta/llama"


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ([], True),
        (["--no-status-page"], False),
        (["--host", "0.0.0.0", "--api-key", KEY], False),
        (["--host", "0.0.0.0", "--api-key", KEY, "--status-page"], True),
    ],
)
def test_the_page_is_on_by_default_only_on_loopback(
    tmp_path: Path, monkeypatch, capsys, options, shown
):
    told = []

    @contextmanager
    def opened(options, backend) -> Iterator[SimpleNamespace]:
        told.append(options)
        yield SimpleNamespace(run=lambda on_ready: on_ready("http://h:1") or {})

    monkeypatch.setattr("toolkit.server.server.Server.open", opened)
    fake_plan(tmp_path)
    with pytest.raises(SystemExit):
        run(["serve", str(tmp_path / "plan.json"), *options])
    assert told[0].status_page is shown
    assert (told[0].notice_s, told[0].timeout_s) == (0.0, 30.0)
    printed = capsys.readouterr().out
    assert (" http://h:1/\n" in printed) is shown
    assert KEY not in printed
    assert all(len(line) <= 80 for line in printed.splitlines())


class LiveServer:
    """A server in a thread of this process, which keeps its port when it is started again."""

    def __init__(self, sla: dict[str, float]) -> None:
        self.port = 0
        self.driver = None
        self.sla = sla

    @contextmanager
    def running(self) -> Iterator[Driver]:
        from toolkit.server.process import listen
        from toolkit.server.server import HttpServer

        started = threading.Event()

        async def serve() -> None:
            driver = make_driver(ToyWorkers())
            driver.stats.sla = self.sla
            await driver.start()
            self.driver = driver
            app = app_of(driver, replace(OPTIONS, status_page=True), FACTS)
            server = HttpServer(app)
            self.ending = asyncio.Event()
            self.loop = asyncio.get_running_loop()
            with listen("127.0.0.1", self.port) as listener:
                self.port = listener.getsockname()[1]
                await server.start(listener)
                started.set()
                await self.ending.wait()
                await server.stop()
            await driver.stop()

        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        assert started.wait(60)
        try:
            yield self.driver
        finally:
            self.end()
            thread.join(60)

    def end(self) -> None:
        with suppress(RuntimeError):  # it has ended already
            self.loop.call_soon_threadsafe(self.ending.set)

    def load(self, count: int) -> None:
        for _ in range(count):
            body = {"prompt": "hello", "max_tokens": 20, "temperature": 0}
            assert (
                httpx.post(
                    f"http://127.0.0.1:{self.port}/v1/completions", json=body, timeout=60
                ).status_code
                == 200
            )


def shows(page, selector: str, text: str | re.Pattern[str]) -> None:
    """Wait until it is true. A script in the page is not possible: its policy forbids it."""
    from playwright.sync_api import expect

    expect(page.locator(selector).first).to_have_text(text, timeout=60_000)


def texts_of(page, selector: str) -> list[str]:
    return page.locator(selector).all_text_contents()


SERVED = "#totals td:nth-child(2)"


@pytest.fixture
def browser() -> Iterator:
    with chromium() as one:
        yield one


@pytest.mark.slow
def test_values_appear_change_under_load_and_come_back_after_a_restart(browser):
    sla = {"ttft_p99_s": 1e-9, "e2e_mean_s": 500.0, "mtpot_p99_s": 1.0}
    server = LiveServer(sla)
    with server.running():
        url = f"http://127.0.0.1:{server.port}/"
        with page_of(browser, url, reduced_motion="reduce") as (page, seen):
            shows(page, "#state", "ready")
            assert set(texts_of(page, "#latencies td.n")) == {"–"}
            server.load(2)
            shows(page, SERVED, "2")
            latencies = texts_of(page, "#latencies td.n")
            assert len(latencies) == 15
            assert all(re.fullmatch(r"[\d.]+ ([mµ]?s)", one) for one in latencies)
            for text in (*latencies, *texts_of(page, "#rates td.n")[1:]):
                for number in re.findall(r"\d[\d,]*\.?\d*", text):
                    digits = re.sub(r"[,.]", "", number).lstrip("0")
                    assert len(digits.rstrip("0")) <= 3, text
            targets = texts_of(page, "#targets td:nth-child(3)")[:3]  # the last row is a share
            assert [one.split()[-1] for one in targets] == ["broken", "kept", "kept"]
            assert texts_of(page, "#targets td:nth-child(3)")[3] == "0 %"
            for scheme, width in (("light", 360), ("dark", 1600)):
                page.emulate_media(color_scheme=scheme)
                page.set_viewport_size({"width": width, "height": 800})
                assert page.evaluate("document.documentElement.scrollWidth") == width
                assert page.evaluate(CONTRAST) == []
            server.load(3)
            shows(page, SERVED, "5")
            assert re.fullmatch(r"\d+\.\d\d ×", texts_of(page, "#workers td:nth-child(5)")[0])
            assert seen.complaints == []
            assert seen.hosts == {f"127.0.0.1:{server.port}"}
            server.end()
            shows(page, "#state", "no answer")
            while server.loop.is_running():
                pass
            with server.running():  # on the same port: the page forgets the first
                shows(page, "#state", "ready")
                shows(page, SERVED, "0")
