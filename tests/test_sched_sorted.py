"""Sorted blocks and counted lengths against sorting everything, and what they cost."""

import random
from math import log2

import pytest

from toolkit.sched.inbox import MOST_ENTRIES, LengthCounts, SortedBlocks


class Counted(int):
    """A number that counts comparisons."""

    compared = 0

    def __lt__(self, other):
        Counted.compared += 1
        return int(self) < int(other)

    def __gt__(self, other):
        Counted.compared += 1
        return int(self) > int(other)

    def __ge__(self, other):
        Counted.compared += 1
        return int(self) >= int(other)

    def __eq__(self, other):
        Counted.compared += 1
        return int(self) == int(other)

    __hash__ = int.__hash__


def agree(blocks, entries):
    assert list(blocks) == entries
    assert blocks.size == len(entries)
    if entries:
        assert (blocks.first, blocks.last) == (entries[0], entries[-1])
    sizes = [len(block) for block in blocks._blocks]
    assert max(sizes) <= MOST_ENTRIES
    assert min(sizes) > 0 or len(sizes) == 1


@pytest.mark.slow
@pytest.mark.parametrize("coming", ["anywhere", "last", "first"])
def test_entries_come_and_go_in_order(coming):
    rng = random.Random(coming)
    blocks = SortedBlocks()
    entries = []
    numbers = {
        "anywhere": rng.sample(range(4000), 4000),
        "last": list(range(4000)),
        "first": list(range(4000, 0, -1)),
    }[coming]
    for turn, number in enumerate(numbers):
        blocks.add((number % 7 if coming == "anywhere" else number, number, str(number)))
        entries.append((number % 7 if coming == "anywhere" else number, number, str(number)))
        if turn % 3 == 2:
            gone = rng.choice((0, len(entries) - 1, rng.randrange(len(entries))))
            entries.sort()
            assert blocks.remove(entries[gone][:2]) == entries.pop(gone)
        if turn % 500 == 0:
            agree(blocks, sorted(entries))
    entries.sort()
    agree(blocks, entries)
    for number in range(-1, 4001, 37):
        for key in ((number,), (3, number)):
            assert blocks.before(key) == sum(entry < key for entry in entries)
    while entries:
        assert blocks.remove(entries[-1][:2]) == entries.pop()
    agree(blocks, [])
    blocks.add((1, 1, ""))
    agree(blocks, [(1, 1, "")])


@pytest.mark.parametrize("size", [100, 20_000])
def test_an_entry_costs_comparisons_by_the_logarithm(size):
    blocks = SortedBlocks()
    for number in range(0, 2 * size, 2):
        blocks.add((Counted(number),))
    most = 3 * log2(size) + 6  # a tuple compares its values for equality before it orders them
    for number in (1, size // 2 * 2 + 1, 2 * size - 3, 2 * size + 1):
        for act in (blocks.add, blocks.before, blocks.remove):
            Counted.compared = 0
            act((Counted(number),))
            assert Counted.compared <= most
    for act in (lambda: blocks.add((Counted(2 * size),)), lambda: blocks.remove(blocks.first)):
        Counted.compared = 0
        act()
        assert Counted.compared <= 6


def test_the_least_length_is_that_of_the_jobs_that_are_left():
    rng = random.Random(1)
    counts = LengthCounts()
    lengths = []
    for _ in range(3000):
        if lengths and rng.random() < 0.49:
            length = lengths.pop(rng.randrange(len(lengths)))
            counts.remove(length)
        else:
            lengths.append(rng.randrange(-40, 40))
            counts.add(lengths[-1])
        assert counts.jobs == len(lengths)
        if lengths and rng.random() < 0.5:
            assert counts.least == min(lengths)
        assert len(counts._heap) == len(set(counts._heap)) <= 80
