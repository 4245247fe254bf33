"""What `toolkit.backends.vllm.driver` and its child tell each other, a line of JSON each."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec


class GroupSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A group of layers with one kind of KV cache.

    Attributes:
        block: its tokens.
        window: tokens that a sliding window or a chunk of local attention sees.
        mode: of states, vLLM's `mamba_cache_mode`.
        checkpoint: blocks for states inside the last chunk of a prompt.
        draft: the group is of the layers that draft.
    """

    kind: Literal["full", "window", "chunk", "state"]
    block: int
    window: int = 0
    mode: Literal["align", "none"] = "align"
    checkpoint: int = 0
    draft: bool = False


class DraftSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Speculative decoding: vLLM's method, and drafts per row and pass."""

    method: str
    tokens: int


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one of vLLM's schedulers, named as vLLM's flags where it has one.

    Attributes:
        blocks: usable ones; vLLM keeps one more for itself.
        ahead: the scheduler is vLLM's `AsyncScheduler`.
        groups: empty: one of full attention, with blocks of `block_tokens`.
        retention: vLLM's `prefix_cache_retention_interval`; None: every block is kept.
        flags: further arguments of vLLM's `EngineArgs`.
    """

    block_tokens: int
    blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_caching: bool
    chunked_prefill: bool = True
    reserve_full_isl: bool = True
    watermark: float = 0.0
    ahead: bool = False
    groups: list[GroupSettings] = []
    retention: int | None = None
    drafts: DraftSettings | None = None
    flags: dict[str, Any] = {}


class OpenScheduler(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Make a scheduler, with a number that no open one has."""

    scheduler: int
    settings: SchedulerSettings


class AddRequest(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A request comes. `tokens` are (first token, how many consecutive ones) of its prompt, of
    `prompt` tokens, and of its output.
    """

    scheduler: int
    number: int
    prompt: int
    limit: int
    tokens: list[tuple[int, int]]


class PlanPass(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Plan a pass."""

    scheduler: int


class GiveTokens(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The tokens of the oldest pass that is under way exist: (request, accepted drafts), and
    (request, drafts that are proposed next) where these are not all.
    """

    scheduler: int
    accepted: list[tuple[int, int]] = []
    offered: list[tuple[int, int]] = []


class CloseScheduler(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Forget a scheduler."""

    scheduler: int


class LoadedVllm(msgspec.Struct, frozen=True, kw_only=True):
    """The first line: the vLLM that was loaded, and the folder of its package."""

    version: str
    path: str


class Answered(msgspec.Struct, frozen=True):
    """It is done."""


class PlannedPass(msgspec.Struct, frozen=True, kw_only=True):
    """A planned pass.

    Attributes:
        rows: (request, tokens computed before, new tokens, drafts among these, whether it gets a
            token), in vLLM's order.
        preempted: requests that lost their blocks for it.
        free, waiting: blocks and requests, after planning.
        found: tokens looked up and found of requests admitted for the first time, and again.
    """

    rows: list[tuple[int, int, int, int, bool]]
    preempted: list[int]
    free: int
    waiting: int
    found: tuple[int, int, int, int]


class GivenTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The requests that ended, and free blocks and waiting requests now."""

    ended: list[int]
    free: int
    waiting: int


Message: TypeAlias = OpenScheduler | AddRequest | PlanPass | GiveTokens | CloseScheduler
REQUESTS: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)
