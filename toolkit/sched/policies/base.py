"""What a policy is: a frozen object that reads a `View` and returns a `Decision`.

`Policy` is the base of all policies, which override what they need. A policy keeps no state:
everything that it may remember is in the `View`. So a decision depends only on what the scheduler
saw, and a log of the calls replays exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from mypy_extensions import mypyc_attr

from toolkit.sched.policies.parameters import choice, parameter, validate
from toolkit.sched.policies.routers import ROUTERS
from toolkit.sched.types import NO_LIMIT, Job, LatencyLaw, Moves, Pass, Worker
from toolkit.sched.view import NOTHING, Decision, LengthHistory, View
from toolkit.sched.waiting import Ranking

# Output lengths that are kept for a policy that does not set the size of the history itself.
DEFAULT_HISTORY = 1000


@mypyc_attr(native_class=False)  # so that subclasses may be data classes with slots
class Policy:
    """A scheduling policy: a frozen object with its parameters as fields (`parameters.policy`).

    Most policies decide worker by worker, with `plan_worker`. A policy that decides over all
    workers overrides `plan`. `router`, `chunk_tokens` and `max_batch_size` are parameters of the
    policies that declare them (`router_choice`, `chunk_parameter`, `rows_parameter`).
    """

    __slots__ = ()
    name: ClassVar[str] = ""
    continuous: ClassVar[bool] = True  # whether its passes keep their caches
    knows_lengths: ClassVar[bool] = False  # whether it needs the true output lengths: an oracle
    at_start: ClassVar[tuple[str, ...]] = ()  # parameters that only a new scheduler reads
    output_tokens: Mapping[str, int] = {}  # of an oracle: the true output length of each request id
    router: str = "round-robin"
    chunk_tokens: int = 0
    max_batch_size: int = NO_LIMIT

    def __post_init__(self) -> None:
        validate(self)

    def route(self, view: View, now_s: float) -> Sequence[int] | None:
        """The index of each pooled job's worker; None: jobs stay in the pool until batched."""
        return ROUTERS[self.router](view) if view.alive else None

    def plan(self, view: View, now_s: float) -> Decision:
        """What to run next. Called at every tick; an empty `Decision` starts nothing."""
        passes = [
            self.plan_worker(view, worker, now_s)
            for worker in view.due
            if worker.has_jobs and not worker.queue
        ]
        interrupts = []
        for index, newcomers in view.arrived.items():
            worker = view.workers[index]
            batch = worker.batch
            if batch is None or batch.interrupted or not worker.waiting.jobs:
                continue
            if self.should_interrupt(view, worker, newcomers):
                interrupts.append(index)
        return Decision(passes, interrupt=interrupts) if passes or interrupts else NOTHING

    def plan_worker(self, view: View, worker: Worker, now_s: float) -> Pass:
        """The next pass of a worker that runs nothing and has jobs."""
        raise NotImplementedError

    def should_interrupt(self, view: View, worker: Worker, newcomers: int) -> bool:
        """Whether the worker's pass should stop early for `newcomers` jobs that arrived there."""
        return False

    def first_history(self) -> LengthHistory:
        """The history of output lengths before the first request ends."""
        return LengthHistory(DEFAULT_HISTORY)

    def ranking(self, law: LatencyLaw) -> Ranking | None:
        """How waiting jobs rank under a worker's law; None: they are served by arrival."""
        return None

    def release(self, view: View, now_s: float) -> Sequence[Job]:
        """The jobs that leave their worker, which runs nothing, to be routed again.

        They lose their caches and keep their tokens. Called before `route` while a worker is due.
        """
        return ()

    def reorder(self, view: View, now_s: float) -> tuple[Sequence[Job], Sequence[Job]]:
        """The jobs to defer behind all others at their worker, and the deferred jobs to advance.

        Called before `plan` while a worker is due.
        """
        return (), ()

    def with_lengths(self, output_tokens: Mapping[str, int]) -> Policy:
        """Return the same oracle with the true output length of each request id."""
        return replace(self, output_tokens=output_tokens)  # type: ignore[type-var]

    def make_pass(
        self,
        worker: Worker,
        entering: Sequence[Job],
        steps: int,
        evict: Sequence[Job] = (),
        moves: Moves | None = None,
        stop_every: int = 1,
    ) -> Pass:
        """Return a pass of the worker; engines that shape newcomers prefill without chunks."""
        return Pass(
            worker.index,
            tuple(entering),
            steps,
            max([job.length for job in entering]) if entering else 0,
            keep_cache=self.continuous,
            evict=tuple(evict),
            stop_every=stop_every,
            moves=moves,
            chunk_tokens=0 if worker.joining == "shape" else self.chunk_tokens,
        )


def router_choice() -> Any:
    """The parameter `router`."""
    return choice(
        "round-robin", ROUTERS, doc="how requests are assigned to workers: " + ", ".join(ROUTERS)
    )


def chunk_parameter() -> Any:
    """The parameter `chunk_tokens`."""
    return parameter(
        0,
        search=(32, 16_384),
        log=True,
        doc="tokens of a prefill chunk while rows decode, with a step after each; "
        "0: whole prefills, before any step",
    )


def rows_parameter(default: int) -> Any:
    """The parameter `max_batch_size`: rows."""
    doc = "the most rows that run at once on a worker"
    return parameter(default, low=1, search=(1, 256), log=True, doc=doc)


def prefill_parameter(doc: str = "a pass prefills until it has so many prompt tokens") -> Any:
    """The parameter `max_prefill_tokens`."""
    return parameter(32_768, low=1, search=(512, 65_536), log=True, doc=doc)
