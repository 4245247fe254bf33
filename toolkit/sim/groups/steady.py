"""Rows that decode in step, by the rhythm of their blocks.

A row that decodes takes a block of each group when its last one is full, once in `block` passes. A
window (and a state, like a window of two tokens) gives one back as often, and not in the same pass
as a rule. Both depend on the number of passes alone. So rows are sorted into buckets by the pass in
which they take and give, modulo a block, and a pass costs as much as the rows in its buckets.

With c tokens computed before a pass, and the outputs of `late` passes not known when it is planned,
a row takes a block of b tokens when c is a multiple of b, and gives one back when c - late - window
+ 1 is.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from toolkit.sim.groups.full import FullGroup, ceil_div
from toolkit.sim.groups.pool import Block, GroupPool
from toolkit.sim.groups.row import GroupRow
from toolkit.sim.groups.state import OneStateGroup, StateGroup, StateTable
from toolkit.sim.groups.window import WindowGroup

CAPPED = -1  # a change: the row's tokens in windows no longer grow
STATE_WINDOW = 2  # a state is given back like a window of so many tokens


class Rhythm:
    """The rows of groups with equal blocks and windows, by the pass in which they take a block, or
    give one back, modulo a block.

    Attributes:
        window: of gives; 0: of takes.
        groups: that these rules are of.
        rows: [block] buckets.
    """

    __slots__ = ("block", "count", "groups", "rows", "window")

    def __init__(self, block: int, window: int) -> None:
        self.block = block
        self.window = window
        self.groups: list[FullGroup] = []
        self.rows: list[dict[GroupRow, None]] = [{} for _ in range(block)]
        self.count = 0  # of rows

    def add(self, row: GroupRow, value: int) -> None:
        """Add a row. Its passes are those where `value` + the passes so far is a multiple of the
        block.
        """
        self.rows[-value % self.block][row] = None
        self.count += 1

    def remove(self, row: GroupRow, value: int) -> None:
        """Remove it."""
        del self.rows[-value % self.block][row]
        self.count -= 1

    def blocks(self, steps: int) -> int:
        """Blocks that all rows take, or give, in the pass after `steps`."""
        return len(self.groups) * len(self.rows[steps % self.block])

    def blocks_in(self, steps: int, passes: int) -> int:
        """The same in so many passes after `steps`."""
        block = self.block
        whole = passes // block
        total = whole * self.count
        for k in range(whole * block, passes):
            total += len(self.rows[(steps + k) % block])
        return total * len(self.groups)


class SteadyRows:
    """The rows in step.

    Args:
        groups: of the model.
        late: passes with outputs that are not known when a pass is planned.
        window: for `inside` and `growing`; see `StepShape`.

    Attributes:
        count: of the rows.
        steps: passes so far.
        last_order: no row that is in step was admitted after this one.
        is_aligned: a row takes at least as many blocks in a pass as it gives back.
    """

    __slots__ = (
        "_capped", "_changes", "_ends", "_growing", "_growing_base", "_keyed", "_late", "_sum",
        "_window", "count", "gives", "is_aligned", "last_order", "steps", "takes",
    )  # fmt: skip

    def __init__(self, groups: Sequence[FullGroup], late: int, window: int) -> None:
        self.count = 0
        self.steps = 0
        self.last_order = 0
        self._late = late
        self._window = window
        self._sum = 0  # of `base`
        self._growing = 0  # rows with less than a window
        self._growing_base = 0  # the sum of their `base`
        self._capped = 0
        self.takes: list[Rhythm] = []
        self.gives: list[Rhythm] = []
        for group in groups:
            if isinstance(group, OneStateGroup):
                continue  # a row has its block from the first pass on
            _rhythm(self.takes, group.block, 0).groups.append(group)
            if isinstance(group, WindowGroup):
                _rhythm(self.gives, group.block, group.window).groups.append(group)
            elif isinstance(group, StateGroup):
                _rhythm(self.gives, group.block, STATE_WINDOW).groups.append(group)
        # whether a row that gives a block takes one of the same group in the same pass
        self.is_aligned = True
        for rhythm in self.gives:
            aligned = late == 1 and rhythm.window % rhythm.block == 0
            self.is_aligned = self.is_aligned and aligned
        # heaps: (pass, order, row); (pass, order, which rhythm of `gives` or CAPPED, row); (pass,
        # order, group, place of a block with a key that is given back, row)
        self._ends: list[tuple[int, int, GroupRow]] = []
        self._changes: list[tuple[int, int, int, GroupRow]] = []
        self._keyed: list[tuple[int, int, int, int, GroupRow]] = []

    def cached(self) -> int:
        """Tokens in the caches of all rows."""
        return self._sum + self.count * self.steps

    def inside(self) -> int:
        """Of those, tokens inside the windows."""
        if not self._window:
            return 0
        growing = self._growing_base + self._growing * self.steps
        return growing + self._capped * (self._window - 1)

    @property
    def growing(self) -> int:
        """Rows with less than a window cached."""
        return self._growing

    def can_join(self, row: GroupRow) -> bool:
        """Whether a row that decodes holds the blocks that the rhythm expects."""
        processed = row.computed - self._late - 1
        for rhythm in self.gives:
            gone = max(processed - rhythm.window + 1, 0) // rhythm.block
            for group in rhythm.groups:
                table = row.tables[group.number]
                if table.length != ceil_div(row.computed, group.block):
                    return False
                if isinstance(table, StateTable):
                    if len(table.keyed) != table.length - gone:
                        return False
                elif table.gone != gone:
                    return False
        return True

    def join(self, row: GroupRow) -> None:
        """A row decodes in step from now on."""
        steps = self.steps
        base = row.computed - steps
        row.base = base
        row.is_steady = True
        row.last_pass = steps + row.request.left
        self.count += 1
        self._sum += base
        self.last_order = max(self.last_order, row.order)
        heappush(self._ends, (row.last_pass, row.order, row))
        for rhythm in self.takes:
            rhythm.add(row, base)
        row.awake = 0
        for which, rhythm in enumerate(self.gives):
            value = self._value(row, rhythm)
            if value + steps > 0:
                row.awake |= 1 << which
                rhythm.add(row, value)
            else:  # the first block is passed then
                heappush(self._changes, (rhythm.block - value, row.order, which, row))
            for group in rhythm.groups:
                self._add_keyed(row, group, value)
        row.is_growing = self._window > 0 and row.computed < self._window - 1
        if row.is_growing:
            self._growing += 1
            self._growing_base += base
            heappush(self._changes, (self._window - 1 - base, row.order, CAPPED, row))
        else:
            self._capped += 1

    def leave(self, row: GroupRow) -> None:
        """A row is on its own again: its state is what it is after all passes so far, but for what
        depends on the passes under way.
        """
        steps = self.steps
        base = row.base
        row.is_steady = False
        row.computed = base + steps
        row.request.left = row.last_pass - steps
        self.count -= 1
        self._sum -= base
        if not self.count:
            self.last_order = 0
        if row.is_growing:
            self._growing -= 1
            self._growing_base -= base
        else:
            self._capped -= 1
        for rhythm in self.takes:
            rhythm.remove(row, base)
            for group in rhythm.groups:
                row.tables[group.number].length = ceil_div(row.computed, group.block)
        for which, rhythm in enumerate(self.gives):
            value = self._value(row, rhythm)
            if row.awake >> which & 1:
                rhythm.remove(row, value)
            gone = max(value + steps - 1, 0) // rhythm.block
            for group in rhythm.groups:
                _set_gone(row, group, gone)

    def change(self) -> None:
        """Make the changes that are due before the next pass."""
        changes = self._changes
        while changes and changes[0][0] <= self.steps:
            at, _, which, row = heappop(changes)
            if not row.is_steady:
                continue
            if which == CAPPED:
                if row.is_growing and at == self._window - 1 - row.base:
                    row.is_growing = False
                    self._growing -= 1
                    self._growing_base -= row.base
                    self._capped += 1
                continue
            rhythm = self.gives[which]
            value = self._value(row, rhythm)
            if not row.awake >> which & 1 and at == rhythm.block - value:
                row.awake |= 1 << which
                rhythm.add(row, value)

    def due(self) -> int:
        """Blocks that all rows take in the next pass."""
        total = 0
        for rhythm in self.takes:
            total += rhythm.blocks(self.steps)
        return total

    def given(self) -> int:
        """Blocks that all rows give back in the next pass."""
        total = 0
        for rhythm in self.gives:
            total += rhythm.blocks(self.steps)
        return total

    def has_keyed(self) -> bool:
        """Whether a block with a key is given back in the next pass."""
        keyed = self._keyed
        while keyed and not self._is_held(keyed[0]):
            heappop(keyed)
        return bool(keyed) and keyed[0][0] <= self.steps

    def step(self, pool: GroupPool, due: int, given: int) -> None:
        """Take and give the blocks of the next pass, in any order: no block with a key is evicted
        for it.
        """
        found = []
        while self.has_keyed():
            found.append(heappop(self._keyed))
        found.sort(key=lambda one: one[1:4])
        last: tuple[int, int, int, int, GroupRow] | None = None
        for one in found:
            if one == last:
                continue  # a row that came into step again is there twice
            last = one
            _, _, group, place, row = one
            pool.give([row.tables[group].keyed.pop(place)])
            given -= 1
        pool.give_plain(given)
        pool.take(due)

    def events(self) -> list[GroupRow]:
        """The rows that take or give blocks in the next pass, in order of admission."""
        rows: dict[GroupRow, None] = {}
        for rhythm in self.takes:
            rows.update(rhythm.rows[self.steps % rhythm.block])
        for rhythm in self.gives:
            rows.update(rhythm.rows[self.steps % rhythm.block])
        found = list(rows)
        found.sort(key=lambda row: row.order)
        return found

    def step_row(self, row: GroupRow, pool: GroupPool) -> None:
        """Give and take the blocks of one row for the next pass; as many must be free."""
        steps = self.steps
        given: list[tuple[int, int]] = []  # group and place
        for which, rhythm in enumerate(self.gives):
            value = self._value(row, rhythm) + steps
            if row.awake >> which & 1 and value % rhythm.block == 0:
                place = value // rhythm.block - 1
                given += [(group.number, place) for group in rhythm.groups]
        given.sort()
        for number, place in given:
            block = row.tables[number].keyed.pop(place, None)
            if block is None:
                pool.give_plain(1)
            else:
                pool.give([block])
        for rhythm in self.takes:
            if (row.base + steps) % rhythm.block == 0:
                pool.take(len(rhythm.groups))

    def held(self, row: GroupRow) -> list[int]:
        """Blocks of each group that a row holds, with those of the planned pass."""
        steps = self.steps
        found = [table.length for table in row.tables]
        for rhythm in self.takes:
            for group in rhythm.groups:
                found[group.number] = ceil_div(row.base + steps + 1, rhythm.block)
        for rhythm in self.gives:
            gone = max(self._value(row, rhythm) + steps, 0) // rhythm.block
            for group in rhythm.groups:
                found[group.number] -= gone
        return found

    def alike(self, most: int, pool: GroupPool) -> int:
        """How many passes, at most `most`, are all of these rows, one after the other, with the
        blocks that they need, where the order of rows makes no difference; the first of them has
        its blocks.
        """
        steps = self.steps
        ends = self._ends
        while not ends[0][2].is_steady or ends[0][2].last_pass != ends[0][0]:
            heappop(ends)
        most = min(most, ends[0][0] - steps)
        if self._changes:
            most = min(most, self._changes[0][0] - steps)
        keyed = self._keyed
        while keyed and not self._is_held(keyed[0]):
            heappop(keyed)
        if keyed:
            most = min(most, keyed[0][0] - steps)
        if most < 2:
            return 1
        at_most = 0
        for rhythm in self.takes:
            at_most += ((most - 1) // rhythm.block + 1) * rhythm.count * len(rhythm.groups)
        if at_most <= pool.plain:
            return most
        room = pool.free if self.is_aligned else pool.plain
        for passes in range(1, most):
            for rhythm in self.takes:
                room -= rhythm.blocks(steps + passes)
            if self.is_aligned:
                for rhythm in self.gives:
                    room += rhythm.blocks(steps + passes)
            if room < 0:
                return passes
        return most

    def leap(self, passes: int, pool: GroupPool) -> None:
        """Take and give the blocks of so many more passes after the next one."""
        due = 0
        given = 0
        for rhythm in self.takes:
            due += rhythm.blocks_in(self.steps + 1, passes)
        for rhythm in self.gives:
            given += rhythm.blocks_in(self.steps + 1, passes)
        pool.give_plain(given)
        pool.take(due)

    def ended(self) -> list[GroupRow]:
        """The rows that got their last token with the passes so far; they are still in step."""
        found: list[GroupRow] = []
        ends = self._ends
        while ends and ends[0][0] <= self.steps:
            at, _, row = heappop(ends)
            is_again = found and found[-1] is row  # it came into step more than once
            if row.is_steady and row.last_pass == at and not is_again:
                found.append(row)
        return found

    def _value(self, row: GroupRow, rhythm: Rhythm) -> int:
        """With the passes so far: the tokens that the row's window has passed."""
        return row.base - self._late - rhythm.window + 1

    def _add_keyed(self, row: GroupRow, group: FullGroup, value: int) -> None:
        """Note when the blocks with keys are given back."""
        for place, block in row.tables[group.number].keyed.items():
            if block.key is not None:
                at = (place + 1) * group.block - value
                heappush(self._keyed, (at, row.order, group.number, place, row))

    def _is_held(self, event: tuple[int, int, int, int, GroupRow]) -> bool:
        at, _, number, place, row = event
        if not row.is_steady or place not in row.tables[number].keyed:
            return False
        for rhythm in self.gives:
            for group in rhythm.groups:
                if group.number == number:
                    value = row.base - self._late - rhythm.window + 1
                    return at == (place + 1) * rhythm.block - value
        return False


def _rhythm(rhythms: list[Rhythm], block: int, window: int) -> Rhythm:
    """The one with this block and window, made where there is none."""
    for rhythm in rhythms:
        if rhythm.block == block and rhythm.window == window:
            return rhythm
    rhythms.append(Rhythm(block, window))
    return rhythms[-1]


def _set_gone(row: GroupRow, group: FullGroup, gone: int) -> None:
    """The blocks at the first `gone` places of a row were given back."""
    table = row.tables[group.number]
    if not isinstance(table, StateTable):
        table.gone = max(table.gone, gone)
        return
    keyed = table.keyed
    for place in [place for place in keyed if place < gone]:
        del keyed[place]
    for place in range(gone, table.length):
        if place not in keyed:
            keyed[place] = Block(None)
    table.given = gone
    table.last = table.length - 2
    table.checkpoint = 0
