"""Least attained service first: the jobs with the fewest tokens run, the others are paused."""

from toolkit.sched.memory import no_rows
from toolkit.sched.policies.base import Policy, rows_parameter
from toolkit.sched.policies.parameters import parameter, policy
from toolkit.sched.types import Job, Moves, Pass, Worker
from toolkit.sched.view import View


@policy("least-served")
class LeastServedPolicy(Policy):
    """A paused job keeps its cache on the device. If memory is full, the most served are evicted
    until one job fits.
    """

    max_batch_size: int = rows_parameter(4)
    quantum: int = parameter(8, low=1, doc="decode steps after which jobs are ranked again")

    def should_interrupt(self, view: View, worker: Worker, newcomers: int) -> bool:
        return False  # a round is short

    def plan_worker(self, view: View, worker: Worker, now_s: float) -> Pass:
        running = worker.running
        served = {job: job.generated + running.steps - job.joined for job in running.jobs}
        served |= {job: job.generated for job in worker.paused.jobs}
        caches = sorted(served, key=lambda job: (served[job], job.ticket))
        evict: list[Job] = []
        while True:
            chosen, steps = self._choose(worker, caches, served)
            if chosen:
                break
            evict.append(caches.pop())
        pause = [job for job in caches if job in running.jobs and job not in chosen]
        resume = [job for job in chosen if job in worker.paused.jobs]
        moves = Moves(pause=tuple(pause), resume=tuple(resume)) if pause or resume else None
        entering = [job for job in chosen if job not in served]
        return self.make_pass(worker, entering, steps, evict, moves)

    def _choose(
        self, worker: Worker, caches: list[Job], served: dict[Job, int]
    ) -> tuple[list[Job], int]:
        """The jobs that run, the least served first, and for how many steps."""
        tokens = {job: job.length + served[job] - job.generated for job in caches}
        rows = no_rows(worker).beside(sum(tokens.values()))  # all are paused until they run
        chosen: list[Job] = []
        jobs = [*caches, *worker.waiting.jobs]
        for job in sorted(jobs, key=lambda job: (served.get(job, job.generated), job.ticket)):
            if len(chosen) >= min(self.max_batch_size, worker.row_limit):
                break
            if job in tokens:
                wider = rows.beside(-tokens[job])
                if wider.fits(tokens[job], wider.capacity, enters=False):
                    rows = wider.joined(tokens[job])
                    chosen.append(job)
            elif rows.fits(job.length, rows.capacity) or not (chosen or caches):
                rows = rows.entered(job)
                chosen.append(job)
        rows = rows.prefilled()
        steps = min(self.quantum, rows.room(rows.capacity)) if chosen else 0
        return chosen, max(steps, 1)
