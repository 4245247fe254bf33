"""The iteration log of a paged engine: a line for each of its forward passes, who was in it, and
how long it took.

Written inside the engine (`toolkit.backends.vllm.iterations`), read by whoever profiles it or holds
the simulator to it. Lengths and times only: no text and no tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec


class LoggedRow(NamedTuple):
    """One request's part in a pass. A row that ends its prefill gets its first token in the same
    pass.
    """

    request_id: str
    computed: int  # tokens in the cache before the pass
    new: int  # tokens that the pass computes
    prompt_tokens: int

    @property
    def decodes(self) -> bool:
        """Whether it is one step behind the prompt. The last token of a cache that is made anew is
        none.
        """
        return self.new == 1 and self.computed >= self.prompt_tokens


class IterationLogHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine resolved: its limits, its cache, and what it runs."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_tokens: int
    blocks: int  # that requests can have: vLLM never gives out one of `num_gpu_blocks`
    enable_chunked_prefill: bool
    prefix_caching: bool
    async_scheduling: bool
    policy: str
    version: str
    model_type: str
    dtype: str
    device: str
    max_model_len: int
    vocab_size: int
    kv_bytes_per_token: int


class LoggedPass(msgspec.Struct, frozen=True, kw_only=True):
    """One forward pass. Seconds are of the machine's monotonic clock, which its processes share.

    `start_s` is when the engine asked its scheduler for the pass, `end_s` when it had taken the
    tokens in. With async scheduling passes overlap: a pass begins when it was asked for, and not
    before the one before it has ended.
    """

    step: int
    start_s: float
    end_s: float
    rows: list[LoggedRow]
    preempted: list[str]
    ended: list[str]
    waiting: int
    free_blocks: int


_HEADER = msgspec.json.Decoder(IterationLogHeader)
_PASS = msgspec.json.Decoder(LoggedPass)


def to_line(what: IterationLogHeader | LoggedPass) -> bytes:
    """A line of the log."""
    return msgspec.json.encode(what) + b"\n"


def header_of(line: bytes) -> IterationLogHeader:
    """The log's first line. Raises `msgspec.DecodeError` for anything else."""
    return _HEADER.decode(line)


def passes_of(lines: Iterable[bytes]) -> list[LoggedPass]:
    """The lines behind the first. Raises `msgspec.DecodeError` for anything else."""
    return [_PASS.decode(line) for line in lines]
