"""How newcomers are prefilled: who shares a pass, how far each pass goes, and what is left of it when one leaves.

A pass is one forward call over some columns of a group of like length (`toolkit.sched.likeness`). While rows decode,
passes are bounded, so that a long prompt does not hold up those who run: a pass, a step, the next pass. One book of it
for the engine that makes the passes, for the fake one, and for the simulated worker that costs them, so that all
three agree on who joins when.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from toolkit.sched.likeness import alike

Key = TypeVar("Key")  # what newcomers go by: an engine's numbers, a scheduler's jobs


@dataclass(slots=True, eq=False)
class Group(Generic[Key]):
    """Newcomers that are prefilled together, the longest first, padded to its length; `done` columns are cached."""

    keys: list[Key]
    lengths: list[int]
    done: int = 0

    @property
    def width(self) -> int:
        """Columns in all."""
        return self.lengths[0]


@dataclass(slots=True, frozen=True)
class Pass(Generic[Key]):
    """Columns `start` to `end` of a group."""

    group: Group[Key]
    start: int
    end: int

    @property
    def completes(self) -> bool:
        """Whether the group's prefill ends with it."""
        return self.end == self.group.width


class Passes(Generic[Key]):
    """Newcomers on their way into a batch, in the order of their arrival as far as groups allow.

    Args:
        mixes: newcomers of any lengths share a group, as in a static batch; else those of like length.
    """

    __slots__ = ("_mixes", "_waiting", "group")

    def __init__(self, *, mixes: bool = False) -> None:
        self._mixes = mixes
        self._waiting: list[tuple[Key, int]] = []
        self.group: Group[Key] | None = None  # the one that is being prefilled

    def __bool__(self) -> bool:
        return self.group is not None or bool(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting) + (len(self.group.keys) if self.group else 0)

    def __contains__(self, key: Key) -> bool:
        return bool(self) and key in self.everybody()

    def everybody(self) -> list[Key]:
        """All who are here, those of the group in the works first."""
        return [*(self.group.keys if self.group else ()), *[key for key, _ in self._waiting]]

    def copy(self) -> Passes[Key]:
        """What can be advanced without this one."""
        other: Passes[Key] = Passes(mixes=self._mixes)
        other._waiting = self._waiting.copy()
        if self.group is not None:
            other.group = Group(self.group.keys, self.group.lengths, self.group.done)
        return other

    def add(self, key: Key, length: int) -> None:
        """A newcomer of so many tokens, at least one."""
        self._waiting.append((key, length))

    def remove(self, key: Key) -> None:
        """A newcomer goes. If it was in the group in the works, that is no more, and the others come first anew.

        To cut one out of a half-made cache would save a rare pass and cost every engine the code for it.
        """
        group = self.group
        if group is not None and key in group.keys:
            self.group = None
            self._waiting[:0] = zip(group.keys, group.lengths, strict=True)
        self._waiting = [one for one in self._waiting if one[0] != key]

    def take_waiting(self) -> list[Key]:
        """All who wait, for whoever prefills them otherwise."""
        taken = [key for key, _ in self._waiting]
        self._waiting.clear()
        return taken

    def clear(self) -> None:
        """Nobody is here any more."""
        self._waiting.clear()
        self.group = None

    def form(self, bound: int = 0, fits: Callable[[Sequence[int]], bool] | None = None) -> Group[Key]:
        """The group in the works; where there is none, it is the first who waits from now on, and those like it.

        Args:
            bound: tokens of a pass, at most, padding counted; 0: no bound. The first goes whatever its length.
            fits: whether memory has room for a group of these lengths; it is halved until it does, or is one row.
        """
        if self.group is None:
            lengths = [length for _, length in self._waiting]
            chosen = list(range(len(lengths))) if self._mixes else alike(lengths, bound or None)
            while fits and not fits([lengths[index] for index in chosen]) and len(chosen) > 1:
                chosen = chosen[: (len(chosen) + 1) // 2]
            members = sorted([self._waiting[index] for index in chosen], key=lambda one: -one[1])
            gone = set(chosen)
            self._waiting = [one for index, one in enumerate(self._waiting) if index not in gone]
            self.group = Group([key for key, _ in members], [length for _, length in members])
        return self.group

    def next(self, bound: int = 0) -> Pass[Key]:
        """The next pass: of at most `bound` tokens, padding counted, and at least one column; 0: all that is left."""
        group = self.form(bound)
        end = min(group.width, group.done + max(bound // len(group.keys), 1)) if bound else group.width
        return Pass(group, group.done, end)

    def made(self, one: Pass[Key]) -> None:
        """The pass was made."""
        one.group.done = one.end
        if one.completes:
            self.group = None
