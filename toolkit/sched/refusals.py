"""Requests that the scheduler gives up on, and why, in words that may be shown to their clients."""

from __future__ import annotations

from toolkit.sched.stranded import RETURN_S
from toolkit.sched.types import Job, Refusal, Request

MAX_STRIKES = 2  # a job that failed this often alone is given up
_FAILED = {
    "oom": "ran out of memory alone, twice",
    "crashed": "the worker died while it ran alone, twice",
}


def too_long(request: Request, longest: int) -> Refusal | None:
    """A refusal where the request may need more tokens than `longest`, what a worker's memory holds."""
    total = request.prompt_tokens + request.max_new_tokens
    if total <= longest:
        return None
    reason = f"prompt + max_tokens is {total} tokens; a worker's memory holds {longest}"
    return Refusal(request.request_id, reason)


class Refusals:
    """Those that were accepted and are given up, until somebody asks for them."""

    def __init__(self) -> None:
        self._refused: list[Refusal] = []

    def take(self) -> list[Refusal]:
        """Those since the last call."""
        refused, self._refused = self._refused, []
        return refused

    def strike(self, job: Job, failure: str) -> bool:
        """The job failed alone: whether it is given up, as it is if not for the first time."""
        job.strikes += 1
        if job.strikes < MAX_STRIKES:
            return False
        self._refused.append(Refusal(job.request_id, _FAILED[failure]))
        return True

    def strand(self, job: Job) -> None:
        """The workers that could hold the job were lost, and did not come back."""
        tokens = job.limit_tokens
        reason = f"prompt + max_tokens is {tokens} tokens; workers that hold so many are lost since {RETURN_S:g} s"
        self._refused.append(Refusal(job.request_id, reason))
