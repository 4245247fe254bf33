"""BATON: re-batching on an unmodified padded engine; when a row ends, a waiting job takes its
place.

*BATON: Enhancing Batch-wise Inference Efficiency for LLMs via Dynamic Re-batching*. The running
batch is one slab of KV cache: rows x the longest resident, after the columns that are padding in
every row were released. A longer newcomer makes the slab wider for all rows. The worker decides how
newcomers join: prefilled apart and embedded (BATON-PD in the paper), or shaped into the batch at a
cost to every row (vector shaping: the paper's baseline, which it says has the throughput of Orca).

If memory would pass a threshold, the last rows that joined leave. They go to host memory and come
back without a prefill, before any other job enters. Without room in host memory they are evicted
and prefilled again. Not implemented: the paper prefills queries ahead of their turn and keeps their
caches aside until then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from toolkit.sched.planner import RoundPlanner
from toolkit.sched.policies.baton_rounds import BatonRounds
from toolkit.sched.policies.continuous import RoundPolicy
from toolkit.sched.policies.parameters import choice, chunk_knob, knob, validate
from toolkit.sched.policies.routers import ROUTERS
from toolkit.sched.view import View


@dataclass(frozen=True, slots=True)
class BatonPolicy(RoundPolicy):
    """First come, first served, up to a number of rows and a share of memory.

    The paper uses batches of 2 to 10 rows and states no value for the threshold.
    """

    name: ClassVar[str] = "baton"
    continuous: ClassVar[bool] = True

    max_batch_size: int = knob(
        16, low=1, search=(1, 256), log=True, doc="the most rows that run at once on a worker"
    )
    memory_threshold: float = knob(
        0.9,
        low=0.01,
        high=1,
        search=(0.5, 1.0),
        doc="share of the capacity above which rows leave, padding counted",
    )
    headroom_steps: int = knob(
        16,
        low=1,
        high=10_000,
        search=(1, 256),
        log=True,
        doc="decode steps that must have room before a row joins",
    )
    max_prefill_tokens: int = knob(
        32_768,
        low=1,
        search=(512, 65_536),
        log=True,
        doc="a round prefills until it has so many prompt tokens",
    )
    router: str = choice(
        "round-robin", ROUTERS, doc="how requests are assigned to workers: " + ", ".join(ROUTERS)
    )
    chunk_tokens: int = chunk_knob()

    def __post_init__(self) -> None:
        validate(self)

    @property
    def most_rows(self) -> int:
        return self.max_batch_size

    def make_planner(self, view: View) -> RoundPlanner:
        return BatonRounds(
            view,
            max_batch_size=self.max_batch_size,
            memory_threshold=self.memory_threshold,
            headroom_steps=self.headroom_steps,
            max_prefill_tokens=self.max_prefill_tokens,
            chunk_tokens=self.chunk_tokens,
        )
