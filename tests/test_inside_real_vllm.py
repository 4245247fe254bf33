"""Our scheduler inside a real vLLM: the blocks that it counts.

The test runs if vLLM is installed or VLLM_PYTHON names the Python of an environment that has it.
"""

import pytest
from real_vllm import PYTHON, needed

from benchmarks.engines import workloads
from toolkit.backends.vllm.conformance.modelled import differs
from toolkit.backends.vllm.conformance.run import run_cases


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
