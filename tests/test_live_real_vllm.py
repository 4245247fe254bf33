"""Live settings of a real vLLM: no request is lost, and the simulator makes the same passes.

The tests need vLLM, or VLLM_PYTHON as the Python of an environment that has it.
"""

import pytest
from real_vllm import PYTHON, needed

from benchmarks.engines import live_settings, workloads
from toolkit.backends.vllm.conformance.modelled import differs
from toolkit.backends.vllm.conformance.run import run_cases
from toolkit.backends.vllm.setup import PYTHON_VARIABLE

pytestmark = [needed, pytest.mark.slow]


def test_vllm_s_schedulers_take_new_settings_as_the_simulator_does() -> None:
    cases = [workloads.make("live settings", seed, seed % 2 == 1) for seed in range(5000, 5060)]
    theirs = run_cases(PYTHON, cases).passes()
    differ = [differs(case, found) for case, found in zip(cases, theirs, strict=True)]
    assert differ == [None] * len(cases)


def test_no_request_is_lost_or_changed_while_settings_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, PYTHON)
    found = live_settings.measure(changes=40, count=60, at_once=12, seed=1)
    assert (found.made, found.lost, found.other) == (40, 0, 0)
    assert len(found.passes) > 100
    assert found.differ == []
