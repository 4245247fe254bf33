"""The iteration log of a paged engine: one line per forward pass, with its rows and its duration.

It is written inside the engine (`toolkit.backends.vllm.iterations`) and read by the profiler and by
checks of the simulator. It has lengths and times only: no text and no tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from toolkit.catalogue.resolved import Resolved
from toolkit.laws.features import StepShape, chunk_attended, chunk_inside
from toolkit.sched.types import Request


class LoggedRow(NamedTuple):
    """One request's part in a pass; the pass that ends its prefill gives its first token."""

    request_id: str
    computed: int  # tokens in the cache before the pass; drafts under way count as accepted
    new: int  # tokens that the pass computes
    prompt_tokens: int
    drafts: int = 0  # of the new tokens
    is_chunk: bool = False  # it gets no token

    @property
    def decodes(self) -> bool:
        """Whether the row decodes. Recomputing the last token of a dropped cache does not count."""
        if self.is_chunk or self.computed < self.prompt_tokens:
            return False
        return self.new == 1 + self.drafts


def shape_of_rows(rows: Sequence[LoggedRow], window: int = 0) -> StepShape:
    """The composition of a logged pass of a model with windows of `window` tokens; 0: without."""
    decodes = [row.computed for row in rows if row.decodes]
    drafts = sum(row.drafts for row in rows if row.decodes)
    chunks = [row for row in rows if not row.decodes]
    attended = sum(chunk_attended(row.computed, row.new) for row in chunks)
    new = sum(row.new for row in chunks)
    before = sum(row.computed for row in chunks)
    shape = StepShape(
        len(decodes), sum(decodes), len(chunks), new, attended, before, draft_tokens=drafts
    )
    if window:
        shape.decode_inside = sum(min(cached, window - 1) for cached in decodes)
        shape.prefill_inside = sum(chunk_inside(row.computed, row.new, window) for row in chunks)
        shape.growing = sum(cached < window - 1 for cached in decodes)
    return shape


class IterationLogHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's resolved settings: its limits, its cache, its model and its CUDA graphs.

    `executor` is where passes are launched: `uni` in the thread that schedules them, others in
    processes of their own. `resolved` has all that the engine resolved.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    block_tokens: int  # of the only group of caches; of several: the least common multiple
    blocks: int  # usable by requests: vLLM never gives out one of `num_gpu_blocks`
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
    graph_sizes: list[int] = []  # the tokens of each CUDA graph, ascending
    graph_mode: str = ""  # vLLM's cudagraph_mode, such as FULL_AND_PIECEWISE; empty: not known
    executor: str = ""  # vLLM's distributed_executor_backend; empty: not known
    resolved: Resolved | None = None


class LoggedPass(msgspec.Struct, kw_only=True):
    """One forward pass. Times are seconds of the machine's monotonic clock, of all processes.

    `start_s` is when the engine asked its scheduler for the pass, `end_s` when it had processed the
    tokens. With async scheduling passes overlap: a pass is scheduled and launched while the one
    before it runs. `launched_s` is when its forward pass was launched, `ready_s` when its tokens
    had come from the GPU; 0: not known. `accepted` are the drafts that became tokens, of each row
    with drafts.
    """

    step: int
    start_s: float
    end_s: float
    rows: list[LoggedRow]
    preempted: list[str]
    ended: list[str]
    waiting: int
    free_blocks: int
    launched_s: float = 0.0
    ready_s: float = 0.0
    accepted: list[int] = []
    changed: dict[str, bool | int | float | str] = {}  # settings that are new with this pass
    arrived: list[Request] = []  # since the pass before; of a server with live settings


_HEADER = msgspec.json.Decoder(IterationLogHeader)
_PASS = msgspec.json.Decoder(LoggedPass)


def to_line(what: IterationLogHeader | LoggedPass) -> bytes:
    """A line of the log."""
    return msgspec.json.encode(what) + b"\n"


def header_of(line: bytes) -> IterationLogHeader:
    """The log's first line; `msgspec.DecodeError` for anything else."""
    return _HEADER.decode(line)


def passes_of(lines: Iterable[bytes]) -> list[LoggedPass]:
    """The lines after the first; `msgspec.DecodeError` for anything else."""
    return [_PASS.decode(line) for line in lines]
