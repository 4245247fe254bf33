"""Models and GPUs of a newcomer: from one command to an answer, or to a refusal by name, with
no line that is written by hand.
"""

from pathlib import Path

import pytest
from commands import printed, ran, refused

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("short_chat")]

# What is asked for; what `capacity` then says: GPUs of the answer, or the reason of a refusal.
CASES = [
    ("qwen3-32b --gpu l40s --gpus 2 --quantization fp8", 2),
    ("llama-3.3-70b --gpu h100-sxm --gpus 4", 4),
    ("qwen3-30b-a3b --gpu h100-sxm", 1),
    ("gpt-oss-20b --gpu h100-sxm", 1),
    ("deepseek-v3 --gpu h200 --gpus 8", 8),
    ("deepseek-v3 --gpu b200 --gpus 8", 8),
    ("deepseek-v3 --gpu a100-80gb --gpus 16", "a100_sxm"),
    ("llama-3.1-8b --gpu rtx-4090 --gpus 1", "rtx-4090"),
]


@pytest.mark.parametrize(("words", "answer"), CASES)
def test_from_one_command_to_an_answer(tmp_path, monkeypatch, capsys, words, answer):
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(ran(capsys, f"recipe new {words}").out, encoding="utf-8")
    capacity = "capacity recipe.yaml --trace chat-small"
    if isinstance(answer, str):
        assert answer in refused(capsys, capacity)[0]
        return
    [found] = printed(capsys, capacity)["capacities"]
    assert found["gpus"] == answer
    assert found["capacity_rps"] > 0.1
    assert found["analytic"]
