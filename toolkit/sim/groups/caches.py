"""All cache groups of a model on one pool (vLLM's `v1/core/kv_cache_manager.py` and
`kv_cache_coordinator.py`): what a request finds in all of them, and the blocks of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd, lcm

from toolkit.catalogue.caches import (
    FULL_KINDS,
    is_plain,
    logged_tokens,
    longest_blocks,
    window_of,
)
from toolkit.catalogue.resolved import CacheGroup, Resolved
from toolkit.errors import InputError
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.groups.chunk import ChunkGroup
from toolkit.sim.groups.full import FullGroup, Hit, SharedRules, ceil_div
from toolkit.sim.groups.pool import GroupPool
from toolkit.sim.groups.row import GroupRow
from toolkit.sim.groups.state import OneStateGroup, StateGroup
from toolkit.sim.groups.window import WindowGroup


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The cache groups of a model, as vLLM resolved them.

    Attributes:
        groups: in vLLM's order.
        max_model_len: tokens of the longest request.
        retention: vLLM's prefix_cache_retention_interval: tokens between the ends of windows and
            states that are kept; 0: only those that a known return can use; None: all.
        in_flight: tokens of all passes that might be under way when vLLM logged its capacity.
        rehashes: as of `SharedRules`.
        rows_within_blocks: whether vLLM starts with states only if there are as many blocks as
            max_num_seqs, as it does with CUDA graphs.
    """

    groups: tuple[CacheGroup, ...]
    max_model_len: int
    retention: int | None = 0
    in_flight: int = 0
    rehashes: bool = False
    rows_within_blocks: bool = False

    @property
    def window(self) -> int:
        """As `window_of`."""
        return window_of(self.groups)

    def can_count(self, flags: VllmPolicy) -> bool:
        """Whether rows that decode can only be counted (`toolkit.sim.groups.steady`): the blocks
        that they give back have no keys, but for those of their prompts.
        """
        kinds = {group.kind for group in self.groups}
        if "chunk" in kinds:
            return False
        return not kinds & {"window", "state"} or self.retention == 0 or not flags.prefix_caching

    def capacity_tokens(self, blocks: int) -> int:
        """The tokens of cache that vLLM logs for so many blocks; see `logged_tokens`."""
        return logged_tokens(self.groups, blocks, self.max_model_len, self.in_flight)

    def start_problem(self, blocks: int, flags: VllmPolicy, *, ahead: bool) -> tuple[str, str]:
        """Why vLLM would not start with this cache and these flags, and the remedy; empty: it
        would.
        """
        in_flight = in_flight_tokens(flags, ahead=ahead)
        needs = longest_blocks(self.groups, self.max_model_len, in_flight)
        if needs > blocks + 1:
            problem = f"a request of max_model_len {self.max_model_len:,} tokens needs {needs:,} "
            problem += f"blocks, and the cache has {blocks:,}"
            return problem, "lower max_model_len or max_num_batched_tokens, or give more memory"
        for group in self.groups:
            aligned = group.mode == "align"
            if group.kind == "state" and aligned != flags.prefix_caching:
                problem = f"prefix_caching {str(flags.prefix_caching).lower()}: the states' blocks "
                problem += f"were laid out for mode '{group.mode}'"
                return problem, "profile the server again with that flag"
            if group.kind == "state" and aligned and not flags.chunked_prefill:
                problem = "chunked_prefill false: states with prefix caching need chunks"
                return problem, "set chunked_prefill to true, or prefix_caching to false"
            too_many = self.rows_within_blocks and flags.max_num_seqs > blocks
            if group.kind == "state" and too_many:
                problem = f"max_num_seqs {flags.max_num_seqs:,}: the cache has {blocks:,} blocks, "
                problem += "and each request's state takes one"
                return problem, f"set max_num_seqs to at most {blocks:,}"
        return "", ""

    def allowed(self, flags: VllmPolicy, blocks: int, *, ahead: bool) -> VllmPolicy:
        """The flags nearest to `flags` with which vLLM starts, as far as fewer rows and tokens of a
        pass decide that.
        """
        rows = flags.max_num_seqs
        if self.rows_within_blocks and any(group.kind == "state" for group in self.groups):
            rows = max(min(rows, blocks), 1)
        tokens = flags.max_num_batched_tokens
        low = rows
        high = tokens
        while low < high:  # the most tokens for which the longest request fits
            middle = (low + high + 1) // 2
            in_flight = middle * (2 if ahead else 1)
            if longest_blocks(self.groups, self.max_model_len, in_flight) <= blocks + 1:
                low = middle
            else:
                high = middle - 1
        if (rows, low) == (flags.max_num_seqs, tokens):
            return flags
        return replace(flags, max_num_seqs=rows, max_num_batched_tokens=low)


