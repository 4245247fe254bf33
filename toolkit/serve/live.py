"""A request on its way and the batch that it is in, as the driver sees them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from toolkit.engines.protocol import FinishReason, Row, SamplingParams, StepOutput
from toolkit.sched.types import Batch
from toolkit.serve.forecast import NOTHING, Told
from toolkit.serve.reply import Reply
from toolkit.serve.text import TextOutput

Status = Literal["", "stop", "length", "cancelled", "failed"]


@dataclass(slots=True, frozen=True)
class Ask:
    """What one choice asks for, in tokens."""

    request_id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams
    priority: int = 0
    end_after: int | None = None  # for replayed traces; the scheduler never sees it
    timeout_s: float = math.inf  # from its arrival to its last token


@dataclass(slots=True, eq=False)
class Live:
    """A request on its way, and when what happened to it, in seconds on the driver's clock."""

    ask: Ask
    output: TextOutput
    reply: Reply
    index: int
    arrival_s: float
    told: Told = NOTHING  # what the forecast said of one like it
    tokens: list[int] = field(default_factory=list)  # generated so far
    started_s: float = math.nan
    first_token_s: float = math.nan
    last_token_s: float = math.nan
    max_gap_s: float = 0.0  # between two tokens; tokens that come together share their gap
    status: Status = ""  # how it ended
    flight: Flight | None = None
    deadline: asyncio.TimerHandle | None = None

    def row(self) -> Row:
        """What a worker must know to go on with it."""
        ask = self.ask
        tokens = ask.prompt + tuple(self.tokens)
        return Row(ask.request_id, tokens, len(self.tokens), ask.max_new_tokens, ask.sampling, ask.end_after)


@dataclass(slots=True, eq=False)
class Flight:
    """A batch on a worker: its rows, and how many tokens of each have come."""

    batch: Batch
    lives: tuple[Live, ...]
    received: list[int]
    follows: bool = False  # it was sent as soon as the worker's last batch had ended: nothing else kept that waiting
    arrived: int = 0  # requests that had been submitted when it started


def merge(steps: Sequence[StepOutput]) -> dict[int, tuple[list[int], FinishReason]]:
    """Row to its tokens of all `steps`, and how it ended or ''."""
    tokens: dict[int, list[int]] = {}
    ended: dict[int, FinishReason] = {}
    for step in steps:
        for row, token in zip(step.rows, step.tokens, strict=True):
            tokens.setdefault(row, []).append(token)
        ended.update(step.ended)
    return {row: (tokens.get(row, []), ended.get(row, "")) for row in {**tokens, **ended}}
