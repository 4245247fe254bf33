"""What workers report to the scheduler.

This module is never compiled: the event log reads these classes by their annotations, which
compiled classes do not keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Failure = Literal["", "oom", "crashed"]


@dataclass
class BatchResult:
    """What a worker did with a static batch: new tokens and whether it ended, for each job in
    order.

    If there was a `failure`, `generated` still counts the tokens that reached the client before it.
    """

    batch_id: int
    worker: int
    generated: Sequence[int]
    finished: Sequence[bool]
    failure: Failure = ""


@dataclass
class RoundResult:
    """What a worker did with a round: all residents decoded `steps` times; `ended` jobs did so
    last.

    Attributes:
        ended: jobs that ended in the round's last step.
        joined: for each job that ended its prefill in the round, the steps of the round before it
            joined, which it did not decode. None: every prefill ended before the first step. On
            engines with a prefill that gives a token, the job has that token, and a round in which
            a job ends with it may have 0 steps. The prefill of a job that is not named continues in
            the next round.
        failure: "oom" if memory ran out. "crashed" if the worker died: then no cache is left.
        missed: residents that an engine which also schedules (`toolkit.backends.vllm`) left out of
            so many of the steps.
        dropped: jobs that lost their caches, the last admitted first; they wait again. Memory
            had no room for them (then `failure` is "oom", and `dropped` may be all residents, or
            empty if splitting a pass was enough), or an engine that also schedules made room.
    """

    batch_id: int
    worker: int
    steps: int
    ended: tuple[str, ...] = ()
    joined: tuple[tuple[str, int], ...] | None = None
    failure: Failure = ""
    missed: tuple[tuple[str, int], ...] = ()
    dropped: tuple[str, ...] = ()
