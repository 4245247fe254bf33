"""Requests and replicas as routers see them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

DEFAULT_EXPECTED_TOKENS = 128  # of an output, before the first has ended
# Of our front, live and simulated: the tokens of a block that it matches prompts by, and the
# seconds between two readings of a replica's own figures, where the router reads them.
BLOCK_TOKENS = 64
REPORT_EVERY_S = 0.25
# Requests by which kinds of replicas are weighed, in tokens.
TYPICAL_PROMPT = 768
TYPICAL_OUTPUT = 256


class RoutedRequest(msgspec.Struct, frozen=True):
    """A request as a router sees it.

    `blocks` are chain hashes of the prompt's full blocks: equal values stand for equal tokens in
    that block and in all before it. `session` names the conversation; empty if there is none.
    """

    request_id: str
    prompt_tokens: int
    max_new_tokens: int
    blocks: tuple[int, ...] = ()
    session: str = ""


class ReplicaReport(msgspec.Struct, frozen=True):
    """A replica's own figures, as its metrics had them at `at_s`."""

    waiting: int
    kv_usage: float  # the used share of its cache, from 0 to 1
    at_s: float


class PassLaw(Protocol):
    """Seconds of an engine's forward pass, its host's part included.

    `behind_s` is what each cached token before a part of a prompt adds; `pass_s` leaves it out.
    """

    @property
    def behind_s(self) -> float: ...

    def pass_s(
        self, decodes: int, decode_cached: float, chunks: float, new_tokens: float, attended: float
    ) -> float:
        """Seconds of a pass.

        `decodes` rows decode, with `decode_cached` tokens in their caches together. `chunks` parts
        of prompts have `new_tokens` tokens together, which attend to `attended` keys.
        """


class ReplicaTraits(msgspec.Struct, frozen=True):
    """What is known of a replica before it serves.

    Attributes:
        capacity_tokens: that its cache holds.
        pass_tokens: the most new tokens of a forward pass.
        max_rows: the most requests that run at once.
        law: of its forward passes; None if it was never fitted.
        kind: of a fleet's replica, the name of its kind.
        weight: the requests that it serves for one of the fleet's first kind (`weighed`).
    """

    capacity_tokens: int
    pass_tokens: int = 2048
    max_rows: int = 256
    law: PassLaw | None = None
    kind: str = ""
    weight: float = 1.0

    @property
    def pace(self) -> float:
        """Typical requests per second while its cache or its rows are full; needs a law."""
        assert self.law is not None
        rows = max(min(self.max_rows, self.capacity_tokens // (TYPICAL_PROMPT + TYPICAL_OUTPUT)), 1)
        new = min(rows * TYPICAL_PROMPT / TYPICAL_OUTPUT, max(self.pass_tokens - rows, 1))
        prompts = new / TYPICAL_PROMPT
        context = rows * (TYPICAL_PROMPT + TYPICAL_OUTPUT / 2)
        attended = new * TYPICAL_PROMPT / 2
        return prompts / self.law.pass_s(rows, context, max(prompts, 1.0), new, attended)


def strictest(sla: Mapping[str, float], metric: str) -> float:
    """The strictest target of a metric in a recipe, in seconds; infinity if it has none."""
    limits = (limit for key, limit in sla.items() if key.startswith(f"{metric}_"))
    return min(limits, default=math.inf)


def weighed(kinds: Sequence[ReplicaTraits]) -> list[ReplicaTraits]:
    """The kinds of a fleet with weights: by their laws, or by cache size where one has no law."""
    if len(kinds) == 1:
        return list(kinds)
    lawful = all(kind.law is not None for kind in kinds)
    sizes = [kind.pace if lawful else float(kind.capacity_tokens) for kind in kinds]
    return [
        msgspec.structs.replace(kind, weight=size / sizes[0])
        for kind, size in zip(kinds, sizes, strict=True)
    ]
