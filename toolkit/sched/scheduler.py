"""The sans-IO scheduler: what every policy shares.

A driver tells it what happens (`submit`, `complete`, `end`, `cancel`, `worker_lost`, `worker_ready`) and asks what to
run (`tick`); time comes in with every call. It keeps the pool, the workers' queues and their loads, and it owns what no
policy should have to get right: requests that can never fit, batches that ran out of memory or lost their worker,
cancellation. The decisions themselves are the policy's.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Sequence
from operator import attrgetter

import numpy as np

from toolkit.sched import moves
from toolkit.sched.history import History
from toolkit.sched.longest import longest
from toolkit.sched.protocols import LooksBack, Policy, Ranks, Reorders, Reschedules
from toolkit.sched.queues import Queues
from toolkit.sched.ranked import RankedInbox
from toolkit.sched.rounds import Rounds
from toolkit.sched.stranded import RETURN_S, Stranded
from toolkit.sched.types import Batch, BatchResult, Job, Refusal, Request, RoundResult, View, Worker

MAX_STRIKES = 2  # a job that failed this often alone is given up
_index = attrgetter("index")


class Scheduler:
    """Requests in, batches out.

    Args:
        policy: decides what runs where and when.
        workers: one `Worker` per engine instance, numbered from 0; of one kind, or of several with own laws.
        history: how many finished output lengths the policy may look back on, where it does not say so itself.
        seed: of the policy's random draws.
        finished: output lengths of requests that ended before, which a policy looks back on like those to come.
    """

    def __init__(
        self,
        policy: Policy,
        workers: Sequence[Worker],
        *,
        history: int = 1000,
        seed: int = 0,
        finished: Iterable[int] = (),
    ) -> None:
        self.policy = policy
        self.workers = list(workers)
        self._pool: list[Job] = []
        self._jobs: dict[str, Job] = {}
        self._finished = policy.first_history() if isinstance(policy, LooksBack) else History(history)
        for length in finished:
            self._finished.add(length)
        self._refusals: list[Refusal] = []
        self._tickets = 0
        self._interrupts: list[int] = []
        self._rounds = Rounds()
        self._reschedules = policy if isinstance(policy, Reschedules) else None
        self._reorders = policy if isinstance(policy, Reorders) else None
        for worker in self.workers:
            worker.longest = longest(worker.memory, policy.continuous)
        self._longest = max(worker.longest for worker in self.workers)
        self._stranded = Stranded(self.workers)
        self._view = View(self._pool, self.workers, -math.inf, self._finished, np.random.default_rng(seed))
        self._queues = Queues(self.workers, self._view.mixed)
        if isinstance(policy, Ranks):
            for worker in self.workers:
                worker.inbox = RankedInbox(policy.standings(worker.latency))

    @property
    def wake_at_s(self) -> float:
        """When to tick again though nothing happened; infinity: no need."""
        due_s = self._view.due_s if self._pool else math.inf
        return min(due_s, self._stranded.wake_at_s) if self._view.mixed else due_s

    @property
    def jobs(self) -> int:
        """Requests that were accepted and have not ended."""
        return len(self._jobs)

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
        """Requests that wait to run: in the pool, at a worker, preempted, or in a batch in its queue."""
        queued = sum(batch.size for worker in self.workers for batch in worker.queue)
        at_workers = sum(worker.inbox.waiting + len(worker.held) + len(worker.swapped) for worker in self.workers)
        return len(self._pool) + len(self._stranded.jobs) + queued + at_workers

    def submit(self, request: Request, now_s: float) -> Refusal | None:
        """A request arrives. A `Refusal`, and no further trace of it, where it can never fit."""
        total = request.prompt_tokens + request.max_new_tokens
        if total > self._longest:
            return Refusal(
                request.request_id,
                f"prompt + max_tokens is {total} tokens; a worker's memory holds {self._longest}",
            )
        if request.request_id in self._jobs:
            raise ValueError(f"request {request.request_id!r} is already here")
        job = Job(request, 0, request.prompt_tokens, waiting_since_s=now_s)
        self._jobs[request.request_id] = job
        if request.priority:
            self._view.prioritised = True
        self._to_pool((job,))
        return None

    def tick(self, now_s: float) -> list[Batch]:
        """The batches to start now, at most one per worker."""
        if self._view.mixed:
            self._give_up(now_s)
        if self._reschedules is not None:
            self._release(self._reschedules.release(self._view, now_s), now_s)
        if self._pool:
            self._route(now_s)
        view = self._view
        view.now_s = now_s
        if self._reorders is not None:
            self._reorder(*self._reorders.reorder(view, now_s))
        decision = self.policy.plan(view, now_s)
        if view.arrived:
            view.arrived.clear()
        if decision.wake_at_s is not None:
            view.due_s = decision.wake_at_s
        for index in decision.interrupt:
            self._interrupt(index)
        if decision.batches:
            self._take(decision.batches)
            for batch in decision.batches:
                self._queues.put(batch)
        if not view.free:
            return []
        started = [self._start(worker, now_s) for worker in view.free if worker.queue]
        if started:
            view.free[:] = [worker for worker in view.free if worker.running is None]
        return started

    def take_interrupts(self) -> list[int]:
        """Workers whose round should stop at its next allowed step, asked for since the last call.

        A driver whose engine cannot stop a round may ignore them: the round ends later, nothing else changes.
        """
        if not self._interrupts:
            return []
        interrupts, self._interrupts = self._interrupts, []
        return interrupts

    def complete(self, result: BatchResult | RoundResult, now_s: float) -> None:
        """A worker is done with its batch: some jobs ended, others go on; a failed batch is tried again in halves."""
        worker = self.workers[result.worker]
        batch = worker.running
        if batch is None or batch.batch_id != result.batch_id:
            raise ValueError(f"worker {result.worker} does not run batch {result.batch_id}")
        worker.running = None
        if worker.alive:
            insort(self._view.free, worker, key=_index)
        if isinstance(result, RoundResult):
            self._complete_round(worker, batch, result, now_s)
        else:
            self._queues.unload(worker, batch)
            self._complete_batch(worker, batch, result, now_s)

    def _complete_batch(self, worker: Worker, batch: Batch, result: BatchResult, now_s: float) -> None:
        going_on = []
        for job, generated, finished in zip(batch.jobs, result.generated, result.finished, strict=True):
            job.generated += generated
            job.length += generated
            job.slices += 1
            if finished or job.cancelled:
                self._end(job)
            else:
                job.waiting_since_s = now_s
                going_on.append(job)
        if result.failure:
            worker.oom_events += result.failure == "oom"
            self._try_again(worker, batch, going_on, result.failure)
        else:
            self._to_pool(going_on)

    def _complete_round(self, worker: Worker, batch: Batch, result: RoundResult, now_s: float) -> None:
        if worker.index in self._interrupts:  # nobody took it in time
            self._interrupts.remove(worker.index)
        for job in self._rounds.finish(worker, batch, result, self._jobs, now_s):
            self._end(job)
        if result.failure:
            is_short = result.failure == "oom"
            worker.oom_events += is_short
            rounds = self._rounds
            alone = rounds.run_short(worker, result, self._jobs) if is_short else rounds.crash(worker, now_s)
            if alone is not None:
                self._strike(alone, result.failure)

    def _strike(self, job: Job, failure: str) -> None:
        """It failed alone; it is given up if not for the first time."""
        job.strikes += 1
        if job.strikes >= MAX_STRIKES:
            if job.home >= 0:
                self.workers[job.home].inbox.remove(job)
            self._refusals.append(Refusal(job.request_id, _FAILED[failure]))
            self._end(job)

    def _interrupt(self, index: int) -> None:
        batch = self.workers[index].running
        if batch is not None and batch.keep_cache and not batch.interrupted:
            batch.interrupted = True
            self._interrupts.append(index)

    def end(self, request_id: str, generated: int, now_s: float) -> None:
        """The driver saw it end after `generated` tokens, of which the worker cannot know: at a stop string.

        An ordinary end, and its length one of those that policies look back on. A row that still runs is taken out as a
        cancelled one is. Unknown or ended requests are ignored.
        """
        job = self._jobs.get(request_id)
        if job is not None and not job.cancelled:
            self._finished.add(generated)
            self._take_out(job)

    def cancel(self, request_id: str, now_s: float) -> None:
        """The client does not want it any more. Unknown or ended requests are ignored."""
        job = self._jobs.get(request_id)
        if job is not None and not job.cancelled:
            self._take_out(job)

    def _take_out(self, job: Job) -> None:
        """At once where it waits, with its batch where it runs."""
        job.cancelled = True
        for worker in self.workers:
            if moves.holds(worker, job):
                if self._rounds.cancel(worker, job):
                    self._end(job)
                else:
                    self._interrupt(worker.index)
                return
        waiting = self.workers[job.home].inbox if job.home >= 0 else self._pool
        if job in self._stranded.jobs:
            waiting = self._stranded.jobs
        if job in waiting:
            waiting.remove(job)
            self._end(job)
        elif self._queues.take_out(job):
            self._end(job)

    def worker_lost(self, index: int, now_s: float) -> None:
        """A worker's process is gone, after its running batch was completed as crashed: its queue runs elsewhere."""
        worker = self.workers[index]
        worker.alive = False
        self._view.workers_changed()
        self._rounds.lose(worker, now_s)
        if self._view.mixed:
            self._stranded.lost(now_s)
            self._stranded.divide(self._pool)
        if not any(other.alive for other in self.workers):
            return  # what waits here, waits for this worker to come back
        inbox, worker.inbox = worker.inbox, worker.inbox.emptied()
        self._to_pool(inbox.everybody())
        self._queues.leave(worker)

    def worker_ready(self, index: int, now_s: float) -> None:
        """A worker that was lost is back."""
        self.workers[index].alive = True
        self._view.workers_changed()
        if self._view.mixed:
            self._stranded.divide(self._pool)

    def take_refusals(self) -> list[Refusal]:
        """Requests given up on since the last call."""
        refusals, self._refusals = self._refusals, []
        return refusals

    def _to_pool(self, jobs: Iterable[Job]) -> None:
        stranded = self._stranded
        for job in jobs:
            job.ticket = self._tickets
            job.home = -1
            self._tickets += 1
            (self._pool if job.limit_tokens <= stranded.limit else stranded.jobs).append(job)

    def _give_up(self, now_s: float) -> None:
        """Those whose workers were lost, and did not come back."""
        for job in self._stranded.given_up(now_s):
            tokens, job.cancelled = job.limit_tokens, True  # not a length to look back on
            reason = f"prompt + max_tokens is {tokens} tokens; workers that hold so many are lost since {RETURN_S:g} s"
            self._refusals.append(Refusal(job.request_id, reason))
            self._end(job)

    def _release(self, jobs: Sequence[Job], now_s: float) -> None:
        """They leave their workers, whose next round tells the engine, and wait in the pool behind all others."""
        for job in jobs:
            self._rounds.release(self.workers[job.home], job, now_s)
        self._to_pool(jobs)

    def _reorder(self, behind: Sequence[Job], first: Sequence[Job]) -> None:
        for job in behind:
            self.workers[job.home].inbox.defer(job)
        for job in first:
            self.workers[job.home].inbox.advance(job)

    def _route(self, now_s: float) -> None:
        homes = self.policy.route(self._view, now_s)
        if homes is None:
            return
        for job, home in zip(self._pool, homes, strict=True):
            job.home = home
            self.workers[home].inbox.append(job)
        self._view.arrived += homes
        self._pool.clear()

    def _take(self, batches: Sequence[Batch]) -> None:
        """The batches' jobs leave the pool and the inboxes."""
        pooled = 0
        for batch in batches:
            for job in batch.jobs:
                if job.home >= 0:
                    inbox = self.workers[job.home].inbox
                    if inbox[0] is job:
                        inbox.popleft()
                    else:
                        inbox.remove(job)
                else:
                    pooled += 1
        if not pooled:
            return
        if pooled == len(self._pool):
            self._pool.clear()
        else:
            taken = {job.ticket for batch in batches for job in batch.jobs}
            self._pool[:] = [job for job in self._pool if job.ticket not in taken]

    def _start(self, worker: Worker, now_s: float) -> Batch:
        batch = worker.queue.popleft()
        if batch.keep_cache:
            self._rounds.begin(worker, batch, now_s)
        batch.started_s = now_s
        worker.running = batch
        return batch

    def _try_again(self, worker: Worker, batch: Batch, jobs: list[Job], failure: str) -> None:
        """In two halves; who fails alone is struck, and given up in the end."""
        if len(jobs) == 1:
            self._strike(jobs[0], failure)
            if jobs[0].strikes >= MAX_STRIKES:
                return
        self._queues.halve(worker, batch, jobs, crashed=failure == "crashed")

    def _end(self, job: Job) -> None:
        if not job.cancelled:
            self._finished.add(job.generated)
        del self._jobs[job.request_id]


_FAILED = {
    "oom": "ran out of memory alone, twice",
    "crashed": "the worker died while it ran alone, twice",
}
