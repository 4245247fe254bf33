"""The sans-IO scheduler: everything that all policies share.

A driver reports events (`submit`, `complete`, `end`, `cancel`, `worker_lost`, `worker_ready`) and
asks what to run (`tick`); each call brings the time. The scheduler handles what no policy should
have to: requests that can never fit, batches that ran out of memory or lost their worker, and
cancellation. It keeps the state of waiting jobs in `pool`, of waiting batches in `queues`, and of
rounds in `residents`. The policy makes the decisions.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from operator import attrgetter

import numpy as np
from mypy_extensions import mypyc_attr

from toolkit.sched.footprint import Footprint, longest
from toolkit.sched.inbox import RankedInbox
from toolkit.sched.pool import RETURN_S, AcceptedJobs, WaitingPool, take_waiting
from toolkit.sched.protocols import PlansRounds, Policy, Ranks, Reorders, Reschedules, UsesHistory
from toolkit.sched.queues import BatchQueues
from toolkit.sched.residents import WorkerRounds, holds
from toolkit.sched.types import (
    Batch,
    BatchResult,
    Job,
    Joining,
    Refusal,
    Request,
    RoundResult,
    Worker,
)
from toolkit.sched.view import NOTHING, LengthHistory, RoundPlanner, View

# A job that ran alone is given up at its second failure without a token in between, which is what
# a request that breaks its worker does. One that makes progress goes on, but not for ever.
MAX_STRIKES_HERE = 2
MAX_STRIKES = 5
_FAILED = {"oom": "ran out of memory alone", "crashed": "the worker died while it ran alone"}
_TIMES = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}

# Output lengths that are kept for a policy that does not set the size of the history itself.
DEFAULT_HISTORY = 1000
_index = attrgetter("index")


@mypyc_attr(allow_interpreted_subclasses=True)
class Scheduler:
    """Requests in, batches out.

    `workers` has one `Worker` per engine instance, numbered from 0; they may be of several kinds.
    `seed` is that of the policy's random draws. `finished` are output lengths of earlier requests,
    with which the history starts.
    """

    def __init__(
        self,
        policy: Policy,
        workers: Sequence[Worker],
        *,
        seed: int = 0,
        finished: Iterable[int] = (),
    ) -> None:
        self.policy = policy
        self.workers = list(workers)
        history = policy.first_history() if isinstance(policy, UsesHistory) else None
        self._finished = history or LengthHistory(DEFAULT_HISTORY)
        for length in finished:
            self._finished.add(length)
        self._refused: list[Refusal] = []  # accepted requests that were given up
        self.interrupts: list[int] = []  # what `take_interrupts` will return; drivers may read it
        self._rounds = WorkerRounds()
        self._reschedules = policy if isinstance(policy, Reschedules) else None
        self._reorders = policy if isinstance(policy, Reorders) else None
        layouts: dict[Joining | None, Footprint] = {}
        for worker in self.workers:
            worker.longest = longest(worker.memory, policy.continuous)
            worker.scratch = layouts.setdefault(worker.joining, worker.scratch)
        self._longest = max(worker.longest for worker in self.workers)
        self._pool = WaitingPool(self.workers)
        self._accepted = AcceptedJobs(self._pool, self.workers, named=policy.continuous)
        # whether a job was ever in an inbox; a continuous policy evicts jobs into them
        self._has_routed = policy.continuous
        self._view = View(
            self._pool.jobs, self.workers, -math.inf, self._finished, np.random.default_rng(seed)
        )
        self._queues = BatchQueues(self._view)
        self._planner: RoundPlanner | None = (
            policy.planner(self._view) if isinstance(policy, PlansRounds) else None
        )
        if isinstance(policy, Ranks):
            for worker in self.workers:
                worker.inbox = RankedInbox(policy.standings(worker.latency))

    @property
    def wake_at_s(self) -> float:
        """When to call `tick` again even if nothing happens; infinity if there is no need."""
        due_s = self._view.due_s if self._pool.jobs else math.inf
        return min(due_s, self._pool.wake_at_s) if self._view.mixed else due_s

    @property
    def jobs(self) -> int:
        """Accepted requests that have not ended."""
        return self._accepted.count

    @property
    def running_jobs(self) -> int:
        """Requests in batches that run now."""
        return sum(
            len(worker.residents) if worker.running.keep_cache else worker.running.size
            for worker in self.workers
            if worker.running
        )

    @property
    def waiting_jobs(self) -> int:
        """Requests that wait to run: in the pool, at a worker, preempted, or in a queued batch."""
        queued = sum(batch.size for worker in self.workers for batch in worker.queue)
        preempted = sum(len(worker.held) + len(worker.swapped) for worker in self.workers)
        return self._pool.waiting + queued + preempted

    def submit(self, request: Request, now_s: float, number: int = -1) -> Refusal | None:
        """A request arrives. Returns a `Refusal`, and keeps nothing of it, if it can never fit.

        `number` is for drivers that would rather look jobs up in a list than by id: `Job.number`.
        Such a driver gives each id once. `ValueError`: a request with this id has not ended yet.
        """
        total = request.prompt_tokens + request.max_new_tokens
        most = self._longest
        if total > most:
            reason = f"prompt + max_tokens is {total} tokens; a worker's memory holds {most}"
            return Refusal(request.request_id, reason)
        job = Job(request, 0, request.prompt_tokens, 0, now_s)
        job.number = number
        if not self._accepted.add(job):
            raise ValueError(f"request {request.request_id!r} was already submitted")
        if request.priority:
            self._view.prioritised = True
        self._pool.add_one(job)
        return None

    def tick(self, now_s: float) -> list[Batch]:
        """The batches to start now, at most one per worker."""
        view = self._view
        pool = self._pool
        view.now_s = now_s
        if view.mixed:
            self._refuse_stranded(now_s)
        if self._reschedules is not None:  # released jobs are routed again
            released = self._reschedules.release(view, now_s)
            for job in released:
                view.changed(job.home)
                self._rounds.release(self.workers[job.home], job, now_s)
            pool.add(released)
        if pool.jobs:
            self._route(now_s)
        due = view.due
        if len(due) > 1:
            due.sort(key=_index)
        if self._reorders is not None:
            pool.reorder(*self._reorders.reorder(view, now_s))
        planner = self._planner
        if planner is not None:
            if view.arrived:
                for index in planner.interrupts():
                    self._interrupt(index)
                view.arrived.clear()
            return self._start_rounds(planner, now_s) if due else []
        decision = self.policy.plan(view, now_s)
        if view.arrived:
            view.arrived.clear()
        if decision is NOTHING and not due:
            return []
        if decision.wake_at_s is not None:
            view.due_s = decision.wake_at_s
        for index in decision.interrupt:
            self._interrupt(index)
        batches = decision.batches
        if batches:
            pool.take(batches, has_routed=self._has_routed)
            for batch in batches:
                self._queues.put(batch)
                if view.figures:
                    view.changed(batch.worker)
        return self._start_due(now_s) if due else []

    def _start_rounds(self, planner: RoundPlanner, now_s: float) -> list[Batch]:
        """Plan and start the rounds of the due workers, by index. Afterwards no worker is due."""
        due = self._view.due
        queues = self._queues
        started: list[Batch] = []
        for worker in due:
            worker.is_due = False
            if planner.has_work(worker):
                batch = planner.plan_round(worker, now_s)
                batch.batch_id = queues.batches
                queues.batches += 1
                worker.assigned += 1
                for job in batch.jobs:
                    take_waiting(worker, job)
                self._start(worker, batch, now_s)
                started.append(batch)
        due.clear()
        return started

    def _start_due(self, now_s: float) -> list[Batch]:
        """Start the first queued batch of each due worker, by index; then no worker is due."""
        due = self._view.due
        idle = self._view.idle
        if len(due) > 1:
            due.sort(key=_index)
        started: list[Batch] = []
        for worker in due:
            worker.is_due = False
            if worker.queue:
                batch = worker.queue.popleft()
                self._start(worker, batch, now_s)
                del idle[bisect_left(idle, worker.index)]
                started.append(batch)
        due.clear()
        return started

    def _start(self, worker: Worker, batch: Batch, now_s: float) -> None:
        if batch.keep_cache:
            self._rounds.begin(worker, batch, now_s)
        batch.started_s = now_s
        worker.running = batch
        if self._view.figures:
            self._view.changed(worker.index)

    def take_interrupts(self) -> list[int]:
        """Workers that should stop their round at its next allowed step, since the last call.

        A driver may ignore them if its engine cannot stop a round: then the round ends later.
        """
        interrupts = self.interrupts
        self.interrupts = []
        return interrupts

    def complete(self, result: BatchResult | RoundResult, now_s: float) -> None:
        """A worker reports the result of its batch. A failed batch is retried in halves.

        `ValueError`: the worker does not run that batch.
        """
        worker = self.workers[result.worker]
        batch = worker.running
        if batch is None or batch.batch_id != result.batch_id:
            raise ValueError(f"worker {result.worker} does not run batch {result.batch_id}")
        worker.running = None
        view = self._view
        if view.figures:
            view.changed(worker.index)
        if worker.alive:
            if self._planner is None:
                insort(view.idle, worker.index)
            worker.is_due = True
            view.due.append(worker)
        if isinstance(result, RoundResult):
            if self.interrupts and worker.index in self.interrupts:  # not taken before it ended
                self.interrupts.remove(worker.index)
            jobs = self._accepted.by_id()
            for job in self._rounds.finish(worker, batch, result, jobs, now_s):
                self._end([job])
            if result.failure:
                if result.failure == "oom":
                    worker.oom_events += 1
                    alone = self._rounds.run_out_of_memory(worker, result, jobs)
                else:
                    alone = self._rounds.crash(worker, now_s)
                if alone is not None:
                    self._strike(alone, result.failure)
        else:
            self._queues.unload(worker, batch)
            self._complete_batch(worker, batch, result, now_s)

    def _complete_batch(
        self, worker: Worker, batch: Batch, result: BatchResult, now_s: float
    ) -> None:
        ended = []
        going_on = []
        for job, generated, finished in zip(
            batch.jobs, result.generated, result.finished, strict=True
        ):
            job.generated += generated
            job.length += generated
            job.slices += 1
            if finished or job.cancelled:
                ended.append(job)
            else:
                job.waiting_since_s = now_s
                going_on.append(job)
        self._end(ended)
        if not result.failure:
            self._pool.add(going_on)
            return
        worker.oom_events += result.failure == "oom"
        if len(going_on) != 1 or not self._strike(going_on[0], result.failure):
            self._queues.halve(worker, batch, going_on, crashed=result.failure == "crashed")

    def _strike(self, job: Job, failure: str) -> bool:
        """Count the failure of a job that ran alone, and end the job if it is given up (True)."""
        job.strikes += 1
        job.strikes_here = job.strikes_here + 1 if job.generated == job.struck_at else 1
        job.struck_at = job.generated
        if job.strikes_here < MAX_STRIKES_HERE and job.strikes < MAX_STRIKES:
            return False
        reason = f"{_FAILED[failure]}, {_TIMES[job.strikes]}"
        self._refused.append(Refusal(job.request_id, reason))
        if job.home >= 0:  # an evicted job waits in an inbox
            self._pool.remove(job)
        self._end([job])
        return True

    def _interrupt(self, index: int) -> None:
        batch = self.workers[index].running
        if batch is not None and batch.keep_cache and not batch.interrupted:
            batch.interrupted = True
            self.interrupts.append(index)

    def end(self, request_id: str, generated: int, now_s: float) -> None:
        """The driver ended the request after `generated` tokens, for example at a stop string.

        The request counts as finished, and its length enters the history. A row that still runs is
        removed in the way of a cancelled one. Unknown or ended requests are ignored.
        """
        job = self._accepted.by_id().get(request_id)
        if job is not None and not job.cancelled:
            self._finished.add(generated)
            self._take_out(job)

    def cancel(self, request_id: str, now_s: float) -> None:
        """The client withdrew the request. Unknown or ended requests are ignored."""
        job = self._accepted.by_id().get(request_id)
        if job is not None and not job.cancelled:
            self._take_out(job)

    def _take_out(self, job: Job) -> None:
        """Remove the job: at once if it waits, at the end of its batch if it runs."""
        job.cancelled = True
        if job.home >= 0:
            self._view.changed(job.home)
        for worker in self.workers:
            if holds(worker, job):
                self._view.changed(worker.index)
                if self._rounds.cancel(worker, job):
                    self._end([job])
                else:
                    self._interrupt(worker.index)
                return
        if self._pool.remove(job) or self._queues.take_out(job):
            self._end([job])

    def worker_lost(self, index: int, now_s: float) -> None:
        """A worker died, after its batch was completed as crashed. Its queue moves elsewhere."""
        worker = self.workers[index]
        worker.alive = False
        self._view.workers_changed()
        self._view.changed(index)
        self._rounds.lose(worker, now_s)
        if self._view.mixed:
            self._pool.worker_lost(now_s)
        if not any(other.alive for other in self.workers):
            return  # its jobs wait until it comes back
        self._pool.take_back(worker)
        self._queues.leave(worker)

    def worker_ready(self, index: int, now_s: float) -> None:
        """A lost worker came back."""
        self.workers[index].alive = True
        self._view.workers_changed()
        self._view.make_due(self.workers[index])
        if self._view.mixed:
            self._pool.divide()

    def resize(self, index: int, capacity_tokens: int) -> None:
        """A worker's memory has room for so many tokens from now on, where an engine that also
        schedules holds tokens that no job counts. Jobs are refused by the capacity at the start.
        """
        self.workers[index].capacity_tokens = capacity_tokens
        self._view.changed(index)

    def take_refusals(self) -> list[Refusal]:
        """The accepted requests that were given up since the last call."""
        refused = self._refused
        self._refused = []
        return refused

    def _refuse_stranded(self, now_s: float) -> None:
        """Refuse the jobs that waited too long for a lost worker."""
        for job in self._pool.given_up(now_s):
            job.cancelled = True  # keeps its length out of the history
            reason = (
                f"prompt + max_tokens is {job.limit_tokens} tokens; the workers that hold so many "
                f"have been lost for {RETURN_S:g} s"
            )
            self._refused.append(Refusal(job.request_id, reason))
            self._end([job])

    def _route(self, now_s: float) -> None:
        view = self._view
        planner = self._planner
        if planner is None or planner.router is None:
            homes = self.policy.route(view, now_s)
        else:
            homes = planner.router(view, planner.router_rows) if view.alive() else None
        if homes is not None:
            self._has_routed = True
            pool = self._pool.jobs
            arrived = view.arrived
            if len(homes) != len(pool):
                raise ValueError(f"{len(homes)} workers for {len(pool)} jobs")
            for k, home in enumerate(homes):
                job = pool[k]
                job.home = home
                worker = self.workers[home]
                worker.inbox.append(job)
                arrived[home] = arrived.get(home, 0) + 1
                if worker.running is None:
                    view.make_due(worker)
                if view.figures:
                    view.changed(home)
            pool.clear()

    def _end(self, ended: list[Job]) -> None:
        for job in ended:
            if not job.cancelled:
                self._finished.add(job.generated)
        self._accepted.remove(ended)
