"""Replicas as routers see them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from toolkit.laws.passes import PassLaw

DEFAULT_EXPECTED_TOKENS = 128  # of an output, before the first has ended
# Of our front, live and simulated: the tokens of a block that it matches prompts by, and the
# seconds between two readings of a replica's own figures, where the router reads them.
BLOCK_TOKENS = 64
REPORT_EVERY_S = 0.25


class ReplicaReport(msgspec.Struct, frozen=True):
    """A replica's own figures, as its metrics have them."""

    waiting: int
    kv_usage: float  # the used share of its cache, from 0 to 1


class ReplicaTraits(msgspec.Struct, frozen=True):
    """What is known of a replica before it serves.

    Attributes:
        capacity_tokens: that its cache holds.
        pass_tokens: the most new tokens of a forward pass.
        max_rows: the most requests that run at once.
        law: of its forward passes; None if it was never fitted.
    """

    capacity_tokens: int
    pass_tokens: int = 2048
    max_rows: int = 256
    law: PassLaw | None = None


def strictest(sla: Mapping[str, float], metric: str) -> float:
    """The strictest target of a metric in a recipe, in seconds; infinity if it has none."""
    limits = (limit for key, limit in sla.items() if key.startswith(f"{metric}_"))
    return min(limits, default=math.inf)
