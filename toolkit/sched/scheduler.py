"""The sans-IO scheduler: everything that all policies share.

A driver reports events (`submit`, `complete`, `end`, `cancel`, `worker_lost`, `worker_ready`) and
asks what to run (`tick`, the loop of the scheduler); each call brings the time. The policy makes
the decisions. The scheduler handles what no policy should have to: requests that can never fit,
batches that ran out of memory or lost their worker, and cancellation. It keeps the state of waiting
jobs in `waiting`, of waiting passes in `queues`, and of running ones in `caches`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from mypy_extensions import mypyc_attr

from toolkit.errors import InputError
from toolkit.sched.caches import WorkerPasses, holds
from toolkit.sched.memory import longest
from toolkit.sched.policies.base import Policy
from toolkit.sched.policies.parameters import Parameter, Value, declared
from toolkit.sched.queues import PassQueues
from toolkit.sched.types import (
    Job,
    Pass,
    PassResult,
    Refusal,
    Request,
    Worker,
)
from toolkit.sched.view import Decision, View
from toolkit.sched.waiting import RankedJobs, WaitingPool

# A job that ran alone is given up at its second failure without a token in between, which is what
# a request that breaks its worker does. One that makes progress goes on, but not for ever.
MAX_FAILURES_HERE = 2
MAX_FAILURES = 5
_FAILED = {"oom": "ran out of memory alone", "crashed": "the worker died while it ran alone"}
_TIMES = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}


@mypyc_attr(allow_interpreted_subclasses=True)
class Scheduler:
    """Requests in, batches out.

    `workers` has one `Worker` per engine instance, numbered from 0; all have equal laws. `seed`: of
    the policy's random draws. `finished` are output lengths of earlier requests, with which the
    history starts. Raises `InputError` for an oracle that was not told the lengths.
    """

    def __init__(
        self,
        policy: Policy,
        workers: Sequence[Worker],
        *,
        seed: int = 0,
        finished: Iterable[int] = (),
    ) -> None:
        if policy.knows_lengths and not policy.output_tokens:
            raise InputError(
                f"policy '{policy.name}' needs the true output lengths",
                "it runs in simulations only",
            )
        self.policy = policy
        self.workers = list(workers)
        self._finished = policy.first_history()
        for length in finished:
            self._finished.add(length)
        self._refused: list[Refusal] = []  # accepted requests that were given up
        self.interrupts: list[int] = []  # what `take_interrupts` will return; drivers may read it
        self._passes = WorkerPasses()
        for worker in self.workers:
            ranking = policy.ranking(worker.latency)
            if ranking is not None:
                worker.waiting = RankedJobs(ranking)
        self._longest = longest(self.workers[0].memory, policy.continuous)
        self._pool = WaitingPool(self.workers)
        self._jobs: dict[str, Job] = {}  # those that have not ended, by request id
        self._releases = type(policy).release is not Policy.release
        self._reorders = type(policy).reorder is not Policy.reorder
        self._view = View(
            self._pool.jobs, self.workers, -math.inf, self._finished, np.random.default_rng(seed)
        )
        self._queues = PassQueues(self._view)

    def tick(self, now_s: float) -> list[Pass]:
        """The batches to start now, at most one per worker."""
        view = self._view
        view.now_s = now_s
        if view.due and self._releases:
            self._release(now_s)
        self._route(now_s)
        if view.due:
            view.sort_due()
            if self._reorders:
                self._pool.reorder(*self.policy.reorder(view, now_s))
        decision = self.policy.plan(view, now_s)
        self._accept(decision)
        return self._start_due(now_s)

    def _release(self, now_s: float) -> None:
        """Jobs that the policy takes off their worker go back to the pool."""
        released = self.policy.release(self._view, now_s)
        for job in released:
            self._view.changed(job.home)
            self._passes.release(self.workers[job.home], job, now_s)
        self._pool.add(released)

    def _route(self, now_s: float) -> None:
        """Pooled jobs go to the workers that the policy gives them."""
        if not self._pool.jobs:
            return
        view = self._view
        homes = self.policy.route(view, now_s)
        if homes is None:
            return
        self._pool.route(homes)
        for home in homes:
            view.arrived[home] = view.arrived.get(home, 0) + 1
            view.make_due(self.workers[home])
            view.changed(home)

    def _accept(self, decision: Decision) -> None:
        """Queue the passes of a decision at their workers, and interrupt passes."""
        view = self._view
        view.arrived.clear()
        if decision.wake_at_s is not None:
            view.due_s = decision.wake_at_s
        for index in decision.interrupt:
            self._interrupt(index)
        if decision.batches:
            self._pool.take(decision.batches)
            for batch in decision.batches:
                self._queues.put(batch)
                view.changed(batch.worker)

    def _start_due(self, now_s: float) -> list[Pass]:
        """Start the first queued batch of each due worker, by index; then no worker is due."""
        view = self._view
        view.sort_due()
        started: list[Pass] = []
        for worker in view.due:
            worker.is_due = False
            if worker.queue:
                batch = worker.queue.popleft()
                self._passes.begin(worker, batch, now_s)
                batch.started_s = now_s
                worker.batch = batch
                view.changed(worker.index)
                started.append(batch)
        view.due.clear()
        return started

    @property
    def wake_at_s(self) -> float:
        """When to call `tick` again even if nothing happens; infinity if there is no need."""
        return self._view.due_s if self._pool.jobs else math.inf

    @property
    def jobs(self) -> int:
        """Accepted requests that have not ended."""
        return len(self._jobs)

    @property
    def running_jobs(self) -> int:
        """Requests in batches that run now."""
        return sum(len(worker.running.jobs) for worker in self.workers if worker.batch)

    @property
    def waiting_jobs(self) -> int:
        """Requests that wait to run: in the pool, at a worker, preempted, or in a queued batch."""
        queued = sum(len(batch.jobs) for worker in self.workers for batch in worker.queue)
        preempted = sum(
            len(worker.paused.jobs) + len(worker.swapped.jobs) for worker in self.workers
        )
        return self._pool.count + queued + preempted

    def submit(self, request: Request, now_s: float, number: int = -1) -> Refusal | None:
        """A request arrives. Returns a `Refusal`, and keeps nothing of it, if it can never fit.

        `number` is for drivers that would rather look jobs up in a list than by id: `Job.number`.
        `ValueError`: a request with this id has not ended yet.
        """
        total = request.prompt_tokens + request.max_new_tokens
        most = self._longest
        if total > most:
            reason = f"prompt + max_tokens is {total} tokens; a worker's memory holds {most}"
            return Refusal(request.request_id, reason)
        if request.request_id in self._jobs:
            raise ValueError(f"request {request.request_id!r} was already submitted")
        job = Job(request, 0, request.prompt_tokens, 0, now_s)
        job.number = number
        self._jobs[request.request_id] = job
        if request.priority:
            self._view.prioritised = True
        self._pool.add([job])
        return None

    def take_interrupts(self) -> list[int]:
        """Workers that should stop their pass at its next allowed step, since the last call.

        A driver may ignore them if its engine cannot stop a pass: then the pass ends later.
        """
        interrupts = self.interrupts
        self.interrupts = []
        return interrupts

    def complete(self, result: PassResult, now_s: float) -> None:
        """A worker reports the result of its pass.

        `ValueError`: the worker does not run that pass.
        """
        worker = self.workers[result.worker]
        batch = worker.batch
        if batch is None or batch.pass_id != result.pass_id:
            raise ValueError(f"worker {result.worker} does not run pass {result.pass_id}")
        worker.batch = None
        view = self._view
        view.changed(worker.index)
        if worker.alive:
            worker.is_due = True
            view.due.append(worker)
        if self.interrupts and worker.index in self.interrupts:  # not taken before it ended
            self.interrupts.remove(worker.index)
        failure = result.failure
        worker.oom_events += failure == "oom"
        self._end(self._passes.finish(worker, batch, result, self._jobs, now_s))
        if not batch.keep_cache:
            self._take_back(worker, batch, failure, now_s)
        elif failure:
            if failure == "oom":
                alone = self._passes.run_out_of_memory(worker, result, self._jobs)
            else:
                alone = self._passes.crash(worker, now_s)
            if alone is not None:
                self._count_failure(alone, failure)

    def _take_back(self, worker: Worker, batch: Pass, failure: str, now_s: float) -> None:
        """The jobs of a pass that kept no caches wait again; of a failed one, in two halves."""
        self._queues.unload(worker, batch)
        jobs = self._passes.drop_all(worker, now_s)
        if not failure:
            self._pool.add(jobs)
        elif len(jobs) != 1 or not self._count_failure(jobs[0], failure):
            self._queues.halve(worker, batch, jobs, crashed=failure == "crashed")

    def _count_failure(self, job: Job, failure: str) -> bool:
        """Count the failure of a job that ran alone, and end the job if it is given up (True)."""
        job.failures += 1
        job.failures_here = job.failures_here + 1 if job.generated == job.failed_at else 1
        job.failed_at = job.generated
        if job.failures_here < MAX_FAILURES_HERE and job.failures < MAX_FAILURES:
            return False
        reason = f"{_FAILED[failure]}, {_TIMES[job.failures]}"
        self._refused.append(Refusal(job.request_id, reason))
        if job.home >= 0:  # it was evicted, and waits at its worker
            self._pool.remove(job)
        self._end([job])
        return True

    def _interrupt(self, index: int) -> None:
        batch = self.workers[index].batch
        if batch is not None and batch.keep_cache and not batch.interrupted:
            batch.interrupted = True
            self.interrupts.append(index)

    def end(self, request_id: str, generated: int, now_s: float) -> None:
        """The driver ended the request after `generated` tokens, for example at a stop string.

        The request counts as finished, and its length enters the history. A row that still runs is
        removed in the way of a cancelled one. Unknown or ended requests are ignored.
        """
        job = self._jobs.get(request_id)
        if job is not None and not job.cancelled:
            self._finished.add(generated)
            self._take_out(job)

    def cancel(self, request_id: str, now_s: float) -> None:
        """The client withdrew the request. Unknown or ended requests are ignored."""
        job = self._jobs.get(request_id)
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
                if self._passes.cancel(worker, job):
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
        self._passes.lose(worker, now_s)
        if not any(other.alive for other in self.workers):
            return  # its jobs wait until it comes back
        self._pool.take_back(worker)
        self._queues.leave(worker)

    def worker_ready(self, index: int, now_s: float) -> None:
        """A lost worker came back."""
        self.workers[index].alive = True
        self._view.workers_changed()
        self._view.make_due(self.workers[index])

    def resize(self, index: int, capacity_tokens: int) -> None:
        """A worker's memory has room for so many tokens from now on, where an engine that also
        schedules holds tokens that no job counts. Jobs are refused by the capacity at the start.
        """
        self.workers[index].capacity_tokens = capacity_tokens
        self._view.changed(index)

    def live_parameters(self) -> dict[str, Parameter]:
        """The policy's parameters that `configure` changes, with their limits: of a continuous
        policy, and none that orders waiting jobs or makes the history.
        """
        policy = self.policy
        ranks = any(policy.ranking(worker.latency) is not None for worker in self.workers)
        if not policy.continuous or ranks:
            return {}
        known = declared(policy)
        return {name: known[name] for name in known if name not in policy.at_start}

    def configure(self, settings: Mapping[str, Value], slots: int = 0) -> None:
        """New values of the policy's parameters, and of the rows that run at once on each worker
        (0: as before), from the next tick on. Running jobs go on.

        `InputError` for a value outside its limits, and for one of no `live_parameters`.
        """
        known = self.live_parameters()
        for name in settings:
            if name not in known:
                owner = f"policy '{self.policy.name}'"
                raise InputError(f"{owner} takes no new {name} while it runs", "restart for that")
        if settings:
            self.policy = replace(self.policy, **settings)  # type: ignore[type-var]
        for worker in self.workers:
            if slots:
                worker.slots = slots
                worker.row_limit = slots
            self._view.changed(worker.index)

    def take_refusals(self) -> list[Refusal]:
        """The accepted requests that were given up since the last call."""
        refused = self._refused
        self._refused = []
        return refused

    def _end(self, ended: list[Job]) -> None:
        for job in ended:
            if not job.cancelled:
                self._finished.add(job.generated)
            del self._jobs[job.request_id]
