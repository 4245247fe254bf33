"""What workers report of passes.

This module is never compiled: the event log writes and reads the class, and msgspec cannot do
that with compiled classes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Failure = Literal["", "oom", "crashed"]


class PassResult(msgspec.Struct, omit_defaults=True):
    """What a worker did with a pass: all running jobs decoded `steps` times, `ended` jobs last.

    Attributes:
        steps: decode steps. In a pass that keeps no caches these are the tokens of its longest row:
            the token of a prefill is the first.
        ended: jobs that ended in the pass: in its last step, less what they `missed`.
        joined: for each job that ended its prefill in the pass, the steps of the pass before it
            joined, which it did not decode. None: every prefill ended before the first step. On
            engines with a prefill that gives a token, the job has that token, and a pass in which
            a job ends with it may have 0 steps. The prefill of a job that is not named continues in
            the next pass.
        failure: "oom" if memory ran out. "crashed" if the worker died: then no cache is left.
        missed: how many of the steps a running job had no part in: its row ended before the others
            of a pass that keeps no caches, or an engine that also schedules
            (`toolkit.backends.vllm`) left it out.
        dropped: jobs that lost their caches, the last admitted first; they wait again. Memory
            had no room for them (then `failure` is "oom", and `dropped` may be all running jobs, or
            empty if splitting a forward pass was enough), or an engine that also schedules made
            room. A pass that keeps no caches names none: all its jobs lose theirs.
    """

    pass_id: int
    worker: int
    steps: int
    ended: tuple[str, ...] = ()
    joined: tuple[tuple[str, int], ...] | None = None
    failure: Failure = ""
    missed: tuple[tuple[str, int], ...] = ()
    dropped: tuple[str, ...] = ()
