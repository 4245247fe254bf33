"""Full attention and sliding windows with blocks of two sizes, as where heads have two sizes."""

from __future__ import annotations

from toolkit.backends.vllm.conformance.groups import differs, make_grouped, two_sizes
from toolkit.backends.vllm.conformance.kinds import ModelKind
from toolkit.backends.vllm.conformance.workloads import Case


def make(seed: int, ahead: bool) -> Case:
    """A made-up workload."""
    return make_grouped(two_sizes, seed, ahead=ahead)


KIND = ModelKind("block sizes", ("windows", "block sizes"), make, differs, order=22)
