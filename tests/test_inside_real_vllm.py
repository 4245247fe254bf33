"""Our scheduler inside a real vLLM, compared with vLLM's own tokens and the replay of its log.

The test runs if vLLM is installed or VLLM_PYTHON names the Python of an environment that has it.
"""

import json
from pathlib import Path

import pytest
from real_vllm import PYTHON, differences, needed

from benchmarks.engines import vllm_past_future as bench
from benchmarks.engines.random_llama import save_llama
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
@pytest.mark.slow
def test_past_future_counts_the_blocks_that_vllm_holds() -> None:
    """Prompts in a tree, whole in a pass; those that came first end while others go on."""
    size = 8
    requests = [[3 * n, size * 9 + 4, 4 + 7 * n % 30, 34] for n in range(60)]
    case = {
        "block_tokens": size,
        "blocks": 100,
        "max_model_len": 256,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "prefix_caching": True,
        "watermark": 0.0,
        "shared_tokens": size,
        "ids": [[100 * k + n % 2 ** (k // 2) for k in range(9)] + [1000 + n] for n in range(60)],
        "requests": requests,
        "policy": "past-future initial_count=50 initial_length=30",
    }
    cases = [case | {"ahead": ahead} for ahead in (False, True)]
    passes = [one for found in run_cases(PYTHON, cases).passes() for one in found]
    placed = [one["blocks"][:3] for one in passes if not one["blocks"][3]]
    held, counted, uncounted = zip(*placed, strict=True)
    assert max(uncounted) > 0
    assert [a + b for a, b in zip(counted, uncounted, strict=True)] == list(held)
