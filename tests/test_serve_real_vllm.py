"""A real vLLM server over HTTP: the log of its passes adds up, and it runs the plan's scheduler.

The tests need vLLM, or VLLM_PYTHON as the Python of an environment that has it.
"""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
import samples
from real_vllm import differences, needed, recipe

from toolkit.backends.openai import Endpoint
from toolkit.backends.vllm.command import VllmCommand, vllm_server
from toolkit.backends.vllm.profile import timed
from toolkit.endpoints.load import Sample
from toolkit.engines.saved import saved_model
from toolkit.files.io import write_file
from toolkit.sched.iterations import header_of, passes_of

pytestmark = [needed, pytest.mark.slow]


def requests(count: int) -> list[Sample]:
    return [Sample(0.01 * k, 20 + 7 * k, 30 + 3 * k) for k in range(count)]


def send(url: str, count: int) -> list[Sample]:
    endpoint = Endpoint(recipe(), url)
    endpoint.vocab_size = 256
    return asyncio.run(endpoint.at_times(requests(count), time.perf_counter()))


def test_each_request_is_in_as_many_passes_as_it_has_tokens_and_passes_follow_one_another(
    tmp_path: Path,
):
    asked = recipe()
    log = tmp_path / "passes.jsonl"
    flags = ["--scheduler-cls", "toolkit.backends.vllm.iterations.logged_scheduler"]
    flags += ["--async-scheduling", "--no-enable-prefix-caching"]
    command = VllmCommand(
        asked,
        saved_model(asked.model, asked.hardware),
        "toy",
        flags,
        {"LLMCTL_VLLM_ITERATIONS": str(log)},
    )
    with vllm_server(command, quiet=True) as server:
        send(server.url, 10)
    first, *lines = log.read_bytes().splitlines(keepends=True)
    header = header_of(first)
    passes = passes_of(lines)
    assert (header.blocks, header.block_tokens, header.kv_bytes_per_token) == (
        12,
        32,
        2 * 2 * 64 * 4,
    )
    assert (
        not header.async_scheduling
    )  # vLLM's CPU platform switches it off, whatever was asked for
    computed: Counter[str] = Counter()
    for one in passes:
        for row in one.rows:
            assert row.computed == computed[row.request_id]
            computed[row.request_id] += row.new
        for name in one.preempted:
            computed[name] = 0
    kept = sorted(count for count in computed.values() if count)
    assert kept[-10:] == sorted(one.prompt_tokens + one.wanted_tokens - 1 for one in requests(10))
    assert any(one.preempted for one in passes)
    following = timed(passes)
    assert all(one.seconds > 0.0 for one in following)


def test_a_policy_of_ours_serves_over_http_and_its_log_replays(tmp_path: Path):
    plan = samples.plan(recipe(), samples.vllm_fit(), "past-future")
    write_file(plan, tmp_path / "plan.json")
    words = [
        "serve",
        str(tmp_path / "plan.json"),
        "--port",
        "0",
        "--json",
        "--event-log",
        str(tmp_path / "events"),
    ]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-m", "toolkit", *words], stdout=subprocess.PIPE, stderr=log
        ) as server,
    ):
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        served = send(url, 10)
        asked = {"prompt": "a", "max_tokens": 40, "ignore_eos": True}
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
        with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            *_, last, done = (line for line in lines if line)
        server.wait(120)
    assert [one.output_tokens for one in served] == [one.wanted_tokens for one in requests(10)]
    assert server.returncode == 0
    assert (
        json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"] == 40
    )  # vLLM finished what ran
    assert done == "data: [DONE]"
    assert differences(tmp_path / "events", {"LLMCTL_VLLM_PLAN": str(tmp_path / "plan.json")}) == []
