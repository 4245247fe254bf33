"""The status page: access, what it shows and hides, and how it looks in a browser."""

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import httpx
import orders
import pytest
from browser import CONTRAST, chromium, page_of
from hypothesis import given
from hypothesis import strategies as st
from said import says
from within import in_a_loop, within

from benchmarks.common.serving import (
    SETTINGS,
    HandWorkers,
    Server,
    ToyWorkers,
    app_of,
    fake_plan,
    make_driver,
)
from toolkit.cli.main import run
from toolkit.metrics import Served, meets_sla
from toolkit.serve.access import Keyring
from toolkit.serve.driver import Driver
from toolkit.serve.server import Ending
from toolkit.serve.stats import TOKEN_BUCKETS, Histogram, Stats, finer, quantile
from toolkit.serve.status import (
    COLUMNS,
    POINTS_MAX,
    SAMPLE_S,
    WINDOW_POINTS,
    Facts,
    KindFacts,
    MetricHistory,
    Status,
    facts_of,
    gauges,
)

SLA = {
    "ttft_p99_s": 200.0,
    "e2e_mean_s": 500.0,
    "mtpot_p99_s": 100.0,
}  # no busy machine breaks them
ONE_KIND = [KindFacts("toy", "fake", "cpu", 2)]
FACTS = Facts("toy", "slice", {"slice_tokens": 8}, ONE_KIND, SLA, {"ttft_p99_s": 1.5})
KEY = "sk-canary-51c0"
IDLE = gauges(make_driver(HandWorkers()))


@asynccontextmanager
async def client(
    workers: HandWorkers | None = None, *, page: bool = True, api_key: str = "", **settings
):
    """A client of a server with a status page; `.driver` and `.status` on it."""
    driver = make_driver(workers or ToyWorkers())
    driver.stats.sla = SLA
    await driver.start()
    status = Status(driver, FACTS)
    app = app_of(driver, replace(SETTINGS, **settings), Keyring(api_key), status if page else None)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000"
    ) as http:
        http.driver = driver
        http.status = status
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


@in_a_loop
async def test_without_the_page_there_is_no_such_route():
    async with client(page=False) as http:
        assert [(await http.get(path)).status_code for path in ("/", "/status.json")] == [
            404,
            404,
        ]
    async with client(page=False, api_key=KEY) as http:
        assert [(await http.get(path)).status_code for path in ("/", "/status.json")] == [
            401,
            401,
        ]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("localhost:8000", 200),
        ("LOCALHOST.", 200),
        ("10.0.0.7", 200),
        ("rebound.example:8000", 403),
        ("localhost.example", 403),
        ("127.0.0.1.example:8000", 403),
        ("127.0.0.1@rebound.example", 403),
        ("", 200),  # no web page is asked for with it
    ],
)
@with_page()
async def test_a_foreign_host_name_cannot_read_the_page(http: httpx.AsyncClient, host, status):
    for path in ("/", "/status.json"):
        answer = await http.get(path, headers={"host": host})
        assert answer.status_code == status
        assert "access-control-allow-origin" not in answer.headers


@with_page()
async def test_a_refused_request_is_not_within_all_targets(http: httpx.AsyncClient):
    await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
    http.status.history._stats.refusals["the queue is full"] += 3
    http.status.history.sample()
    found = await data(http)
    assert found["attainment"] == 0.25
    assert found["totals"]["refused"] == 3
    point = dict(zip(found["columns"], found["points"][-1], strict=True))
    assert point["attainment"] == 0.25
    assert point["refused_per_s"] > 0


@with_page()
async def test_the_page_shows_totals_and_nothing_of_any_request(http: httpx.AsyncClient):
    asked = {
        "prompt": "a secret text",
        "temperature": 0,
        "max_tokens": 20,
        "user": "end-user-7",
    }
    answer = await http.post("/v1/completions", json=asked, headers={"x-request-id": "my-own-id"})
    http.status.history.sample()
    found = await data(http)
    assert found["totals"]["ended"] == {"length": 1}
    assert (found["totals"]["input_tokens"], found["totals"]["output_tokens"]) == (13, 20)
    point = dict(zip(found["columns"], found["points"][-1], strict=True))
    assert point["output_tokens_per_s"] > 0
    assert 0 < point["ttft_p50_s"] <= point["e2e_p99_s"]
    assert point["attainment"] == found["attainment"] == 1.0
    now = {one["name"]: one["now"] for one in found["targets"]}
    assert now["ttft_p99_s"] <= now["e2e_mean_s"] * 1.3
    assert 0 < now["mtpot_p99_s"] < SLA["mtpot_p99_s"]
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
        http.status.history.sample()
        after = await data(http)
        assert (after["workers"][0]["state"], after["workers"][0]["restarts"]) == ("lost", 1)
        (one,) = after["happenings"]
        assert says(one["text"], "lost", "started again")
        while 1 not in workers.running:
            await asyncio.sleep(0)
        workers.finish(1)
        await post