def settings_of(
    resolved: Resolved | None, max_model_len: int, version: str, device: str
) -> CacheSettings | None:
    """The cache groups of an engine; None: one group of full attention, or it is not known.

    Args:
        version: of vLLM.
        device: 'cpu', which has no CUDA graphs, or another.
    """
    if resolved is None:
        return None
    groups = resolved.groups
    if not groups or is_plain(groups):
        return None
    return CacheSettings(
        tuple(groups),
        max_model_len,
        resolved.retention,
        resolved.max_in_flight_tokens,
        is_before(version, 0, 33),
        device != "cpu",
    )


def is_before(version: str, major: int, minor: int) -> bool:
    """Whether a version such as '0.32.0' is older than `major`.`minor`."""
    numbers = [int(part) for part in version.split(".")[:2] if part.isdecimal()]
    return tuple(numbers) < (major, minor)


def in_flight_tokens(flags: VllmPolicy, *, ahead: bool) -> int:
    """Tokens of all passes that may be under way at once."""
    return flags.max_num_batched_tokens * (2 if ahead else 1)


class LookUp:
    """What a waiting request finds: blocks by group, tokens, and up to where some group has more
    than all groups have; 0: none has.
    """

    __slots__ = ("found", "hits", "junction")

    def __init__(self, hits: list[Hit], found: int, junction: int) -> None:
        self.hits = hits
        self.found = found
        self.junction = junction


