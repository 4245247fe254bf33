"""What each policy does in a few words, and where it comes from. Imports no policy: a list of names must cost nothing.

A test holds the names to the registry, `toolkit.sched.policies.KNOWN`; docs/policies.md has the papers' titles.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class About:
    """A policy in one line: what it does, and the paper or the system that describes it."""

    does: str
    source: str


ABOUT = {
    "sequence": About("fixed batches, to their longest output", "SCLS, baseline"),
    "slice": About("dynamic-programmed batches, in slices", "SCLS"),
    "slice-continuous": About("slices on a running batch", "SCLS, section 7"),
    "conservative": About("admits while all output limits fit", "TGI, DeepSpeed-MII"),
    "aggressive": About("admits while prompts fit, and evicts", "vLLM"),
    "past-future": About("admits by the predicted memory peak", "Past-Future"),
    "past-future-sla": About("the same within TTFT and MTPOT limits", "llmctl"),
    "fcfs": About("in order of arrival, each to its end", "FastServe"),
    "past-future-oracle": About("admits by the true memory peak", "Past-Future"),
    "mlfq": About("short jobs first, by feedback queues", "FastServe"),
    "baton": About("refills the places of ended rows", "BATON"),
    "srpt-oracle": About("shortest remaining first, true lengths", "FastServe"),
    "vllm": About("in order of arrival, chunked prompts", "vLLM"),
}