def test_the_ratio_of_each_worker_is_of_the_last_minute():
    stats = Stats()
    clock = iter(range(10**6))
    history = MetricHistory(
        stats, lambda: gauges(make_driver(HandWorkers(2))), lambda: 2.0 * next(clock)
    )

    def last() -> list[float | None]:
        history.sample()
        return json.loads(bytes(history.points[-1]))[COLUMNS.index("worker_batch_ratios")]

    assert last() == [None, None]
    stats.compared[1].took_s = 3.0
    stats.compared[1].predicted_s = 2.0
    assert last() == [None, 1.5]
    for _ in range(WINDOW_POINTS):
        history.sample()
    assert last() == [None, None]


@with_page()
async def test_a_page_gets_only_new_points(http: httpx.AsyncClient):
    for _ in range(5):
        http.status.history.sample()
    first = await data(http)
    assert (first["first"], len(first["points"])) == (0, 5)
    http.status.history.sample()
    more = await data(http, instance=first["instance"], since=5)
    assert (more["first"], len(more["points"])) == (5, 1)
    for other in (
        {"instance": "another", "since": 5},
        {"instance": first["instance"], "since": "-1"},
        {"since": 5},
    ):
        assert len((await data(http, **other))["points"]) == 6
    assert (await data(http, instance=first["instance"], since=10**9))["points"] == []


@pytest.mark.slow
def test_an_hour_is_kept_and_history_and_answer_are_bounded():
    assert POINTS_MAX * SAMPLE_S == 3600
    stats = Stats()
    clock = iter(range(10**6))
    history = MetricHistory(stats, lambda: IDLE, lambda: 2.0 * next(clock))
    for _ in range(2 * POINTS_MAX):
        stats.count_tokens(1, 0.0, float("nan"), 0.5)
        stats.oom_events += 1
        history.sample()
    assert (len(history.points), history.taken, len(history.incidents)) == (
        POINTS_MAX,
        2 * POINTS_MAX,
        20,
    )
    assert len(b"".join(map(bytes, history.points))) < 200 * POINTS_MAX


def test_percentiles_cover_only_the_window():
    stats = Stats()
    clock = iter(range(10**6))
    history = MetricHistory(stats, lambda: IDLE, lambda: 2.0 * next(clock))
    stats.count_tokens(1, 0.0, float("nan"), 9.0)
    history.sample()
    assert history.recent("ttft_p99_s") == pytest.approx(9.0, rel=0.1)
    for _ in range(WINDOW_POINTS):
        history.sample()
    assert history.recent("ttft_p99_s") is None
    stats.count_tokens(1, 0.0, float("nan"), 0.02)
    history.sample()
    assert history.recent("ttft_max_s") == pytest.approx(0.02, rel=0.1)
    assert history.recent("ttft_mean_s") == pytest.approx(0.02)


