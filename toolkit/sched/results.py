"""What workers report of static batches.

This module is never compiled: the event log reads the class by its annotations, which compiled
classes do not keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Failure = Literal["", "oom", "crashed"]


@dataclass
class BatchResult:
    """What a worker did with a static batch: for each job in order new tokens, and if it ended.

    If there was a `failure`, `generated` still counts the tokens that reached the client before it.
    """

    batch_id: int
    worker: int
    generated: Sequence[int]
    finished: Sequence[bool]
    failure: Failure = ""
