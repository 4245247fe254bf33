"""API keys with limits: when a request gets 429, when it may retry, and what counts."""

import asyncio
import hashlib
import math
from pathlib import Path
from typing import Any

import httpx
import pytest
from commands import llmctl
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from said import says
from within import in_a_loop, with_server

from benchmarks.common.serving import Server, client, fake_plan, turns
from toolkit.errors import InputError
from toolkit.serve.access import MAX_KEYS, ApiKey, Bucket, read_keys
from toolkit.serve.driver import Driver

ANA = "sk-ana-canary"
BEN = "sk-ben-canary"


def key(name: str, secret: str, **limits: int) -> ApiKey:
    return ApiKey(name=name, sha256=hashlib.sha256(secret.encode()).hexdigest(), **limits)


async def post(
    http: httpx.AsyncClient, secret: str = ANA, path: str = "/v1/completions", **body
) -> httpx.Response:
    body = {"prompt": "hello", "max_tokens": 4, "temperature": 0} | body
    return await http.post(path, json=body, headers={"Authorization": f"Bearer {secret}"})


class Clock:
    """The server's clock, which a test sets."""

    now_s = 0.0


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(Driver, "now_s", property(lambda _: made.now_s))
    return made


async def scrape(http: httpx.AsyncClient, secret: str = ANA) -> dict[tuple[str, ...], float]:
    text = (await http.get("/metrics", headers={"Authorization": f"Bearer {secret}"})).text
    return {
        (
            sample.name,
            *(sample.labels[label] for label in ("key", "limit") if label in sample.labels),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "key" in sample.labels
    }


@with_server(keys=[key("ana", ANA), key("ben", BEN)])
async def test_only_known_keys_are_accepted(http: httpx.AsyncClient):
    for secret, status in (
        (ANA, 200),
        (BEN, 200),
        ("sk-other", 401),
        (key("x", ANA).sha256, 401),
    ):
        assert (await post(http, secret)).status_code == status
    assert (await http.get("/v1/models")).status_code == 401
    assert (await http.get("/health")).status_code == 200


@with_server(keys=[key("ana", ANA, requests_per_minute=2), key("ben", BEN, requests_per_minute=2)])
async def test_a_key_over_its_limit_waits_and_others_do_not(http: httpx.AsyncClient, clock):
    assert [(await post(http)).status_code for _ in range(3)] == [200, 200, 429]
    assert (await post(http, BEN)).status_code == 200
    refused = await post(http)
    assert refused.headers["retry-after"] == "30"
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert refused.json()["error"]["type"] == "requests"
    assert says(refused.json()["error"]["message"], "'ana'", "2", "30s")
    clock.now_s += 29.0
    assert (await post(http)).status_code == 429
    clock.now_s += 1.0
    assert (await post(http)).status_code == 200


@with_server(keys=[key("ana", ANA, requests_per_minute=1)])
async def test_requests_are_refused_before_their_body_is_read(http: httpx.AsyncClient):
    async def endless():
        raise AssertionError("the body was read")
        yield b""

    assert (await post(http)).status_code == 200
    headers = {"Authorization": f"Bearer {ANA}", "Content-Type": "application/json"}
    assert (
        await http.post("/v1/completions", content=endless(), headers=headers)
    ).status_code == 429


@with_server(keys=[key("ana", ANA, requests_per_minute=1)])
async def test_reading_is_free(http: httpx.AsyncClient):
    for path in ("/v1/models", "/metrics", "/version") * 3:
        assert (await http.get(path, headers={"Authorization": f"Bearer {ANA}"})).status_code == 200
    assert (await post(http)).status_code == 200


@with_server(keys=[key("ana", ANA, tokens_per_minute=100)], hands=1)
async def test_tokens_are_reserved_and_unused_ones_returned(http: httpx.AsyncClient):
    first = asyncio.create_task(post(http, max_tokens=50))  # 5 + 50 of 100
    await turns(60)
    refused = await post(http, max_tokens=50)
    assert refused.status_code == 429
    assert refused.json()["error"]["type"] == "tokens"
    assert (
        refused.headers["retry-after"] == "3"
    )  # 45 of 50 are there, 100 come in a minute; the prompt is unread
    assert refused.headers["x-ratelimit-remaining-tokens"] == "45"
    http.workers.finish(steps=4)  # ended by the worker, so the client leaves
    first.cancel()
    await turns(60)
    answer = await post(http, max_tokens=1, prompt="a" * 600)
    assert answer.status_code == 400  # too long for the model: costs a request, and no tokens
    assert answer.headers["x-ratelimit-remaining-tokens"] == "91"  # 5 + 4 were used


@with_server(keys=[key("ana", ANA, tokens_per_minute=100)])
async def test_all_prompts_and_choices_count(http: httpx.AsyncClient):
    answer = await post(http, prompt=["ab", "cd"], n=2, max_tokens=4)
    assert answer.json()["usage"]["total_tokens"] == 4 + 16
    assert answer.headers["x-ratelimit-remaining-tokens"] == str(100 - 4 - 16)
    assert (await scrape(http))["llmctl_key_tokens_total", "ana"] == 20


@with_server(keys=[key("ana", ANA, tokens_per_minute=100)])
async def test_a_request_over_the_whole_limit_says_not_to_retry(http: httpx.AsyncClient):
    for body in (
        {"max_tokens": 120},
        {"max_tokens": 30, "n": 4},
        {"prompt": "a" * 90, "max_tokens": 20},
    ):
        refused = await post(http, **body)
        assert (refused.status_code, refused.headers["x-should-retry"]) == (429, "false")
        assert "retry-after" not in refused.headers


@with_server(keys=[key("ana", ANA, max_concurrent=3)], hands=1)
async def test_concurrent_choices_are_bounded_and_released(http: httpx.AsyncClient):
    running = asyncio.create_task(post(http, n=2, max_tokens=8))
    await turns(60)
    refused = await post(http, n=2)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert says(refused.text, "at most 3", "asks for 2")
    assert (await post(http, n=4)).headers["x-should-retry"] == "false"
    found = await scrape(http)
    assert found["llmctl_key_running", "ana"] == 2
    assert found["llmctl_key_limited_total", "ana", "concurrent"] == 2
    http.workers.finish()
    assert (await running).status_code == 200
    assert (await scrape(http))["llmctl_key_running", "ana"] == 0


@with_server(keys=[key("ana", ANA, max_concurrent=1, tokens_per_minute=60)], hands=1)
async def test_a_disconnect_releases_choices_and_tokens(http: httpx.AsyncClient):
    leaving = asyncio.create_task(post(http, max_tokens=50, stream=True))
    await turns(60)
    leaving.cancel()
    await turns(60)
    assert (await scrape(http))["llmctl_key_running", "ana"] == 0
    again = asyncio.create_task(post(http, max_tokens=50))
    await turns(60)
    assert (await scrape(http))["llmctl_key_running", "ana"] == 1
    again.cancel()
    await turns(60)


@with_server(keys=[key("ana", ANA, requests_per_minute=1)])
async def test_requests_refused_by_the_server_do_not_count(http: httpx.AsyncClient):
    http.driver.state = "draining"
    for _ in range(3):
        assert (await post(http)).status_code == 503
    http.driver.state = "ready"
    assert (await post(http)).status_code == 200
    assert (await post(http)).status_code == 429


@with_server(keys=[key("ana", ANA, requests_per_minute=60, tokens_per_minute=100), key("ben", BEN)])
async def test_responses_carry_openais_rate_limit_headers(http: httpx.AsyncClient):
    headers = (await post(http, stream=True)).headers
    assert {name: value for name, value in headers.items() if name.startswith("x-ratelimit")} == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "91",
        "x-ratelimit-reset-tokens": "6s",
    }
    assert not any(name.startswith("x-ratelimit") for name in (await post(http, BEN)).headers)


