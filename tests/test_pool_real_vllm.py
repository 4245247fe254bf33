"""Two real vLLM servers behind the front: one is killed in the middle of a stream; and both answer
/v1/responses.

The tests need vLLM, or VLLM_PYTHON as the Python of an environment that has it.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import samples
from real_vllm import needed, recipe

from toolkit.files.io import write_file

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
            if parent is None or parent.cmdline() == words:  # the watcher of the server
                continue
            process.kill()


@contextmanager
def two_servers(folder: Path, args: Sequence[str] = ()) -> Iterator[str]:
    """The URL of a front before two servers with further `args`, which ends well."""
    served = recipe()
    vllm = served.engine.vllm.model_copy(update={"args": list(args)})
    served = served.model_copy(update={"engine": served.engine.model_copy(update={"vllm": vllm})})
    write_file(samples.plan(served, samples.vllm_fit(), workers=2), folder / "plan.json")
    command = ["serve", str(folder / "plan.json"), "--port", "0", "--json"]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-m", "toolkit", *command], stdout=subprocess.PIPE, stderr=log
        ) as server,
    ):
        assert server.stdout is not None
        try:
            yield json.loads(server.stdout.readline())["url"]
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(120)
    assert server.returncode == 0, (folder / "log").read_text()[-2000:]


def test_a_killed_server_costs_no_token_and_comes_back(tmp_path: Path):
    with two_servers(tmp_path) as url:
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
    (line,) = [line for line in told.splitlines() if line.startswith("llmctl_continued_total")]
    assert line.endswith(" 1.0")


def test_responses_pass(tmp_path: Path):
    body = {"input": "Once", "max_output_tokens": 12, "temperature": 0, "ignore_eos": True}
    template = tmp_path / "template.jinja"
    template.write_text("{% for each in messages %}{{ each.role }}: {{ each.content }}{% endfor %}")
    with two_servers(tmp_path, args=["--chat-template", str(template)]) as url:
        route = f"{url}/v1/responses"
        answers = [httpx.post(route, json=body, timeout=120) for _ in range(4)]
        assert [each.status_code for each in answers] == [200] * 4, answers[0].text
        made = [each.json() for each in answers]
        assert [one["usage"]["output_tokens"] for one in made] == [12] * 4
        answer = httpx.post(route, json=body | {"stream": True}, timeout=120).text
        assert answer.startswith("event: response.created\ndata: ")
        events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: ")]
        assert events[-1]["type"] in ("response.completed", "response.incomplete")
        assert events[-1]["response"]["usage"] == made[0]["usage"]
        requests = [each["requests"] for each in httpx.get(f"{url}/replicas").json()["replicas"]]
        assert min(requests) > 0
