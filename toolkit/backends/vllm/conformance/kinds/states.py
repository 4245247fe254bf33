"""Full attention beside states (Mamba, linear attention), with prefix caching and without, with
states that are kept inside chunks and without. 0.30 and older choose ends of chunks otherwise.
"""

from __future__ import annotations

from toolkit.backends.vllm.conformance.groups import differs, make_grouped, states
from toolkit.backends.vllm.conformance.kinds import ModelKind
from toolkit.backends.vllm.conformance.workloads import Case


def make(seed: int, ahead: bool) -> Case:
    """A made-up workload."""
    return make_grouped(states, seed, ahead=ahead)


KIND = ModelKind("states", ("states",), make, differs, order=23)