@given(
    values=st.lists(st.floats(0.001, 79.0), min_size=1),
    share=st.sampled_from([0.5, 0.95, 0.99, 1.0]),
)
def test_a_percentile_is_accurate_to_a_tenth(values, share):
    histogram = Histogram(TOKEN_BUCKETS, finer(TOKEN_BUCKETS))
    for value in values:
        histogram.observe(value)
    exact = sorted(values)[max(0, -(-int(share * 1000) * len(values) // 1000) - 1)]
    assert quantile(histogram.bounds, histogram.counts, share) == pytest.approx(exact, rel=0.101)


@given(values=st.lists(st.floats(0, 200)))
def test_prometheus_sees_the_same_buckets_as_before(values):
    fine = Histogram(TOKEN_BUCKETS, finer(TOKEN_BUCKETS))
    coarse = Histogram(TOKEN_BUCKETS)
    for value in values:
        fine.observe(value)
        coarse.observe(value)
    assert fine.cumulative() == coarse.cumulative()


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
    stats.count_end("stop", arrival, first, last, tokens, gap)
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
    assert facts_of(plan, "/home/user/models/my-llama").model == "my-llama"
    assert facts_of(plan, "meta/llama").model == "meta/llama"


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
    orders = []

    def launch(config, make, on_ready) -> dict[str, int]:
        orders.append(config)
        on_ready("http://h:1")
        return {}

    monkeypatch.setattr("toolkit.serve.launch.launch", launch)
    fake_plan(tmp_path)
    with pytest.raises(SystemExit):
        run(["serve", str(tmp_path / "plan.json"), *options])
    assert orders[0].settings.status_page is shown
    assert orders[0].ending == Ending()
    printed = capsys.readouterr().out
    assert ("status page: http://h:1/" in printed) is shown
    assert KEY not in printed
    assert all(len(line) <= 80 for line in printed.splitlines())


class LiveServer:
    """A server in a thread of this process, which keeps its port when it is started again."""

    def __init__(self, facts: Facts = FACTS) -> None:
        self.port = 0
        self.driver = None
        self.facts = facts

    @contextmanager
    def running(self) -> Iterator[Driver]:
        from toolkit.serve.http import HttpServer
        from toolkit.serve.server import listen

        started = threading.Event()

        async def serve() -> None:
            driver = make_driver(ToyWorkers())
            driver.stats.sla = SLA
            await driver.start()
            self.driver = driver
            self.status = Status(driver, self.facts)
            server = HttpServer(app_of(driver, status=self.status))
            self.ending = asyncio.Event()
            self.loop = asyncio.get_running_loop()
            with listen("127.0.0.1", self.port) as listener:
                self.port = listener.getsockname()[1]
                await server.start(listener)
                started.set()
                await self.ending.wait()
                await server.stop(5.0)
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

    def sample(self) -> None:
        done = threading.Event()
        self.loop.call_soon_threadsafe(lambda: (self.status.history.sample(), done.set()))
        assert done.wait(60)


def shows(page, selector: str, text: str | re.Pattern[str]) -> None:
    """Wait until it is true. A script in the page is not possible: its policy forbids it."""
    from playwright.sync_api import expect

    expect(page.locator(selector).first).to_have_text(text, timeout=60_000)


SERIES = 22  # numbers above charts
SERVED = "#totals td:nth-child(2)"


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with chromium() as one:
        yield one


@pytest.mark.slow
def test_values_appear_change_under_load_and_come_back_after_a_restart(browser):
    server = LiveServer()
    with server.running():
        url = f"http://127.0.0.1:{server.port}/"
        with page_of(browser, url) as (page, seen):
            shows(page, "#state", "ready")
            server.load(2)
            server.sample()
            shows(page, SERVED, "2")
            numbers = page.locator(".figures b").all_text_contents()
            assert len(numbers) == SERIES
            assert sum(number != "–" for number in numbers) >= SERIES - 2
            server.load(3)
            server.sample()
            shows(page, SERVED, "5")
            assert (
                page.locator("#charts path.s0").first.get_attribute("d").count("L") == 1
            )  # two points, one line
            assert page.locator("#workers .spark path.s0").first.get_attribute("d").startswith("M")
            assert re.fullmatch(
                r"\d+\.\d\d ×", page.locator("#workers td:nth-child(5)").first.text_content()
            )
            assert page.title() == "toy · llmctl"
            assert seen.complaints == []
            assert seen.hosts == {f"127.0.0.1:{server.port}"}
            server.end()
            shows(page, "#state", "no answer")
            with_restart(server, page)


@pytest.mark.slow
def test_each_kind_of_a_fleet_is_named(browser):
    kinds = [
        KindFacts("h200", "rebatch", "NVIDIA H200", 1),
        KindFacts("a100", "rebatch", "NVIDIA A100-SXM4-80GB", 1),
    ]
    server = LiveServer(replace(FACTS, kinds=kinds))
    with server.running():
        options = {"viewport": {"width": 360, "height": 800}}
        with page_of(browser, f"http://127.0.0.1:{server.port}/", **options) as (page, seen):
            shows(page, "#state", "ready")
            assert says(
                page.locator("#facts").text_content(), "2 workers", "1 of h200", "1 of a100"
            )
            assert page.locator("#workers td:nth-child(1)").all_text_contents() == [
                "0 h200",
                "1 a100",
            ]
            assert page.evaluate("document.documentElement.scrollWidth") == 360
            assert seen.complaints == []


def test_kinds_are_listed_in_the_order_of_their_workers(tmp_path: Path):
    kinds = facts_of(orders.fleet(tmp_path), "toy").kinds
    assert [(one.name, one.device, one.workers) for one in kinds] == [
        ("test", "NVIDIA H200", 1),
        ("small", "NVIDIA A100-SXM4-80GB", 2),
        ("cpus", "none", 2),
    ]


def with_restart(server: LiveServer, page) -> None:
    """Another server on the same port: the page shows it, and forgets the first."""
    while server.loop.is_running():
        pass
    with server.running():
        server.sample()
        shows(page, "#state", "ready")
        shows(page, SERVED, "0")


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), [("light", 360), ("dark", 1600)])
def test_the_page_fits_and_is_readable(browser, scheme, width):
    server = LiveServer()
    with server.running():
        server.load(2)
        server.sample()
        options = {
            "viewport": {"width": width, "height": 800},
            "color_scheme": scheme,
            "reduced_motion": "reduce",
        }
        with page_of(browser, f"http://127.0.0.1:{server.port}/", **options) as (page, seen):
            shows(page, SERVED, "2")
            assert page.evaluate("document.documentElement.scrollWidth") == width
            assert page.evaluate(CONTRAST) == []
            assert seen.complaints == []


@pytest.mark.slow
def test_charts_work_with_the_keyboard(browser):
    server = LiveServer()
    with server.running():
        for count in (1, 2):
            server.load(count)
            server.sample()
        with page_of(browser, f"http://127.0.0.1:{server.port}/") as (page, _):
            shows(page, SERVED, "3")
            page.keyboard.press("Tab")
            assert page.evaluate("document.activeElement.value") == "300"
            page.keyboard.press("Tab")
            now = page.evaluate("document.activeElement.getAttribute('aria-label')")
            assert now.startswith("Requests per second: served ")
            page.keyboard.press("ArrowLeft")
            assert re.search(r"\d\d:\d\d:\d\d, \d+ s ago", page.locator("#when").text_content())
            assert page.evaluate("document.activeElement.getAttribute('aria-label')") != now
            page.keyboard.press("Escape")
            assert page.evaluate("document.activeElement.getAttribute('aria-label')") == now


@pytest.mark.slow
def test_the_range_is_chosen_and_the_axis_has_clock_times(browser):
    server = LiveServer()
    with server.running():
        live_for(server, 3000.0)
        with page_of(browser, f"http://127.0.0.1:{server.port}/", timezone_id="Asia/Kolkata") as (
            page,
            seen,
        ):
            shows(page, "#when", "The last 5 min")
            dots = {}
            for name, least, most, step in (
                ("5 min", 4, 5, 1),
                ("15 min", 2, 3, 5),
                ("1 h", 3, 4, 15),
            ):
                page.get_by_text(name, exact=True).click()
                shows(page, "#when", f"The last {name}")
                marks = page.locator(".axis").first.locator("span").all_text_contents()
                assert least <= len(marks) <= most
                minutes = [int(mark[-2:]) for mark in marks]
                assert all(re.fullmatch(r"[0-2]\d:[0-5]\d", mark) for mark in marks)
                assert all((b - a) % 60 == step for a, b in pairwise(minutes))
                assert all(minute % step == 0 for minute in minutes), (
                    "round times, where the zone is half an hour off too"
                )
                drawn = page.locator("#charts path.s0").first.get_attribute("d")
                dots[name] = drawn.count("L") + 1
                assert float(re.match(r"M(-?[\d.]+)", drawn)[1]) == pytest.approx(
                    {"1 h": 50}.get(name, 0), abs=2
                )
            assert dots["5 min"] == pytest.approx(150, abs=2)
            assert dots["15 min"] == pytest.approx(225, abs=2), "two points in each"
            assert dots["1 h"] == pytest.approx(250, abs=2), (
                "of 1,500 points: a chart is not crowded"
            )
            assert page.locator(".chart:visible").count() == 10
            page.keyboard.press("ArrowLeft")
            shows(page, "#when", "The last 15 min")
            assert seen.complaints == []


def live_for(server: LiveServer, seconds: float) -> None:
    """Make the server this old, with a request every half minute."""
    driver = server.driver
    driver._start_s -= seconds
    stats = Stats()
    clock = [0.0]
    server.status.history = history = MetricHistory(stats, lambda: gauges(driver), lambda: clock[0])
    while clock[0] + SAMPLE_S < driver.now_s:
        clock[0] += SAMPLE_S
        if clock[0] % 30 == 0:
            stats.count_tokens(1, clock[0], float("nan"), 0.1 + clock[0] / 1e4)
            stats.count_end("stop", clock[0] - 3, clock[0] - 2, clock[0], 5, 0.5)
        history.sample()


@pytest.mark.slow
def test_a_tile_without_data_says_what_is_missing(browser):
    server = LiveServer(
        replace(
            FACTS, sla={}, predicted={}, parameters={"min_interval_s": 2.8622024, "eager": True}
        )
    )
    with server.running(), page_of(browser, f"http://127.0.0.1:{server.port}/") as (page, _):
        shows(page, "#state", "ready")
        assert page.locator(".chart:visible").count() == 9, "there are no targets to be within"
        empty = page.locator(".empty:visible").all_text_contents()
        assert len(empty) == 9
        assert all(says(each, "2 s") for each in empty)
        server.sample()
        shows(page, ".chart:nth-child(6) .empty", "No request ended in this range.")
        empty = page.locator(".empty:visible").all_text_contents()
        assert len(empty) == 5
        assert all("in this range" in each for each in empty)
        assert not page.locator(".bare .plot:visible").count()
        assert page.locator("#targets").text_content() == "The recipe has no targets."
        assert page.locator("#policy").text_content() == "policyslicemin_interval_s2.86 seagertrue"


@pytest.mark.slow
def test_targets_say_kept_or_broken_in_words(browser):
    server = LiveServer(
        replace(FACTS, sla={"ttft_p99_s": 1e-9, "e2e_mean_s": 500.0, "mtpot_p99_s": 1.0})
    )
    with server.running(), page_of(browser, f"http://127.0.0.1:{server.port}/") as (page, _):
        server.load(1)
        server.sample()
        shows(page, SERVED, "1")
        now = page.locator("#targets td:nth-child(3)").all_text_contents()
        assert re.fullmatch(r"[\d.]+ [mµ]?s ✗ broken", now[0])
        assert re.fullmatch(r"[\d.]+ [mµ]?s ✓ kept", now[1])
        assert re.fullmatch(r"[\d.]+ [mµ]?s ✓ kept", now[2])


NUMBERS = re.compile(r"\d[\d,]*\.?\d*")


@pytest.mark.slow
def test_values_have_three_digits_and_units(browser):
    server = LiveServer()
    with server.running():
        live_for(server, 300.0)
        with page_of(browser, f"http://127.0.0.1:{server.port}/") as (page, _):
            shows(page, "#when", "The last 5 min")
            assert page.locator(".figures b").first.text_content() == "0.0333/s"
            texts = page.locator(".figures b").all_text_contents()
            digits = [
                re.sub(r"^0+|[,.]", "", one).lstrip("0")
                for text in texts
                for one in NUMBERS.findall(text)
            ]
            assert digits
            assert all(len(one.rstrip("0")) <= 3 for one in digits), texts
            assert all(
                re.search(r"(/s|%|s|×)$", text) for text in texts[:5] + texts[7:] if text != "–"
            ), texts


def test_the_data_has_the_columns_that_the_page_reads():
    page = (
        Path(__file__)
        .parent.parent.joinpath("templates", "status.html")
        .read_text(encoding="utf-8")
    )
    names = set(re.findall(r'\["([a-z]\w+_?[a-z]+)", "', page)) | {
        f"{name}_{share}_s"
        for name in re.findall(r'percentiles\("(\w+)"\)', page)
        for share in ("p50", "p95", "p99")
    }
    assert len(names) == SERIES
    assert names <= set(COLUMNS)


@pytest.mark.slow
def test_a_real_server_serves_the_page(tmp_path: Path):
    fake_plan(tmp_path)
    with Server(tmp_path / "plan.json", LLMCTL_API_KEY=KEY) as server:
        assert server.ready["status_page"] == f"{server.url}/"
        answer = httpx.get(f"{server.url}/status.json")
        assert answer.json()["state"] == "ready"
        assert KEY not in answer.text + httpx.get(f"{server.url}/").text
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
