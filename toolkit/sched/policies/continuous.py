"""The base of continuous policies, the three that decide by memory alone, and BATON.

`RoundPolicy` is the base of all policies of rounds, `ContinuousPolicy` that of those which admit in
order of arrival; `toolkit.sched.policies.continuous_rounds` plans their rounds.

A worker runs one round after the other. Every `interval_steps` decode steps, and whenever it is
empty, waiting jobs may enter in order of arrival; the policy decides how many. Before a round, the
last admitted jobs are evicted until one more step fits. They keep their tokens and wait before all
others. A round ends before memory is exceeded, so the capacity holds at every step. The worker's
footprint knows what rows take of it, paged or padded.

If requests have priorities, urgent ones come first. The least urgent rows are evicted first. If the
most urgent waiting job may not enter, the fewest less urgent rows that make room are evicted, or
none if that is not enough.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from toolkit.sched.footprint import Footprint
from toolkit.sched.policies.continuous_rounds import BatonRounds, Bounds, ContinuousRounds
from toolkit.sched.policies.parameters import (
    choice,
    chunk_knob,
    knob,
    prefill_knob,
    rows_knob,
    validate,
)
from toolkit.sched.policies.routers import ROUTERS
from toolkit.sched.types import NO_LIMIT, Job, Worker
from toolkit.sched.view import NOTHING, Decision, RoundPlanner, View


def router_choice() -> Any:
    """The parameter `router`, which all continuous policies have."""
    return choice(
        "round-robin", ROUTERS, doc="how requests are assigned to workers: " + ", ".join(ROUTERS)
    )


class RoundPolicy(ABC):
    """Base of the policies of rounds: a planner decides, worker by worker.

    A subclass that overrides `plan` decides by it alone.
    """

    __slots__ = ()
    name: ClassVar[str]
    continuous: ClassVar[bool] = True
    router: str  # the name of a router, a parameter

    def __post_init__(self) -> None:
        validate(self)

    @abstractmethod
    def make_planner(self, view: View) -> RoundPlanner:
        """A planner with these parameters."""

    @property
    def most_rows(self) -> int:
        """The most residents that the policy allows on any worker."""
        return NO_LIMIT

    def planner(self, view: View) -> RoundPlanner | None:
        if type(self).plan is not RoundPolicy.plan:
            return None
        planner = self.make_planner(view)
        if type(self).route is RoundPolicy.route:
            planner.router = ROUTERS[self.router]
            planner.router_rows = self.most_rows
        return planner

    def route(self, view: View, now_s: float) -> Sequence[int] | None:
        return ROUTERS[self.router](view, self.most_rows) if view.alive() else None

    def plan(self, view: View, now_s: float) -> Decision:
        """The same rounds and interruptions as one `Decision`."""
        if view.planner is None:
            view.planner = self.make_planner(view)
        planner = view.planner
        batches = [
            planner.plan_round(worker, now_s) for worker in view.due if planner.has_work(worker)
        ]
        interrupts = planner.interrupts()
        return Decision(batches, interrupt=interrupts) if batches or interrupts else NOTHING


@dataclass(frozen=True, slots=True)
class ContinuousPolicy(RoundPolicy):
    """Base of the continuous policies: subclasses decide which jobs may enter.

    They do so with `bounds`, with `admissible` if a criterion is no bound on tokens, and with
    `admit` if that is not enough. What a subclass does not override costs nothing. The default of
    `interval_steps` is the 10 of Past-Future's Table 1, that of `max_prefill_tokens` its 32,768.
    """

    # Whether another job than the first may be the next to enter, when the policy reorders.
    any_may_come: ClassVar[bool] = False

    interval_steps: int = knob(
        10,
        low=1,
        high=10_000,
        search=(1, 64),
        log=True,
        doc="decode steps from one attempt to admit to the next",
    )
    max_prefill_tokens: int = prefill_knob("an attempt admits until it has so many prompt tokens")
    overfill: bool = knob(
        False,
        doc="true: a job enters without room for it now, and may be evicted after a step "
        "(as in Table 1's artifact)",
    )
    router: str = router_choice()
    chunk_tokens: int = chunk_knob()

    def bounds(self, worker: Worker) -> Bounds:
        """The most tokens that the rows of this worker may take and be promised when a job enters.

        They do not change while the worker runs.
        """
        return Bounds()

    def admissible(self, worker: Worker, job: Job, footprint: Footprint) -> bool:
        """Whether `job` may join the rows in `footprint` by a criterion that is no bound on tokens.

        `False` must hold until one of these rows ends, because it is not asked again before. This
        lets a round be long.
        """
        return True

    def admit(self, view: View, worker: Worker, candidates: Sequence[Job]) -> int:
        """How many of `candidates`, in order, may enter by the policy's own criterion.

        They fit the memory as it is now, and each is `admissible` if those before it enter. If the
        worker has no residents, the first candidate need not be: it is admitted whatever this
        returns, because a job that fits alone must not wait for ever.
        """
        return len(candidates)

    def longest_round(self, worker: Worker, entering: int) -> int:
        """The most decode steps until the policy has to decide something even if no row ends.

        `entering`: how many jobs enter with the round.
        """
        return NO_LIMIT

    def make_planner(self, view: View) -> ContinuousRounds:
        planner = ContinuousRounds(view, self)
        kind = type(self)
        if kind.admissible is not ContinuousPolicy.admissible:
            planner.admissible = self.admissible
        if kind.admit is not ContinuousPolicy.admit:
            planner.admit = self.admit
        if kind.longest_round is not ContinuousPolicy.longest_round:
            planner.longest_round = self.longest_round
        return planner


@dataclass(frozen=True, slots=True)
class AggressivePolicy(ContinuousPolicy):
    """Admit while the tokens in use, newcomers' included, are within `watermark` of capacity.

    Eviction makes room later, as in vLLM (Past-Future, section 2.3; Table 1 has 0.90, 0.95, 0.99).
    """

    name: ClassVar[str] = "aggressive"

    watermark: float = knob(
        0.95, low=0.01, high=1, search=(0.5, 1.0), doc="share of the capacity that may be filled"
    )

    def bounds(self, worker: Worker) -> Bounds:
        # The artifact leaves out the generated tokens of evicted jobs.
        taken = math.floor(self.watermark * worker.capacity_tokens)
        return Bounds(taken=taken, prompts_only=self.overfill)


@dataclass(frozen=True, slots=True)
class ConservativePolicy(ContinuousPolicy):
    """Admit while the sum of prompt + max_new_tokens is within `overcommit` times the capacity.

    TGI and DeepSpeed-MII do so (Past-Future, section 2.3), and the baseline of continuous batching
    (ILS) in the SCLS paper. On a padded worker, the number of rows x the largest prompt +
    max_new_tokens counts instead. With an `overcommit` of 1 nothing is ever evicted. Past-Future's
    Table 1 has 1, 1.25 and 1.5.
    """

    name: ClassVar[str] = "conservative"

    overcommit: float = knob(
        1.0, low=0.01, high=100, search=(1.0, 3.0), doc="capacity that is promised over capacity"
    )

    def bounds(self, worker: Worker) -> Bounds:
        return Bounds(promised=math.floor(self.overcommit * worker.capacity_tokens))


@dataclass(frozen=True, slots=True)
class FcfsPolicy(ContinuousPolicy):
    """FastServe's baseline: in order of arrival, each job to its end, and nothing is evicted.

    Jobs are admitted up to a number of rows, while memory holds all that they may generate.
    """

    name: ClassVar[str] = "fcfs"

    max_batch_size: int = rows_knob(32)

    @property
    def most_rows(self) -> int:
        return self.max_batch_size

    def bounds(self, worker: Worker) -> Bounds:
        return Bounds(promised=worker.capacity_tokens)


@dataclass(frozen=True, slots=True)
class BatonPolicy(RoundPolicy):
    """BATON: when a row ends, a waiting job takes its place, in order of arrival, up to a number of
    rows and a share of memory.

    *BATON: Enhancing Batch-wise Inference Efficiency for LLMs via Dynamic Re-batching*, for an
    unmodified padded engine. The running batch is one slab of KV cache: rows x the longest
    resident, after the columns that are padding in every row were released. A longer newcomer makes
    the slab wider for all rows. The worker decides how newcomers join: prefilled apart and embedded
    (BATON-PD in the paper), or shaped into the batch at a cost to every row (vector shaping: the
    paper's baseline, which it says has the throughput of Orca).

    If memory would pass a threshold, the last rows that joined leave. They go to host memory and
    come back without a prefill, before any other job enters. Without room in host memory they are
    evicted and prefilled again. Not implemented: the paper prefills queries ahead of their turn and
    keeps their caches aside until then. It uses batches of 2 to 10 rows and states no threshold.
    """

    name: ClassVar[str] = "baton"

    max_batch_size: int = rows_knob(16)
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
    max_prefill_tokens: int = prefill_knob()
    router: str = router_choice()
    chunk_tokens: int = chunk_knob()

    @property
    def most_rows(self) -> int:
        return self.max_batch_size

    def make_planner(self, view: View) -> RoundPlanner:
        return BatonRounds(view, self)
