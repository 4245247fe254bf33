"""What each policy does in a few words, and its source.

This module imports no policy, so that listing names is cheap. A test compares the names with the
registry, `toolkit.sched.policies.KNOWN`. docs/explanation/policies.md has the papers' titles.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PolicySummary:
    """A policy in one line: what it does, and the paper or system that describes it."""

    does: str
    source: str


ABOUT = {
    "sequence": PolicySummary("fixed batches, to their longest output", "SCLS, baseline"),
    "slice": PolicySummary("dynamic-programmed batches, in slices", "SCLS"),
    "slice-continuous": PolicySummary("slices on a running batch", "SCLS, section 7"),
    "conservative": PolicySummary("admits while all output limits fit", "TGI, DeepSpeed-MII"),
    "aggressive": PolicySummary("admits while prompts fit, and evicts", "vLLM"),
    "past-future": PolicySummary("admits by the predicted memory peak", "Past-Future"),
    "past-future-sla": PolicySummary("the same within TTFT and MTPOT limits", "llmctl"),
    "fcfs": PolicySummary("in order of arrival, each to its end", "FastServe"),
    "past-future-oracle": PolicySummary("admits by the true memory peak", "Past-Future"),
    "mlfq": PolicySummary("short jobs first, by feedback queues", "FastServe"),
    "baton": PolicySummary("refills the places of ended rows", "BATON"),
    "srpt-oracle": PolicySummary("shortest remaining first, true lengths", "FastServe"),
    "vllm": PolicySummary("in order of arrival, chunked prompts", "vLLM"),
}
