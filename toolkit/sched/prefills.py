"""How the newcomers of a pass are prefilled: together, and in chunks.

The engine that computes the chunks, the fake engine, and the simulated worker that computes their
cost share this module, so that all three agree on when a row joins: `alike` and `groups_alike`
choose newcomers for one padded prefill, and `PrefillChunks` cuts prefills into chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

# Newcomers of similar length share a padded prefill (BATON, section 4.2). A row joins if it adds
# less padding than this many tokens, or than this share of the longest row: about what a forward
# forward pass of its own would cost on top.
PADDING_TOKENS = 32
PADDING_SHARE = 0.25


def alike(lengths: Sequence[int], limit: int | None = None) -> list[int]:
    """Indices of the rows that share a prefill with the first, nearest to its length first.

    Args:
        lengths: tokens of each row, oldest first; at least one row.
        limit: the most tokens of a chunk with padding; the first row is always in. None: no limit.
    """
    first = lengths[0]
    low = high = first
    members: list[int] = []
    # The sort is stable, so among equals the oldest comes first.
    for index in sorted(range(len(lengths)), key=lambda k: abs(lengths[k] - first)):
        low = min(low, lengths[index])
        high = max(high, lengths[index])
        too_wide = high - low > max(PADDING_TOKENS, PADDING_SHARE * high)
        if too_wide or (members and limit is not None and high * (len(members) + 1) > limit):
            break
        members.append(index)
    return members


def groups_alike(lengths: Sequence[int]) -> list[list[int]]:
    """All indices in groups of similar length; each begins with the oldest row that is left."""
    left = list(range(len(lengths)))
    groups = []
    while left:
        members = [left[k] for k in alike([lengths[index] for index in left])]
        groups.append(members)
        taken = set(members)
        left = [index for index in left if index not in taken]
    return groups


# A chunk is one forward pass over some columns of a group of similar length. While rows decode,
# chunks are bounded and alternate with decode steps, so that a long prompt does not stall the
# running rows.

Key = TypeVar("Key")  # identifies a newcomer: a number in an engine, a job in the scheduler


class PrefillGroup(Generic[Key]):
    """Newcomers prefilled together, longest first and padded to it; `done` columns are cached."""

    __slots__ = ("done", "keys", "lengths")

    def __init__(self, keys: list[Key], lengths: list[int], done: int = 0) -> None:
        self.keys = keys
        self.lengths = lengths
        self.done = done

    @property
    def width(self) -> int:
        """Columns in total."""
        return self.lengths[0]


class PrefillChunk(Generic[Key]):
    """Columns `start` to `end` of a group."""

    __slots__ = ("end", "group", "start")

    def __init__(self, group: PrefillGroup[Key], start: int, end: int) -> None:
        self.group = group
        self.start = start
        self.end = end

    @property
    def completes(self) -> bool:
        """Whether the chunk ends the group's prefill."""
        return self.end == self.group.width

    def up_to(self, end: int) -> PrefillChunk[Key]:
        """The same chunk with another end."""
        return PrefillChunk(self.group, self.start, end)


class PrefillChunks(Generic[Key]):
    """Newcomers that are on their way into a batch, in order of arrival as far as groups allow.

    With `mixes`, newcomers of any lengths share a group, as in a static batch.
    """

    __slots__ = ("_mixes", "_waiting", "group")

    def __init__(self, *, mixes: bool = False) -> None:
        self._mixes = mixes
        self._waiting: list[tuple[Key, int]] = []
        self.group: PrefillGroup[Key] | None = None  # the group that is being prefilled

    def __bool__(self) -> bool:
        return self.group is not None or bool(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting) + (len(self.group.keys) if self.group else 0)

    def __contains__(self, key: Key) -> bool:
        return bool(self) and key in self.all_keys()

    def all_keys(self) -> list[Key]:
        """All newcomers, the current group's first."""
        return [*(self.group.keys if self.group else ()), *[key for key, _ in self._waiting]]

    def copy(self) -> PrefillChunks[Key]:
        """A copy that can advance independently."""
        other: PrefillChunks[Key] = PrefillChunks(mixes=self._mixes)
        other._waiting = self._waiting.copy()
        if self.group is not None:
            other.group = PrefillGroup(self.group.keys, self.group.lengths, self.group.done)
        return other

    def add(self, key: Key, length: int) -> None:
        """Add a newcomer of `length` tokens, at least one."""
        self._waiting.append((key, length))

    def remove(self, key: Key) -> None:
        """Remove a newcomer. Its group, if it is the current one, dissolves; the others wait first.

        Cutting a row out of a half-made cache would rarely save a forward pass, and every engine
        would need the code for it.
        """
        group = self.group
        if group is not None and key in group.keys:
            self.group = None
            self._waiting[:0] = zip(group.keys, group.lengths, strict=True)
        self._waiting = [entry for entry in self._waiting if entry[0] != key]

    def take_waiting(self) -> list[Key]:
        """Remove and return all waiting newcomers, for an engine with another way to prefill."""
        taken = [key for key, _ in self._waiting]
        self._waiting.clear()
        return taken

    def clear(self) -> None:
        """Remove all newcomers."""
        self._waiting.clear()
        self.group = None

    def form(
        self, bound: int = 0, fits: Callable[[Sequence[int]], bool] | None = None
    ) -> PrefillGroup[Key]:
        """The current group, or a new one of the first newcomer and those of similar length.

        Args:
            bound: the most tokens of a chunk, padding included; 0: no bound. The first newcomer is
                always in.
            fits: whether memory has room for a group of these lengths; the group is halved until it
                fits or is one row.
        """
        if self.group is None:
            lengths = [length for _, length in self._waiting]
            chosen = list(range(len(lengths))) if self._mixes else alike(lengths, bound or None)
            while fits and not fits([lengths[index] for index in chosen]) and len(chosen) > 1:
                chosen = chosen[: (len(chosen) + 1) // 2]
            waiting = self._waiting
            taken = set(chosen)
            members = sorted([waiting[index] for index in chosen], key=lambda entry: -entry[1])
            self._waiting = [entry for k, entry in enumerate(waiting) if k not in taken]
            lengths = [length for _, length in members]
            self.group = PrefillGroup([key for key, _ in members], lengths)
        return self.group

    def next(self, bound: int = 0) -> PrefillChunk[Key]:
        """The next chunk: at most `bound` tokens with padding, at least one column; 0: the rest."""
        group = self.form(bound)
        end = group.width
        if bound:
            end = min(end, group.done + max(bound // len(group.keys), 1))
        return PrefillChunk(group, group.done, end)

    def made(self, completed: PrefillChunk[Key]) -> None:
        """Record that the engine computed the chunk."""
        completed.group.done = completed.end
        if completed.completes:
            self.group = None