@with_server(keys=[key("ana", ANA, requests_per_minute=1), key("ben", BEN)])
async def test_metrics_show_names_but_no_keys(http: httpx.AsyncClient):
    for secret in (ANA, ANA, BEN, "sk-other"):
        await post(http, secret)
    found = await scrape(http)
    assert found["llmctl_key_requests_total", "ana"] == 1
    assert found["llmctl_key_limited_total", "ana", "requests"] == 1
    assert found["llmctl_key_requests_total", "ben"] == 1
    assert {labels[1] for labels in found} == {"ana", "ben"}


@given(
    per_minute=st.integers(1, 1000),
    asked=st.lists(st.tuples(st.floats(0, 30), st.integers(1, 1000)), max_size=40),
)
def test_a_key_gets_at_most_twice_its_limit_in_a_minute(per_minute, asked):
    bucket = Bucket(per_minute)
    now_s = 0.0
    taken = []
    for pause_s, amount in asked:
        now_s += pause_s
        wait_s = bucket.wait_s(amount, now_s)
        if math.isfinite(wait_s):
            now_s += wait_s
            bucket.take(amount, now_s)
            taken.append((now_s, amount))
    for begin_s, _ in taken:
        assert (
            sum(amount for at_s, amount in taken if 0 <= at_s - begin_s < 60)
            <= 2 * per_minute + 1e-6
        )
    if taken:
        assert sum(amount for _, amount in taken) <= per_minute * (1 + now_s / 60) + 1e-6


