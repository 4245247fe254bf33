"""A token bucket, on whatever clock it is told."""

from __future__ import annotations

import math

MINUTE_S = 60.0


class Bucket:
    """Holds what may be taken in a minute, and fills at that rate. Full at first.

    So nobody gets more than twice `per_minute` within any minute, nor more than `per_minute` in the long run.
    """

    def __init__(self, per_minute: int) -> None:
        self.size = per_minute
        self._level = float(per_minute)
        self._at_s = 0.0

    def level(self, now_s: float) -> float:
        """What may be taken now. A clock that goes back fills nothing."""
        gained = max(now_s - self._at_s, 0.0) * self.size / MINUTE_S
        self._level, self._at_s = min(self._level + gained, self.size), now_s
        return self._level

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until so much is in it; infinity: never."""
        missing = amount - self.level(now_s)
        return math.inf if amount > self.size else max(missing, 0.0) * MINUTE_S / self.size

    def take(self, amount: float, now_s: float) -> None:
        """Take what is there: whoever calls has asked `wait_s`."""
        self._level = self.level(now_s) - amount

    def give_back(self, amount: float, now_s: float) -> None:
        """Of what was taken, what was not used."""
        self._level = min(self.level(now_s) + amount, self.size)
