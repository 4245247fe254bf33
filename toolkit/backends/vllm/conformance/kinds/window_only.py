"""Sliding windows in every layer, as in the first Mistral 7B."""

from __future__ import annotations

from toolkit.backends.vllm.conformance.groups import differs, make_grouped, windows_alone
from toolkit.backends.vllm.conformance.kinds import ModelKind
from toolkit.backends.vllm.conformance.workloads import Case


def make(seed: int, ahead: bool) -> Case:
    """A made-up workload."""
    return make_grouped(windows_alone, seed, ahead=ahead)


KIND = ModelKind("window only", ("window only",), make, differs, order=21)
