"""Full attention beside sliding windows: one group of each as in gpt-oss, or one of full attention
and several of windows as in Gemma 3.
"""

from __future__ import annotations

from toolkit.backends.vllm.conformance.groups import (
    differs,
    like_gemma,
    like_gpt_oss,
    like_gpt_oss_whole,
    make_grouped,
)
from toolkit.backends.vllm.conformance.kinds import ModelKind
from toolkit.backends.vllm.conformance.workloads import Case

MAKERS = (like_gpt_oss, like_gemma, like_gpt_oss_whole)


def make(seed: int, ahead: bool) -> Case:
    """The three kinds of models in turn."""
    return make_grouped(MAKERS[seed % len(MAKERS)], seed, ahead=ahead)


KIND = ModelKind("windows", ("windows",), make, differs, order=20)
