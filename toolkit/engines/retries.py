"""What a round does when memory runs out in a pass: it makes the pass again, with more room, and then in parts.

A pass holds activations beside the cache, and fewer of them over fewer rows, or over fewer columns of a prefill. So one
that did not fit is made again when all that is spare has been given up, which suffices where the lack was of a moment;
then in two parts, and in more. It takes longer, but nobody loses a cache, and the round goes on. Where the cache itself
has no room no number of parts helps, and somebody has to go: that is the engine's to decide.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from toolkit.engines.memory import ByteLedger

PARTS = (1, 1, 2, 4, 8)  # of a pass, try after try
Result = TypeVar("Result")


class Retries:
    """The passes of one round.

    Args:
        ledger: of the device.
        give_up: frees what memory is held without need.
    """

    def __init__(self, ledger: ByteLedger, give_up: Callable[[], None]) -> None:
        self._ledger = ledger
        self._give_up = give_up
        self._first = 0  # try of the next pass: where memory stays short, not every one need fail twice
        self.ran_out = 0  # passes that had no room though nothing was to spare

    def make(self, work: Callable[[int], Result], most: int = PARTS[-1]) -> Result | None:
        """`work(parts)` with as few parts as it takes, `most` being there to be had; None where memory has no room.

        Where memory runs out, `work` has to leave everything as it was.
        """
        tries = [parts for parts in PARTS if parts < 2 * most]
        for number in range(min(self._first, len(tries) - 1), len(tries)):
            result = self._ledger.attempt(partial(work, tries[number]))
            if result is not None:
                self._first = max(number - 1, 0)
                return result
            self.ran_out += number > 0
            self._give_up()
        return None
