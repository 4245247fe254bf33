"""Live settings of a real vLLM: no request is lost, and the simulator makes the same passes.

The tests need vLLM, or VLLM_PYTHON as the Python of an environment that has it.
"""

import json
from pathlib import Path

import pytest
from real_vllm import CONFIG, PYTHON, needed

from benchmarks.engines import live_settings, vllm_passes
from toolkit.backends.vllm.setup import PYTHON_VARIABLE

pytestmark = [needed, pytest.mark.slow]


def test_vllm_s_schedulers_take_new_settings_as_the_simulator_does(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(CONFIG | {"architectures": ["LlamaForCausalLM"]}), encoding="utf-8"
    )
    cases = [vllm_passes.live_case(seed) for seed in range(5000, 5060)]
    theirs = vllm_passes.theirs_of_cases(cases, PYTHON, str(tmp_path))
    ours = [json.loads(json.dumps(vllm_passes.passes_of_case(case))) for case in cases]
    assert [k for k, (one, two) in enumerate(zip(ours, theirs, strict=True)) if one != two] == []


def test_no_request_is_lost_or_changed_while_settings_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, PYTHON)
    found = live_settings.measure(changes=40, count=60, at_once=12, seed=1)
    assert (found.made, found.lost, found.other) == (40, 0, 0)
    assert len(found.passes) > 100
    assert found.differ == []
