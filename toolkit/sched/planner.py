"""What plans the rounds of continuous policies, one worker at a time.

A `RoundPlanner` belongs to one scheduler. It holds what a policy's parameters say in the form that
its decisions need, and may keep what it worked out for a worker until its next round. Everything in
it follows from what the scheduler saw, so a log of the calls still replays exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

if TYPE_CHECKING:
    from toolkit.sched.types import Batch, Worker
    from toolkit.sched.view import View


@mypyc_attr(allow_interpreted_subclasses=True)
class RoundPlanner:
    """Plans the rounds of the workers in `view`. Of a worker it reads only this worker's state, so
    one round can start before the next one is planned.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        # Gives each pooled job a worker, as `Policy.route`; None: the policy does.
        self.router: Callable[[View, int], Sequence[int]] | None = None
        self.router_rows = 0  # the most rows on a worker, for the router

    def has_work(self, worker: Worker) -> bool:
        """Whether a worker that runs nothing has anything to run."""
        return bool(worker.inbox.jobs or worker.residents.jobs)

    def plan_round(self, worker: Worker, now_s: float) -> Batch:
        """The next round of a worker that runs nothing and has work."""
        raise NotImplementedError

    def should_interrupt(self, worker: Worker, newcomers: int) -> bool:
        """Whether the worker's round should stop early for `newcomers` jobs that arrived there."""
        raise NotImplementedError
