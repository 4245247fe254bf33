"""Our scheduler inside a real vLLM: the bench of few requests, held to vLLM's own tokens and to the replay of its log.

Runs where vLLM is installed, or where VLLM_PYTHON names the Python of an environment that has it.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import vllm_past_future as bench

from toolkit.inside.setup import make_worker, read_setup
from toolkit.sched.eventlog import from_lines, replay
from toolkit.sched.policies import make_policy
from toolkit.sched.scheduler import Scheduler

PYTHON = os.environ.get("VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else "")


@pytest.mark.skipif(not PYTHON, reason="vLLM is not installed, and VLLM_PYTHON names no Python that has it")
def test_tokens_are_vllm_s_own_and_the_log_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"warm": "4", "requests": "10", "clients": "10", "kv-tokens": "768", "repeats": "1", "trace": "chat-small"}
    words = [f"--{key}={value}" for key, value in (few | {"policy": "aggressive watermark=1.0"}).items()]
    options = bench.options([f"--vllm-python={PYTHON}", *words])
    (tmp_path / "work.json").write_text(json.dumps(bench.make_work(options)))
    bench.save_model(tmp_path / "model")
    log = tmp_path / "events.jsonl"
    monkeypatch.setenv("LLMCTL_VLLM_EVENT_LOG", str(log))
    found = bench.measure(PYTHON, tmp_path)
    assert found["equal"] == found["compared"] == 10
    assert min(run["preemptions"] for run in found["runs"]) > 0
    header, *events = from_lines(log.read_bytes().splitlines(keepends=True))
    worker = make_worker(read_setup({}), header.capacity_tokens, header.slots)
    assert list(replay(events, Scheduler(make_policy(header.policy, header.parameters), [worker]))) == []