class GroupedCache:
    """The groups of one engine.

    Args:
        settings: of the model.
        blocks: without the one that vLLM never gives out.
        ahead: a pass is planned while the one before it runs.

    Raises `InputError` where vLLM would not start.
    """

    def __init__(
        self, settings: CacheSettings, blocks: int, flags: VllmPolicy, *, ahead: bool
    ) -> None:
        problem, hint = settings.start_problem(blocks, flags, ahead=ahead)
        if problem:
            raise InputError(problem, hint)
        sizes = [group.block for group in settings.groups]
        whole = lcm(*sizes)
        unit = gcd(*sizes)
        self.caches: bool = flags.prefix_caching
        if not self.caches:
            unit = whole
        self.pool = GroupPool(blocks)
        self.rules = SharedRules(
            self.pool, unit, whole, settings.retention, rehashes=settings.rehashes
        )
        self.smallest = min(sizes)
        in_flight = in_flight_tokens(flags, ahead=ahead)
        longest = settings.max_model_len
        self.groups: list[FullGroup] = []
        self.states: list[StateGroup] = []  # with prefix caching
        kinds: dict[tuple[str, int, int], list[int]] = {}
        for number, group in enumerate(settings.groups):
            self._add(number, group, in_flight, longest)
            kind = "full" if group.kind in FULL_KINDS else group.kind
            kinds.setdefault((kind, group.block, group.window), []).append(number)
        # groups with equal rules are looked up together, those of full attention first
        self._kinds = sorted(kinds.values(), key=lambda each: not self.groups[each[0]].is_full)
        self._first_full: FullGroup | None = None
        for each in self.groups:
            if each.is_full and self._first_full is None:
                self._first_full = each
        self._reserve = int(flags.watermark * (blocks + 1))

    def _add(self, number: int, group: CacheGroup, in_flight: int, longest: int) -> None:
        if group.kind == "window":
            self.groups.append(WindowGroup(number, group, self.rules, in_flight, longest))
        elif group.kind == "chunk":
            self.groups.append(ChunkGroup(number, group, self.rules, in_flight, longest))
        elif group.kind == "state" and group.mode == "align":
            states = StateGroup(number, group, self.rules)
            self.groups.append(states)
            self.states.append(states)
        elif group.kind == "state":
            self.groups.append(OneStateGroup(number, group, self.rules))
        elif group.kind in FULL_KINDS:
            self.groups.append(FullGroup(number, group, self.rules))
        else:
            raise InputError(
                f"a cache of kind '{group.kind or group.spec}' is not modelled",
                "full, mla, window, chunk and state are",
            )

    def begin_pass(self) -> None:
        """The next pass is planned."""
        for group in self.states:
            group.begin_pass()

    def add(self, row: GroupRow) -> None:
        """A request comes; it has no blocks."""
        row.tables = [group.table() for group in self.groups]

    def look_up(self, row: GroupRow) -> LookUp:
        """What a waiting row would find now: the longest beginning that every group has, and not
        its last token.
        """
        groups = self.groups
        if not self.caches:
            return LookUp([Hit() for _ in groups], 0, 0)
        most = row.known - 1
        if len(groups) == 1:
            hits, found = groups[0].find(row, most, (0,))
            return LookUp(hits, found, 0)
        by_group = [Hit() for _ in groups]
        found = most
        longest = 0
        full: dict[int, int] = {}  # what groups of full attention have, by the first of a kind
        while True:
            now = found
            for numbers in self._kinds:
                group = groups[numbers[0]]
                if group.number in full:
                    now = min(now, full[group.number])
                    continue
                hits, now = group.find(row, now, numbers)
                for number, hit in zip(numbers, hits, strict=True):
                    by_group[number] = hit
                if group.is_full:
                    full[group.number] = now
                longest = max(longest, now)
            if now >= found:
                break
            found = now
            if full and len(self._kinds) == 2:
                break  # what the other kind has found, full attention has, too
        for group in groups:
            if group.is_full:
                del by_group[group.number].blocks[ceil_div(found, group.block) :]
        return LookUp(by_group, found, longest if longest > found else 0)

    def admit(
        self, row: GroupRow, seen: LookUp, new: int, *, reserves: bool, others_run: bool
    ) -> bool:
        """Give a waiting row what it has found and the blocks for `new` more tokens; False: there
        is no room.

        Args:
            reserves: whether its whole input must fit.
            others_run: whether rows run, so that the watermark counts.
        """
        free = self.pool.free - (self._reserve if others_run else 0)
        found = seen.found
        if reserves and self._needed(row, row.known, seen, found, whole=True) > free:
            return False
        if self._needed(row, found + new, seen, found, whole=False) > free:
            return False
        if any(hit.stop for hit in seen.hits):
            for group, hit in zip(self.groups, seen.hits, strict=True):
                group.adopt(row, hit, found)
        self._fill(row, found + new)
        return True

    def extend(self, row: GroupRow, new: int) -> bool:
        """Give a running row the blocks for `new` more tokens; False: there are too few. What its
        windows have passed is given back in any case.
        """
        processed = max(0, row.computed - row.in_flight)
        for group in self.groups:
            group.skip(row, processed)
        tokens = row.computed + new
        if self._needed(row, tokens, None, row.computed, whole=False) > self.pool.free:
            return False
        self._fill(row, tokens)
        return True

    def register(self, row: GroupRow, tokens: int) -> None:
        """The first `tokens` tokens of a row are known and in its blocks: others can find them."""
        if not self.caches:
            return
        if len(self.groups) > 1:
            tokens = tokens // self.rules.whole * self.rules.whole
        returns = [row.prompt - 1]
        if row.junction:
            returns.append(row.junction)
        for group in self.groups:
            group.register(row, tokens, returns)
            if group.is_full:
                group.register_end(row, tokens)
        full = self._first_full
        if full is not None:
            self._see(row, full, min(tokens, row.known) // full.block)

    def has_prompt(self, row: GroupRow) -> bool:
        """Whether the blocks that lie within the row's prompt can be found. Those of a size that is
        not `whole` get their keys late: with the next multiple of `whole` tokens.
        """
        if not self.caches or self.smallest == self.rules.whole:
            return True
        for group in self.groups:
            if isinstance(group, StateGroup | OneStateGroup):
                continue  # its blocks are kept at multiples of `whole` only
            if row.tables[group.number].looked < row.prompt // group.block:
                return False
        return True

    def lost(self, row: GroupRow, found: int) -> int:
        """Tokens behind those that a waiting row has found that were once in the first group of
        full attention: given out since, or of no use without the tail of a window or a state.
        """
        full = self._first_full
        if full is None:
            return 0
        size = full.block
        limit = (row.known - 1) // size
        first = found // size
        at = first
        for node in row.path:
            stop = node.end // size
            if stop <= at:
                continue
            seen = min(node.seen, limit)
            if seen <= at:
                break
            at = seen
            if seen < stop:
                break
        return (at - first) * size

    def _see(self, row: GroupRow, full: FullGroup, stop: int) -> None:
        """Note in the nodes of a row that its first blocks up to `stop` were registered once."""
        for node in row.path:
            seen = min(stop, node.end // full.block)
            if node.seen < seen:
                node.seen = seen
            if node.end >= stop * full.block:
                break

    def release(self, row: GroupRow) -> None:
        """The row gives all of its blocks back, group by group."""
        for group in self.groups:
            group.release(row)

    def held(self, row: GroupRow) -> list[int]:
        """Blocks of each group that the row holds."""
        return [group.held(row) for group in self.groups]

    def _needed(
        self, row: GroupRow, tokens: int, seen: LookUp | None, computed: int, *, whole: bool
    ) -> int:
        total = 0
        for group in self.groups:
            hit = seen.hits[group.number] if seen is not None else None
            total += group.needed(row, tokens, hit, computed, whole=whole)
        return total

    def _fill(self, row: GroupRow, tokens: int) -> None:
        for group in self.groups:
            group.allocate(row, tokens)
        self.register(row, min(tokens, row.known))
