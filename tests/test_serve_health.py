"""Health, readiness and metrics of a server in every state."""

import asyncio
import re
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from toy_server import HandWorkers, app_of, make_driver, turns
from within import with_server

from toolkit.errors import EngineError
from toolkit.server.metrics import worker_states
from toolkit.server.stats import Histogram
from toolkit.workers.protocol import WorkerLost


def test_a_loading_server_is_healthy_and_not_ready():
    driver = make_driver(HandWorkers())
    backend = app_of(driver).backend
    assert backend.failure == ""
    assert backend.state == "loading"
    assert not any(worker.alive for worker in worker_states(driver))


@with_server()
async def test_a_leaving_server_is_healthy_and_not_ready(http: httpx.AsyncClient):
    for path in ("/health", "/ready"):
        assert (await http.get(path)).status_code == 200
        assert (await http.head(path)).status_code == 200
    http.app.leaving = True
    ready = await http.get("/ready")
    assert (ready.status_code, ready.json()) == (503, {"status": "leaving"})
    assert (await http.get("/health")).status_code == 200
    assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 200
    http.driver.error = EngineError("no worker is left")
    assert (await http.get("/health")).status_code == 503
    http.driver.error = ValueError("a bug")
    assert (await http.get("/health")).status_code == 503


async def begun(http: httpx.AsyncClient, **more: object) -> asyncio.Task[httpx.Response]:
    """A request of which the batch runs."""
    body = {"prompt": "a", "max_tokens": 8} | more
    asking = asyncio.create_task(http.post("/v1/completions", json=body))
    await turns(60)
    return asking


@with_server(hands=2)
async def test_without_a_living_worker_it_is_healthy_and_not_ready(http: httpx.AsyncClient):
    asking = await begun(http)
    (worker,) = http.workers.running
    http.workers.crash(worker)
    assert (await http.get("/ready")).status_code == 200
    await turns()
    http.workers.finish(1 - worker)
    await asking
    http.workers.on_event(WorkerLost(1 - worker, "killed"))
    response = await http.get("/ready")
    assert (response.status_code, response.json()) == (503, {"status": "no worker is alive"})
    assert (await http.get("/health")).status_code == 200
    assert scrape((await http.get("/metrics")).text)["llmctl_workers_alive"] == 0
    http.workers.recover(worker)
    assert (await http.get("/ready")).status_code == 200


def scrape(body: str) -> dict[str, float]:
    """The value of each sample; the name has the labels that differ in brackets."""
    samples = {}
    for family in text_string_to_metric_families(body):
        for sample in family.samples:
            labels = [
                value
                for name, value in sample.labels.items()
                if name not in ("model_name", "engine")
            ]
            samples[sample.name + (f"[{','.join(labels)}]" if labels else "")] = sample.value
    return samples


@with_server()
async def test_metrics_count_requests_and_tokens(http: httpx.AsyncClient):
    for tokens in (10, 20):
        await http.post("/v1/completions", json={"prompt": "hello", "max_tokens": tokens})
    await turns()  # a row ends before its batch does
    found = scrape((await http.get("/metrics")).text)
    assert found["llmctl_requests_running"] == found["llmctl_requests_waiting"] == 0
    assert found["llmctl_workers_alive"] == 2
    assert found["llmctl_prompt_tokens_total"] == 10
    assert found["llmctl_generation_tokens_total"] == 30
    assert found["llmctl_requests_total[length]"] == 2
    assert found["llmctl_ttft_seconds_count"] == found["llmctl_e2e_seconds_count"] == 2
    assert found["llmctl_queue_seconds_bucket[+Inf]"] == 2
    assert found["llmctl_batches_total"] == found["llmctl_batch_time_ratio_count"] == 5
    assert found["llmctl_oom_events_total"] == found["llmctl_extrapolated_batches_total"] == 0


@with_server(hands=1)
async def test_cache_usage_includes_padding_and_all_steps(http: httpx.AsyncClient):
    asking = await begun(http, prompt=["a", "hello"])
    found = scrape((await http.get("/metrics")).text)
    assert found["llmctl_requests_running"] == 2
    assert found["llmctl_kv_cache_usage_ratio"] == 2 * (5 + 8) / 8192
    assert found["llmctl_worker_load_seconds[0]"] > 0
    assert found["llmctl_worker_requests_running[0]"] == 2
    assert found["llmctl_worker_kv_cache_usage_ratio[0]"] == found["llmctl_kv_cache_usage_ratio"]
    http.workers.finish()
    await asking


@with_server(hands=2)
async def test_actual_and_predicted_batch_times_are_per_worker(http: httpx.AsyncClient):
    for _ in range(2):  # the second goes to the other worker, which was idle for longer
        asking = await begun(http, prompt="hello")
        (worker,) = http.workers.running
        http.driver.rows[worker].batch.started_s -= 3.0 * worker
        http.workers.finish(worker)
        await asking
    found = scrape((await http.get("/metrics")).text)
    for kind in ("", "predicted_"):
        parts = [found[f"llmctl_worker_{kind}batch_seconds_total[{worker}]"] for worker in (0, 1)]
        assert sum(parts) == found[f"llmctl_{kind}batch_seconds_total"]
        assert all(parts)
    assert found["llmctl_worker_batch_seconds_total[1]"] >= 3.0


def test_histogram_bounds_are_inclusive():
    histogram = Histogram((1.0, 2.0))
    for value, times in ((1.0, 1), (1.5, 2), (2.5, 1)):
        histogram.observe(value, times)
    assert histogram.cumulative() == [("1.0", 1.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert histogram.total == 6.5


@with_server()
async def test_the_documentation_names_exactly_the_metrics(http: httpx.AsyncClient):
    families = text_string_to_metric_families((await http.get("/metrics")).text)
    exposed = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    docs = (Path(__file__).parent.parent / "docs" / "reference" / "metrics.md").read_text(
        encoding="utf-8"
    )
    assert exposed == set(re.findall(r"llmctl_(?!end_after)[a-z0-9_]+", docs))
