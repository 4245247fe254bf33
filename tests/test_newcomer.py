"""Six models and GPUs of a newcomer: from one command to an answer, or to a refusal by name, with
no line that is written by hand.
"""

import json
from pathlib import Path

import pytest
from commands import llmctl

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("short_chat")]

TRAFFIC = ["--trace", "chat-small", "--no-at-once", "--json"]
# What is asked for; what `capacity` then says: GPUs of the answer, or the reason of a refusal.
CASES = [
    (["qwen3-32b", "--gpu", "l40s", "--gpus", "2", "--quantization", "fp8"], 2),
    (["llama-3.3-70b", "--gpu", "h100-sxm", "--gpus", "4"], 4),
    (["qwen3-30b-a3b", "--gpu", "h100-sxm"], 1),
    (["gpt-oss-20b", "--gpu", "h100-sxm"], "sliding windows"),
    (["deepseek-v3", "--gpu", "h200", "--gpus", "8"], "MLA"),
    (["mistral-small-24b", "--gpu", "a100-80gb", "--lora"], "LoRA"),
]


@pytest.mark.parametrize(("words", "answer"), CASES, ids=lambda case: str(case))
def test_from_one_command_to_an_answer(tmp_path, monkeypatch, capsys, words, answer):
    monkeypatch.chdir(tmp_path)
    assert llmctl("recipe new", *words) == 0
    Path("recipe.yaml").write_text(capsys.readouterr().out, encoding="utf-8")
    code = llmctl("capacity recipe.yaml", *TRAFFIC)
    shown = capsys.readouterr()
    if isinstance(answer, str):
        assert code == 2
        error = [line for line in shown.err.splitlines() if line.startswith("error: ")]
        assert len(error) == 1
        assert answer in error[0]
        return
    assert code == 0
    [found] = json.loads(shown.out)["capacities"]
    assert found["gpus"] == answer
    assert found["capacity_rps"] > 0.1
    assert found["analytic"]
