"""Our scheduler inside a real vLLM, compared with vLLM's own tokens and the replay of its log.

The test runs if vLLM is installed or VLLM_PYTHON names the Python of an environment that has it.
"""

import json
from pathlib import Path

import pytest
from real_vllm import PYTHON, differences, needed

from benchmarks.engines import vllm_past_future as bench
from benchmarks.engines import workloads
from benchmarks.engines.random_llama import save_llama
from toolkit.backends.vllm.conformance.modelled import differs
from toolkit.backends.vllm.conformance.run import run_cases


@needed
@pytest.mark.slow
def test_tokens_are_vllm_s_own_and_the_log_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {
        "warm": "4",
        "requests": "10",
        "clients": "10",
        "kv-tokens": "768",
        "repeats": "1",
        "trace": "chat-small",
    }
    words = [
        f"--{key}={value}" for key, value in (few | {"policy": "aggressive watermark=1.0"}).items()
    ]
    options = bench.options([f"--vllm-python={PYTHON}", *words])
    (tmp_path / "work.json").write_text(json.dumps(bench.make_work(options)))
    save_llama(tmp_path / "model", bench.LLAMA)
    log = tmp_path / "events.jsonl"
    monkeypatch.setenv("LLMCTL_VLLM_EVENT_LOG", str(log))
    found = bench.measure(PYTHON, tmp_path)
    assert found["equal"] == found["compared"] == 10
    assert min(run["preemptions"] for run in found["runs"]) > 0
    assert differences(log, {}) == []


@needed
@pytest.mark.slow
def test_past_future_counts_the_blocks_that_vllm_holds() -> None:
    """Prompts in a tree, whole in a pass; those that came first end while others go on."""
    cases = [
        workloads.make("our policies inside", seed, ahead)
        for seed in (1, 2)
        for ahead in (False, True)
    ]
    for case, passes in zip(cases, run_cases(PYTHON, cases).passes(), strict=True):
        assert differs(case, passes) is None
        assert max(one["blocks"][2] for one in passes) > 0, "some are counted with no request"
