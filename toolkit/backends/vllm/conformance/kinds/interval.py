"""Full attention with `prefill_schedule_interval`, which engines without data parallelism keep from
0.33 on.
"""

from __future__ import annotations

import random

from toolkit.backends.vllm.conformance.kinds import ModelKind
from toolkit.backends.vllm.conformance.kinds.full import differs
from toolkit.backends.vllm.conformance.workloads import Case, make_case


def make(seed: int, ahead: bool) -> Case:
    """A made-up workload with an interval of some passes."""
    interval = random.Random(f"{seed} interval").choice([2, 3, 4, 8])
    flags = {"prefill_schedule_interval": interval}
    return make_case(seed) | {"ahead": ahead, "flags": flags}


KIND = ModelKind("prefill interval", (), make, differs, since="0.33", cited=False, order=10)
