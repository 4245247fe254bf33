"""The cache groups of a model as vLLM resolved them, and the flags with which vLLM starts."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from toolkit.catalogue.caches import is_plain, logged_tokens, longest_blocks, read_tokens
from toolkit.catalogue.resolved import CacheGroup, Resolved
from toolkit.errors import InputError
from toolkit.sched.policies.vllm import VllmPolicy


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The cache groups of a model, as vLLM resolved them.

    Attributes:
        groups: in vLLM's order.
        max_model_len: tokens of the longest request.
        retention: vLLM's prefix_cache_retention_interval: tokens between the ends of windows and
            states that are kept; 0: only those that a known return can use; None: all.
        in_flight: tokens of all passes that might be under way when vLLM logged its capacity.
        rows_within_blocks: whether vLLM starts with states only if there are as many blocks as
            max_num_seqs, as it does with CUDA graphs.
        best: tokens that sparse attention reads; 0: all.
    """

    groups: tuple[CacheGroup, ...]
    max_model_len: int
    retention: int | None = 0
    in_flight: int = 0
    rows_within_blocks: bool = False
    best: int = 0

    @property
    def window(self) -> int:
        """Tokens, its own included, that a step attends to at most in most layers; 0: all."""
        return read_tokens(self.groups, self.best)

    @property
    def states(self) -> list[CacheGroup]:
        """The groups of layers with states."""
        return [group for group in self.groups if group.kind == "state"]

    def capacity_tokens(self, blocks: int) -> int:
        """The tokens of cache that vLLM logs for so many blocks; see `logged_tokens`."""
        return logged_tokens(self.groups, blocks, self.max_model_len, self.in_flight)

    def refuse(self, blocks: int, flags: VllmPolicy, *, ahead: bool) -> None:
        """Raise InputError if vLLM would not start with this cache and these flags."""
        in_flight = flags.max_num_batched_tokens * (1 + ahead)
        needs = longest_blocks(self.groups, self.max_model_len, in_flight)
        if needs > blocks + 1:
            raise InputError(
                f"a request of max_model_len {self.max_model_len:,} tokens needs {needs:,} blocks, "
                f"and the cache has {blocks:,}",
                "lower max_model_len or max_num_batched_tokens, or give more memory",
            )
        for group in self.states:
            aligned = group.mode == "align"
            if aligned != flags.prefix_caching:
                raise InputError(
                    f"prefix_caching {str(flags.prefix_caching).lower()}: the states' blocks were "
                    f"laid out for mode '{group.mode}'",
                    "profile the server again with that flag",
                )
            if aligned and not flags.chunked_prefill:
                raise InputError(
                    "chunked_prefill false: states with prefix caching need chunks",
                    "set chunked_prefill to true, or prefix_caching to false",
                )
        if self.states and self.rows_within_blocks and flags.max_num_seqs > blocks:
            raise InputError(
                f"max_num_seqs {flags.max_num_seqs:,}: the cache has {blocks:,} blocks, and each "
                "request's state takes one",
                f"set max_num_seqs to at most {blocks:,}",
            )

    def allowed(self, flags: VllmPolicy, blocks: int, *, ahead: bool) -> VllmPolicy:
        """The flags nearest to `flags` with which vLLM starts, as far as fewer rows and tokens of a
        pass decide that.
        """
        rows = flags.max_num_seqs
        if self.rows_within_blocks and self.states:
            rows = max(min(rows, blocks), 1)
        tokens = flags.max_num_batched_tokens
        most = rows + bisect_left(  # the longest request must fit beside the passes under way
            range(rows + 1, tokens + 1),
            True,
            key=lambda count: (
                longest_blocks(self.groups, self.max_model_len, count * (1 + ahead)) > blocks + 1
            ),
        )
        if (rows, most) == (flags.max_num_seqs, tokens):
            return flags
        return replace(flags, max_num_seqs=rows, max_num_batched_tokens=most)


def settings_of(resolved: Resolved | None, max_model_len: int, device: str) -> CacheSettings | None:
    """The cache groups of an engine; None: one group of full attention, or it is not known.

    Args:
        device: 'cpu', which has no CUDA graphs, or another.
    """
    if (
        resolved is None
        or not resolved.groups
        or (is_plain(resolved.groups) and not resolved.index_topk)
    ):
        return None
    return CacheSettings(
        tuple(resolved.groups),
        max_model_len,
        resolved.retention,
        resolved.max_in_flight_tokens,
        device != "cpu",
        resolved.index_topk,
    )