def test_a_clock_that_goes_back_fills_no_bucket():
    bucket = Bucket(60)
    bucket.take(60, 1000.0)
    assert bucket.wait_s(1, 0.0) == 1.0
    assert bucket.wait_s(1, 1.0) == 0.0


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
        (f"keys:\n{ENTRY}    requests_per_minute: 0\n", ("keys[0].requests_per_minute: 0",)),
        (f"keys:\n{ENTRY}    request_per_minute: 6\n", ("'requests_per_minute'",)),
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


@pytest.mark.slow
def test_an_api_key_and_a_keys_file_together_are_refused(tmp_path: Path, capsys):
    fake_plan(tmp_path)
    (tmp_path / "keys.yaml").write_text(f"keys:\n{ENTRY}")
    assert (
        llmctl(
            "serve", tmp_path / "plan.json", "--api-keys", tmp_path / "keys.yaml", "--api-key", ANA
        )
        == 2
    )
    assert says(capsys.readouterr().err, "--api-keys", "--api-key")


@pytest.mark.slow
def test_openais_client_obeys_retry_after_and_should_retry(tmp_path: Path, monkeypatch):
    import openai  # here: it takes half a second, and only slow tests need it

    fake_plan(tmp_path)
    limits = "    requests_per_minute: 60\n    tokens_per_minute: 2000\n"
    (tmp_path / "keys.yaml").write_text(f"keys:\n{ENTRY}{limits}")
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    with (
        Server(tmp_path / "plan.json", "--api-keys", str(tmp_path / "keys.yaml")) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=ANA, max_retries=1) as one,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="sk-wrong") as wrong,
    ):
        model = server.ready["model"]
        with pytest.raises(openai.RateLimitError) as caught:
            one.completions.create(model=model, prompt="a", max_tokens=256, n=16)
        assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "tokens")
        assert waited == []
        with pytest.raises(openai.RateLimitError, match="60"):
            ask_often(one, model)
        assert waited == [1.0]
        with pytest.raises(openai.AuthenticationError):
            wrong.models.list()


def ask_often(one: Any, model: str) -> None:
    for _ in range(1000):
        one.completions.create(model=model, prompt="a", max_tokens=1)


@in_a_loop
async def test_only_an_urgent_key_may_ask_for_priority():
    keys = (key("ana", ANA), key("ben", BEN, urgent=True))
    async with client(keys=keys) as http:
        refused = await post(http, ANA, priority=-1)
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            403,
            "priority_not_allowed",
        )
        assert (await post(http, ANA, priority=5)).status_code == 200
        assert (await post(http, BEN, priority=-1)).status_code == 200
    async with client(api_key=ANA) as http:
        assert (await post(http, ANA, priority=-1)).status_code == 200
