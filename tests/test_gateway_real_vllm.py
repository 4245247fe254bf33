"""Two real vLLM servers behind the front, here or in actors of Ray: one is killed in the middle of
a stream.

The test needs vLLM, or VLLM_PYTHON as the Python of an environment that has it.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import samples
from real_vllm import needed, recipe

from toolkit.files.io import processor, write_file
from toolkit.files.plan import Plan, PlannedPolicy
from toolkit.sched.policies import make_any
from toolkit.sched.policies.parameters import parameters

pytestmark = [needed, pytest.mark.slow]


def stream(url: str, body: dict[str, Any], kill_at: int = 0) -> tuple[str, dict[str, int]]:
    """The text and the usage of a streamed answer; the server that gives it is killed then."""
    text = ""
    usage = {}
    count = 0
    asked = body | {"stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=120) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            text += "".join(choice["text"] for choice in event["choices"])
            count += 1
            if count == kill_at:
                kill_the_busy(url)
    return text, usage


def kill_the_busy(url: str) -> None:
    shown = httpx.get(f"{url}/replicas").json()["replicas"]
    (busy,) = [each for each in shown if each["running"]]
    port = int(busy["url"].rpartition(":")[2])
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if "toolkit.backends.vllm.child" in words and str(port) in words:
            parent = process.parent()
            assert parent is not None
            in_actor = parent.cmdline()[0].startswith("ray::ServerActor")
            (parent if in_actor else process).kill()


@pytest.mark.parametrize("where", [[], ["--ray", "local"]], ids=["here", "on Ray"])
def test_a_killed_server_costs_no_token_and_comes_back(tmp_path: Path, where: list[str]):
    chosen = PlannedPolicy(name="vllm", parameters=parameters(make_any("vllm", {})))
    envelope = {"tool_version": "0", "environment": samples.ENVIRONMENT, "inputs": {}}
    fit = samples.fit(workers=1)
    here = {"engine": "vllm", "engine_version": "0.32.0", "device": "cpu", "processor": processor()}
    fit = fit.model_copy(update={"engine": fit.engine.model_copy(update=here)})
    plan = Plan(
        **envelope, recipe=recipe(), fit=fit, workers=2, policy=chosen, predicted={}, limits=[],
        explained={},
    )  # fmt: skip
    write_file(plan, tmp_path / "plan.json")
    words = ["serve", str(tmp_path / "plan.json"), "--port", "0", "--json", *where]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-m", "toolkit", *words], stdout=subprocess.PIPE, stderr=log
        ) as server,
    ):
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        body = {"prompt": "Once upon", "max_tokens": 150, "temperature": 0, "ignore_eos": True}
        calm = stream(url, body)
        assert calm[1]["completion_tokens"] == 150
        assert stream(url, body, kill_at=20) == calm
        told = httpx.get(f"{url}/metrics").text
        deadline_s = time.monotonic() + 120
        while time.monotonic() < deadline_s:
            shown = httpx.get(f"{url}/replicas").json()["replicas"]
            if [each["state"] for each in shown] == ["up", "up"]:
                break
            time.sleep(0.5)
        assert [each["state"] for each in shown] == ["up", "up"]
        server.send_signal(signal.SIGTERM)
        server.wait(120)
    assert 'llmctl_continued_total{by="ids"' in told
    assert server.returncode == 0, (tmp_path / "log").read_text()[-2000:]
