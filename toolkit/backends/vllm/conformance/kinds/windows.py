"""Full attention beside sliding windows: one group of each as in gpt-oss, or one of full attention
and several of windows as in Gemma 3.
"""

from __future__ import annotations

from toolkit.backends.vllm.conformance.groups import (
    kind_of,
    like_gemma,
    like_gpt_oss,
    like_gpt_oss_whole,
)

MAKERS = (like_gpt_oss, like_gemma, like_gpt_oss_whole)
KIND = kind_of("windows", MAKERS, ("windows",), 20)
